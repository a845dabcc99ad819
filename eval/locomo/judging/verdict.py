"""Verdicts, and what counts as one in a judge's reply.

A reply counts only where it can be read in one way. Everything else is asked again, for a guess would enter the
accuracy as if it had been a judgement.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum


class Verdict(StrEnum):
    """What a judge makes of an answer.

    ``ABSTAINED``: the answer declines to answer. ``UNJUDGED``: no verdict was had, or the runs' verdicts agree on none;
    it is neither right nor wrong.
    """

    CORRECT = "correct"
    WRONG = "wrong"
    ABSTAINED = "abstained"
    UNJUDGED = "unjudged"


_WORDS = {
    "correct": Verdict.CORRECT,
    "wrong": Verdict.WRONG,
    "incorrect": Verdict.WRONG,
    "not correct": Verdict.WRONG,
    "abstained": Verdict.ABSTAINED,
    "abstain": Verdict.ABSTAINED,
}
_KEYS = {"verdict", "label", "judgment", "judgement"}

_FIELD = re.compile(
    r"""["'*]*\b(?:verdict|label|judge?ment)\b["'*]*\s*(?:[:=]|\bis\b)\s*["'*]*([^"'*,.;}\n]*)""", re.IGNORECASE
)
_ALONE = re.compile(r"\W*([a-z]+(?: [a-z]+)?)\W*", re.IGNORECASE)
_VERDICT_WORD = re.compile(r"\b(?:correct|right|wrong|incorrect|abstain(?:ed|s)?)\b", re.IGNORECASE)
_PREDICATE = re.compile(
    r"(?<!reference )(?<!gold )(?<!golden )\b(?:answer|response|prediction|reply|it|this)\s+(?:is|was|has)\s+"
    r"(correct|wrong|incorrect|abstained)(?=\s*(?:[.!,;:)]|$|because\b|since\b|as\b))",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"n['’]t\b|\b(?:not|no|nor|never|neither|cannot|if|unless|whether|would|could|may|might|but|however|although|though|"
    r"except|only|partly|partially|mostly|almost|nearly|half|hardly|both)\b",
    re.IGNORECASE,
)


def parse_verdict(reply: str) -> Verdict | None:
    """Read a verdict out of a reply, or return `None` where it has none or can be read in two ways.

    Tried in this order, the first that finds something decides: JSON objects in the reply (also fenced, or among
    prose); a field of broken JSON or ``Verdict: …``; a reply of one word; sentences such as "The answer is wrong
    because …", without any word of negation or doubt and without a second verdict. What a reasoning model thought
    before ``</think>`` is passed over.
    """
    text = reply.rpartition("</think>")[2].strip()
    for reading in (_objects, _fields, _alone, _sentences):
        found = reading(text)
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _objects(text: str) -> set[Verdict | None]:
    decoder, found, start = json.JSONDecoder(), set[Verdict | None](), text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):  # the second where a reply opens thousands of brackets
            end = start + 1
        else:
            found |= {_word(item) for key, item in value.items() if key.lower() in _KEYS}
        start = text.find("{", end)
    return found


def _fields(text: str) -> set[Verdict | None]:
    return {_word(match[1]) for match in _FIELD.finditer(text)}


def _alone(text: str) -> set[Verdict | None]:
    match = _ALONE.fullmatch(text)
    return {_word(match[1])} - {None} if match else set()


def _sentences(text: str) -> set[Verdict | None]:
    predicates = _PREDICATE.findall(text)
    if not predicates or _HEDGE.search(text) or len(_VERDICT_WORD.findall(text)) != len(predicates):
        return set()
    return {_word(word) for word in predicates}


def _word(value: object) -> Verdict | None:
    return _WORDS.get(" ".join(str(value).lower().split()))
