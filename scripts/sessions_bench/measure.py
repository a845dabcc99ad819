"""Samples, the rows that they become, and the bars that are read from the rows."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

BARS = (
    "query_ttft_6000_over_600",
    "rival_over_ours_p50",
    "rival_over_ours_p99",
    "append_tokens_ratio",
    "query_overhead_ratio",
)


@dataclass(frozen=True, slots=True)
class Row:
    """What one arm took for one thing."""

    name: str
    arm: str
    unit: str
    median: float
    n: int
    p25: float | None = None
    p75: float | None = None
    p99: float | None = None
    """Nearest rank: of fewer than 100 samples the largest."""

    ratio: float | None = None
    """What the row's note says of it."""

    note: str = ""
    details: Mapping[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return the row with its numbers rounded."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the smallest sample that `percent` % of them do not exceed (nearest rank).

    Raises
    ------
    ValueError
        There is no sample.
    """
    if not samples:
        raise ValueError("no samples")
    return sorted(samples)[max(-(-len(samples) * percent // 100), 1) - 1]


def row_of(
    name: str,
    arm: str,
    samples: Sequence[float],
    *,
    unit: str = "ms",
    ratio: float | None = None,
    note: str = "",
    details: Mapping[str, object] | None = None,
) -> Row:
    """Return the row of these samples."""
    return Row(
        name,
        arm,
        unit,
        statistics.median(samples),
        len(samples),
        p25=percentile(samples, 25),
        p75=percentile(samples, 75),
        p99=percentile(samples, 99),
        ratio=ratio,
        note=note,
        details=details or {},
    )


def median_ratio(dividend: Sequence[float], divisor: Sequence[float]) -> float:
    """Return how many times the one median is the other."""
    return statistics.median(dividend) / statistics.median(divisor)


def percentile_ratio(dividend: Sequence[float], divisor: Sequence[float], percent: int) -> float:
    """Return how many times the one percentile is the other."""
    return percentile(dividend, percent) / percentile(divisor, percent)


def bars_of(measured: dict[str, float]) -> dict[str, float | None]:
    """Return every bar by its name; None is what was not measured.

    Raises
    ------
    KeyError
        Something was measured that is no bar.
    """
    if unknown := measured.keys() - set(BARS):
        raise KeyError(f"no bars: {', '.join(sorted(unknown))}")
    return {name: measured.get(name) for name in BARS}
