"""What the routes of registered questions answer. Ages are in seconds, gaps in nats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sgl_stateful.client.reading import mapping, optional, part, value


@dataclass(frozen=True, slots=True)
class FlashAnswer:
    """A stored answer.

    Attributes
    ----------
    data_version
        Version of the session that it was computed on.
    age_s, staleness_s
        Since it was computed, and since its session went on to another version.
    confidence
        Expected share of agreement with decoding for real; None where nothing was observed yet.
    choice, gap
        The best of the question's choices, and how far it was ahead.
    by
        ``decoding`` or ``gate``.
    """

    text: str
    data_version: int
    output_ids: tuple[int, ...] = ()
    age_s: float | None = None
    staleness_s: float = 0.0
    confidence: float | None = None
    choice: str | None = None
    gap: float | None = None
    by: str = "decoding"
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, output_ids=tuple(mapping(data).get("output_ids") or ()))


@dataclass(frozen=True, slots=True)
class FlashQuestion:
    """A registered question.

    Attributes
    ----------
    state
        ``pending``, ``fresh``, ``stale``, ``failed`` (``error`` says why) or ``retired`` (``retired`` says why).
    answer
        Its latest; None while there is none.
    """

    name: str
    session: str
    owner: str
    state: str
    max_tokens: int = 0
    priority: int = 0
    hits: int = 0
    evaluations: int = 0
    waiting: bool = False
    error: str | None = None
    retired: str | None = None
    answer: FlashAnswer | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, answer=optional(mapping(data).get("answer"), FlashAnswer.of))


@dataclass(frozen=True, slots=True)
class FlashEvent:
    """A change of a session's answers.

    Attributes
    ----------
    id
        To go on behind it; empty for one that was not a change.
    kind
        ``answer``, ``invalid``, ``error``, ``retired``, ``semantic_retired``, ``removed``, ``ended``,
        ``gap`` (some were missed).
    """

    id: str
    kind: str
    data: Mapping[str, Any]


def of_deleted(data: Any) -> FlashQuestion:
    """The question of a reply to its deletion."""
    return FlashQuestion.of(part(data, "deleted"))
