"""What happens to one fact inside a transaction of a SQLite record store."""

import dataclasses
import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import uuid_utils

from memstore.embedding import Vectors
from memstore.errors import (
    DuplicateFact,
    EmbedderMismatch,
    FactNotFound,
    IdempotencyConflict,
    InvalidFact,
    StoreError,
    VersionConflict,
)
from memstore.records.base import Draft, IdempotencyKey, Insertion, Replacement, RestoredFact
from memstore.records.codec import (
    carried_vectors,
    content_digest,
    fact_from_new,
    is_same,
    pack_vectors,
    record_body,
    seal,
    unsealed,
)
from memstore.records.sqlite.schema import SLOTS
from memstore.types import ChangeKind, Fact, FactId, FactState, OwnerId


class FactWriter:
    """Writes facts of one owner; every method is a part of the transaction that `db` is in."""

    def __init__(self, db: sqlite3.Connection, owner: OwnerId, path: Path, *, embedder: str, now: float) -> None:
        self._db = db
        self._owner = owner
        self._path = path
        self._embedder = embedder
        self._now = now

    def replay(self, key: IdempotencyKey) -> list[Insertion] | None:
        """Return what was added under `key`, or None where it is new."""
        rows = self._db.execute(
            "SELECT digest, ids FROM idempotency WHERE owner = ? AND key = ?", [self._owner, key.key]
        ).fetchall()
        if not rows:
            return None
        digest, ids = rows[0]
        if digest != key.digest:
            raise IdempotencyConflict(key.key)
        return [Insertion(self._existing(fact_id), created=False) for fact_id in json.loads(ids)]

    def remember(self, key: IdempotencyKey, insertions: list[Insertion], *, keys_before: float) -> None:
        """Keep what was added under `key`; forget some keys of before `keys_before`, more than come in their place."""
        self._db.execute(
            "DELETE FROM idempotency WHERE owner = ?1 AND key IN"
            " (SELECT key FROM idempotency WHERE owner = ?1 AND at < ?2 LIMIT 20)",
            [self._owner, keys_before],
        )
        ids = json.dumps([insertion.fact.id for insertion in insertions])
        self._db.execute(
            "INSERT INTO idempotency (owner, key, digest, ids, at) VALUES (?, ?, ?, ?, ?)",
            [self._owner, key.key, key.digest, ids, self._now],
        )

    def insert(self, draft: Draft) -> Insertion:
        """Store a draft, or return its twin."""
        twin = self._living_twin(content_digest(draft.fact))
        if twin is not None:
            if draft.supersedes is not None:
                raise VersionConflict(f"another writer added the fact that is to supersede {draft.supersedes!r}")
            wanted, until = draft.fact.expires_at, twin.expires_at
            if until is not None and (wanted is None or wanted > until):
                raise VersionConflict(f"fact {twin.id!r} says the same, and does not stay as long")
            return Insertion(twin, created=False)
        fact = fact_from_new(self._owner, str(uuid_utils.uuid7()), draft.fact, event_at=draft.event_at, now=self._now)
        return self._store(dataclasses.replace(fact, supersedes=draft.supersedes), draft.vectors)

    def restore(self, restored: RestoredFact) -> Insertion:
        """Store a fact as it is, or return the one that has its id, or its content."""
        fact = restored.fact
        rows = self._db.execute("SELECT owner, record FROM facts WHERE id = ?", [fact.id]).fetchall()
        if rows and rows[0][0] != self._owner:
            raise InvalidFact(f"the id {fact.id!r} is another owner's: ids are unique over all owners")
        if rows:
            return Insertion(unsealed(self._path, self._owner, fact.id, rows[0][1]), created=False)
        if fact.state is FactState.CURRENT:
            twin = self._living_twin(content_digest(fact))
            if twin is not None:
                return Insertion(twin, created=False)
        insertion = self._store(fact, restored.vectors)
        self._db.execute("DELETE FROM history WHERE owner = ? AND id = ?", [self._owner, fact.id])
        self._db.executemany(
            "INSERT INTO history (owner, id, version, record) VALUES (?, ?, ?, ?)",
            [
                [self._owner, fact.id, former.version, seal(insertion.fact.seq, record_body(former))]
                for former in restored.history
            ],
        )
        return insertion

    def replace(self, new: Replacement) -> None:
        """Give a stored fact its next state."""
        fact = new.fact
        assert (fact.id, fact.seq) == (new.expected.id, new.expected.seq), "the next state of another fact"
        former = self._record_as_read(new.expected)
        is_current, digest = fact.state is FactState.CURRENT, content_digest(fact)
        if is_current:
            twin = self._twin(digest)
            if twin is not None and twin.id != fact.id:
                raise DuplicateFact(twin.id)
        has_new_version = fact.version != new.expected.version
        if has_new_version:
            self._db.execute(
                "INSERT INTO history (owner, id, version, record) VALUES (?, ?, ?, ?)",
                [self._owner, fact.id, new.expected.version, former],
            )
        self._db.execute(
            "UPDATE facts SET stream = ?, version = ?, is_current = ?, expires_at = ?, digest = ?, record = ?"
            " WHERE seq = ?",
            [
                fact.stream,
                fact.version,
                int(is_current),
                fact.expires_at,
                digest,
                seal(fact.seq, record_body(fact)),
                fact.seq,
            ],
        )
        if not is_current or new.vectors is not None:
            drop_vectors(self._db, fact.seq)
        elif has_new_version:
            self._carry_vectors(fact)
        if is_current and new.vectors is not None:
            self._store_vectors(fact, new.vectors)
        append_change(
            self._db, ChangeKind.UPDATED if is_current else ChangeKind.SUPERSEDED, self._owner, fact, self._now
        )

    def check_present(self, facts: Iterable[Fact]) -> None:
        """Raise `VersionConflict` unless all of `facts` are as they were read."""
        for fact in facts:
            self._record_as_read(fact)

    def remove(self, fact_id: FactId, *, expired_by: float | None = None) -> Fact | None:
        """Remove a fact with its history and vectors and return it, or None."""
        rows = self._db.execute(
            "DELETE FROM facts WHERE owner = ?1 AND id = ?2 AND (?3 IS NULL OR expires_at <= ?3) RETURNING id, record",
            [self._owner, fact_id, expired_by],
        ).fetchall()
        if not rows:
            return None
        fact = unsealed(self._path, self._owner, *rows[0])
        self._db.execute("DELETE FROM history WHERE owner = ? AND id = ?", [self._owner, fact_id])
        drop_vectors(self._db, fact.seq)
        append_change(self._db, ChangeKind.DELETED, self._owner, fact, self._now)
        return fact

    def _record_as_read(self, expected: Fact) -> str:
        """Return the stored record of a fact; raise `VersionConflict` where it is not the fact that was read."""
        rows = self._db.execute(
            "SELECT record FROM facts WHERE owner = ? AND id = ?", [self._owner, expected.id]
        ).fetchall()
        if not rows or not is_same(unsealed(self._path, self._owner, expected.id, rows[0][0]), expected):
            raise VersionConflict(f"fact {expected.id!r} was changed by another writer at the same time")
        return str(rows[0][0])

    def _store(self, fact: Fact, vectors: Vectors | None) -> Insertion:
        is_current, digest = fact.state is FactState.CURRENT, content_digest(fact)
        seq = self._db.execute(
            "INSERT INTO facts (id, owner, stream, version, is_current, expires_at, digest, record)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, '')",
            [fact.id, self._owner, fact.stream, fact.version, int(is_current), fact.expires_at, digest],
        ).lastrowid
        assert seq is not None, "an insert without a row id"
        fact = dataclasses.replace(fact, seq=seq)
        self._db.execute("UPDATE facts SET record = ? WHERE seq = ?", [seal(seq, record_body(fact)), seq])
        if vectors is not None:
            self._store_vectors(fact, vectors)
        append_change(self._db, ChangeKind.ADDED, self._owner, fact, self._now)
        return Insertion(fact, created=True)

    def _living_twin(self, digest: str) -> Fact | None:
        """Return the current fact with this content, after it has been removed if it has expired."""
        twin = self._twin(digest)
        if twin is None or twin.expires_at is None or twin.expires_at > self._now:
            return twin
        self.remove(twin.id)
        return None

    def _twin(self, digest: str) -> Fact | None:
        rows = self._db.execute(
            "SELECT id, record FROM facts WHERE owner = ? AND digest = ? AND is_current = 1", [self._owner, digest]
        ).fetchall()
        return unsealed(self._path, self._owner, *rows[0]) if rows else None

    def _existing(self, fact_id: str) -> Fact:
        rows = self._db.execute(
            "SELECT id, record FROM facts WHERE owner = ? AND id = ?", [self._owner, fact_id]
        ).fetchall()
        if not rows:
            raise FactNotFound(fact_id)
        return unsealed(self._path, self._owner, *rows[0])

    def _store_vectors(self, fact: Fact, vectors: Vectors) -> None:
        self._db.execute(
            "INSERT INTO vectors (id, version, data) VALUES (?, ?, ?)",
            [
                fact.seq * SLOTS + embedder_slot(self._db, self._embedder),
                fact.version,
                pack_vectors(fact.seq, fact.version, np.atleast_2d(vectors)),
            ],
        )

    def _carry_vectors(self, fact: Fact) -> None:
        """Keep the vectors of the version before, of every embedder: what they are made of is the same."""
        rows = self._db.execute(
            "SELECT id, version, data FROM vectors WHERE id BETWEEN ? AND ?", _vector_ids(fact.seq)
        ).fetchall()
        for vector_id, version, data in rows:
            carried = carried_vectors(fact.seq, version, fact.version, data)
            if carried is not None:
                self._db.execute(
                    "UPDATE vectors SET version = ?, data = ? WHERE id = ?", [fact.version, carried, vector_id]
                )


def drop_vectors(db: sqlite3.Connection, seq: int) -> None:
    """Remove the vectors of one fact, of every embedder."""
    db.execute("DELETE FROM vectors WHERE id BETWEEN ? AND ?", _vector_ids(seq))


def _vector_ids(seq: int) -> tuple[int, int]:
    return seq * SLOTS, seq * SLOTS + SLOTS - 1


def check_embedder(db: sqlite3.Connection, fingerprint: str) -> None:
    """Raise `EmbedderMismatch` unless the store's vectors are made with this embedder."""
    rows = db.execute("SELECT value FROM meta WHERE key = 'embedder'").fetchall()
    if not rows or rows[0][0] != fingerprint:
        raise EmbedderMismatch(stored=rows[0][0] if rows else "none", offered=fingerprint)


def embedder_slot(db: sqlite3.Connection, fingerprint: str) -> int:
    """Return the slot of an embedder, a free one where it has none yet."""
    rows = db.execute("SELECT slot FROM embedders WHERE fingerprint = ?", [fingerprint]).fetchall()
    if rows:
        return int(rows[0][0])
    taken = {row[0] for row in db.execute("SELECT slot FROM embedders")}
    slot = next((slot for slot in range(SLOTS) if slot not in taken), None)
    if slot is None:
        raise StoreError(f"vectors of {SLOTS} embedders are there, of reindexes that never ended: finish one of them")
    db.execute("INSERT INTO embedders (slot, fingerprint) VALUES (?, ?)", [slot, fingerprint])
    return slot


def append_change(db: sqlite3.Connection, kind: ChangeKind, owner: OwnerId, fact: Fact | None, now: float) -> None:
    """Append to the feed what happened to `fact`, or to all facts of `owner`."""
    named = [None, None, None] if fact is None else [fact.id, fact.seq, fact.version]
    position = db.execute(
        "INSERT INTO changes (kind, owner, id, seq, version, at) VALUES (?, ?, ?, ?, ?, ?)",
        [kind.value, owner, *named, now],
    ).lastrowid
    db.execute(
        "INSERT INTO owners (owner, position) VALUES (?, ?)"
        " ON CONFLICT (owner) DO UPDATE SET position = excluded.position",
        [owner, position],
    )


def trim_feed(db: sqlite3.Connection, retention: int) -> None:
    """Forget the oldest changes, so that `retention` of them stay, or up to a tenth more."""
    [(first, last)] = db.execute(
        "SELECT (SELECT position FROM changes ORDER BY position LIMIT 1),"
        " (SELECT position FROM changes ORDER BY position DESC LIMIT 1)"
    ).fetchall()
    # Not at every write.
    if first is not None and last - first > retention * 1.1:
        floor = last - retention
        db.execute("DELETE FROM changes WHERE position <= ?", [floor])
        db.execute("UPDATE meta SET value = ? WHERE key = 'feed_floor'", [str(floor)])
