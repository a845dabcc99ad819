"""What the decoded answers of an arm are worth, by formulas that need the gold and no judge."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from locomo.dataset import Category
from locomo.scores.rows import Arm, Figures
from locomo.scoring.mem0 import mem0_bleu1, mem0_f1
from locomo.scoring.official import gold_answer, official_f1


def official_of(arm: Arm) -> Figures:
    """Official F1 of every answer; what was not answered has none."""
    return {
        key: official_f1(entry.prediction, entry.question)
        for key, entry in arm.entries.items()
        if entry.prediction is not None
    }


def answers_of(arm: Arm, official: Figures) -> dict[str, Any]:
    """Means over the questions that were answered; null where none was.

    Parameters
    ----------
    official
        As of `official_of`; empty for answers that were not decoded to their end, which have no figure here.

    Returns
    -------
    dict
        ``official_f1`` over all ids and of each, ``answered`` with how many answers each of these is of; ``mem0_f1``
        and ``mem0_bleu1`` over ids 1 to 4, as Mem0 has them, which are ``mem0_answered``.
    """
    of_id = {
        str(int(category)): [score for key, score in official.items() if arm.entries[key].question.category is category]
        for category in Category
    }
    scores = {"all": list(official.values()), **of_id}
    plain = [
        (entry.prediction, gold_answer(entry.question))
        for key in official
        if (entry := arm.entries[key]).prediction is not None and entry.question.category is not Category.ADVERSARIAL
    ]
    return {
        "official_f1": {name: _mean(found) for name, found in scores.items()},
        "answered": {name: len(found) for name, found in scores.items()},
        "mem0_f1": _mean(mem0_f1(prediction, gold) for prediction, gold in plain),
        "mem0_bleu1": _mean(mem0_bleu1(prediction, gold) for prediction, gold in plain),
        "mem0_answered": len(plain),
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
