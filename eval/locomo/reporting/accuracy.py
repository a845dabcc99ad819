"""Accuracy: the official F1 per id, the judge, and Mem0's metrics, each in a table of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import commands
from .charts import ROW_INCHES, Row, forest
from .contents import ABSENT, Cell, Figure, Missing, Part, Section, Table, count, estimate, number, share_of, text
from .drawing import canvas, export
from .palette import LIGHT, colour_of
from .scores import ArmScore, arms_of, at_k, finite, main_k, spread

IDS = {
    "all": "all ids",
    "4": "4 single-hop",
    "1": "1 multi-hop",
    "2": "2 temporal",
    "3": "3 open-domain",
    "5": "5 adversarial",
}


def accuracy(score: Mapping[str, Any]) -> Section:
    """Tables of all arms, charts of F1 and of the judge."""
    arms, k = arms_of(score), main_k(score)
    scored = [arm for arm in arms if arm.number("official_f1", "all") is not None]
    judged = [arm for arm in arms if arm.estimate("judge", mean="accuracy")]
    parts: list[Part] = []
    parts += [_official_chart(at_k(scored, k), k), _official_table(scored)] if scored else [commands.ANSWERS]
    parts += (
        [_judge_chart(at_k(judged, k), k), _judge_table(judged), *_controls_table(score)]
        if judged
        else [commands.JUDGE]
    )
    if any(arm.number(key) is not None for arm in arms for key in ("mem0_f1", "mem0_bleu1")):
        parts.append(_mem0_table(arms))
    if reason := score.get("judge_refused"):
        parts.append(Missing(f"The judge's verdicts ({reason} in the middle)", commands.JUDGE.command))
    lead = [
        "Three metrics that share a name or a range and nothing else: they are never put into one column. The official "
        "F1 is shown without an interval.",
    ]
    return Section("accuracy", "Accuracy of the answers", lead, parts)


def _names(arm: ArmScore) -> list[Cell]:
    return [text(arm.name.label), count(arm.name.k), count(arm.number("n"))]


def _official_table(arms: Sequence[ArmScore]) -> Table:
    rows = [
        _names(arm)
        + [share_of(arm.number("official_f1", key), arm.number("answered", key)) for key in IDS]
        + [count(arm.number("errors"))]
        for arm in arms
    ]
    columns = ["Arm", "k", "Asked", *IDS.values(), "failed"]
    return Table("Official LoCoMo F1, by category id", columns, rows)


def _judge_table(arms: Sequence[ArmScore]) -> Table:
    rows = []
    for arm in arms:
        judge = arm.values["judge"]
        runs = " / ".join(ABSENT if run is None else f"{run:.3f}" for run in judge.get("runs") or ())
        rows.append(
            [
                text(arm.name.label),
                count(arm.name.k),
                count(arm.number("judge", "n")),
                estimate(arm.estimate("judge", mean="accuracy")),
                text(runs or None),
                count(arm.number("judge", "abstained")),
                count(arm.number("judge", "unjudged")),
                count(arm.number("judge", "tied")),
            ]
        )
    over = spread(arm.estimate("judge", mean="accuracy") for arm in arms)
    columns = ["Arm", "k", "Answers", "Accuracy", "Each run", "Abstained", "Unjudged", "Tied"]
    return Table(f"LLM judge, 95 % intervals{f' over {over}' if over else ''}", columns, rows)


def _controls_table(score: Mapping[str, Any]) -> list[Table]:
    """How often the judge let pass what is known to be wrong, in each run; empty where the score has no controls."""
    controls = (score.get("judge") or {}).get("controls") or []
    keys = ("judged", "known_wrong_accepted", "vague_accepted", "unjudged")
    rows = [
        [count(run), *(number(finite(control.get(key)), 3 if "accepted" in key else 0) for key in keys)]
        for run, control in enumerate(controls, start=1)
    ]
    columns = ["Run", "Controls judged", "Known-wrong answers accepted", "Vague answers accepted", "Unjudged"]
    return [Table("The judge's controls, share accepted", columns, rows)] if rows else []


def _mem0_table(arms: Sequence[ArmScore]) -> Table:
    rows = [
        [
            text(arm.name.label),
            count(arm.name.k),
            count(arm.number("mem0_answered")),
            number(arm.number("mem0_f1")),
            number(arm.number("mem0_bleu1")),
        ]
        for arm in arms
    ]
    return Table(
        "Mem0's metrics (set overlap without stems; sentence BLEU): not the official F1",
        ["Arm", "k", "n", "Mem0 F1", "Mem0 BLEU-1"],
        rows,
    )


def _official_chart(arms: Sequence[ArmScore], k: int | None) -> Figure:
    largest = max((arm.number("official_f1", key) or 0.0 for arm in arms for key in IDS), default=0.0)
    with canvas(0.9 + ROW_INCHES * len(arms)) as drawn:
        panels = drawn.subplots(1, len(IDS), sharey=True)
        for axes, (key, title) in zip(panels, IDS.items(), strict=True):
            for position, arm in enumerate(arms):
                value = arm.number("official_f1", key)
                if value is not None:
                    axes.barh(position, value, color=colour_of(arm.name), height=0.62)
                    axes.annotate(
                        f"{value:.2f}",
                        (value, position),
                        (3, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                    )
            axes.set_title(title.replace(" ", "\n", 1), fontsize=7.5, fontweight="normal")
            axes.set_xlim(0, max(largest * 1.45, 0.01))
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
            axes.axvline(0, color=LIGHT["muted"], linewidth=0.8)
        panels[0].set_yticks(range(len(arms)), [arm.name.label for arm in arms])
        panels[0].tick_params(axis="y", labelcolor=LIGHT["ink"])
        panels[0].invert_yaxis()
        return export(
            drawn,
            "accuracy",
            alt="Bars of the official F1 of every arm, for all questions and for each of the five category ids.",
            caption=f"Official LoCoMo F1 (0 to 1) at k = {k}, all ids and each id alone. All panels share one scale.",
        )


def _judge_chart(arms: Sequence[ArmScore], k: int | None) -> Figure:
    rows = [Row(arm.name, arm.name.label, value) for arm in arms if (value := arm.estimate("judge", mean="accuracy"))]
    with canvas(0.75 + ROW_INCHES * len(rows)) as drawn:
        axes = drawn.subplots()
        forest(axes, rows)
        axes.set_xlabel("share of answers that the judge calls right")
        return export(
            drawn,
            "judge",
            alt="Judge accuracy of every arm with its interval.",
            caption=f"Judge accuracy at k = {k}, 95 % intervals. Hollow marks: facts at the head.",
        )
