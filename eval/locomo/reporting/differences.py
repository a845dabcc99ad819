"""Arms against full prefill, and against the same facts in another order: paired, with the questions counted."""

from __future__ import annotations

from collections.abc import Sequence

from .contents import Table, count, estimate, text
from .scores import ArmScore

AGAINST = {"less_text": "facts as text", "less_shuffled": "the same facts in another order"}
METRICS = {
    "kl_answer": ("KL, answer tokens (nats)", 4),
    "nll_per_token": ("NLL (nats per token)", 3),
    "forced_choice": ("Forced choice", 3),
    "official_f1": ("Official F1", 3),
}


def paired_table(arms: Sequence[ArmScore]) -> Table | None:
    """One row for an arm and what it is held against; None where the score has no such differences."""
    rows = []
    for arm in arms:
        for key, against in AGAINST.items():
            found = {metric: arm.estimate(key, metric) for metric in METRICS}
            sizes = [value.n for value in found.values() if value and value.n is not None]
            if sizes:
                cells = [estimate(found[metric], digits, n=max(sizes)) for metric, (_, digits) in METRICS.items()]
                rows.append([text(arm.name.label), count(arm.name.k), text(against), count(max(sizes)), *cells])
    columns = ["Arm", "k", "Less", "n", *(title for title, _ in METRICS.values())]
    return (
        Table("Paired differences, on the questions that both arms have, 95 % intervals", columns, rows)
        if rows
        else None
    )
