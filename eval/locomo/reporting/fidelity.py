"""Fidelity: how far an arm's answers are from full prefill of the same token ids, beside the noise floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locomo.scoring.statistics import FEWEST_GROUPS

from . import commands
from .charts import ROW_INCHES, Line, Row, forest, lines
from .contents import Figure, Part, Section, Table, count, estimate, text
from .differences import paired_table
from .drawing import canvas, export
from .scores import ArmScore, Estimate, arms_of, main_k, spread

KL_AXIS = "mean KL from full prefill, nats per answer token (log)"
KL_DIGITS = 4
COLUMNS = {
    "kl_answer": ("KL, answer tokens (nats)", KL_DIGITS),
    "kl_over_shuffle_floor": ("÷ floor of another order", 2),
    "kl_first": ("KL, first token (nats)", KL_DIGITS),
    "top1_first": ("Same first token", 3),
    "nll_per_token_difference": ("ΔNLL (nats per token)", 3),
    "unlisted_probability": ("Probability not listed", 4),
}


def fidelity(score: Mapping[str, Any]) -> Section:
    """A chart of all arms at one k, curves over k and over the length in front where there are several, a table."""
    arms, k = [arm for arm in arms_of(score) if any(arm.estimate(key) for key in COLUMNS)], main_k(score)
    lead = [
        "Reference: full prefill of the same ids. KL is KL(reference ‖ arm), teacher-forced over the gold answer. The "
        "noise floors change what should not matter: an arm within a floor's band is as close to full prefill as full "
        "prefill is to itself under that change.",
    ]
    if not arms:
        return Section("fidelity", "Fidelity to full prefill", lead, [commands.FIDELITY])
    lead.append(
        "Of a spliced arm only what was wholly spliced counts; what was served otherwise stands in its column. Each "
        "distribution is listed to so many tokens and the rest pooled, so that every KL is a lower bound and a ratio "
        "of two no bound; the last column of the table has what the arm's distributions leave unlisted, on the mean."
    )
    if over := spread(arm.estimate(key) for arm in arms for key in COLUMNS):
        lead.append(f"Intervals: 95 %, by Student's t over {over}; none under {FEWEST_GROUPS}, nor where none differ.")
    parts: list[Part] = [chart for chart in (_arms_chart(arms, k), _k_chart(arms), _length_chart(arms, k)) if chart]
    parts.append(_table(arms))
    if paired := paired_table(arms):
        parts.append(paired)
    return Section("fidelity", "Fidelity to full prefill", lead, parts)


def _table(arms: Sequence[ArmScore]) -> Table:
    rows = [
        [
            text(arm.name.label),
            count(arm.name.k),
            count(arm.number("n")),
            text(served_as(arm)),
            count(n := arm.number("fidelity_measured")),
            *(
                estimate(arm.estimate(key), digits, n=None if n is None else int(n))
                for key, (_, digits) in COLUMNS.items()
            ),
        ]
        for arm in arms
        if not _is_reference(arm)
    ]
    columns = ["Arm", "k", "Asked", "Served as", "n", *(title for title, _ in COLUMNS.values())]
    return Table("Distance from full prefill, 95 % intervals", columns, rows)


def served_as(arm: ArmScore) -> str | None:
    """How its facts got into the prompts, with counts: ``spliced 3, text 197``; None where the score does not say."""
    tiers = arm.values.get("tiers")
    if not isinstance(tiers, Mapping):
        return None
    return ", ".join(f"{tier} {number}" for tier, number in tiers.items()) or None


def _is_reference(arm: ArmScore) -> bool:
    """Whether the arm was compared with itself and so has nothing to show: text with no distance at all."""
    value = arm.estimate("kl_answer")
    return arm.name.kind == "text" and value is not None and value.mean == 0


def _known(arms: Sequence[ArmScore]) -> list[tuple[ArmScore, Estimate]]:
    """The arms that differ from their reference, with their answer-token KL."""
    found = [(arm, arm.estimate("kl_answer")) for arm in arms]
    return [(arm, value) for arm, value in found if value is not None and not _is_reference(arm)]


def _floors(arms: Sequence[ArmScore], k: int | None) -> list[tuple[ArmScore, Estimate]]:
    return [(arm, value) for arm, value in _known(arms) if arm.name.floor and arm.name.k in (k, None)]


def _arms_chart(arms: Sequence[ArmScore], k: int | None) -> Figure | None:
    known = [(arm, value) for arm, value in _known(arms) if arm.name.k in (k, None)]
    if not known:
        return None
    rows = [Row(arm.name, arm.name.label, value) for arm, value in known]
    with canvas(0.75 + ROW_INCHES * len(rows)) as drawn:
        axes = drawn.subplots()
        forest(axes, rows, floors=[value for _, value in _floors(arms, k)], log=True, digits=KL_DIGITS)
        axes.set_xlabel(KL_AXIS)
        return export(
            drawn,
            "fidelity_arms",
            alt=f"Mean answer-token KL of every arm at k = {k} with its interval, noise floors as bands.",
            caption=f"How far each arm is from full prefill at k = {k}; left is closer. Grey bands: the noise floors "
            "with their intervals. Hollow marks: facts at the head of the prompt.",
        )


def _k_chart(arms: Sequence[ArmScore]) -> Figure | None:
    """Lines over k of the arms that were run at several; the floors follow k too and are drawn as bands."""
    series = _series([(arm, value) for arm, value in _known(arms) if not arm.name.floor], by_k=True)
    if not series:
        return None
    floors = _series([(arm, value) for arm, value in _known(arms) if arm.name.floor], by_k=True)
    with canvas(max(3.4, 1.2 + 0.17 * (len(series) + len(floors)))) as drawn:
        axes = drawn.subplots()
        lines(axes, series, floors=floors, log=True)
        axes.set_xlabel("k, facts in the prompt")
        axes.set_ylabel("mean KL, nats per token (log)")
        return export(
            drawn,
            "fidelity_k",
            alt="Mean answer-token KL over k, one line an arm, noise floors as bands.",
            caption="Fidelity against the number of facts. Bars: 95 % intervals. Dashed lines: facts at the head.",
        )


def _length_chart(arms: Sequence[ArmScore], k: int | None) -> Figure | None:
    """Lines over the window's or the anchor list's length, at one k."""
    series = _series(
        [(arm, value) for arm, value in _known(arms) if arm.name.k == k and arm.name.length is not None], by_k=False
    )
    if not series:
        return None
    reach = [min(x for line in series for x in line.x), max(x for line in series for x in line.x)]
    floors = [Line(arm.name, arm.name.label, reach, [value, value]) for arm, value in _floors(arms, k)]
    with canvas(3.6) as drawn:
        axes = drawn.subplots()
        lines(axes, series, floors=floors, log=True)
        axes.set_xlabel("facts in front of each fact when it was encoded (window w, or anchors n)")
        axes.set_ylabel("mean KL, nats per token (log)")
        return export(
            drawn,
            "fidelity_length",
            alt=f"Mean answer-token KL at k = {k} over the length in front of each fact, noise floors as bands.",
            caption=f"Fidelity against the length in front of each fact, k = {k}. Bars: 95 % intervals.",
        )


def _series(known: Sequence[tuple[ArmScore, Estimate]], *, by_k: bool) -> list[Line]:
    """Group into lines with two or more points: over k by series, or over length by family and placement."""
    groups: dict[tuple[object, ...], list[tuple[float, ArmScore, Estimate]]] = {}
    for arm, value in known:
        name = arm.name
        x = name.k if by_k else name.length
        if x is not None:
            key = (name.series,) if by_k else (name.family, name.placement, name.oracle)
            groups.setdefault(key, []).append((x, arm, value))
    found = []
    for points in groups.values():
        points.sort(key=lambda point: point[0])
        name = points[0][1].name
        label = name.label if by_k else ", ".join(filter(None, (name.family, name.placement)))
        if len(points) > 1:
            found.append(Line(name, label, [x for x, _, _ in points], [value for _, _, value in points]))
    return found
