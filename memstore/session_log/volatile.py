"""Sessions of this process alone, for servers without a store."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from memstore.errors import SessionExists, StoreClosed
from memstore.session_log.base import LogEntry, Segment, SessionHeader, SessionId
from memstore.session_log.codec import int32_ids
from memstore.session_log.contract import check_first, check_next, gone, moved
from memstore.types import OwnerId


@dataclass(slots=True)
class _Session:
    header: SessionHeader
    entries: dict[int, tuple[LogEntry, float]] = field(default_factory=dict)
    """By version, ascending: what follows from which, and when it was written."""

    @property
    def version(self) -> int:
        return next(reversed(self.entries))

    def use(self, at: float) -> None:
        if at > self.header.used_at:
            self.header = self.header.used(at)


class VolatileSessionLog:
    """A ``SessionLog`` in memory, gone with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[SessionId, _Session] = {}
        self._closed = False

    def create(self, header: SessionHeader, entry: LogEntry) -> None:
        """Keep a new session with its first version."""
        check_first(entry)
        written = _frozen(entry), header.used_at
        with self._lock:
            self._check_open()
            held = self._sessions.get(header.id)
            if held is None:
                self._sessions[header.id] = _Session(header, {entry.version: written})
                return
            if held.header.used(header.used_at) != header or held.entries.get(entry.version) != written:
                raise SessionExists(f"there is a session {header.id!r}")

    def append(self, owner: OwnerId, session_id: SessionId, entry: LogEntry, *, used_at: float) -> None:
        """Add the next version."""
        check_next(entry)
        written = _frozen(entry), used_at
        with self._lock:
            session = self._of(owner, session_id)
            if session.entries.get(entry.version) == written:
                return
            if session.version != entry.version - 1 or (entry.base and entry.base not in session.entries):
                raise moved(session_id, session.version)
            session.entries[entry.version] = written
            session.use(used_at)

    def update(self, header: SessionHeader) -> None:
        """Replace the header."""
        with self._lock:
            session = self._of(header.owner, header.id)
            session.header = replace(header, used_at=max(header.used_at, session.header.used_at))

    def touch(self, used: Mapping[SessionId, float]) -> None:
        """Set ``used_at`` of many at once."""
        with self._lock:
            self._check_open()
            for session_id, at in used.items():
                if session_id in self._sessions:
                    self._sessions[session_id].use(at)

    def compact(self, owner: OwnerId, session_id: SessionId, entry: LogEntry) -> None:
        """Replace every entry by one that builds on none."""
        check_first(entry)
        with self._lock:
            session = self._of(owner, session_id)
            if session.version != entry.version:
                raise moved(session_id, session.version)
            session.entries = {entry.version: (_frozen(entry), 0.0)}

    def header(self, session_id: SessionId) -> SessionHeader | None:
        """The session of that id, whoever owns it."""
        with self._lock:
            self._check_open()
            session = self._sessions.get(session_id)
            return None if session is None else session.header

    def headers(self, *, after: SessionId | None = None, limit: int = 1000) -> Sequence[SessionHeader]:
        """A page of all sessions by id."""
        with self._lock:
            self._check_open()
            names = sorted(name for name in self._sessions if after is None or name > after)
            return [self._sessions[name].header for name in islice(names, limit)]

    def entries(self, owner: OwnerId, session_id: SessionId) -> Sequence[LogEntry]:
        """Every version that is kept."""
        with self._lock:
            return [entry for entry, _ in self._of(owner, session_id).entries.values()]

    def count(self, owner: OwnerId) -> int:
        """How many sessions an owner has."""
        with self._lock:
            self._check_open()
            return sum(session.header.owner == owner for session in self._sessions.values())

    def delete(self, owner: OwnerId, session_id: SessionId) -> bool:
        """Remove a session."""
        with self._lock:
            self._check_open()
            session = self._sessions.get(session_id)
            if session is None or session.header.owner != owner:
                return False
            del self._sessions[session_id]
            return True

    def purge(self, owner: OwnerId) -> int:
        """Remove every session of an owner."""
        with self._lock:
            self._check_open()
            names = [name for name, session in self._sessions.items() if session.header.owner == owner]
            for name in names:
                del self._sessions[name]
            return len(names)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._sessions.clear()

    def _of(self, owner: OwnerId, session_id: SessionId) -> _Session:
        self._check_open()
        session = self._sessions.get(session_id)
        if session is None or session.header.owner != owner:
            raise gone(session_id)
        return session

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the token log has been closed: open a new one")


def _frozen(entry: LogEntry) -> LogEntry:
    segments = tuple(Segment(int32_ids(segment.token_ids), segment.kind) for segment in entry.segments)
    return replace(entry, segments=segments)
