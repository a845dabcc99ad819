"""Intervals and tests for paired measurements on questions that cluster in conversations.

Questions of one conversation share its people and its facts, so that an interval over questions alone would be too
narrow: what varies is the conversation, with all its questions. LoCoMo has ten, too few for a bootstrap, whose 95 %
intervals hold the true mean in 83 % of the cases at five conversations and in 89 % at ten. Student's t on what the
conversations add up to has no such shortfall: of a mean, the t interval of a ratio estimator (Cochran 1977, "Sampling
Techniques", chapter 6), which is the t interval of the conversations' means where each has as many questions; of a
ratio of two sums, Fieller's interval (Fieller 1954, "Some problems in interval estimation", JRSS B 16(2)).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, inf, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

from locomo.errors import ScoringError

FEWEST_GROUPS = 5
"""With fewer conversations there is no interval: their spread is not known from so few."""

_CONFIDENCE = 0.95
_NO_SPREAD = 1e-12
_Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate with its 95 % interval.

    ``low`` and ``high`` are None where there is none: under `FEWEST_GROUPS` groups, where the groups do not differ at
    all, or where a ratio's denominator may be zero. ``groups`` counts what was taken to vary, which ``over`` names:
    ``"questions"`` where there is one conversation only.
    """

    estimate: float
    low: float | None
    high: float | None
    over: Literal["conversations", "questions"]
    groups: int


def interval_json(interval: Interval) -> list[float] | None:
    """``[low, high]``, or None where there is no interval."""
    return None if interval.low is None or interval.high is None else [interval.low, interval.high]


class McNemar(NamedTuple):
    """Discordant pairs of two systems on the same questions, and the exact two-sided p value."""

    only_first: int
    only_second: int
    p_value: float


def interval_of_mean(
    values: ArrayLike, samples: Sequence[str], *, within: tuple[float, float] = (-inf, inf)
) -> Interval:
    """Mean over questions.

    Parameters
    ----------
    values
        ``[n]``, one per question.
    samples
        ``[n]``, the conversation (`sample_id`) of each.
    within
        Bounds of what the mean can be; the interval is cut to them.

    Raises
    ------
    ScoringError
        There is no value, the lengths differ, or a value is not finite.
    """
    column = _column(values, samples)
    sums, counts, over = _grouped([column, np.ones_like(column)], samples)
    groups, mean = len(sums), float(sums.sum() / counts.sum())
    of_total = _half_width(sums - mean * counts, scale=float(np.abs(sums).sum()))
    if of_total is None:
        return Interval(mean, None, None, over, groups)
    half = of_total / float(counts.sum())
    return Interval(mean, max(mean - half, within[0]), min(mean + half, within[1]), over, groups)


def interval_of_difference(first: ArrayLike, second: ArrayLike, samples: Sequence[str]) -> Interval:
    """Mean over questions of ``first - second``; parameters and errors as of `interval_of_mean`."""
    return interval_of_mean(_column(first, samples) - _column(second, samples), samples)


def interval_of_ratio(numerator: ArrayLike, denominator: ArrayLike, samples: Sequence[str]) -> Interval:
    """``sum(numerator) / sum(denominator)`` over the same questions, both taken together from each conversation.

    Fieller's interval holds every ratio r for which the conversations' sums of ``numerator - r * denominator`` do not
    differ from zero by a t test. It is bounded only where the denominators themselves differ from zero by that test;
    elsewhere there is no interval.

    Raises
    ------
    ScoringError
        As of `interval_of_mean`, or the denominators sum to zero.
    """
    above, below, over = _grouped([_column(numerator, samples), _column(denominator, samples)], samples)
    groups, total_above, total_below = len(above), float(above.sum()), float(below.sum())
    if abs(total_below) <= _NO_SPREAD * float(np.abs(below).sum()):
        raise ScoringError("the denominators sum to zero")
    ratio = total_above / total_below
    if _half_width(above - ratio * below, scale=float(np.abs(above).sum())) is None:
        return Interval(ratio, None, None, over, groups)
    # Ratios r with (A - rB)^2 <= t^2 (var A - 2r cov + r^2 var B), A and B the two totals.
    spread = _quantile(groups) ** 2 * groups * np.cov(above, below)
    a, b, c = total_below**2 - spread[1, 1], total_above * total_below - spread[0, 1], total_above**2 - spread[0, 0]
    if a <= 0:
        return Interval(ratio, None, None, over, groups)
    root = sqrt(max(b * b - a * c, 0.0))
    return Interval(ratio, (b - root) / a, (b + root) / a, over, groups)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Exact McNemar test: under the null each discordant pair falls to either side with probability 1/2.

    Parameters
    ----------
    first, second
        ``[n]``, whether each system was right on the same questions in the same order.
    """
    pairs = list(zip(first, second, strict=True))
    only_first = sum(bool(mine and not other) for mine, other in pairs)
    only_second = sum(bool(other and not mine) for mine, other in pairs)
    discordant = only_first + only_second
    tail = sum(comb(discordant, count) for count in range(min(only_first, only_second) + 1))
    # Integers until the last division: 2 ** discordant overflows a float beyond 1,023 pairs.
    return McNemar(only_first, only_second, min(1.0, 2 * tail / 2**discordant))


def _column(values: ArrayLike, samples: Sequence[str]) -> _Floats:
    column = np.asarray(values, dtype=np.float64)
    if column.shape != (len(samples),):
        raise ScoringError(f"values of shape {column.shape} for {len(samples)} questions")
    if column.size == 0:
        raise ScoringError("no question to average over")
    if not np.isfinite(column).all():
        raise ScoringError(f"{int((~np.isfinite(column)).sum())} of {column.size} values are not finite")
    return column


def _grouped(
    columns: Sequence[_Floats], samples: Sequence[str]
) -> tuple[_Floats, _Floats, Literal["conversations", "questions"]]:
    """Sums of two columns by conversation, or the columns themselves where there is one conversation."""
    first, second = columns
    names, groups = np.unique(np.asarray(samples, dtype=np.str_), return_inverse=True)
    if len(names) == 1:
        return first, second, "questions"
    sums = [np.zeros(len(names)), np.zeros(len(names))]
    np.add.at(sums[0], groups, first)
    np.add.at(sums[1], groups, second)
    return sums[0], sums[1], "conversations"


def _half_width(residuals: _Floats, *, scale: float) -> float | None:
    """Half the interval of a total with these residuals, ``[group]``; None where there is no interval."""
    groups = len(residuals)
    if groups < FEWEST_GROUPS or float(np.abs(residuals).sum()) <= _NO_SPREAD * scale:
        return None
    return _quantile(groups) * sqrt(groups / (groups - 1) * float(residuals @ residuals))


def _quantile(groups: int) -> float:
    return float(student.ppf((1 + _CONFIDENCE) / 2, groups - 1))
