"""What finds an owner's facts: vectors, words, attributes."""
