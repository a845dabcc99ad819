"""The bars, and intervals of ratios."""

import random
import statistics
from collections.abc import Callable, Sequence

from sessions_bench.measure import percentile

BARS = (
    "radix_decode_over_flash_p50",
    "radix_decode_over_flash_p99",
    "radix_decode_over_gate_p50",
    "flash_7000_over_500",
    "stock_over_preposition_7000",
    "foreground_p95_on_over_off",
    "gate_precision",
    "gate_coverage",
    "stale",
)

Statistic = Callable[[Sequence[float]], float]
Blocks = Sequence[Sequence[float]]


def at(percent: int) -> Statistic:
    """The percentile by nearest rank; the median of an even number is the mean of the middle two."""
    return statistics.median if percent == 50 else lambda samples: percentile(samples, percent)


def ratio(above: Blocks, below: Blocks, statistic: Statistic) -> float:
    """The statistic of all samples of the one over that of the other."""
    return statistic(flat(above)) / statistic(flat(below))


def interval_of_ratio(above: Blocks, below: Blocks, statistic: Statistic, *, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of ``ratio``, by percentile bootstrap over blocks.

    Samples of one block were taken one after the other and share what the machine did then: whole blocks are drawn, of
    either side apart. Where a side has one block alone, its samples are drawn.
    """
    draw = random.Random(0)
    found = [ratio(_drawn(above, draw), _drawn(below, draw), statistic) for _ in range(draws)]
    of_forty = statistics.quantiles(found, n=40)
    return of_forty[0], of_forty[-1]


def _drawn(blocks: Blocks, draw: random.Random) -> Blocks:
    if len(blocks) == 1:
        return [draw.choices(blocks[0], k=len(blocks[0]))]
    return draw.choices(blocks, k=len(blocks))


def flat(blocks: Blocks) -> list[float]:
    """Every sample, whatever its block."""
    return [sample for block in blocks for sample in block]
