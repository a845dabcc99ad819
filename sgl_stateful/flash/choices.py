"""A closed set of answers, told apart by the first token of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_stateful.errors import BadFlashRequest, FlashChoicesAlike

MOST_CHOICES = 64
MOST_GAP = 1000.0  # nats: of a token that a grammar or a bias rules out


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer of a set, and the ids of its text."""

    text: str
    token_ids: tuple[int, ...]


class Decision(NamedTuple):
    """What a next-token distribution says of a set.

    Attributes
    ----------
    choice
        The most probable one.
    gap
        Difference of the log probabilities of the best two, nats; not negative, and at most ``MOST_GAP``.
    """

    choice: Choice
    gap: float


def choices_of(texts: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[Choice, ...]:
    """The choices of a question.

    Raises
    ------
    BadFlashRequest
        Fewer than two or too many, one of them empty, or two the same.
    FlashChoicesAlike
        Two begin with the same token.
    """
    if not 2 <= len(texts) <= MOST_CHOICES:
        raise BadFlashRequest(f"choices: 2 to {MOST_CHOICES} of them, not {len(texts)}")
    if len(set(texts)) < len(texts):
        raise BadFlashRequest("choices: two of them are the same")
    made = tuple(Choice(text, tuple(encode(text))) for text in texts)
    if any(not choice.token_ids for choice in made):
        raise BadFlashRequest("choices: one of them is empty")
    first: dict[int, str] = {}
    for choice in made:
        other = first.setdefault(choice.token_ids[0], choice.text)
        if other is not choice.text:
            raise FlashChoicesAlike(
                f"choices: {other!r} and {choice.text!r} begin with the same token: word them apart"
            )
    return made


def decide(choices: Sequence[Choice], logprobs: Mapping[int, float]) -> Decision:
    """The best of a set by the next token, and how far it is ahead.

    Parameters
    ----------
    logprobs
        Log probability of the first token of every choice, nats.
    """
    ranked = sorted(choices, key=lambda choice: -logprobs[choice.token_ids[0]])
    best, second = (max(logprobs[choice.token_ids[0]], -MOST_GAP) for choice in ranked[:2])
    return Decision(ranked[0], min(best - second, MOST_GAP))


def leading(choices: Sequence[Choice], text: str) -> Choice | None:
    """The choice with which a text begins, the longest of several; None: with none of them."""
    found = [choice for choice in choices if agrees(choice, text)]
    return max(found, key=lambda choice: len(choice.text.strip()), default=None)


def agrees(choice: Choice, text: str) -> bool:
    """Whether what was decoded for real begins as the choice does, white space and case of letters aside."""
    return text.strip().casefold().startswith(choice.text.strip().casefold())
