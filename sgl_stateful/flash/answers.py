"""Answers, and everything that each depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .question import Ask

FactVersions = tuple[tuple[str, int], ...]
"""Facts of a prompt with their versions, in the order in which the store has ranked or named them."""

By = Literal["decoding", "gate"]


class Present(NamedTuple):
    """A session at one moment.

    Attributes
    ----------
    owner_epoch
        Counts the purges of its owner.
    weight_version
        Name of the model's weights; None while they are being updated, when no answer is right.
    is_first
        It holds nothing: a question is rendered otherwise then.
    """

    data_version: int
    owner_epoch: int
    weight_version: str | None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """Everything that an answer depends on. One that is equal in all of it is what decoding would say.

    Attributes
    ----------
    flushes
        Counts the flushes of the cache.
    template_version
        Of the registration; new with every update, and never used again.
    """

    session_id: str
    present: Present
    flushes: int
    template_version: int
    ask: Ask
    facts: FactVersions = ()

    def has_fact(self, fact_id: str | None) -> bool:
        """Whether a fact stood in the prompt, in whatever version; None: no."""
        return any(fact_id == name for name, _ in self.facts)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was decoded, or what the gate has let through.

    Attributes
    ----------
    reply
        The engine's reply, to be shown again.
    choice, gap
        The best of the question's choices, and how far it was ahead, nats; None without choices.
    ms
        That it took.
    decoded_tokens
        That it took.
    """

    text: str
    token_ids: tuple[int, ...]
    by: By = "decoding"
    choice: str | None = None
    gap: float | None = None
    ms: float = 0.0
    decoded_tokens: int = 0
    reply: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(slots=True, eq=False)
class Stored:
    """An answer in the table.

    Attributes
    ----------
    computed_at
        Seconds, of the table's clock.
    superseded_at
        When its session went on to another version; None: it has not.
    """

    key: AnswerKey
    answer: Answer
    computed_at: float
    superseded_at: float | None = None
    hits: int = 0

    def staleness_s(self, now: float) -> float:
        """How long it has not been of its session's newest version."""
        return 0.0 if self.superseded_at is None else max(now - self.superseded_at, 0.0)
