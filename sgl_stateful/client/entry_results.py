"""What the routes of entries answer. Ages are in seconds, gaps in nats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sgl_stateful.client.reading import mapping, optional, part, value


@dataclass(frozen=True, slots=True)
class KnownAhead:
    """What is known behind an entry.

    Attributes
    ----------
    tokens
        Of the answer.
    ends
        ``stop`` or ``length`` where that is all of it; None: there is more.
    choice, gap, agreed
        The best of the choices at the decision point, how far it was ahead, and whether decoding on has said the same;
        None where it was not.
    by
        ``decoding``, or ``gate`` where the choice answers.
    """

    text: str
    data_version: int
    output_ids: tuple[int, ...] = ()
    tokens: int = 0
    ends: str | None = None
    age_s: float | None = None
    choice: str | None = None
    gap: float | None = None
    agreed: bool | None = None
    by: str = "decoding"
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, output_ids=tuple(mapping(data).get("output_ids") or ()))


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a session.

    Attributes
    ----------
    state
        ``pending``, ``fresh``, ``stale``, ``failed`` (``error`` says why) or ``retired`` (``retired`` says why).
    cells
        Of the KV pool, that it has pinned beside its session's.
    ahead
        What is known behind it; None while nothing is.
    """

    name: str
    session: str
    owner: str
    state: str
    max_tokens: int = 0
    priority: int = 0
    hits: int = 0
    evaluations: int = 0
    cells: int = 0
    waiting: bool = False
    error: str | None = None
    retired: str | None = None
    ahead: KnownAhead | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, ahead=optional(mapping(data).get("ahead"), KnownAhead.of))


def of_deleted_entry(data: Any) -> Entry:
    """The entry of a reply to its deletion."""
    return Entry.of(part(data, "deleted"))
