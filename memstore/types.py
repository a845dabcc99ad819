"""The values that go into and come out of a store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

OwnerId = NewType("OwnerId", str)
"""Whose facts these are. Compared byte by byte; nothing is ever shared between two owners."""

FactId = NewType("FactId", str)
"""A UUIDv7 in its canonical text form."""

EncodingId = NewType("EncodingId", str)
"""Lower-case hex, the content address of one KV encoding; made by whoever encodes."""


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
    """

    text: str
    stream: str = ""
    speaker: str | None = None
    time: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fact:
    """A stored fact.

    Attributes
    ----------
    version
        Starts at 1; grows with every change of the record. Caches are keyed by it.
    seq
        Assigned by the store, unique over all owners, increasing, never reused: the order within a stream and
        the id in the vector index.
    created_at, updated_at
        Unix seconds.
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


class SearchHit(NamedTuple):
    """One result of a search, best first."""

    fact: Fact
    score: float
    """Cosine similarity in [-1, 1]."""
