"""What of the facts reaches the answer: the share of information kept, and the forced choice among ten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import commands
from .charts import ROW_INCHES, Row, forest
from .contents import Figure, Part, Section, Table, count, estimate, text
from .drawing import canvas, export
from .palette import LIGHT
from .scores import ArmScore, arms_of, at_main_k, main_k

CHANCE = 0.1
SHARE = "share_of_information_kept"
CHOICE = "forced_choice"


def information(score: Mapping[str, Any]) -> Section:
    """Both figures of every arm that has either; no judge and no decoding stand behind them."""
    arms = [arm for arm in arms_of(score) if arm.estimate(SHARE) or arm.estimate(CHOICE)]
    lead = [
        "Share kept: the sum over questions of NLL without memory less the arm's NLL, over the same with full prefill. "
        "0 is no memory, 1 is full prefill; more than 1 can happen. Forced choice: how often the gold answer is the "
        "likeliest of ten; blind guessing gets 0.1.",
    ]
    parts: list[Part] = [*_charts(arms), _table(arms)] if arms else [commands.INFORMATION]
    return Section("information", "Information kept, and forced choice", lead, parts)


def _table(arms: Sequence[ArmScore]) -> Table:
    rows = [
        [
            text(arm.name.label),
            count(arm.name.k),
            count(arm.number("n")),
            estimate(arm.estimate(SHARE)),
            estimate(arm.estimate(CHOICE)),
        ]
        for arm in arms
    ]
    columns = ["Arm", "k", "n", "Share of information kept", "Forced choice, share right"]
    return Table("Information kept and forced choice, 95 % intervals", columns, rows)


def _charts(arms: Sequence[ArmScore]) -> list[Figure]:
    described = {
        SHARE: (
            "information_kept",
            "share of the answer's information kept",
            (0.0, "no memory"),
            (1.0, "full prefill"),
            f"Share of the answer's information that each arm keeps at k = {main_k(arms)}, with 95 % intervals.",
        ),
        CHOICE: (
            "forced_choice",
            "share of questions whose gold answer is the likeliest of ten",
            (CHANCE, "chance"),
            None,
            f"Forced choice of the gold answer among ten at k = {main_k(arms)}, with 95 % intervals.",
        ),
    }
    charts = []
    for key, (name, axis, first, second, caption) in described.items():
        rows = [Row(arm.name, arm.name.label, value) for arm in at_main_k(arms) if (value := arm.estimate(key))]
        if not rows:
            continue
        with canvas(0.95 + ROW_INCHES * len(rows)) as drawn:
            axes = drawn.subplots()
            forest(axes, rows)
            for mark in filter(None, (first, second)):
                axes.axvline(mark[0], color=LIGHT["muted"], linewidth=1, linestyle=":")
                axes.annotate(
                    mark[1],
                    (mark[0], 1.0),
                    xycoords=("data", "axes fraction"),
                    ha="center",
                    va="bottom",
                    fontsize=7.5,
                    color=LIGHT["muted"],
                )
            axes.set_xlabel(axis)
            charts.append(export(drawn, name, alt=caption, caption=f"{caption} Hollow marks: facts at the head."))
    return charts
