"""Sessions in a SQLite database beside the facts."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from memstore.errors import SessionExists, StoreBusy
from memstore.session_log.base import LogEntry, SessionHeader, SessionId
from memstore.session_log.codec import pack_entry, pack_header, pack_stamp, read_header, read_log, unpack_stamp
from memstore.session_log.contract import are_text, check_first, check_names, check_next, gone, moved
from memstore.session_log.sqlite_schema import SessionConnections
from memstore.types import OwnerId

FILE_NAME = "sessions.sqlite3"

_HEADER = "SELECT id, owner, header, used FROM sessions WHERE id = ?"


class SQLiteSessionLog:
    """A ``SessionLog`` in ``directory/sessions.sqlite3``; any number of processes on one machine may have it open.

    A commit returns after the disk has it (``synchronous = FULL``). Removed content is overwritten (``secure_delete``).

    Raises
    ------
    StoreReadOnly, StoreFull, StoreDamaged, StoreTooNew
    """

    def __init__(self, directory: Path, *, busy_timeout_s: float = 30.0) -> None:
        self.path = directory / FILE_NAME
        self._db = SessionConnections(self.path, busy_timeout_s=busy_timeout_s)

    # ---- writing ----

    def create(self, header: SessionHeader, entry: LogEntry) -> None:
        """Keep a new session with its first version."""
        check_first(entry)
        sealed, stamp = pack_header(header), pack_stamp(header.id, header.used_at)
        written = pack_entry(header.id, entry, at=header.used_at)
        with self._db.transaction() as db:
            held = db.execute("SELECT number, header FROM sessions WHERE id = ?", [header.id]).fetchall()
            if held:
                [(number, its_header)] = held
                if its_header != sealed or _entry(db, number, entry.version) != written:
                    raise SessionExists(f"there is a session {header.id!r}")
                return
            number = db.execute(
                "INSERT INTO sessions (id, owner, first, last, header, used) VALUES (?, ?, ?, ?, ?, ?)",
                [header.id, header.owner, entry.version, entry.version, sealed, stamp],
            ).lastrowid
            _put(db, number, entry.version, written)

    def append(self, owner: OwnerId, session_id: SessionId, entry: LogEntry, *, used_at: float) -> None:
        """Add the next version."""
        check_next(entry)
        check_names(owner, session_id)
        stamp = pack_stamp(session_id, used_at)
        written = pack_entry(session_id, entry, at=used_at)
        with self._db.transaction() as db:
            number, last = self._found(db, owner, session_id)
            if _entry(db, number, entry.version) == written:
                return
            if last != entry.version - 1 or (entry.base and not _has(db, number, entry.base)):
                raise moved(session_id, last)
            _put(db, number, entry.version, written)
            db.execute("UPDATE sessions SET last = ? WHERE number = ?", [entry.version, number])
            _note_use(db, session_id, stamp)

    def update(self, header: SessionHeader) -> None:
        """Replace the header."""
        check_names(header.owner, header.id)
        sealed, stamp = pack_header(header), pack_stamp(header.id, header.used_at)
        with self._db.transaction() as db:
            number, _ = self._found(db, header.owner, header.id)
            db.execute("UPDATE sessions SET header = ? WHERE number = ?", [sealed, number])
            _note_use(db, header.id, stamp)

    def touch(self, used: Mapping[SessionId, float]) -> None:
        """Set ``used_at`` of many at once, in one transaction."""
        stamps = {session_id: pack_stamp(session_id, at) for session_id, at in used.items() if are_text(session_id)}
        if not stamps:
            return
        with self._db.transaction() as db:
            for session_id, stamp in stamps.items():
                _note_use(db, session_id, stamp)

    def compact(self, owner: OwnerId, session_id: SessionId, entry: LogEntry) -> None:
        """Replace every entry by one that builds on none."""
        check_first(entry)
        check_names(owner, session_id)
        written = pack_entry(session_id, entry, at=0.0)
        with self._db.transaction() as db:
            number, last = self._found(db, owner, session_id)
            if last != entry.version:
                raise moved(session_id, last)
            db.execute("DELETE FROM entries WHERE session = ?", [number])
            _put(db, number, entry.version, written)
            db.execute("UPDATE sessions SET first = ? WHERE number = ?", [entry.version, number])

    def delete(self, owner: OwnerId, session_id: SessionId) -> bool:
        """Remove a session."""
        if not are_text(owner, session_id):
            return False
        with self._db.transaction() as db:
            return _remove(db, "owner = ? AND id = ?", owner, session_id) > 0

    def purge(self, owner: OwnerId) -> int:
        """Remove every session of an owner, from the write-ahead log too.

        Raises
        ------
        StoreBusy
            The sessions are gone, but another process has been reading for so long that their bytes are still in the
            write-ahead log. To be repeated.
        """
        with self._db.transaction() as db:
            count = _remove(db, "owner = ?", owner)
        # In any case: what was deleted, or compacted, before is in there too.
        if self._db.truncate_log() is not None:
            raise StoreBusy(
                f"the sessions are removed, but while another process reads, their bytes stay in {self.path}-wal:"
                " repeat the purge"
            )
        return count

    # ---- reading ----

    def header(self, session_id: SessionId) -> SessionHeader | None:
        """The session of that id, whoever owns it."""
        if not are_text(session_id):
            return None
        rows = self._db.read(_HEADER, session_id)
        return read_header(self.path, *rows[0]) if rows else None

    def headers(self, *, after: SessionId | None = None, limit: int = 1000) -> Sequence[SessionHeader]:
        """A page of all sessions by id."""
        condition, arguments = ("", []) if after is None else ("WHERE id > ?", [after])
        rows = self._db.read(
            f"SELECT id, owner, header, used FROM sessions {condition} ORDER BY id LIMIT ?", *arguments, limit
        )
        return [read_header(self.path, *row) for row in rows]

    def entries(self, owner: OwnerId, session_id: SessionId) -> Sequence[LogEntry]:
        """Every version that is kept."""
        check_names(owner, session_id)
        # One statement, so that all of it is of one moment.
        rows = self._db.read(
            "SELECT first, last, entry FROM sessions LEFT JOIN entries ON session = number WHERE id = ? AND owner = ?",
            session_id,
            owner,
        )
        if not rows:
            # Where whose it is was damaged, that is raised instead.
            self.header(session_id)
            raise gone(session_id)
        stored = [entry for *_, entry in rows if entry is not None]
        return read_log(self.path, session_id, stored, first=rows[0][0], last=rows[0][1])

    def count(self, owner: OwnerId) -> int:
        """How many sessions an owner has."""
        return int(self._db.read("SELECT count(*) FROM sessions WHERE owner = ?", owner)[0][0])

    def close(self) -> None:
        """Release the connections; may be called twice."""
        self._db.close()

    def _found(self, db: sqlite3.Connection, owner: OwnerId, session_id: SessionId) -> tuple[int, int]:
        """Return a session's number and last version."""
        rows = db.execute(
            "SELECT number, last FROM sessions WHERE id = ? AND owner = ?", [session_id, owner]
        ).fetchall()
        if rows:
            return int(rows[0][0]), int(rows[0][1])
        for row in db.execute(_HEADER, [session_id]).fetchall():
            read_header(self.path, *row)
        raise gone(session_id)


# ---- parts of a transaction ----


def _entry(db: sqlite3.Connection, number: int, version: int) -> bytes | None:
    rows = db.execute("SELECT entry FROM entries WHERE session = ? AND version = ?", [number, version]).fetchall()
    return rows[0][0] if rows else None


def _has(db: sqlite3.Connection, number: int, version: int) -> bool:
    return bool(db.execute("SELECT 1 FROM entries WHERE session = ? AND version = ?", [number, version]).fetchall())


def _put(db: sqlite3.Connection, number: int | None, version: int, written: bytes) -> None:
    db.execute("INSERT INTO entries (session, version, entry) VALUES (?, ?, ?)", [number, version, written])


def _note_use(db: sqlite3.Connection, session_id: SessionId, stamp: bytes) -> None:
    """Make this when a session was last used, unless that was later; one that is damaged is left to be found."""
    for (before,) in db.execute("SELECT used FROM sessions WHERE id = ?", [session_id]).fetchall():
        try:
            is_later = unpack_stamp(session_id, stamp) > unpack_stamp(session_id, before)
        except ValueError:
            is_later = False
        if is_later:
            db.execute("UPDATE sessions SET used = ? WHERE id = ?", [stamp, session_id])


def _remove(db: sqlite3.Connection, condition: str, *arguments: str) -> int:
    """Remove the sessions that `condition` is true of; return how many."""
    db.execute(f"DELETE FROM entries WHERE session IN (SELECT number FROM sessions WHERE {condition})", arguments)
    return db.execute(f"DELETE FROM sessions WHERE {condition}", arguments).rowcount
