"""What encoding facts costs: time, tokens and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import commands
from .arm_names import parse_arm
from .benches import Row, rows_of, value
from .charts import ROW_INCHES
from .contents import Figure, Part, Section, Table, count, format_number, number, text
from .drawing import canvas, export
from .palette import LIGHT, colour_of

COSTS = {
    "facts_per_s": ("facts per second", 1),
    "tokens_prefilled_per_fact_token": ("tokens prefilled\nper fact token", 2),
    "bytes_per_fact": ("bytes per fact", 0),
}


OF_A_RUN = {
    "facts": "Facts",
    "fact_tokens": "Fact tokens",
    "tokens_prefilled": "Tokens prefilled",
    "bytes": "Bytes",
}


def encoding(bench: Mapping[str, Any] | None, own: Mapping[str, Any] | None = None) -> Section:
    """Bars and a table from the file of `scripts/bench_encode`, and what a run itself encoded, by policy."""
    rows = sorted(rows_of(bench), key=lambda row: parse_arm(f"splice/{row.get('policy')}"))
    lead = ["Paid once per fact, when it is stored, and not while anybody waits for an answer."]
    parts: list[Part] = [_bars(rows), _table(rows)] if rows else [commands.ENCODING]
    policies = {policy: values for policy, values in (own or {}).items() if isinstance(values, Mapping)}
    if policies:
        parts.append(_of_a_run(policies))
    return Section("encoding", "Cost of encoding", lead, parts)


def _of_a_run(policies: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = [
        [text(policy), *(count(value(values, key)) for key in OF_A_RUN)]
        for policy, values in sorted(policies.items(), key=lambda item: parse_arm(f"splice/{item[0]}"))
    ]
    return Table("What this run encoded, by policy", ["Policy", *OF_A_RUN.values()], rows)


def _table(rows: Sequence[Row]) -> Table:
    columns = ["Policy", *(title.replace("\n", " ").capitalize() for title, _ in COSTS.values())]
    return Table(
        "Cost of encoding, by policy",
        columns,
        [
            [text(row.get("policy")), *(number(value(row, key), digits) for key, (_, digits) in COSTS.items())]
            for row in rows
        ],
    )


def _bars(rows: Sequence[Row]) -> Figure:
    with canvas(0.9 + ROW_INCHES * len(rows)) as drawn:
        panels = drawn.subplots(1, len(COSTS), sharey=True)
        for axes, (key, (title, digits)) in zip(panels, COSTS.items(), strict=True):
            known = [(position, cost) for position, row in enumerate(rows) if (cost := value(row, key)) is not None]
            for position, cost in known:
                arm = parse_arm(f"splice/{rows[position].get('policy')}")
                axes.barh(position, cost, height=0.62, color=colour_of(arm))
                axes.annotate(
                    format_number(cost, digits),
                    (cost, position),
                    (3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            axes.set_title(title, fontsize=8.5)
            axes.set_xlim(0, max((cost for _, cost in known), default=1.0) * 1.5 or 1.0)
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.axvline(0, color=LIGHT["muted"], linewidth=0.8)
        panels[0].set_yticks(range(len(rows)), [str(row.get("policy")) for row in rows])
        panels[0].tick_params(axis="y", labelcolor=LIGHT["ink"])
        panels[0].invert_yaxis()
        return export(
            drawn,
            "encoding",
            alt="Bars of facts per second, tokens prefilled per fact token and bytes per fact, by encoding policy.",
            caption="Cost of encoding by policy. Each panel has its own scale.",
        )
