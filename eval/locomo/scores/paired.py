"""What an arm has more or less than another, over the questions that both have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locomo.runs.config import reference_of
from locomo.scores import estimates
from locomo.scores.distance import floor_of
from locomo.scores.rows import Arm, Figures, Rows

METRICS = ("kl_answer", "nll_per_token", "forced_choice", "official_f1")


def paired_differences(arm: Arm, rows: Rows, official: Mapping[str, Figures]) -> dict[str, Any]:
    """Differences from full prefill of the same facts, and from the same facts in another order.

    Returns
    -------
    dict
        ``less_text`` and ``less_shuffled``: by each of `METRICS` an estimate, null where no question is shared; null as
        a whole where the run has no such arm, or it is this one.
    """
    against = {
        "less_text": rows.arm(reference_of(arm.name, rows.config) or ""),
        "less_shuffled": floor_of(arm.name, rows),
    }
    mine = figures_of(arm, official[arm.key])
    return {
        name: _differences(mine, figures_of(other, official[other.key])) if other and other.key != arm.key else None
        for name, other in against.items()
    }


def figures_of(arm: Arm, official: Figures) -> dict[str, Figures]:
    """Every figure of an arm that single questions have, by its name."""
    return {
        "kl_answer": arm.figure("kl_answer"),
        "kl_first": arm.figure("kl_first"),
        "top1_first": arm.figure("top1_first"),
        "nll_per_token": arm.figure("nll"),
        "forced_choice": arm.forced_choice(),
        "official_f1": official,
    }


def _differences(mine: Mapping[str, Figures], theirs: Mapping[str, Figures]) -> dict[str, Any]:
    return {metric: estimates.mean_difference(mine[metric], theirs[metric]) for metric in METRICS}
