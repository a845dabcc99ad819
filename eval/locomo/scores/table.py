"""A score on the terminal: one line an arm, then the bars and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from locomo.reporting.arm_names import parse_arm
from locomo.reporting.scores import ArmScore, spread
from locomo.scores.rows import tier_of
from locomo.scoring.statistics import FEWEST_GROUPS

_ABSENT = "-"
_ESTIMATES = {
    "kl_answer": ("KL answer", 4),
    "kl_over_shuffle_floor": ("÷ shuffled", 2),
    "share_of_information_kept": ("info kept", 3),
    "forced_choice": ("choice", 3),
    "top1_first": ("top-1", 3),
    "nll_per_token_difference": ("ΔNLL", 3),
}
_BARS = ("kl_over_shuffle_floor", "share_of_information_kept", "recall_all_at_10")


def render(score: Mapping[str, Any]) -> Group:
    """Everything for a rich console; intervals, 95 %, in brackets."""
    arms: Mapping[str, Mapping[str, Any]] = score["arms"]
    judged = any(values["judge"] for values in arms.values())
    table = Table()
    table.add_column("arm", no_wrap=True)
    numbers = ["asked", "n", *(title for title, _ in _ESTIMATES.values()), "F1", *(["judge"] if judged else [])]
    for title in numbers:
        table.add_column(title, justify="right")
    table.add_column("tiers")
    table.add_column("failed", justify="right")
    for key in sorted(arms, key=parse_arm):
        table.add_row(*map(Text, _row(key, arms[key], judged=judged)))
    return Group(table, *(Text(line) for line in [*_bars(score), *_notes(score)]))


def _row(key: str, values: Mapping[str, Any], *, judged: bool) -> list[str]:
    cells = [key, str(values["n"]), str(values["fidelity_measured"])]
    cells += [_estimate(values[name], digits) for name, (_, digits) in _ESTIMATES.items()]
    cells.append(_number(values["official_f1"]["all"], 3))
    if judged:
        cells.append(_number((values["judge"] or {}).get("accuracy"), 3))
    cells.append(", ".join(f"{tier} {count}" for tier, count in values["tiers"].items()) or _ABSENT)
    return [*cells, str(values["errors"])]


def _bars(score: Mapping[str, Any]) -> Iterator[str]:
    best, k, chosen_from = score["best_arm"], score["k"], score["best_of"]
    for name in _BARS:
        found = _number(score["bars"][name], 4)
        if name.startswith("recall"):
            whose = "of the questions with evidence"
        elif best is None:
            whose = (
                f"no splice arm at k = {k} has the figure" if chosen_from is None else "no question that all arms have"
            )
        else:
            of = (
                f" of {len(chosen_from['arms'])} on {chosen_from['n']} questions"
                if len(chosen_from["arms"]) > 1
                else ""
            )
            whose = f"of {best}, the splice arm at k = {k} with the least KL{of}"
        if interval := score["bars"][f"{name}_interval"]:
            found += f" {_interval(interval, 4)}"
        yield f"{name}: {found}  ({whose})"


def _notes(score: Mapping[str, Any]) -> Iterator[str]:
    questions = score["questions"]
    if questions["scored"] < questions["wanted"]:
        yield f"unfinished: {questions['scored']} of the run's {questions['wanted']} questions have a row"
    for key, values in score["arms"].items():
        arm = parse_arm(key)
        others = {tier: count for tier, count in values["tiers"].items() if tier != tier_of(arm)}
        if arm.kind == "splice" and others:
            told = ", ".join(f"{number} {tier}" for tier, number in others.items())
            count = f"{sum(others.values())} of {values['n']}"
            yield f"{key}: {count} not {tier_of(arm)} ({told}), left out of its fidelity"
        if values["not_served"]:
            yield f"{key}: nothing to serve for {values['not_served']} questions, which it was not asked"
        if values["without_prediction"] and values["answered"]["all"]:
            yield f"{key}: {values['without_prediction']} of {values['n']} without an answer, left out of its F1"
    over = spread(
        ArmScore(parse_arm(key), values).estimate(name) for key, values in score["arms"].items() for name in _ESTIMATES
    )
    if over:
        yield f"[low, high]: 95 %, by Student's t over {over}; none under {FEWEST_GROUPS}"
    if (audit := score["audit"]) is not None:
        yield f"audited: {audit['excluded']} of these questions have a wrong gold; without them:"
        for name in _BARS:
            bars = score["audited"]["bars"]
            interval = bars[f"{name}_interval"]
            yield f"  {name}: {_number(bars[name], 4)}{f' {_interval(interval, 4)}' if interval else ''}"
    if score["judge_refused"]:
        yield f"no verdicts: {score['judge_refused']}"


def _estimate(estimate: Mapping[str, Any] | None, digits: int) -> str:
    if estimate is None:
        return _ABSENT
    interval = f" {_interval(estimate['interval'], digits)}" if estimate["interval"] else ""
    return f"{estimate['mean']:.{digits}f}{interval}"


def _interval(interval: Sequence[float], digits: int) -> str:
    low, high = interval
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


def _number(value: float | None, digits: int) -> str:
    return _ABSENT if value is None else f"{value:.{digits}f}"
