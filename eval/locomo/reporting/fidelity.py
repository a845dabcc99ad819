"""Fidelity: how far an arm's answers are from full prefill of the same token ids, beside the noise floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import commands
from .charts import ROW_INCHES, Line, Row, forest, lines
from .contents import Figure, Section, Table, count, estimate, text
from .drawing import canvas, export
from .scores import ArmScore, Estimate, arms_of, main_k

KL_AXIS = "mean KL from full prefill, nats per answer token (log)"
KL_DIGITS = 4
COLUMNS = {
    "kl_answer": ("KL, answer tokens (nats)", KL_DIGITS),
    "kl_over_shuffle_floor": ("÷ floor of another order", 2),
    "kl_first": ("KL, first token (nats)", KL_DIGITS),
    "top1_first": ("Same first token", 3),
    "nll_difference": ("ΔNLL (nats per token)", 3),
}


def fidelity(score: Mapping[str, Any]) -> Section:
    """A chart of all arms at one k, curves over k and over the length in front where there are several, a table."""
    arms = [arm for arm in arms_of(score) if any(arm.estimate(key) for key in COLUMNS)]
    lead = [
        "Reference: full prefill of the same ids. KL is KL(reference ‖ arm), teacher-forced over the gold answer. The "
        "noise floors change what should not matter: an arm within a floor's band is as close to full prefill as full "
        "prefill is to itself under that change.",
    ]
    if not arms:
        return Section("fidelity", "Fidelity to full prefill", lead, [commands.FIDELITY])
    over = {value.over for arm in arms for key in COLUMNS if (value := arm.estimate(key)) and value.over}
    if over:
        lead.append(f"Intervals: 95 %, bootstrap over {' or '.join(sorted(over))}.")
    charts = [chart for chart in (_arms_chart(arms), _k_chart(arms), _length_chart(arms)) if chart]
    return Section("fidelity", "Fidelity to full prefill", lead, [*charts, _table(arms)])


def _table(arms: Sequence[ArmScore]) -> Table:
    rows = [
        [text(arm.name.label), count(arm.name.k), count(arm.number("n"))]
        + [estimate(arm.estimate(key), digits) for key, (_, digits) in COLUMNS.items()]
        for arm in arms
        if not _is_reference(arm)
    ]
    return Table(
        "Distance from full prefill, 95 % intervals", ["Arm", "k", "n", *(title for title, _ in COLUMNS.values())], rows
    )


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


def _arms_chart(arms: Sequence[ArmScore]) -> Figure | None:
    k = main_k(arms)
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


def _length_chart(arms: Sequence[ArmScore]) -> Figure | None:
    """Lines over the window's or the anchor list's length, at the k that most arms have."""
    k = main_k(arms)
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
