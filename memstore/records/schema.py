"""The tables of a SQLite record store."""

import sqlite3
from pathlib import Path

from memstore.errors import StoreDamaged, StoreTooNew

SCHEMA_VERSION = 1

COLUMNS = "id, owner, text, stream, speaker, time, metadata, version, seq, created_at, updated_at"
"""Of the table `facts`, in the order of the fields of `Fact`."""

# AUTOINCREMENT and not a bare rowid: the seq of a deleted fact must never come back.
_TABLES = """
BEGIN IMMEDIATE;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE facts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    text TEXT NOT NULL,
    stream TEXT NOT NULL,
    speaker TEXT,
    time TEXT,
    metadata TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    digest BLOB NOT NULL,
    embedding BLOB NOT NULL
) STRICT;
CREATE INDEX facts_by_owner ON facts (owner);
CREATE INDEX facts_by_stream ON facts (owner, stream);
CREATE UNIQUE INDEX facts_by_content ON facts (owner, digest);
CREATE TABLE epochs (owner TEXT PRIMARY KEY, epoch INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta (key, value) VALUES ('schema_version', '1');
COMMIT;
"""


def apply_schema(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables in a new database, or check that this release can use the ones it finds.

    Raises
    ------
    StoreTooNew
        Where a newer release wrote them.
    StoreDamaged
        Where the database holds something else.
    """
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        db.execute("PRAGMA journal_mode = WAL").fetchall()
        db.executescript(_TABLES)
        return
    rows = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall() if "meta" in tables else []
    if not rows or not str(rows[0][0]).isdigit():
        raise StoreDamaged(f"{path} holds tables of another program: use another directory")
    found = int(rows[0][0])
    if found > SCHEMA_VERSION:
        raise StoreTooNew(
            f"{path} has schema version {found}, and this release reads up to {SCHEMA_VERSION}: install a newer one"
        )
