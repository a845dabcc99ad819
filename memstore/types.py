"""The values that go into and come out of a store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

OwnerId = NewType("OwnerId", str)
"""Whose facts these are. Compared byte by byte; nothing is ever shared between two owners."""

FactId = NewType("FactId", str)
"""A UUIDv7 in its canonical text form."""

EncodingId = NewType("EncodingId", str)
"""Lower-case hex, the content address of one KV encoding; made by whoever encodes."""


class FactState(StrEnum):
    """Whether a fact still holds."""

    CURRENT = "current"
    SUPERSEDED = "superseded"
    """Another fact took its place: kept as history, found by no search."""


@dataclass(frozen=True, slots=True)
class NewFact:
    """A fact before it has an identity.

    Attributes
    ----------
    text
        What is remembered, byte-exact.
    stream
        The thread inside the owner that the fact belongs to, such as a conversation.
    speaker
        Who said it.
    time
        When it happened (not when it was stored), verbatim as the source gives it: ISO 8601 or free text.
    metadata
        A JSON object.
    expires_at
        Unix seconds from which on the fact is gone; None keeps it. No part of the content: of two identical facts
        the one that stays longer counts.
    """

    text: str
    stream: str = ""
    speaker: str | None = None
    time: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A stored fact.

    Attributes
    ----------
    version
        Starts at 1; grows with every change of text, stream, speaker, time, metadata or state. Caches are keyed by
        it.
    seq
        Assigned by the store, unique over all owners, increasing, never reused: the order within a stream and
        the id in the vector index.
    created_at, updated_at
        Unix seconds.
    event_at
        `time` as Unix seconds, where it names one day at least; what filters by time compare.
    supersedes
        The fact whose place this one took.
    """

    id: FactId
    owner: OwnerId
    text: str
    stream: str
    speaker: str | None
    time: str | None
    metadata: Mapping[str, object]
    version: int
    seq: int
    created_at: float
    updated_at: float
    state: FactState = FactState.CURRENT
    event_at: float | None = None
    expires_at: float | None = None
    supersedes: FactId | None = None


class SearchHit(NamedTuple):
    """One result of a search, best first."""

    fact: Fact
    score: float
    """In [-1, 1], to compare facts of one search: cosine similarity, BM25 x as x / (1 + x), or what a hybrid search
    makes of both (see `memstore.search.fusion` and `memstore.search.boosts`)."""

    unboosted: float
    """What `min_score` is compared with: the score before the boosts of a hybrid search, else `score`. It does not
    depend on what stands beside the fact, or on how weak the weakest hit is."""


class Addition(NamedTuple):
    """What became of one fact that was added."""

    fact: Fact
    created: bool
    """False where the owner had this very fact already; then `fact` is that one."""

    near_duplicates: tuple[SearchHit, ...]
    """Other facts of the owner and the same speaker that say almost the same, nearest first."""

    chunks: int
    """Parts that the fact was embedded in; more than 1 where it is longer than the embedder's limit."""


class ChangeKind(StrEnum):
    """What happened to a fact, or to all of an owner's."""

    ADDED = "added"
    UPDATED = "updated"
    SUPERSEDED = "superseded"
    DELETED = "deleted"
    PURGED = "purged"


class Change(NamedTuple):
    """One entry of the change feed. It names facts and never repeats what they say."""

    position: int
    """Unique over all owners, increasing in the order of commits, never reused."""

    kind: ChangeKind
    owner: OwnerId
    fact_id: FactId | None
    """None where the change is of the whole owner."""

    seq: int | None
    version: int | None
    at: float
    """Unix seconds."""
