"""Samples of several arms in turns, and the rows that they become."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

Timed = Callable[[int, int], list[float]]
"""Runs the items [first, first + count) and returns the milliseconds of each."""

Samples = dict[str, list[float]]
"""Milliseconds of each arm."""

_ROUNDS = 20
# A first call that takes so many times the median, because something is read or built then, is told of.
_NOTABLE = 10
_RIVAL = "mem0"


class Measured(NamedTuple):
    """What the arms took."""

    samples: Samples
    first_calls: dict[str, float]
    """Milliseconds of the very first call of each, which is no sample."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one arm took for one thing."""

    name: str
    size: int
    """Facts in the store before."""

    arm: str
    unit: str
    median: float
    p95: float | None
    n: int
    ratio: float | None = None
    """mem0's median over this one; None where mem0 has no such thing."""

    ratio_p95: float | None = None
    note: str = ""
    details: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return the row with its numbers rounded."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def timed(call: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> tuple[float, _T]:
    """Return the milliseconds that a call took, and its result."""
    start = time.perf_counter()
    result = call(*arguments, **named)
    return (time.perf_counter() - start) * 1e3, result


def interleaved(arms: Mapping[str, Timed], repeats: Mapping[str, int], *, warm_up: int, first: int = 0) -> Measured:
    """Run a warm-up, then rounds in which every arm runs a part of its repeats.

    Each round begins with another arm, so that none always follows the same one.
    """
    done = dict.fromkeys(arms, first + warm_up)
    first_calls = {arm: run(first, warm_up)[0] for arm, run in arms.items()}
    samples: Samples = {arm: [] for arm in arms}
    names = list(arms)
    for turn in range(_ROUNDS):
        for arm in names[turn % len(names) :] + names[: turn % len(names)]:
            count = repeats[arm] * (turn + 1) // _ROUNDS - repeats[arm] * turn // _ROUNDS
            if count:
                samples[arm] += arms[arm](done[arm], count)
                done[arm] += count
    return Measured(samples, first_calls)


def rows_of(name: str, size: int, measured: Measured, *, notes: Mapping[str, str] | None = None) -> list[Row]:
    """Return a row per arm; where mem0 is among them the others are compared with it."""
    rival = measured.samples.get(_RIVAL)
    rows = []
    for arm, times in measured.samples.items():
        first_call = measured.first_calls[arm]
        is_slower = first_call > _NOTABLE * statistics.median(times)
        remarks = [(notes or {}).get(arm, ""), f"the very first took {first_call:.0f} ms" if is_slower else ""]
        is_compared = rival is not None and not arm.startswith(_RIVAL)
        rows.append(
            Row(
                name,
                size,
                arm,
                "ms",
                statistics.median(times),
                p95(times),
                len(times),
                ratio=statistics.median(rival) / statistics.median(times) if rival and is_compared else None,
                ratio_p95=p95(rival) / p95(times) if rival and is_compared else None,
                note="; ".join(filter(None, remarks)),
                details={"first_call_ms": round(first_call, 3)},
            )
        )
    return rows


def p95(times: list[float]) -> float:
    """Return the smallest sample that 95 % do not exceed."""
    return sorted(times)[-(-len(times) * 95 // 100) - 1]


def bars_of(rows: list[Row], *, recall: float) -> dict[str, float | None]:
    """Return the figures that the bench is about; of two backends the worse one. None is what was not measured."""

    def worst(name: str, size: int | None, value: Callable[[Row], float]) -> float | None:
        measured = [
            row for row in rows if row.name == name and not row.arm.startswith(_RIVAL) and size in (None, row.size)
        ]
        return max(map(value, measured), default=None)

    large = 100_000
    has_large = any(row.size == large and row.name == "search_vector" for row in rows)
    return {
        "search_p95_ms_100k": worst("search_vector", large, lambda row: row.p95 or row.median),
        "recall_at_10_100k": recall if has_large else None,
        "open_owner_ms": worst("open_owner", None, lambda row: row.median),
        "worst_ratio_vs_mem0": min((row.ratio for row in rows if row.ratio is not None), default=None),
    }
