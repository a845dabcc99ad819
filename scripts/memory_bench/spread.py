"""What a row says of many times."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from math import exp, log, sqrt

from scipy.stats import t as student
from sessions_bench.measure import percentile

# Of fewer samples the 95th percentile is one of the three largest, and tells of these rather than of the tail.
_FEW = 60


def spread_ms(samples: Sequence[float]) -> dict[str, float]:
    """Mean, median and, by nearest rank, ``p25``, ``p75``, ``p95``; of how many, and whether too few for the last."""
    return {
        "mean": statistics.mean(samples),
        "p25": percentile(samples, 25),
        "p50": statistics.median(samples),
        "p75": percentile(samples, 75),
        "p95": percentile(samples, 95),
        "p95_of_few": len(samples) < _FEW,
        "repeats": len(samples),
    }


def interval_of_medians(above: Sequence[float], below: Sequence[float], *, draws: int = 4000) -> tuple[float, float]:
    """95 % interval of the ratio of two medians, by percentile bootstrap over the rounds that both were measured in.

    Parameters
    ----------
    above, below
        ``[n]``, one time per round each, in the order of the rounds.
    """
    rounds, draw = list(zip(above, below, strict=True)), random.Random(0)
    found = []
    for _ in range(draws):
        upper, lower = zip(*draw.choices(rounds, k=len(rounds)), strict=True)
        found.append(statistics.median(upper) / statistics.median(lower))
    of_forty = statistics.quantiles(found, n=40)
    return of_forty[0], of_forty[-1]


def interval_of_ratios(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the geometric mean of at least two ratios, by Student's t on their logarithms."""
    logs = [log(ratio) for ratio in ratios]
    half = float(student.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / sqrt(len(logs))
    return exp(statistics.mean(logs) - half), exp(statistics.mean(logs) + half)
