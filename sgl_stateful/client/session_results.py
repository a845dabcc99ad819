"""What the session routes answer. Times are in seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sgl_stateful.client.reading import each, mapping, optional, part, value


@dataclass(frozen=True, slots=True)
class Pin:
    """Whether a session's KV is kept.

    Attributes
    ----------
    state
        ``pinned``, ``lost`` (the next use prefills it once more) or ``unpinned``.
    cells
        What it counts against the budget.
    reason
        Why it is not pinned: in words, or where it did not fit the numbers that ``PinRefused`` has, in cells.
    """

    state: str
    cells: int = 0
    reason: str | Mapping[str, Any] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data)


@dataclass(frozen=True, slots=True)
class Window:
    """How long the data of a session may be, and what has left for that."""

    tokens: int
    dropped_messages: int = 0
    dropped_tokens: int = 0
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data)


@dataclass(frozen=True, slots=True)
class Queue:
    """Appends that wait, and those that were dropped."""

    waiting: int = 0
    dropped: int = 0
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data)


@dataclass(frozen=True, slots=True)
class Parent:
    """What a session was forked from."""

    id: str
    version: int
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session at the moment of a reply.

    Attributes
    ----------
    version
        From 1, one more with every change.
    tokens
        Length of its content.
    ttl_s, max_age_s
        Idle lifetime, and lifetime since ``created_at``; None: no limit.
    raw
        The JSON, with the fields that this client does not know.
    """

    id: str
    owner: str
    version: int
    tokens: int
    pin: Pin
    state: str = "open"
    ttl_s: float | None = None
    max_age_s: float | None = None
    created_at: float | None = None
    used_at: float | None = None
    expires_at: float | None = None
    priority: int = 0
    reserve_tokens: int = 0
    on_full: str = "refuse"
    window: Window | None = None
    queue: Queue = field(default_factory=Queue)
    parent: Parent | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        given = mapping(data)
        return value(
            cls,
            given,
            pin=Pin.of(part(given, "pin")),
            window=optional(given.get("window"), Window.of),
            queue=optional(given.get("queue"), Queue.of) or Queue(),
            parent=optional(given.get("parent"), Parent.of),
        )


@dataclass(frozen=True, slots=True)
class Appended:
    """An append that is done.

    Attributes
    ----------
    version
        The one that it made.
    appended_tokens
        How many tokens it added.
    prefilled_tokens, cached_tokens
        How many were computed for it, and how many were in the pool.
    dropped_messages
        How many left the window for it.
    """

    session: SessionInfo
    version: int
    appended_tokens: int
    prefilled_tokens: int | None = None
    cached_tokens: int | None = None
    dropped_messages: int = 0
    ms: float | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, session=SessionInfo.of(part(data, "session")))


@dataclass(frozen=True, slots=True)
class Queued:
    """An append that will be done; ``queued``: how many wait."""

    session: SessionInfo
    queued: int
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, session=SessionInfo.of(part(data, "session")))


@dataclass(frozen=True, slots=True)
class SessionStats:
    """What an operator asks first; the groups are those of ``docs/sessions.md``.

    Attributes
    ----------
    rows
        Sessions of all owners, most cells first.
    """

    cells: Mapping[str, Any]
    sessions: Mapping[str, Any]
    totals: Mapping[str, Any]
    rows: tuple[SessionInfo, ...] = ()
    queue: Queue = field(default_factory=Queue)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        given = mapping(data)
        return value(
            cls,
            given,
            rows=each(given.get("rows") or [], SessionInfo.of),
            queue=optional(given.get("queue"), Queue.of) or Queue(),
        )


def of_session(data: Any) -> SessionInfo:
    """The session of a reply that is one, or has one under ``session`` or ``closed``."""
    given = mapping(data)
    for name in ("session", "closed"):
        if name in given:
            return SessionInfo.of(given[name])
    return SessionInfo.of(given)
