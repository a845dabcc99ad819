"""Throughput: requests per second and tail latency, by users at once and by rate of arrivals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import commands
from .benches import Row, arm_of, rows_of, value
from .charts import Line, lines
from .contents import Figure, Section, Table, count, format_number, number, text
from .drawing import canvas, export
from .scores import Estimate


def throughput(bench: Mapping[str, Any] | None) -> Section:
    """Curves and a table from the file of `scripts/bench_throughput`."""
    rows = sorted(
        rows_of(bench),
        key=lambda row: (str(row.get("load")), arm_of(row), value(row, "users") or 0, value(row, "rate_per_s") or 0),
    )
    lead = [
        "Closed loop: so many users, each sends its next request when the last is answered. Open loop: Poisson "
        "arrivals at a rate, whether or not the server keeps up. Retrieval and splice are included. Below a rate: the "
        "least and the most of its blocks.",
    ]
    if not rows:
        return Section("throughput", "Throughput", lead, [commands.THROUGHPUT])
    return Section("throughput", "Throughput", lead, [_curves(rows), _table(rows)])


def _table(rows: Sequence[Row]) -> Table:
    columns = ["Arm", "Loop", "Users", "Arrivals per s", "Requests per s", "TTFT p50, ms", "TTFT p95, ms", "Arena, MiB"]
    return Table(
        "Throughput and time to first token under load",
        columns,
        [
            [
                text(arm_of(row).label),
                text(row.get("load")),
                count(value(row, "users")),
                number(value(row, "rate_per_s"), 2),
                number(value(row, "qps"), 2)._replace(interval=_blocks(row)),
                number(value(row, "ttft_ms", "p50"), 1),
                number(value(row, "ttft_ms", "p95"), 1)._replace(interval=_of_few(row)),
                number(value(row, "arena_mib"), 1),
            ]
            for row in rows
        ],
    )


def _blocks(row: Row) -> str | None:
    least, most = value(row, "qps_min"), value(row, "qps_max")
    return None if least is None or most is None else f"{format_number(least, 2)} to {format_number(most, 2)}"


def _of_few(row: Row) -> str | None:
    times = row.get("ttft_ms")
    return "of few requests" if isinstance(times, Mapping) and times.get("p95_of_few") else None


def _lines(rows: Sequence[Row], x: str, *y: str) -> list[Line]:
    found = []
    for name in sorted({arm_of(row) for row in rows}):
        points = sorted(
            (at, high)
            for row in rows
            if arm_of(row) == name and (at := value(row, x)) is not None and (high := value(row, *y)) is not None
        )
        if points:
            found.append(Line(name, name.label, [at for at, _ in points], [Estimate(high) for _, high in points]))
    return found


def _curves(rows: Sequence[Row]) -> Figure:
    closed = [row for row in rows if row.get("load") == "closed"]
    opened = [row for row in rows if row.get("load") == "open"]
    panels = [
        ("closed loop: requests per second", "users", "requests per s", _lines(closed, "users", "qps"), False),
        (
            "closed loop: p95 of time to first token",
            "users",
            "ms (log)",
            _lines(closed, "users", "ttft_ms", "p95"),
            True,
        ),
        (
            "open loop: p95 of time to first token",
            "arrivals per s",
            "ms (log)",
            _lines(opened, "rate_per_s", "ttft_ms", "p95"),
            True,
        ),
    ]
    panels = [panel for panel in panels if panel[3]]
    with canvas(2.4 * len(panels) + 0.2) as drawn:
        for axes, (title, x_label, y_label, series, log) in zip(
            drawn.subplots(max(len(panels), 1), 1, squeeze=False)[:, 0], panels, strict=False
        ):
            lines(axes, series, log=log)
            axes.set_title(title)
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
        return export(
            drawn,
            "throughput",
            alt="Requests per second and 95th percentile of time to first token, by users and by rate of arrivals.",
            caption="Throughput and tail latency under load.",
        )
