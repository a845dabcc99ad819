"""Intervals and tests for paired measurements on questions that cluster in conversations.

Questions of one conversation share its people and its facts, so that an interval over questions alone would be too
narrow: the bootstrap resamples conversations, each with all its questions (Field and Welsh 2007, "Bootstrapping
clustered data", JRSS B 69(3)), and takes percentiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from locomo.errors import ScoringError

RESAMPLES = 2000
_Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate with its 95 % interval.

    ``over`` says what was resampled: ``"questions"`` where there is one conversation only. ``resamples`` counts those
    in which the figure was defined; fewer than were drawn means that the figure's denominator vanished in the others.
    """

    estimate: float
    low: float
    high: float
    over: Literal["conversations", "questions"]
    resamples: int


class McNemar(NamedTuple):
    """Discordant pairs of two systems on the same questions, and the exact two-sided p value."""

    only_first: int
    only_second: int
    p_value: float


def bootstrap_mean(values: ArrayLike, samples: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Mean over questions.

    Parameters
    ----------
    values
        ``[n]``, one per question.
    samples
        ``[n]``, the conversation (`sample_id`) of each.
    resamples, seed
        How many draws, and the seed of their generator: the same seed draws the same conversations for every figure
        over as many conversations.

    Raises
    ------
    ScoringError
        There is no value, the lengths differ, or a value is not finite.
    """
    column = _column(values, samples)
    return _bootstrap([column, np.ones_like(column)], samples, resamples, seed)


def bootstrap_paired_difference(
    first: ArrayLike, second: ArrayLike, samples: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Mean over questions of ``first - second``; parameters and errors as of `bootstrap_mean`."""
    return bootstrap_mean(_column(first, samples) - _column(second, samples), samples, resamples=resamples, seed=seed)


def bootstrap_ratio_of_sums(
    numerator: ArrayLike, denominator: ArrayLike, samples: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """``sum(numerator) / sum(denominator)`` over the same questions, resampled together.

    Raises
    ------
    ScoringError
        As of `bootstrap_mean`, or the denominators sum to zero.
    """
    return _bootstrap([_column(numerator, samples), _column(denominator, samples)], samples, resamples, seed)


def bootstrap_ratio_of_means(
    numerator: ArrayLike, denominator: ArrayLike, samples: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """``mean(numerator) / mean(denominator)``, where either may lack some questions.

    A NaN says that the question was not measured; each mean is over what was. Without NaN this is
    `bootstrap_ratio_of_sums`.

    Raises
    ------
    ScoringError
        As of `bootstrap_ratio_of_sums`; infinities are refused, and a side of NaN alone.
    """
    columns = []
    for values in (numerator, denominator):
        column = np.asarray(values, dtype=np.float64)
        measured = ~np.isnan(column)
        columns += [_column(np.where(measured, column, 0.0), samples), measured.astype(np.float64)]
    above, counted_above, below, counted_below = columns
    return _bootstrap([above, counted_above, below, counted_below], samples, resamples, seed)


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


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927); ``(0, 1)`` where nothing was tried.

    Raises
    ------
    ScoringError
        The successes are not between 0 and `n`.
    """
    if not 0 <= successes <= n:
        raise ScoringError(f"{successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def _column(values: ArrayLike, samples: Sequence[str]) -> _Floats:
    column = np.asarray(values, dtype=np.float64)
    if column.shape != (len(samples),):
        raise ScoringError(f"values of shape {column.shape} for {len(samples)} questions")
    if not column.size:
        raise ScoringError("no question to average over")
    if not np.isfinite(column).all():
        raise ScoringError(f"{int((~np.isfinite(column)).sum())} of {column.size} values are not finite")
    return column


def _bootstrap(columns: Sequence[_Floats], samples: Sequence[str], resamples: int, seed: int) -> Interval:
    """Bootstrap of ``c0 / c1``, or of ``(c0 / c1) / (c2 / c3)``, where ``ci`` is the total of column i."""
    names, groups = np.unique(np.asarray(samples, dtype=np.str_), return_inverse=True)
    over: Literal["conversations", "questions"] = "conversations"
    if len(names) == 1:
        over, groups = "questions", np.arange(len(samples))
    size = int(groups.max()) + 1
    sums = np.stack([np.bincount(groups, weights=column, minlength=size) for column in columns])  # [column, group]
    estimate = float(_ratio(sums.sum(axis=1, keepdims=True))[0])
    if not np.isfinite(estimate):
        raise ScoringError("the denominators sum to zero, or one side has no value")
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(size, np.full(size, 1.0 / size), size=resamples).astype(np.float64)  # [resample, group]
    drawn = _ratio(sums @ draws.T)
    defined = drawn[np.isfinite(drawn)]
    low, high = np.percentile(defined, [2.5, 97.5])
    return Interval(estimate, float(low), float(high), over, len(defined))


def _ratio(totals: _Floats) -> _Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = totals[0] / totals[1]
        result: _Floats = ratio if len(totals) == 2 else ratio / (totals[2] / totals[3])
        return result
