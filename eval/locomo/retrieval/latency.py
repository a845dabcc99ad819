"""What a variant costs a query."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from locomo.retrieval.ranking import Asked
from locomo.retrieval.variants import Variant


class Latency(NamedTuple):
    """Milliseconds of one query, the embedding of its text left out.

    ``median`` over all queries and rounds; ``added`` the median of each query's difference to the baseline in the same
    round; ``added_low`` and ``added_high`` the least and the greatest of the rounds' own medians.
    """

    median: float
    added: float
    added_low: float
    added_high: float


def measure_latency(
    asked: Sequence[Asked],
    variants: Sequence[Variant],
    *,
    queries: int,
    rounds: int = 5,
    seed: int = 0,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, Latency]:
    """Time every variant on the same queries, in turn, so that what else the machine does falls on all of them.

    Parameters
    ----------
    asked
        Questions whose search remembers nothing; their texts have been embedded before.
    queries
        How many of them, drawn by `seed`; each is asked once before it is timed.
    on_progress
        Called after each query of each round.
    """
    drawn = random.Random(seed).sample(list(asked), min(queries, len(asked)))
    times: dict[str, list[list[float]]] = {variant.name: [] for variant in variants}
    for number in range(rounds + 1):
        of_round: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for about in drawn:
            for variant in variants:
                started = time.perf_counter()
                variant.ranking(about)
                of_round[variant.name].append(1e3 * (time.perf_counter() - started))
            on_progress()
        if number:  # the first one opens indexes
            for name, ms in of_round.items():
                times[name].append(ms)
    return {variant.name: _latency(times[variant.name], times[variant.baseline]) for variant in variants}


def _latency(ms: list[list[float]], baseline: list[list[float]]) -> Latency:
    added = [[mine - other for mine, other in zip(*pair, strict=True)] for pair in zip(ms, baseline, strict=True)]
    medians = [statistics.median(of_round) for of_round in added]
    return Latency(
        statistics.median([value for of_round in ms for value in of_round]),
        statistics.median([value for of_round in added for value in of_round]),
        min(medians),
        max(medians),
    )
