"""Answers of known worth, judged among the others: a judge that accepts these accepts too much."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from locomo.dataset import Category, Question
from locomo.scoring.choice import distractors

VAGUE_ANSWERS = (
    "It was mentioned that they did something recently.",
    "They talked about that and seemed happy with it.",
    "Something to do with what they both like.",
)


class ControlKind(StrEnum):
    """``KNOWN_WRONG``: another question's gold. ``VAGUE``: fits any question and answers none."""

    KNOWN_WRONG = "known_wrong"
    VAGUE = "vague"


@dataclass(frozen=True, slots=True)
class Control:
    """An answer that is to be judged wrong."""

    kind: ControlKind
    question: Question
    prediction: str


def make_controls(questions: Collection[Question], pool: Sequence[Question], *, share: float) -> tuple[Control, ...]:
    """Make a known-wrong and a vague answer for a fixed share of the questions.

    The choice is by a hash of ``(sample_id, index)``: the same questions give the same controls, whatever answers are
    judged. Adversarial questions are left out, since a vague answer may be a right one there.

    Parameters
    ----------
    questions
        Those that are judged; each once.
    pool
        Where other gold answers are taken from, as by `distractors`: of the same category id and conversation first.
    share
        Of the questions that may have controls, in (0, 1]; at least one question is chosen.

    Returns
    -------
    tuple of Control
        Without the known-wrong one of a question for which the pool holds no other answer.
    """
    eligible = [item for item in questions if item.category is not Category.ADVERSARIAL]
    count = min(len(eligible), max(1, round(share * len(eligible))))
    controls: list[Control] = []
    for question in sorted(eligible, key=_digest)[:count]:
        wrong = distractors(question, pool, count=1)
        controls += [Control(ControlKind.KNOWN_WRONG, question, answer) for answer in wrong]
        vague = VAGUE_ANSWERS[_digest(question)[0] % len(VAGUE_ANSWERS)]
        controls.append(Control(ControlKind.VAGUE, question, vague))
    return tuple(controls)


def _digest(question: Question) -> bytes:
    return hashlib.sha256(f"{question.sample_id}\0{question.index}".encode()).digest()
