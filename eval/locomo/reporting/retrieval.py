"""Retrieval: how much of the evidence is among the first k units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import commands
from .charts import sparse
from .contents import Figure, Part, Section, Table, count, number, text
from .drawing import canvas, export, grid
from .palette import LIGHT
from .scores import finite

KINDS = {"any": ("any evidence", "sky"), "share": ("share of evidence", "blue"), "all": ("all evidence", "ink")}


def retrieval(score: Mapping[str, Any]) -> Section:
    """Curves over k and a table, for each kind of unit."""
    recall = {unit: kinds for unit, kinds in (score.get("recall") or {}).items() if kinds}
    lead = [
        "A bound for every arm that retrieves: what is not among the k units cannot be spliced. All: every evidence "
        "unit is there; any: at least one is; share: the mean share that is.",
    ]
    parts: list[Part] = [_chart(recall), _table(recall)] if recall else [commands.RECALL]
    return Section("retrieval", "Retrieval recall", lead, parts)


def _depths(kinds: Mapping[str, Any]) -> list[int]:
    return sorted({int(k) for kind in KINDS for k in kinds.get(kind) or {}})


def _table(recall: Mapping[str, Mapping[str, Any]]) -> Table:
    order = list(reversed(KINDS))
    rows = [
        [
            text(unit),
            count(k),
            count(finite(kinds.get("n"))),
            *(number(finite((kinds.get(kind) or {}).get(str(k)))) for kind in order),
        ]
        for unit, kinds in recall.items()
        for k in _depths(kinds)
    ]
    columns = ["Unit", "k", "n", *(KINDS[kind][0].capitalize() for kind in order)]
    return Table("Recall of evidence among the first k units (0 to 1)", columns, rows)


def _chart(recall: Mapping[str, Mapping[str, Any]]) -> Figure:
    with canvas(3.0) as drawn:
        panels = drawn.subplots(1, len(recall), sharey=True, squeeze=False)[0]
        for axes, (unit, kinds) in zip(panels, recall.items(), strict=True):
            for kind, (label, colour) in KINDS.items():
                found = {int(k): finite(value) for k, value in (kinds.get(kind) or {}).items()}
                points = sorted((k, value) for k, value in found.items() if value is not None)
                if points:
                    x, y = zip(*points, strict=True)
                    axes.plot(x, y, marker="o", color=LIGHT[colour])
                    axes.annotate(
                        label, (x[-1], y[-1]), (7, 0), textcoords="offset points", va="center", fontsize=8.5,
                        color=LIGHT[colour], annotation_clip=False,
                    )  # fmt: skip
            axes.set_title(unit)
            axes.set_ylim(0, 1)
            axes.set_xticks(sparse(_depths(kinds)))
            axes.set_xlabel("k, units retrieved")
            grid(axes, along="y")
        panels[0].set_ylabel("recall of evidence")
        return export(
            drawn,
            "recall",
            alt="Recall of evidence over k, by kind of unit.",
            caption="Recall of evidence over the number of retrieved units.",
        )
