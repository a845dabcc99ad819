"""The tables of sessions in SQLite, and connections to them."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from memstore.errors import StoreDamaged, StoreTooNew
from memstore.records.sqlite.connection import SQLiteConnections, locked
from memstore.records.sqlite.faults import translated

SCHEMA_VERSION = 1

_PAGE_BYTES = 8192

# The blobs are sealed (see codec); the columns beside them are what queries need.
_TABLES = f"""
BEGIN IMMEDIATE;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    header BLOB NOT NULL,
    used BLOB NOT NULL
) STRICT;
CREATE INDEX sessions_by_owner ON sessions (owner);
CREATE TABLE entries (
    session INTEGER NOT NULL,
    version INTEGER NOT NULL,
    entry BLOB NOT NULL,
    PRIMARY KEY (session, version)
) STRICT;
INSERT INTO meta (key, value) VALUES ('schema_version', '{SCHEMA_VERSION}');
COMMIT;
"""


class SessionConnections(SQLiteConnections):
    """Transactions and reads on a database of sessions at `path`, which is made if absent.

    Raises
    ------
    StoreError
    """

    def __init__(self, path: Path, *, busy_timeout_s: float) -> None:
        # Not by way of the records' own, which makes their tables.
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._closed = False
        self._writing = threading.Lock()
        self._idle_readers: list[sqlite3.Connection] = []
        with translated(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        with translated(path), locked(path.with_name("opening.lock")):
            self._refuse_emptied_file()
            self._writer = self._connect()
            try:
                _apply_schema(self._writer, path)
            except BaseException:
                self._writer.close()
                raise


def _apply_schema(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables in a new database, or check that this release can use the ones it finds."""
    if not _tables(db):
        db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = WAL").fetchall()
        db.executescript(_TABLES)
    tables = _tables(db)
    rows = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall() if "meta" in tables else []
    if not rows or not str(rows[0][0]).isdigit():
        raise StoreDamaged(f"{path} holds tables of another program: use another directory")
    found = int(rows[0][0])
    if found > SCHEMA_VERSION:
        raise StoreTooNew(
            f"{path} has schema version {found}, and this release reads up to {SCHEMA_VERSION}: install a newer one"
        )
    if found < SCHEMA_VERSION or not {"sessions", "entries"} <= tables:
        raise StoreDamaged(f"{path} has no tables of sessions: restore a copy, or delete it")


def _tables(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
