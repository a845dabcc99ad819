"""Names of the files with the KV of sessions: who purges an owner need not open them to know whose they are."""

from __future__ import annotations

from pathlib import Path

from memstore.kv.keys import digest
from memstore.session_log.base import SessionId
from memstore.types import OwnerId

FOLDER = "sessions"
"""Beside the files of the KV cache."""

SUFFIX = ".kv"
PART = ".part"
"""Behind the name of a file that is being written."""


def session_file(owner: OwnerId, session_id: SessionId) -> str:
    """Return the name of a session's file."""
    return f"{_prefix(owner)}{session_id}{SUFFIX}"


def session_of(name: str) -> SessionId | None:
    """Return the session whose file that is, or None where it is another kind of file."""
    stem = name.removesuffix(PART).removesuffix(SUFFIX)
    _, dash, session_id = stem.partition("-")
    return SessionId(session_id) if dash and stem != name else None


def drop_session_files(kv_path: Path, owner: OwnerId) -> int:
    """Remove the files of all sessions of an owner, and return how many; raise `OSError` where that fails."""
    files = list((kv_path / FOLDER).glob(f"{_prefix(owner)}*"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _prefix(owner: OwnerId) -> str:
    return f"{digest(owner).hex()}-"
