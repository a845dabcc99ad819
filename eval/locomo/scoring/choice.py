"""Forced choice: whether the model finds the gold answer likelier than nine other answers of the benchmark."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from locomo.dataset import Question
from locomo.errors import ScoringError
from locomo.scoring.official import gold_answer, normalise

DISTRACTORS = 9


def distractors(question: Question, pool: Iterable[Question], *, count: int = DISTRACTORS) -> tuple[str, ...]:
    """Choose wrong answers to a question among the gold answers of others.

    Answers to questions of the same category id come first and, within the same id as within the others, those of the
    same conversation: a distractor should be of the right kind before it is of the right people. Order within these
    four groups is by a hash of the question's ``(sample_id, index)`` and of the answer, and so depends neither on the
    order of the pool nor on a random generator's version.

    Parameters
    ----------
    question
        The question to answer.
    pool
        Questions of the whole data file; the question itself may be among them. Those without a gold are passed over.
    count
        How many to choose.

    Returns
    -------
    tuple of str
        `count` answers, or fewer where the pool has no more, different from the gold and from each other in more than
        case, punctuation, articles and the order of words.
    """
    seed = f"{question.sample_id}\0{question.index}"
    candidates = sorted(
        (
            other.category != question.category,
            other.sample_id != question.sample_id,
            hashlib.sha256(f"{seed}\0{answer}".encode()).digest(),
            answer,
        )
        for other in pool
        if other.answer is not None and (answer := gold_answer(other))
    )
    seen = {_identity(gold_answer(question))}
    chosen: list[str] = []
    for *_, answer in candidates:
        if len(chosen) == count:
            break
        if (identity := _identity(answer)) not in seen:
            seen.add(identity)
            chosen.append(answer)
    return tuple(chosen)


def is_gold_chosen(choices_nll: Sequence[float]) -> bool:
    """Tell whether the gold wins: whether its mean NLL per token is below that of every other choice (a tie loses).

    Parameters
    ----------
    choices_nll
        Mean nats per token of each choice, the gold's first.

    Raises
    ------
    ScoringError
        There is no choice beside the gold, or a value is not a number.
    """
    if len(choices_nll) < 2 or any(math.isnan(value) for value in choices_nll):
        raise ScoringError(f"a forced choice needs two numbers or more, not {list(choices_nll)}")
    gold, *others = choices_nll
    return gold < min(others)


def _identity(answer: str) -> tuple[str, ...]:
    return tuple(sorted(normalise(answer).split())) or (answer.casefold().strip(),)
