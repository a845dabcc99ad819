"""What of the facts reaches the answer: the share of information kept, and the forced choice among ten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import commands
from .charts import ROW_INCHES, Row, forest
from .contents import Figure, Part, Section, Table, count, estimate, number, text
from .drawing import canvas, export
from .palette import LIGHT
from .scores import ArmScore, arms_of, at_k, main_k

SHARE = "share_of_information_kept"
CHOICE = "forced_choice"
IN_TEXT = "information_in_text"


def information(score: Mapping[str, Any]) -> Section:
    """Both figures of every arm that has either; no judge and no decoding stand behind them."""
    arms = [arm for arm in arms_of(score) if any(arm.estimate(key) for key in (IN_TEXT, SHARE, CHOICE))]
    lead = [
        "Share kept: the sum over questions of NLL without memory less the arm's NLL, over the same with full prefill. "
        "0 is no memory, 1 is full prefill; more than 1 can happen. There is no share where the information in the "
        "text itself, the denominator, is not above zero with its whole interval. Forced choice: how often the gold "
        "answer is the likeliest of ten, or of as many as there are; the table has what blind guessing would get.",
    ]
    parts: list[Part] = [*_charts(arms, main_k(score)), _table(arms)] if arms else [commands.INFORMATION]
    return Section("information", "Information kept, and forced choice", lead, parts)


def _table(arms: Sequence[ArmScore]) -> Table:
    rows = [
        [
            text(arm.name.label),
            count(arm.name.k),
            count(n := arm.number("fidelity_measured")),
            estimate(arm.estimate(IN_TEXT), n=None if n is None else int(n)),
            estimate(arm.estimate(SHARE), n=None if n is None else int(n)),
            estimate(arm.estimate(CHOICE), n=None if n is None else int(n)),
            number(arm.number("forced_choice_chance")),
        ]
        for arm in arms
    ]
    columns = ["Arm", "k", "n", "Information in the text, nats per answer", "Share of information kept"]
    columns += ["Forced choice, share right", "Guessing"]
    return Table("Information kept and forced choice, 95 % intervals", columns, rows)


def _charts(arms: Sequence[ArmScore], k: int | None) -> list[Figure]:
    arms = at_k(arms, k)
    chances = [chance for arm in arms if (chance := arm.number("forced_choice_chance")) is not None]
    described = {
        SHARE: (
            "information_kept",
            "share of the answer's information kept",
            (0.0, "no memory"),
            (1.0, "full prefill"),
            f"Share of the answer's information that each arm keeps at k = {k}, with 95 % intervals.",
        ),
        CHOICE: (
            "forced_choice",
            "share of questions whose gold answer is the likeliest",
            (max(chances), "chance") if chances else None,
            None,
            f"Forced choice of the gold answer among ten at k = {k}, with 95 % intervals.",
        ),
    }
    charts = []
    for key, (name, axis, first, second, caption) in described.items():
        rows = [Row(arm.name, arm.name.label, value) for arm in arms if (value := arm.estimate(key))]
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
