"""What the memory routes answer. Times are in seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from sgl_stateful.client.reading import each, mapping, part, value


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact as the server keeps it.

    Attributes
    ----------
    time
        When it happened, as it was given; ``event_at`` is what the server made of it.
    state
        ``current``, or ``superseded`` by another.
    supersedes
        The fact whose place it took.
    """

    id: str
    owner: str
    text: str
    stream: str = ""
    speaker: str | None = None
    time: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""
    version: int = 1
    created_at: float | None = None
    updated_at: float | None = None
    event_at: float | None = None
    expires_at: float | None = None
    supersedes: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data)


@dataclass(frozen=True, slots=True)
class NearDuplicate:
    """A fact that says nearly the same."""

    id: str
    score: float
    text: str
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data)


@dataclass(frozen=True, slots=True)
class AddedFact:
    """A fact that was added.

    Attributes
    ----------
    created
        False: it was there before, and is what it was.
    is_encoded
        Whether its KV was known to exist when the server answered; it is waited for only with ``wait``.
    """

    fact: Fact
    created: bool
    is_encoded: bool
    near_duplicates: tuple[NearDuplicate, ...] = ()
    chunks: int = 1
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def added(data: Any) -> tuple[AddedFact, ...]:
    """The additions of a reply, in the order of the call."""
    pending = set(part(data, "kv_pending"))

    def one(item: Any) -> AddedFact:
        fact = Fact.of(item)
        near = each(mapping(item).get("near_duplicates") or [], NearDuplicate.of)
        return value(AddedFact, item, fact=fact, near_duplicates=near, is_encoded=fact.id not in pending)

    return each(part(data, "facts"), one)


@dataclass(frozen=True, slots=True)
class ChangedFact:
    """A fact that was updated, or that took another's place."""

    fact: Fact
    is_encoded: bool
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        fact = Fact.of(part(data, "fact"))
        return value(cls, data, fact=fact, is_encoded=fact.id not in part(data, "kv_pending"))


@dataclass(frozen=True, slots=True)
class Hit:
    """A fact that a search found; a higher score is a better match.

    Attributes
    ----------
    unboosted
        What ``min_score`` is compared with: of what the search ranks by, before the boosts of a hybrid search. None
        from a server that does not say it.
    """

    score: float
    fact: Fact
    unboosted: float | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, fact=Fact.of(part(data, "fact")))


@dataclass(frozen=True, slots=True)
class PurgeReceipt:
    """What a purge removed.

    Attributes
    ----------
    kv_remains
        Why some KV could not be removed; None: none is left.
    """

    owner: str
    at: float
    encodings: int
    sessions: int = 0
    kv_remains: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data)


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """What a server says of its memory.

    Attributes
    ----------
    verified
        Whether the start-up self-test has passed.
    policies
        Ways in which facts are encoded; the first is the default.
    """

    verified: bool
    policies: tuple[str, ...]
    encoder: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, data: Any) -> Self:
        """From JSON."""
        return value(cls, data, policies=each(part(data, "policies"), str))
