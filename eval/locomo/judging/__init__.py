"""A language model's verdict on answers, through any OpenAI-compatible endpoint."""
