"""A score on the terminal: one line an arm, then the bars and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from locomo.reporting.arm_names import parse_arm
from locomo.scores.rows import SPLICED

_ABSENT = "-"
_ESTIMATES = {
    "kl_answer": ("KL answer", 4),
    "kl_over_shuffle_floor": ("÷ shuffled", 2),
    "share_of_information_kept": ("info kept", 3),
    "forced_choice": ("choice", 3),
    "top1_first": ("top-1", 3),
    "nll_difference": ("ΔNLL", 3),
}
_BARS = ("kl_over_shuffle_floor", "share_of_information_kept", "recall_all_at_10")


def render(score: Mapping[str, Any]) -> Group:
    """Everything for a rich console; intervals, 95 %, in brackets."""
    arms: Mapping[str, Mapping[str, Any]] = score["arms"]
    judged = any(values["judge"] for values in arms.values())
    table = Table()
    table.add_column("arm", no_wrap=True)
    numbers = ["n", *(title for title, _ in _ESTIMATES.values()), "F1", *(["judge"] if judged else [])]
    for title in [*numbers, "TTFT p50/p95 ms"]:
        table.add_column(title, justify="right")
    table.add_column("tiers")
    table.add_column("failed", justify="right")
    for key in sorted(arms, key=parse_arm):
        table.add_row(*map(Text, _row(key, arms[key], judged=judged)))
    return Group(table, *(Text(line) for line in [*_bars(score), *_notes(score)]))


def _row(key: str, values: Mapping[str, Any], *, judged: bool) -> list[str]:
    cells = [key, str(values["n"])]
    cells += [_estimate(values[name], digits) for name, (_, digits) in _ESTIMATES.items()]
    cells.append(_number(values["official_f1"]["all"], 3))
    if judged:
        cells.append(_number((values["judge"] or {}).get("accuracy"), 3))
    times = values["ttft_ms"]
    cells.append(f"{_number(times['p50'], 1)}/{_number(times['p95'], 1)}")
    cells.append(", ".join(f"{tier} {count}" for tier, count in values["tiers"].items()) or _ABSENT)
    return [*cells, str(values["errors"])]


def _bars(score: Mapping[str, Any]) -> Iterator[str]:
    best = score["best_arm"]
    for name in _BARS:
        found = _number(score["bars"][name], 4)
        if name.startswith("recall"):
            whose = f"of {score['questions']['recall']} questions with evidence"
        elif best is None:
            whose = "no splice arm at k = 10 has the figure"
        else:
            whose = f"of {best}, the splice arm at k = 10 with the least KL"
            estimate = score["arms"][best][name]
            found = _estimate(estimate, 4) if estimate else found
        yield f"{name}: {found}  ({whose})"


def _notes(score: Mapping[str, Any]) -> Iterator[str]:
    questions = score["questions"]
    if questions["scored"] < questions["wanted"]:
        yield f"unfinished: {questions['scored']} of the run's {questions['wanted']} questions have a row"
    for key, values in score["arms"].items():
        others = {tier: count for tier, count in values["tiers"].items() if tier != SPLICED}
        if parse_arm(key).kind == "splice" and others:
            told = ", ".join(f"{count} {tier}" for tier, count in others.items())
            yield f"{key}: {sum(others.values())} of {values['n']} not spliced ({told}), left out of its fidelity"
        if values["without_prediction"]:
            yield f"{key}: {values['without_prediction']} of {values['n']} without an answer, left out of its F1"
    overs = {estimate["over"] for values in score["arms"].values() for name in _ESTIMATES if (estimate := values[name])}
    if overs:
        yield f"[low, high]: 95 %, bootstrap over {' or '.join(sorted(overs))}"
    if (audit := score["audit"]) is not None:
        yield f"audited: {audit['excluded']} of these questions have a wrong gold"


def _estimate(estimate: Mapping[str, Any] | None, digits: int) -> str:
    if estimate is None:
        return _ABSENT
    low, high = estimate["interval"]
    return f"{estimate['mean']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _number(value: float | None, digits: int) -> str:
    return _ABSENT if value is None else f"{value:.{digits}f}"
