"""Names of the files with the KV of sessions: who purges an owner need not open them to know whose they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memstore.kv.keys import digest
from memstore.session_log.base import SessionId, SessionLog
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


def drop_orphan_files(kv_path: Path, log: Callable[[], SessionLog]) -> int:
    """Remove the files of sessions that are not in the log, and return how many there were.

    `log` is asked for only where there are files. Raises `OSError` where a file cannot be removed, and `StoreError`
    where the log cannot be read; then none is.
    """
    try:
        # First the files: a session that begins meanwhile must not lose its own.
        files = {file: name for file in (kv_path / FOLDER).iterdir() if (name := session_of(file.name)) is not None}
    except FileNotFoundError:
        return 0
    alive = ids_in(log()) if files else set()
    orphans = [file for file, session_id in files.items() if session_id not in alive]
    for file in orphans:
        file.unlink(missing_ok=True)
    return len(orphans)


def ids_in(log: SessionLog) -> set[SessionId]:
    """Return the sessions that a log has; raise `StoreError` where it cannot be read."""
    found: set[SessionId] = set()
    last: SessionId | None = None
    while page := log.headers(after=last):
        found.update(header.id for header in page)
        last = page[-1].id
    return found


def _prefix(owner: OwnerId) -> str:
    return f"{digest(owner).hex()}-"
