"""The official LoCoMo score of an answer, by the question's category id.

The formulas are those of the data set's own evaluation code; the tests hold worked values that it gave. Two of its
properties surprise: the gold of open-domain questions is cut at its first ``;``, so that the whole gold as a prediction
scores below 1; and an adversarial question is right by either of two phrases, whatever else the answer says.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from functools import lru_cache

from nltk.stem.porter import PorterStemmer

from locomo.dataset import Category, Question
from locomo.errors import ScoringError

NOT_MENTIONED = "Not mentioned in the conversation"
_ABSTENTIONS = ("no information available", "not mentioned")

_ARTICLES = re.compile(r"\b(?:a|an|the|and)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_stem = lru_cache(maxsize=1 << 16)(PorterStemmer().stem)


def gold_answer(question: Question) -> str:
    """Return what a perfect system would answer, uncut: the gold, or for an adversarial question `NOT_MENTIONED`.

    Raises
    ------
    ScoringError
        The question is not adversarial and the data file gives it no answer.
    """
    if question.category is Category.ADVERSARIAL:
        return NOT_MENTIONED
    if question.answer is None:
        raise ScoringError(
            f"question {question.index} of {question.sample_id} (id {question.category:d}) has no gold answer"
        )
    return question.answer


def normalise(text: str) -> str:
    """Lowercase, without ASCII punctuation (no space in its place), articles and "and"; single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def token_f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the multisets of Porter stems; 0 where nothing is shared."""
    predicted, wanted = (Counter(map(_stem, normalise(text).split())) for text in (prediction, gold))
    shared = (predicted & wanted).total()
    # 2pr / (p + r) with p = shared / predicted and r = shared / wanted
    return 2.0 * shared / (predicted.total() + wanted.total()) if shared else 0.0


def parts_f1(prediction: str, gold: str) -> float:
    """Mean over the gold's comma-separated parts of the best `token_f1` of any part of the prediction."""
    predicted, wanted = ([part.strip() for part in text.split(",")] for text in (prediction, gold))
    return sum(max(token_f1(mine, part) for mine in predicted) for part in wanted) / len(wanted)


def official_f1(prediction: str, question: Question) -> float:
    """Score one answer, in [0, 1].

    Parameters
    ----------
    prediction
        Raw text of the answer.
    question
        Its `category` chooses the formula: `parts_f1` for multi-hop, `token_f1` for temporal, open-domain (against the
        gold up to its first ``;``) and single-hop, and for adversarial questions 1 where the answer says that
        the matter was not mentioned.

    Raises
    ------
    ScoringError
        The question needs a gold answer and has none.
    """
    if question.category is Category.ADVERSARIAL:
        return float(any(phrase in prediction.lower() for phrase in _ABSTENTIONS))
    gold = gold_answer(question)
    match question.category:
        case Category.MULTI_HOP:
            return parts_f1(prediction, gold)
        case Category.OPEN_DOMAIN:
            return token_f1(prediction, gold.split(";")[0].strip())
        case _:
            return token_f1(prediction, gold)
