"""Records in one SQLite database, the backend that needs no set-up."""

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uuid_utils

from memstore.errors import StoreClosed, StoreDamaged
from memstore.records.base import Draft, Insertion, StoredVectors, content_digest
from memstore.records.faults import translated
from memstore.records.lock import DirectoryLock
from memstore.records.schema import COLUMNS, apply_schema
from memstore.types import Fact, FactId, NewFact, OwnerId
from memstore.validation import encode_metadata

FILE_NAME = "records.sqlite3"


class SQLiteRecords:
    """A `RecordStore` in `directory/records.sqlite3`, held by one instance at a time.

    One connection writes, under a lock; reads borrow a connection of their own, which the write-ahead log lets run
    beside the writer. A commit returns after the disk has it.

    Raises
    ------
    StoreLocked, StoreReadOnly, StoreFull, StoreDamaged, StoreTooNew
    """

    def __init__(
        self, directory: Path, *, busy_timeout_s: float = 30.0, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = directory / FILE_NAME
        self._busy_timeout_s = busy_timeout_s
        self._clock = clock
        self._closed = False
        self._writing = threading.Lock()
        self._idle_readers: list[sqlite3.Connection] = []
        with translated(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(directory)
        try:
            with translated(self.path):
                self._refuse_emptied_file()
                self._writer = self._connect()
                apply_schema(self._writer, self.path)
        except BaseException:
            self.close()
            raise

    def embedder_fingerprint(self) -> str | None:
        """Return the fingerprint that the vectors were made with, or None in a new store."""
        rows = self._read("SELECT value FROM meta WHERE key = 'embedder_fingerprint'")
        return str(rows[0][0]) if rows else None

    def set_embedder_fingerprint(self, fingerprint: str) -> None:
        """Record the fingerprint that all vectors are made with from now on."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('embedder_fingerprint', ?)", [fingerprint])

    def insert(self, owner: OwnerId, drafts: Sequence[Draft]) -> list[Insertion]:
        """Store all drafts, or none; an identical fact of the owner is returned instead of stored again."""
        with self._transaction() as db:
            return [self._insert_one(db, owner, draft) for draft in drafts]

    def find_identical(self, owner: OwnerId, facts: Sequence[NewFact]) -> list[Fact | None]:
        """Return, for each of `facts`, the stored fact with the same content."""
        found: list[Fact | None] = []
        for fact in facts:
            rows = self._read(
                f"SELECT {COLUMNS} FROM facts WHERE owner = ? AND digest = ?", owner, content_digest(fact)
            )
            found.append(_fact(rows[0]) if rows else None)
        return found

    def get(self, owner: OwnerId, fact_id: FactId) -> Fact | None:
        """Return one fact, or None."""
        facts = self.get_many(owner, [fact_id])
        return facts[0] if facts else None

    def get_many(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[Fact]:
        """Return the facts that exist, in the order of `fact_ids`."""
        wanted = json.dumps(list(fact_ids))
        rows = self._read(
            f"SELECT {COLUMNS} FROM facts WHERE owner = ? AND id IN (SELECT value FROM json_each(?))", owner, wanted
        )
        facts = {fact.id: fact for fact in map(_fact, rows)}
        return [facts[fact_id] for fact_id in fact_ids if fact_id in facts]

    def get_by_seqs(self, owner: OwnerId, seqs: Sequence[int]) -> dict[int, Fact]:
        """Return the facts that exist, by seq."""
        wanted = json.dumps(list(seqs))
        rows = self._read(
            f"SELECT {COLUMNS} FROM facts WHERE owner = ? AND seq IN (SELECT value FROM json_each(?))", owner, wanted
        )
        return {fact.seq: fact for fact in map(_fact, rows)}

    def page(self, owner: OwnerId, *, stream: str | None, limit: int, after_seq: int) -> list[Fact]:
        """Return up to `limit` facts with seq > `after_seq`, by seq; of one stream, or of all for None."""
        of_stream = "" if stream is None else "AND stream = ?"
        rows = self._read(
            f"SELECT {COLUMNS} FROM facts WHERE owner = ? {of_stream} AND seq > ? ORDER BY seq LIMIT ?",
            owner,
            *([] if stream is None else [stream]),
            after_seq,
            limit,
        )
        return [_fact(row) for row in rows]

    def preceding(self, owner: OwnerId, stream: str, *, seq: int, limit: int) -> list[Fact]:
        """Return the last `limit` facts of `stream` with a seq below `seq`, by seq."""
        rows = self._read(
            f"SELECT {COLUMNS} FROM facts WHERE owner = ? AND stream = ? AND seq < ? ORDER BY seq DESC LIMIT ?",
            owner,
            stream,
            seq,
            limit,
        )
        return [_fact(row) for row in reversed(rows)]

    def count(self, owner: OwnerId) -> int:
        """Return the number of facts."""
        return int(self._read("SELECT count(*) FROM facts WHERE owner = ?", owner)[0][0])

    def owners(self) -> list[OwnerId]:
        """Return every owner that has a fact, sorted."""
        return [OwnerId(row[0]) for row in self._read("SELECT DISTINCT owner FROM facts ORDER BY owner")]

    def vectors(self, owner: OwnerId, *, dimension: int) -> StoredVectors:
        """Return all vectors of `owner`; raise `StoreDamaged` where one has another dimension."""
        rows = self._read("SELECT seq, embedding FROM facts WHERE owner = ? ORDER BY seq", owner)
        for seq, blob in rows:
            if len(blob) != 4 * dimension:
                raise StoreDamaged(
                    f"{self.path}: the vector of fact seq {seq} has {len(blob)} bytes, not {4 * dimension}: reindex"
                )
        matrix = np.frombuffer(b"".join(blob for _, blob in rows), dtype="<f4").astype(np.float32)
        return StoredVectors(np.array([seq for seq, _ in rows], dtype=np.int64), matrix.reshape(len(rows), dimension))

    def delete(self, owner: OwnerId, fact_id: FactId) -> Fact | None:
        """Remove one fact with its vector and return it, or None."""
        with self._transaction() as db:
            rows = db.execute(f"DELETE FROM facts WHERE owner = ? AND id = ? RETURNING {COLUMNS}", [owner, fact_id])
            removed = [_fact(row) for row in rows.fetchall()]
        return removed[0] if removed else None

    def epoch(self, owner: OwnerId) -> int:
        """Return how often `bump_epoch` was called for `owner`."""
        rows = self._read("SELECT epoch FROM epochs WHERE owner = ?", owner)
        return int(rows[0][0]) if rows else 0

    def bump_epoch(self, owner: OwnerId) -> int:
        """Add one to the owner's epoch and return it."""
        with self._transaction() as db:
            rows = db.execute(
                "INSERT INTO epochs (owner, epoch) VALUES (?, 1)"
                " ON CONFLICT (owner) DO UPDATE SET epoch = epoch + 1 RETURNING epoch",
                [owner],
            )
            return int(rows.fetchall()[0][0])

    def close(self) -> None:
        """Release the connections and the directory; may be called twice."""
        with self._writing:
            self._closed = True
            while self._idle_readers:
                self._idle_readers.pop().close()
            if hasattr(self, "_writer"):
                self._writer.close()
            self._lock.release()

    def _refuse_emptied_file(self) -> None:
        # SQLite takes an empty file for a new database: facts that were cut off would be gone without a word.
        if self.path.exists() and self.path.stat().st_size == 0:
            raise StoreDamaged(f"{self.path} is empty: restore a copy, or delete it where the store was never used")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing, translated(self.path):
            self._check_open()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            finally:
                # A full disk may have rolled back already.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def _read(self, query: str, *arguments: object) -> list[Any]:
        with translated(self.path):
            self._check_open()
            try:
                connection = self._idle_readers.pop()
            except IndexError:
                connection = self._connect()
            try:
                return connection.execute(query, arguments).fetchall()
            finally:
                if self._closed:
                    connection.close()
                else:
                    self._idle_readers.append(connection)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.path} has been closed: open a new store")

    def _insert_one(self, db: sqlite3.Connection, owner: OwnerId, draft: Draft) -> Insertion:
        fact, digest, now = draft.fact, content_digest(draft.fact), self._clock()
        blob = np.ascontiguousarray(draft.vector, dtype="<f4").tobytes()
        written = db.execute(
            "INSERT INTO facts (id, owner, text, stream, speaker, time, metadata, version, created_at, updated_at,"
            " digest, embedding) VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?, ?, ?, ?)"
            f" ON CONFLICT (owner, digest) DO NOTHING RETURNING {COLUMNS}",
            [
                str(uuid_utils.uuid7()),
                owner,
                fact.text,
                fact.stream,
                fact.speaker,
                fact.time,
                encode_metadata(fact.metadata),
                now,
                now,
                digest,
                blob,
            ],
        ).fetchall()
        if written:
            return Insertion(_fact(written[0]), created=True)
        present = db.execute(f"SELECT {COLUMNS} FROM facts WHERE owner = ? AND digest = ?", [owner, digest]).fetchall()
        return Insertion(_fact(present[0]), created=False)


def _fact(row: Sequence[Any]) -> Fact:
    id_, owner, text, stream, speaker, time_, metadata, version, seq, created_at, updated_at = row
    return Fact(
        id=FactId(id_),
        owner=OwnerId(owner),
        text=text,
        stream=stream,
        speaker=speaker,
        time=time_,
        metadata=json.loads(metadata),
        version=version,
        seq=seq,
        created_at=created_at,
        updated_at=updated_at,
    )
