"""Records in one SQLite database, the backend that needs no set-up."""

import json
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from memstore.errors import FeedGap, StoreDamaged
from memstore.records.base import (
    Applied,
    Batch,
    Finding,
    Insertion,
    OwnerHead,
    OwnerStats,
    Problem,
    PurgeCounts,
    RestoredFact,
    StoredVectors,
    VectorUpdate,
)
from memstore.records.codec import check_order, content_digest, pack_vectors, stored_vectors, unsealed
from memstore.records.sqlite.connection import SQLiteConnections
from memstore.records.sqlite.schema import LACKS_VECTORS, SLOTS
from memstore.records.sqlite.upkeep import check, compact, doctor
from memstore.records.sqlite.writes import FactWriter, append_change, check_embedder, embedder_slot, trim_feed
from memstore.types import Change, ChangeKind, Fact, FactId, NewFact, OwnerId

FILE_NAME = "records.sqlite3"

_BY_ID = "id IN (SELECT value FROM json_each(?))"
_BY_SEQ = "seq IN (SELECT value FROM json_each(?))"
_VECTORS = (
    "SELECT seq, vectors.version, data FROM facts JOIN vectors"
    f" ON vectors.id = seq * {SLOTS} + (SELECT slot FROM embedders WHERE fingerprint = ?)"
)


class SQLiteRecords:
    """A `RecordStore` in `directory/records.sqlite3`; any number of processes on one machine may have it open.

    A commit returns after the disk has it (`synchronous = FULL`). Removed content is overwritten (`secure_delete`).

    Parameters
    ----------
    feed_retention
        Changes that the feed keeps at least.
    idempotency_ttl_s
        How long an idempotency key is remembered at least; older ones go as new ones come, or with `compact`.

    Raises
    ------
    StoreReadOnly, StoreFull, StoreDamaged, StoreTooNew
    """

    def __init__(
        self,
        directory: Path,
        *,
        busy_timeout_s: float = 30.0,
        feed_retention: int = 100_000,
        idempotency_ttl_s: float = 7 * 86400.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = directory / FILE_NAME
        self._db = SQLiteConnections(self.path, busy_timeout_s=busy_timeout_s)
        self._feed_retention = feed_retention
        self._idempotency_ttl_s = idempotency_ttl_s
        self._clock = clock

    @property
    def location(self) -> str:
        """`sqlite:///` and the directory."""
        return f"sqlite:///{self.path.parent}"

    # ---- writing ----

    def apply(self, owner: OwnerId, batch: Batch, *, embedder: str) -> Applied:
        """Apply `batch` as one transaction, and append what it did to the feed."""
        with self._db.transaction() as db:
            writer = FactWriter(db, owner, self.path, embedder=embedder, now=self._clock())
            check_embedder(db, embedder)
            if batch.idempotency is not None and (replayed := writer.replay(batch.idempotency)) is not None:
                return Applied(replayed, [], replayed=True)
            writer.check_present(batch.present)
            removed = [writer.remove(fact_id, expired_by=batch.expired_by) for fact_id in batch.removals]
            for replacement in batch.replacements:
                writer.replace(replacement)
            insertions = [writer.insert(draft) for draft in batch.drafts]
            if batch.idempotency is not None:
                writer.remember(batch.idempotency, insertions, keys_before=self._clock() - self._idempotency_ttl_s)
            trim_feed(db, self._feed_retention)
            return Applied(insertions, [fact for fact in removed if fact is not None])

    def restore(self, owner: OwnerId, facts: Sequence[RestoredFact], *, embedder: str) -> list[Insertion]:
        """Store facts as they are, in one transaction, and append them to the feed."""
        with self._db.transaction() as db:
            writer = FactWriter(db, owner, self.path, embedder=embedder, now=self._clock())
            check_embedder(db, embedder)
            insertions = [writer.restore(fact) for fact in facts]
            trim_feed(db, self._feed_retention)
            return insertions

    def purge(self, owner: OwnerId) -> PurgeCounts:
        """Remove everything of `owner` and start the owner's next epoch."""
        with self._db.transaction() as db:
            of_owner = f"SELECT seq * {SLOTS} + slot FROM facts, embedders WHERE owner = ?"
            vectors = db.execute(f"DELETE FROM vectors WHERE id IN ({of_owner})", [owner]).rowcount
            counts = {
                table: db.execute(f"DELETE FROM {table} WHERE owner = ?", [owner]).rowcount
                for table in ("facts", "history", "changes", "idempotency", "damaged")
            }
            append_change(db, ChangeKind.PURGED, owner, None, self._clock())
            epoch = db.execute(
                "UPDATE owners SET epoch = epoch + 1 WHERE owner = ? RETURNING epoch", [owner]
            ).fetchall()[0][0]
        return PurgeCounts(
            facts=counts["facts"] + counts["damaged"],
            history=counts["history"],
            vectors=vectors,
            changes=counts["changes"],
            idempotency_keys=counts["idempotency"],
            epoch=epoch,
            remains=self._db.truncate_log(),
        )

    # ---- reading ----

    def head(self, owner: OwnerId) -> OwnerHead:
        """Return what caches of one owner are fenced by."""
        [(epoch, position, next_expiry, embedder)] = self._db.read(
            "SELECT (SELECT epoch FROM owners WHERE owner = ?1), (SELECT position FROM owners WHERE owner = ?1),"
            " (SELECT min(expires_at) FROM facts WHERE owner = ?1 AND expires_at IS NOT NULL),"
            " (SELECT value FROM meta WHERE key = 'embedder')",
            owner,
        )
        return OwnerHead(epoch or 0, position or 0, next_expiry, embedder)

    def get_many(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[Fact]:
        """Return the facts that exist, in the order of `fact_ids`."""
        facts = self._facts(owner, _BY_ID, json.dumps(list(dict.fromkeys(fact_ids))))
        by_id = {fact.id: fact for fact in facts}
        return [by_id[fact_id] for fact_id in fact_ids if fact_id in by_id]

    def held_by_others(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[FactId]:
        """Return those of `fact_ids` that are ids of facts of other owners."""
        rows = self._db.read(
            "SELECT id FROM facts WHERE id IN (SELECT value FROM json_each(?)) AND owner <> ?",
            json.dumps(list(fact_ids)),
            owner,
        )
        held = {row[0] for row in rows}
        return [fact_id for fact_id in fact_ids if fact_id in held]

    def get_by_seqs(self, owner: OwnerId, seqs: Sequence[int]) -> dict[int, Fact]:
        """Return the facts that exist, by seq."""
        facts = self._facts(owner, _BY_SEQ, json.dumps([int(seq) for seq in seqs]))
        return {fact.seq: fact for fact in facts}

    def find_identical(self, owner: OwnerId, facts: Sequence[NewFact]) -> list[Fact | None]:
        """Return, for each of `facts`, the current fact with the same content."""
        found: list[Fact | None] = []
        for fact in facts:
            found += self._facts(owner, "digest = ? AND is_current = 1", content_digest(fact)) or [None]
        return found

    def page(
        self, owner: OwnerId, *, stream: str | None, limit: int, after_seq: int, superseded: bool = False
    ) -> list[Fact]:
        """Return up to `limit` facts with seq > `after_seq`, by seq."""
        of_stream, arguments = ("", []) if stream is None else ("stream = ? AND", [stream])
        condition = f"{of_stream} is_current = ? AND seq > ? ORDER BY seq LIMIT ?"
        # SQLite's integers end at 2**63.
        limit = min(limit, 2**62)
        # One state at a time, since SQLite would sort all facts of the owner for both.
        pages = [
            self._facts(owner, condition, *arguments, is_current, after_seq, limit)
            for is_current in ((1, 0) if superseded else (1,))
        ]
        for page in pages:
            check_order(self.path, page, after_seq=after_seq)
        return sorted(chain(*pages), key=lambda fact: fact.seq)[:limit]

    def history(self, owner: OwnerId, fact_id: FactId) -> list[Fact]:
        """Return the former versions of one fact, oldest first."""
        rows = self._db.read(
            "SELECT id, record FROM history WHERE owner = ? AND id = ? ORDER BY version", owner, fact_id
        )
        return [unsealed(self.path, owner, *row) for row in rows]

    def expired(self, owner: OwnerId, *, now: float) -> list[FactId]:
        """Return the facts whose `expires_at` is at or before `now`."""
        rows = self._db.read("SELECT id FROM facts WHERE owner = ? AND expires_at <= ? ORDER BY seq", owner, now)
        return [FactId(row[0]) for row in rows]

    def owners_with_expired(self, *, now: float) -> list[OwnerId]:
        """Return the owners that have a fact whose `expires_at` is at or before `now`."""
        # The plus keeps SQLite from going through all that will ever expire, in the order of owners.
        rows = self._db.read("SELECT DISTINCT +owner FROM facts WHERE expires_at <= ?", now)
        return sorted(OwnerId(row[0]) for row in rows)

    def count(self, owner: OwnerId) -> int:
        """Return the number of current facts."""
        return int(self._db.read("SELECT count(*) FROM facts WHERE owner = ? AND is_current = 1", owner)[0][0])

    def owners(self) -> list[OwnerId]:
        """Return every owner that has a fact, sorted."""
        return [OwnerId(row[0]) for row in self._db.read("SELECT DISTINCT owner FROM facts ORDER BY owner")]

    def stats(self, owner: OwnerId) -> OwnerStats:
        """Return what the store holds of `owner`."""
        [(total, current)] = self._db.read(
            "SELECT count(*), coalesce(sum(is_current), 0) FROM facts WHERE owner = ?", owner
        )
        [(history,)] = self._db.read("SELECT count(*) FROM history WHERE owner = ?", owner)
        facts = self._facts(owner, "is_current = 1")
        text_bytes = sum(len(fact.text.encode()) for fact in facts)
        return OwnerStats(current, total - current, history, text_bytes, self.head(owner).epoch)

    def changes(self, since: int, *, owner: OwnerId | None = None, limit: int = 1000) -> list[Change]:
        """Return up to `limit` changes with position > `since`, in order."""
        of_owner, arguments = ("", []) if owner is None else ("AND owner = ?", [owner])
        rows = self._db.read(
            "SELECT position, kind, owner, id, seq, version, at, (SELECT value FROM meta WHERE key = 'feed_floor')"
            f" FROM changes WHERE position > ? {of_owner} ORDER BY position LIMIT ?",
            since,
            *arguments,
            limit,
        )
        floor = int(rows[0][7] if rows else self._db.read("SELECT value FROM meta WHERE key = 'feed_floor'")[0][0])
        if since < floor:
            raise FeedGap(since=since, floor=floor)
        try:
            return [Change(row[0], ChangeKind(row[1]), *row[2:7]) for row in rows]
        except ValueError as error:
            raise StoreDamaged(f"{self.path}: the feed is damaged ({error}): run `memstore verify --repair`") from error

    def last_position(self) -> int:
        """Return the position of the last change of all."""
        return int(self._db.read("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'changes'")[0][0])

    # ---- vectors ----

    def claim_embedder(self, fingerprint: str) -> str:
        """Return the fingerprint that the vectors are made with; in a new store it becomes `fingerprint`."""
        stored = self._db.read("SELECT value FROM meta WHERE key = 'embedder'")
        if not stored:
            with self._db.transaction() as db:
                db.execute("INSERT OR IGNORE INTO meta (key, value) VALUES ('embedder', ?)", [fingerprint])
            stored = self._db.read("SELECT value FROM meta WHERE key = 'embedder'")
        return str(stored[0][0])

    def vectors(self, owner: OwnerId, *, embedder: str, dimension: int) -> StoredVectors:
        """Return all vectors of `owner` that `embedder` made."""
        rows = self._db.read(f"{_VECTORS} WHERE owner = ? AND is_current = 1 ORDER BY seq", embedder, owner)
        return stored_vectors(rows, dimension=dimension)

    def vectors_of(self, owner: OwnerId, seqs: Sequence[int], *, embedder: str, dimension: int) -> StoredVectors:
        """Return the vectors of these facts that `embedder` made."""
        rows = self._db.read(
            f"{_VECTORS} WHERE +owner = ? AND is_current = 1 AND {_BY_SEQ} ORDER BY seq",
            embedder,
            owner,
            json.dumps([int(seq) for seq in seqs]),
        )
        return stored_vectors(rows, dimension=dimension)

    def unindexed(self, owner: OwnerId, *, embedder: str, limit: int, after_seq: int = 0) -> list[Fact]:
        """Return up to `limit` current facts that have no vectors of `embedder` in their present version."""
        condition = f"is_current = 1 AND seq > ? AND {LACKS_VECTORS} ORDER BY seq LIMIT ?"
        return self._facts(owner, condition, after_seq, embedder, limit)

    def put_vectors(
        self, owner: OwnerId, updates: Sequence[VectorUpdate], *, embedder: str, is_reindex: bool = False
    ) -> int:
        """Store vectors of facts that still have the version they were made of; return how many."""
        with self._db.transaction() as db:
            if not is_reindex:
                check_embedder(db, embedder)
            slot = embedder_slot(db, embedder)
            return sum(
                db.execute(
                    f"INSERT OR REPLACE INTO vectors (id, version, data) SELECT seq * {SLOTS} + ?, version, ?"
                    " FROM facts WHERE +owner = ? AND seq = ? AND version = ? AND is_current = 1",
                    [slot, pack_vectors(seq, version, vectors), owner, seq, version],
                ).rowcount
                for seq, version, vectors in updates
            )

    def adopt_embedder(self, fingerprint: str) -> bool:
        """Make `fingerprint` the store's embedder if every current fact has its vectors, else return False."""
        with self._db.transaction() as db:
            slot = embedder_slot(db, fingerprint)
            query = f"SELECT 1 FROM facts WHERE is_current = 1 AND {LACKS_VECTORS} LIMIT 1"
            if db.execute(query, [fingerprint]).fetchall():
                return False
            db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('embedder', ?)", [fingerprint])
            db.execute(f"DELETE FROM vectors WHERE id % {SLOTS} <> ?", [slot])
            db.execute("DELETE FROM embedders WHERE slot <> ?", [slot])
            return True

    # ---- upkeep ----

    def check(self, *, embedder: str | None, dimension: int | None, repair: bool) -> list[Problem]:
        """Return everything whose parts do not fit together; mend what can be mended if `repair`."""
        return check(self._db, embedder=embedder, dimension=dimension, repair=repair, now=self._clock())

    def compact(self) -> tuple[int, int]:
        """Forget old idempotency keys and rewrite the file without free pages; return the bytes before and after."""
        return compact(self._db, keys_before=self._clock() - self._idempotency_ttl_s)

    def doctor(self) -> list[Finding]:
        """Return what an operator should know."""
        return doctor(self._db)

    def close(self) -> None:
        """Release the connections; may be called twice."""
        self._db.close()

    def _facts(self, owner: OwnerId, condition: str, *arguments: object) -> list[Fact]:
        # The plus keeps SQLite from going through all facts of the owner for a few ids or seqs.
        of_owner = "+owner = ?" if condition in (_BY_ID, _BY_SEQ) else "owner = ?"
        rows = self._db.read(f"SELECT id, record FROM facts WHERE {of_owner} AND {condition}", owner, *arguments)
        return [unsealed(self.path, owner, *row) for row in rows]
