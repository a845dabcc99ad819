"""What a row says of many times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

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
