"""Time to first token: curves over k, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import commands
from .benches import Row, arm_of, rows_of, value
from .charts import ROW_INCHES, Line, lines
from .contents import Figure, Part, Section, Table, count, number, text
from .drawing import canvas, export, grid
from .palette import LIGHT, PARTS
from .scores import Estimate

CASES = {
    "new": "new facts every time",
    "arena": "facts whose KV is in the arena, in a new prompt",
    "repeated": "the same prompt again",
}


def time_to_first_token(bench: Mapping[str, Any] | None) -> Section:
    """Curves, stacked parts and a table from the file of `scripts/bench_ttft`."""
    rows = sorted(rows_of(bench), key=lambda row: (str(row.get("case")), arm_of(row), value(row, "k") or 0))
    lead = [
        "From sending the request to receiving the first token, by the client's clock, retrieval, assembly and splice "
        "included; arms interleaved, one request at a time. Parts are means and add up to the mean; other is what the "
        "server's own clocks do not account for, and may fall below zero where those overlap.",
    ]
    if not rows:
        return Section("ttft", "Time to first token", lead, [commands.TTFT])
    parts: list[Part] = [_curves(rows), *_parts_charts(rows), _table(rows)]
    return Section("ttft", "Time to first token", lead, parts)


def _cases(rows: Sequence[Row]) -> list[str]:
    found = {str(row.get("case")) for row in rows}
    return [case for case in CASES if case in found] + sorted(found - set(CASES))


def _table(rows: Sequence[Row]) -> Table:
    columns = ["Arm", "k", "Facts", "p50, ms", "p95, ms", "Mean, ms", "Repeats", *(f"{part}, ms" for part in PARTS)]
    return Table(
        "Time to first token, and means of its parts",
        columns,
        [
            [
                text(arm_of(row).label),
                count(value(row, "k")),
                text(row.get("case")),
                number(value(row, "ttft_ms", "p50"), 1),
                number(value(row, "ttft_ms", "p95"), 1),
                number(value(row, "ttft_ms", "mean"), 1),
                count(value(row, "ttft_ms", "repeats")),
                *(number(value(row, "parts_ms", part), 2) for part in PARTS),
            ]
            for row in rows
        ],
    )


def _lines(rows: Sequence[Row]) -> list[Line]:
    """One line an arm: p50, with a whisker up to p95."""
    found = []
    for name in sorted({arm_of(row) for row in rows}):
        points = sorted(
            (k, Estimate(p50, p50, value(row, "ttft_ms", "p95")))
            for row in rows
            if arm_of(row) == name
            and (k := value(row, "k")) is not None
            and (p50 := value(row, "ttft_ms", "p50")) is not None
        )
        if points:
            found.append(Line(name, name.label, [k for k, _ in points], [estimate for _, estimate in points]))
    return found


def _curves(rows: Sequence[Row]) -> Figure:
    cases = _cases(rows)
    by_case = [_lines([row for row in rows if str(row.get("case")) == case]) for case in cases]
    everything = [estimate for series in by_case for line in series for estimate in line.y]
    with canvas(2.9 * len(cases) + 0.3) as drawn:
        panels = drawn.subplots(len(cases), 1, squeeze=False)[:, 0]
        for axes, case, series in zip(panels, cases, by_case, strict=True):
            lines(axes, series, log=True, scale_with=everything)
            axes.set_title(CASES.get(case, case))
            axes.set_ylabel("ms (log)")
        panels[-1].set_xlabel("k, facts in the prompt")
        return export(
            drawn,
            "ttft",
            alt="Median time to first token over k, one line an arm, whiskers to the 95th percentile.",
            caption="Time to first token over k: p50, whisker up to p95. The panels share one scale.",
        )


def _parts_charts(rows: Sequence[Row]) -> list[Figure]:
    """Stacked bars of new facts, a panel an arm with its own scale: the slowest would flatten all others."""
    rows = [row for row in rows if row.get("case") == "new" and isinstance(row.get("parts_ms"), Mapping)]
    names = sorted({arm_of(row) for row in rows})
    if not rows:
        return []
    groups = [[row for row in rows if arm_of(row) == name] for name in names]
    heights = [len(group) + 1.9 for group in groups]
    with canvas(ROW_INCHES * sum(heights) + 0.5) as drawn:
        panels = drawn.subplots(len(names), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, name, group in zip(panels, names, groups, strict=True):
            totals = []
            for position, row in enumerate(group):
                left = 0.0
                for part, colour in PARTS.items():
                    width = max(value(row, "parts_ms", part) or 0.0, 0.0)
                    axes.barh(
                        position,
                        width,
                        left=left,
                        height=0.72,
                        color=LIGHT[colour],
                        edgecolor=LIGHT["surface"],
                        linewidth=0.6,
                        label=part if axes is panels[0] and position == 0 else None,
                    )
                    left += width
                totals.append(left)
                if (mean := value(row, "ttft_ms", "mean")) is not None:
                    written, at = f"{mean:.1f}", (left, position)
                    axes.annotate(written, at, (4, 0), textcoords="offset points", va="center", fontsize=8)
            axes.set_title(name.label)
            axes.set_yticks(range(len(group)), [f"k = {value(row, 'k') or 0:.0f}" for row in group])
            axes.invert_yaxis()
            axes.set_xlim(0, max(totals) * 1.12 or 1.0)
            grid(axes, along="x")
        panels[-1].set_xlabel("ms, mean of each part")
        drawn.legend(loc="outside upper right", ncols=len(PARTS), frameon=False, fontsize=8.5, handlelength=1)
        return [
            export(
                drawn,
                "ttft_parts",
                alt="Stacked bars of retrieval, assembly, splice, prefill and the rest, by arm and k.",
                caption="What the mean time to first token, which stands at the bar's end, is made of, new facts every "
                "time. Each arm has its own scale.",
            )
        ]
