"""What is kept of sessions, and the one contract of every place it is kept in.

A session is a list of segments of token ids, whose every state has a version. What is stored is how each version
follows from an earlier one::

    version 1    base 0, keep 0, segments [system]                 [system]
    version 2    base 1, keep 1, segments [first message]          [system, first message]
    version 3    base 2, keep 1, segments [second message]         [system, second message]      (window moved)
    version 4    base 2, keep 2, segments []                       [system, first message]       (rewound to 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NewType, Protocol

import numpy as np
import numpy.typing as npt

from memstore.types import OwnerId

SessionId = NewType("SessionId", str)
TokenIds = npt.NDArray[np.int32]

SegmentKind = Literal["prefix", "data"]
OnFull = Literal["refuse", "demote"]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Token ids ``[num_tokens]`` that are kept or dropped as a whole: one message, or one append.

    Attributes
    ----------
    kind
        ``prefix`` came with the session's creation and stays; ``data`` leaves when the window moves.
    """

    token_ids: TokenIds
    kind: SegmentKind

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Segment) and self.kind == other.kind and np.array_equal(self.token_ids, other.token_ids)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """How a version came about: the first ``keep`` segments of version ``base``, and then ``segments``.

    Attributes
    ----------
    version
        From 1, one more with every change.
    base
        An earlier version that the log still has; 0 (with ``keep`` 0) for one that builds on none.
    """

    version: int
    base: int
    keep: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """What holds for a session as a whole.

    Attributes
    ----------
    model
        Fingerprint of the model and tokenizer that the token ids belong to.
    created_at, used_at
        Seconds since 1970.
    ttl_s
        Idle lifetime; None: no limit.
    max_age_s
        Lifetime since ``created_at``; None: no limit.
    window_tokens
        Length of the data region; None: no limit but the model's context.
    is_pinned
        Whether its KV is to be kept in the pool.
    parent, parent_version
        What it was forked from.
    """

    id: SessionId
    owner: OwnerId
    model: str
    created_at: float
    used_at: float
    ttl_s: float | None = None
    max_age_s: float | None = None
    reserve_tokens: int = 0
    priority: int = 0
    window_tokens: int | None = None
    on_full: OnFull = "refuse"
    is_pinned: bool = True
    parent: SessionId | None = None
    parent_version: int | None = None

    def ends_at(self) -> float | None:
        """When it ends unless it is used: seconds since 1970; None: never."""
        ends = [self.used_at + self.ttl_s] if self.ttl_s is not None else []
        if self.max_age_s is not None:
            ends.append(self.created_at + self.max_age_s)
        return min(ends, default=None)

    def used(self, at: float) -> SessionHeader:
        """The same, last used then."""
        return replace(self, used_at=at)


class SessionLog(Protocol):
    """Keeps sessions. Thread-safe; what has returned is as durable as a fact that was added to the same store.

    Every method raises the ``StoreError`` tree where the store fails; then nothing of the call was done, unless it is
    ``StoreUnreachable``, after which that is unknown. To make the same call again, with ``used_at`` and all, does
    nothing again and succeeds. What is read is what was written, or raises ``StoreDamaged``; what is damaged can be
    removed. ``used_at`` never goes back, whoever sets it.
    """

    def create(self, header: SessionHeader, entry: LogEntry) -> None:
        """Keep a new session with its first version.

        Raises
        ------
        SessionExists
            There is one of that id; it was not changed.
        """
        ...

    def append(self, owner: OwnerId, session_id: SessionId, entry: LogEntry, *, used_at: float) -> None:
        """Add the next version.

        Raises
        ------
        SessionGone
            There is no such session of that owner.
        SessionMoved
            Its last version is not ``entry.version - 1``, or the log has no ``entry.base``: another process has added
            to it, or compacted it.
        """
        ...

    def update(self, header: SessionHeader) -> None:
        """Replace the header; owner, id and ``created_at`` never change. Raises ``SessionGone``."""
        ...

    def touch(self, used: Mapping[SessionId, float]) -> None:
        """Set ``used_at`` of many at once, where it is later than what is stored; those that are gone are left out."""
        ...

    def compact(self, owner: OwnerId, session_id: SessionId, entry: LogEntry) -> None:
        """Replace every entry up to ``entry.version``, which must be the last, by ``entry``, whose base is 0.

        Raises
        ------
        SessionGone, SessionMoved
        """
        ...

    def header(self, session_id: SessionId) -> SessionHeader | None:
        """The session of that id, whoever owns it; None where there is none."""
        ...

    def headers(self, *, after: SessionId | None = None, limit: int = 1000) -> Sequence[SessionHeader]:
        """A page of all sessions by id, ascending; the next begins after the last one's id."""
        ...

    def entries(self, owner: OwnerId, session_id: SessionId) -> Sequence[LogEntry]:
        """Every version that is kept, ascending.

        Raises
        ------
        SessionGone
        StoreDamaged
            What is stored is not what was written; each entry carries a checksum.
        """
        ...

    def count(self, owner: OwnerId) -> int:
        """How many sessions an owner has."""
        ...

    def delete(self, owner: OwnerId, session_id: SessionId) -> bool:
        """Remove a session; returns whether there was one of that owner."""
        ...

    def purge(self, owner: OwnerId) -> int:
        """Remove every session of an owner, the bytes on the disk included; returns how many there were."""
        ...

    def close(self) -> None:
        """Release what is open; may be called twice."""
        ...
