"""A run: questions of the data, asked of every arm, one row each, to be gone on with where it stopped."""

from locomo.runs.runner import Progress

__all__ = ["Progress"]
