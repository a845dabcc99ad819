"""Stateful sessions and spliced memory facts for SGLang servers."""
