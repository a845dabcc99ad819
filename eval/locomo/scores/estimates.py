"""Figures of one or two arms with their intervals, paired by question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locomo.errors import ScoringError
from locomo.scores.rows import Figures, Key
from locomo.scoring.statistics import Interval, bootstrap_mean, bootstrap_ratio_of_sums

Estimate = dict[str, Any]
"""``{"mean", "interval": [low, high], "over", "n"}``; ``n`` counts the questions that it is of."""


def mean(figures: Figures) -> Estimate | None:
    """Mean over the questions that have the figure; None where none has."""
    if not figures:
        return None
    return _estimate(bootstrap_mean(list(figures.values()), _samples(figures)), len(figures))


def mean_difference(figures: Figures, reference: Figures) -> Estimate | None:
    """Mean of ``figures - reference`` over the questions that have both; None where none has."""
    return mean({key: figures[key] - reference[key] for key in figures if key in reference})


def ratio(numerator: Figures, denominator: Figures) -> Estimate | None:
    """Ratio of the two means over the questions that have both; None where none has, or the second mean is 0."""
    shared = {key: figure for key, figure in numerator.items() if key in denominator}
    if not shared:
        return None
    below = [denominator[key] for key in shared]
    try:
        interval = bootstrap_ratio_of_sums(list(shared.values()), below, _samples(shared))
    except ScoringError:  # of finite columns of one length: the denominators sum to zero
        return None
    return _estimate(interval, len(shared))


def _samples(figures: Mapping[Key, float]) -> list[str]:
    return [sample_id for sample_id, _ in figures]


def _estimate(interval: Interval, n: int) -> Estimate:
    return {
        "mean": interval.estimate,
        "interval": [interval.low, interval.high],
        "over": interval.over,
        "n": n,
    }
