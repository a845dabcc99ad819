"""What the decoded answers of an arm are worth, by formulas that need the gold and no judge."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from locomo.dataset import Category
from locomo.scores.rows import Arm, Figures, Key
from locomo.scoring.mem0 import mem0_bleu1, mem0_f1
from locomo.scoring.official import gold_answer, official_f1


def official_of(arm: Arm) -> Figures:
    """Official F1 of every answer; what was not answered has none."""
    return {
        key: official_f1(entry.prediction, entry.question)
        for key, entry in arm.entries.items()
        if entry.prediction is not None
    }


def answers_of(arm: Arm, official: Figures, *, excluded: Collection[Key] | None) -> dict[str, Any]:
    """Means over the questions that were answered; null where none was.

    Parameters
    ----------
    official
        As of `official_of`; empty for answers that were not decoded to their end, which have no figure here.
    excluded
        Questions whose gold is known to be wrong; None where nobody looked.

    Returns
    -------
    dict
        ``official_f1`` over all ids and of each, ``mem0_f1`` and ``mem0_bleu1`` over ids 1 to 4, as Mem0 has them, and
        ``official_f1_audited``: over all ids without those excluded.
    """
    by_id = {
        str(int(category)): _mean(
            score for key, score in official.items() if arm.entries[key].question.category is category
        )
        for category in Category
    }
    plain = [
        (entry.prediction, gold_answer(entry.question))
        for key in official
        if (entry := arm.entries[key]).prediction is not None and entry.question.category is not Category.ADVERSARIAL
    ]
    sound = None if excluded is None else [score for key, score in official.items() if key not in excluded]
    return {
        "official_f1": {"all": _mean(official.values()), **by_id},
        "mem0_f1": _mean(mem0_f1(prediction, gold) for prediction, gold in plain),
        "mem0_bleu1": _mean(mem0_bleu1(prediction, gold) for prediction, gold in plain),
        "official_f1_audited": None if sound is None else _mean(sound),
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
