"""The tables of a SQLite record store."""

import sqlite3
from pathlib import Path

from memstore.errors import StoreDamaged, StoreTooNew

SCHEMA_VERSION = 2
SLOTS = 256
"""A vector's id is the seq of its fact times this, plus the slot of its embedder."""

LACKS_VECTORS = (
    f"NOT EXISTS (SELECT 1 FROM vectors WHERE vectors.id = seq * {SLOTS}"
    " + (SELECT slot FROM embedders WHERE fingerprint = ?) AND vectors.version = facts.version)"
)
"""Condition on `facts`: no vectors of an embedder in the fact's present version."""

_PAGE_BYTES = 8192

# AUTOINCREMENT and not a bare rowid: the seq of a deleted fact must never come back, nor a position of the feed.
# `record` is the sealed fact (see codec); the columns beside it are what queries need and follow from it.
_TABLES = """
BEGIN IMMEDIATE;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE facts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    stream TEXT NOT NULL,
    version INTEGER NOT NULL,
    is_current INTEGER NOT NULL,
    expires_at REAL,
    digest TEXT NOT NULL,
    record TEXT NOT NULL
) STRICT;
CREATE INDEX facts_by_state ON facts (owner, is_current);
CREATE INDEX facts_by_stream ON facts (owner, stream, is_current);
CREATE INDEX facts_by_expiry ON facts (owner, expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX facts_due ON facts (expires_at, owner) WHERE expires_at IS NOT NULL;
CREATE UNIQUE INDEX facts_by_content ON facts (owner, digest) WHERE is_current = 1;
CREATE TABLE history (
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    version INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (owner, id, version)
) STRICT;
CREATE TABLE embedders (slot INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE vectors (id INTEGER PRIMARY KEY, version INTEGER NOT NULL, data BLOB NOT NULL) STRICT;
CREATE TABLE changes (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    id TEXT,
    seq INTEGER,
    version INTEGER,
    at REAL NOT NULL
) STRICT;
CREATE INDEX changes_by_owner ON changes (owner);
CREATE TABLE owners (
    owner TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL DEFAULT 0,
    position INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE TABLE idempotency (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    digest TEXT NOT NULL,
    ids TEXT NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX idempotency_by_time ON idempotency (owner, at);
CREATE TABLE damaged (id TEXT PRIMARY KEY, owner TEXT NOT NULL, record TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO meta (key, value) VALUES ('schema_version', '2'), ('feed_floor', '0');
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
    if not _tables(db):
        # Two vectors of 384 numbers leave a quarter of the usual 4,096 bytes empty.
        db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = WAL").fetchall()
        db.executescript(_TABLES)
    rows = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall() if "meta" in _tables(db) else []
    if not rows or not str(rows[0][0]).isdigit():
        raise StoreDamaged(f"{path} holds tables of another program: use another directory")
    found = int(rows[0][0])
    if found > SCHEMA_VERSION:
        raise StoreTooNew(
            f"{path} has schema version {found}, and this release reads up to {SCHEMA_VERSION}: install a newer one"
        )
    if found < SCHEMA_VERSION:
        raise StoreDamaged(
            f"{path} has schema version {found}, of a release before 0.1: its facts have to be added again"
        )


def _tables(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
