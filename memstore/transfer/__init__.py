"""Moving facts between stores, and out of other programs."""
