"""What every token log holds a call to, before it looks at what is stored."""

from __future__ import annotations

from memstore.errors import SessionGone, SessionMoved
from memstore.session_log.base import LogEntry, SessionId
from memstore.types import OwnerId


def check_first(entry: LogEntry) -> None:
    """Hold an entry to building on no other."""
    assert entry.version >= 1, entry.version
    assert (entry.base, entry.keep) == (0, 0), f"version {entry.version} builds on {entry.base}"


def check_next(entry: LogEntry) -> None:
    """Hold an entry to building on an earlier one, or on none."""
    assert 0 <= entry.base < entry.version, (entry.base, entry.version)
    assert entry.keep >= 0, entry.keep
    assert entry.base or not entry.keep, f"version {entry.version} keeps {entry.keep} segments of nothing"


def check_names(owner: OwnerId, session_id: SessionId) -> None:
    """Raise `SessionGone` where one of these can be the name of nothing that is stored."""
    if not are_text(owner, session_id):
        raise gone(session_id)


def are_text(*names: str) -> bool:
    """Return whether all of these can be the name of something stored: a lone surrogate is no text."""
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return False
    return True


def gone(session_id: SessionId) -> SessionGone:
    """The same words for what is not there and for what is another owner's."""
    return SessionGone(f"this owner has no session {session_id!r}")


def moved(session_id: SessionId, version: object) -> SessionMoved:
    """Another process has added to the session, or compacted it."""
    return SessionMoved(f"session {session_id!r} has version {version}")
