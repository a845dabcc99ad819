"""Figures of one or two arms with their intervals, paired by question."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from locomo.errors import ScoringError
from locomo.scores.rows import Figures, Key
from locomo.scoring.statistics import Interval, interval_json, interval_of_mean, interval_of_ratio

Estimate = dict[str, Any]
"""``{"mean", "interval": [low, high] or null, "over", "groups", "n"}``.

``n`` counts the questions that it is of, ``groups`` the conversations (or questions, by ``over``) that the interval
takes to vary.
"""

POSITIVE = (0.0, inf)
SHARE = (0.0, 1.0)


def mean(figures: Figures, *, within: tuple[float, float] = (-inf, inf)) -> Estimate | None:
    """Mean over the questions that have the figure, which can only lie `within`; None where none has."""
    if not figures:
        return None
    return _estimate(interval_of_mean(list(figures.values()), _samples(figures), within=within), len(figures))


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
        interval = interval_of_ratio(list(shared.values()), below, _samples(shared))
    except ScoringError:  # of finite columns of one length: the denominators sum to zero
        return None
    return _estimate(interval, len(shared))


def _samples(figures: Mapping[Key, float]) -> list[str]:
    return [sample_id for sample_id, _ in figures]


def _estimate(interval: Interval, n: int) -> Estimate:
    return {
        "mean": interval.estimate,
        "interval": interval_json(interval),
        "over": interval.over,
        "groups": interval.groups,
        "n": n,
    }
