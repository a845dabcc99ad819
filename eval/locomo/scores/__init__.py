"""What a run's rows come to, with the golds of the data file: every figure of ``score.json``."""

from locomo.scores.score import score_run

__all__ = ["score_run"]
