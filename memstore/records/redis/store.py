"""Records on a Redis server, which many machines can share."""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from memstore.errors import FeedGap, StoreBusy, StoreDamaged, StoreUnreachable
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
from memstore.records.codec import check_order, content_digest, unsealed
from memstore.records.redis.changes import read_change
from memstore.records.redis.check import Checker
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.doctor import doctor, eviction_risk
from memstore.records.redis.keys import Keys, encode_owner, parse_entry, short_digest
from memstore.records.redis.options import RedisOptions, parse_location
from memstore.records.redis.schema import open_schema
from memstore.records.redis.scripts import Scripts
from memstore.records.redis.server_files import compact, rewrite_files
from memstore.records.redis.vectors import adopt, put_vectors, read_vectors
from memstore.records.redis.walk import chunks
from memstore.records.redis.writes import Present, outcome, present, request, restoration, touched
from memstore.types import Change, Fact, FactId, NewFact, OwnerId

logger = logging.getLogger(__name__)

_BATCH = 500
_ATTEMPTS = 10


class RedisRecords:
    """A `RecordStore` on a Redis server (>= 6.2, no modules, no cluster).

    When a write is acknowledged it is in the server's memory; whether also on its disk is up to `appendfsync`, see
    `doctor`. The layout of the keys is described in the package.

    Parameters
    ----------
    location
        `redis://`, `rediss://`, `redis+sentinel://` or `rediss+sentinel://`, see `parse_location`.

    Raises
    ------
    InvalidLocation, StoreUnreachable, StoreRefused, StoreTLSError, StoreBusy, StoreDamaged, StoreTooNew
    """

    def __init__(
        self, location: str, *, options: RedisOptions | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._options = options or RedisOptions()
        self._clock = clock
        place = parse_location(location, self._options)
        self._keys = Keys(place.prefix)
        self._redis = RedisConnections(place, self._options)
        self._scripts = Scripts(self._redis, self._keys)
        try:
            open_schema(self._redis, self._keys, self._scripts)
            risk = eviction_risk(self._redis)
        except StoreUnreachable as error:
            self.close()
            self._redis.explain_refused_handshake(error)
            raise
        except BaseException:
            self.close()
            raise
        if risk is not None:
            logger.warning("%s: %s", self.location, risk)

    @property
    def location(self) -> str:
        """The URL without user and password."""
        return self._redis.where

    # ---- writing ----

    def apply(self, owner: OwnerId, batch: Batch, *, embedder: str) -> Applied:
        """Apply `batch` in one script, and append what it did to the feed."""
        for _ in range(_ATTEMPTS):
            read = self._present(owner, touched(batch))
            now = self._clock()
            sent = request(owner, batch, read, now=now, keys_before=now - self._options.idempotency_ttl_s)
            head = [*self._about(owner, now), embedder, short_digest(embedder)]
            reply = self._scripts.run("apply", owner, [*head, *sent.arguments])
            applied = outcome(self.location, owner, sent, read, batch, embedder, reply)
            if applied is not None:
                return applied
        raise StoreBusy(f"{self.location}: other writers keep changing what is to be removed: try again later")

    def restore(self, owner: OwnerId, facts: Sequence[RestoredFact], *, embedder: str) -> list[Insertion]:
        """Store facts as they are, in one script, and append them to the feed."""
        sent = restoration(facts)
        head = [*self._about(owner, self._clock()), embedder, short_digest(embedder)]
        reply = self._scripts.run("apply", owner, [*head, *sent.arguments])
        applied = outcome(self.location, owner, sent, {}, Batch(), embedder, reply)
        assert applied is not None, "stale, without anything to remove"
        return applied.insertions

    def purge(self, owner: OwnerId) -> PurgeCounts:
        """Remove everything of `owner` and start the owner's next epoch; then have the server rewrite its files."""
        counts = self._scripts.run("purge", owner, self._about(owner, self._clock()))
        facts, history, vectors, changes, idempotency_keys, epoch = counts
        remains = rewrite_files(self._redis, wait_s=self._options.disk_wait_s)
        return PurgeCounts(facts, history, vectors, changes, idempotency_keys, epoch, remains)

    # ---- reading ----

    def head(self, owner: OwnerId) -> OwnerHead:
        """Return what caches of one owner are fenced by."""
        own = self._keys.of(owner)
        (epoch, position), soonest, embedder = self._redis.together(
            ("hmget", f"{own}head", "epoch", "position"),
            ("zrange", f"{own}expiry", 0, 0, False, True),
            ("hget", self._keys.meta, "embedder"),
        )
        with self._reading():
            return OwnerHead(
                int(epoch or 0),
                int(position or 0),
                soonest[0][1] if soonest else None,
                None if embedder is None else embedder.decode(),
            )

    def get_many(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[Fact]:
        """Return the facts that exist, in the order of `fact_ids`."""
        found = self._records(owner, dict.fromkeys(fact_ids))
        facts = {fact_id: unsealed(self.location, owner, fact_id, record) for fact_id, record in found}
        return [facts[fact_id] for fact_id in fact_ids if fact_id in facts]

    def held_by_others(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[FactId]:
        """Return those of `fact_ids` that are ids of facts of other owners."""
        own, held = encode_owner(owner).encode(), list[FactId]()
        for asked in chunks(fact_ids):
            holders = self._redis.do("hmget", self._keys.ids, asked)
            held += [
                fact_id for fact_id, holder in zip(asked, holders, strict=True) if holder is not None and holder != own
            ]
        return held

    def get_by_seqs(self, owner: OwnerId, seqs: Sequence[int]) -> dict[int, Fact]:
        """Return the facts that exist, by seq."""
        facts: list[Fact] = []
        for chunk in chunks(int(seq) for seq in seqs):
            facts += self._facts(owner, self._scripts.run("by_seqs", owner, chunk))
        return {fact.seq: fact for fact in facts}

    def find_identical(self, owner: OwnerId, facts: Sequence[NewFact]) -> list[Fact | None]:
        """Return, for each of `facts`, the current fact with the same content."""
        found: list[Fact | None] = []
        for chunk in chunks(content_digest(fact) for fact in facts):
            reply = self._scripts.run("identical", owner, chunk)
            found += [
                None if fact_id is None else unsealed(self.location, owner, fact_id.decode(), record)
                for fact_id, record in _pairs(reply)
            ]
        return found

    def page(
        self, owner: OwnerId, *, stream: str | None, limit: int, after_seq: int, superseded: bool = False
    ) -> list[Fact]:
        """Return up to `limit` facts with seq > `after_seq`, by seq."""
        digest = "" if stream is None else short_digest(stream)
        facts: list[Fact] = []
        while len(facts) < limit:
            asked = min(limit - len(facts), _BATCH)
            arguments: list[bytes | str | int] = [digest, max(after_seq, 0), asked, int(superseded)]
            batch = self._facts(owner, self._scripts.run("page", owner, arguments))
            check_order(self.location, batch, after_seq=after_seq)
            facts += batch
            if len(batch) < asked:
                break
            after_seq = batch[-1].seq
        return facts

    def history(self, owner: OwnerId, fact_id: FactId) -> list[Fact]:
        """Return the former versions of one fact, oldest first."""
        reply = self._scripts.run("history", owner, [fact_id])
        return [unsealed(self.location, owner, fact_id, record) for record in reply]

    def expired(self, owner: OwnerId, *, now: float) -> list[FactId]:
        """Return the facts whose `expires_at` is at or before `now`."""
        ids = self._redis.do("zrangebyscore", f"{self._keys.of(owner)}expiry", "-inf", now)
        return [FactId(fact_id.decode()) for fact_id in ids]

    def owners_with_expired(self, *, now: float) -> list[OwnerId]:
        """Return the owners that have a fact whose `expires_at` is at or before `now`."""
        due: list[OwnerId] = []
        for owners in chunks(self.owners()):
            commands = [
                ("zrangebyscore", f"{self._keys.of(owner)}expiry", "-inf", now, 0, 1, False) for owner in owners
            ]
            due += [owner for owner, found in zip(owners, self._redis.together(*commands), strict=True) if found]
        return due

    def count(self, owner: OwnerId) -> int:
        """Return the number of current facts."""
        return int(self._redis.do("zcard", f"{self._keys.of(owner)}current"))

    def owners(self) -> list[OwnerId]:
        """Return every owner that has a fact, sorted."""
        names = self._redis.do("zrange", self._keys.owners, 0, -1)
        with self._reading():
            return sorted(OwnerId(name.decode()) for name in names)

    def stats(self, owner: OwnerId) -> OwnerStats:
        """Return what the store holds of `owner`."""
        own = self._keys.of(owner)
        lines, history, epoch = self._redis.together(
            ("hvals", f"{own}index"), ("hlen", f"{own}history"), ("hget", f"{own}head", "epoch")
        )
        with self._reading():
            entries = [parse_entry(line) for line in lines]
            current = [entry.text_bytes for entry in entries if entry.state == "c"]
            return OwnerStats(len(current), len(entries) - len(current), history, sum(current), int(epoch or 0))

    def changes(self, since: int, *, owner: OwnerId | None = None, limit: int = 1000) -> list[Change]:
        """Return up to `limit` changes with position > `since`, in order."""
        key = self._keys.feed if owner is None else f"{self._keys.of(owner)}changes"
        entries, floor = self._redis.together(
            ("xrange", key, f"{since + 1}-0", "+", max(limit, 1)), ("hget", self._keys.meta, "feed_floor")
        )
        with self._reading():
            if since < int(floor or 0):
                raise FeedGap(since=since, floor=int(floor))
            return [read_change(position, fields, owner) for position, fields in entries[:limit]]

    def last_position(self) -> int:
        """Return the position of the last change of all."""
        with self._reading():
            return int(self._redis.do("get", self._keys.position) or 0)

    # ---- vectors ----

    def claim_embedder(self, fingerprint: str) -> str:
        """Return the fingerprint that the vectors are made with; in a new store it becomes `fingerprint`."""
        stored = self._redis.do("hget", self._keys.meta, "embedder")
        if stored is None:
            self._redis.do("hsetnx", self._keys.meta, "embedder", fingerprint)
            stored = self._redis.do("hget", self._keys.meta, "embedder")
        return str(stored.decode())

    def vectors(self, owner: OwnerId, *, embedder: str, dimension: int) -> StoredVectors:
        """Return all vectors of `owner` that `embedder` made."""
        seqs = self._redis.do("hkeys", self._keys.vectors(owner, embedder))
        return self.vectors_of(
            owner, [int(seq) for seq in seqs if seq.isdigit()], embedder=embedder, dimension=dimension
        )

    def vectors_of(self, owner: OwnerId, seqs: Sequence[int], *, embedder: str, dimension: int) -> StoredVectors:
        """Return the vectors of these facts that `embedder` made."""
        return read_vectors(self._redis, self._keys.vectors(owner, embedder), seqs, dimension=dimension)

    def unindexed(self, owner: OwnerId, *, embedder: str, limit: int, after_seq: int = 0) -> list[Fact]:
        """Return up to `limit` current facts that have no vectors of `embedder` in their present version."""
        facts: list[Fact] = []
        after = after_seq
        while len(facts) < limit:
            reply = self._scripts.run("unindexed", owner, [short_digest(embedder), after, _BATCH, limit - len(facts)])
            facts += self._facts(owner, reply[1:])
            if reply[0] is None:
                break
            with self._reading():
                after = int(reply[0])
        return facts

    def put_vectors(
        self, owner: OwnerId, updates: Sequence[VectorUpdate], *, embedder: str, is_reindex: bool = False
    ) -> int:
        """Store vectors of facts that still have the version they were made of; return how many."""
        return put_vectors(self._scripts, owner, updates, embedder=embedder, is_reindex=is_reindex)

    def adopt_embedder(self, fingerprint: str) -> bool:
        """Make `fingerprint` the store's embedder if every current fact has its vectors, else return False."""
        for _ in range(_ATTEMPTS):
            owners = self.owners()
            if any(self.unindexed(owner, embedder=fingerprint, limit=1) for owner in owners):
                return False
            verdict = adopt(self._scripts, owners, fingerprint)
            if verdict is not None:
                return verdict
        raise StoreBusy(f"{self.location}: other writers keep adding owners: try again later")

    # ---- upkeep ----

    def check(self, *, embedder: str | None, dimension: int | None, repair: bool) -> list[Problem]:
        """Return everything whose parts do not fit together; mend what can be mended if `repair`."""
        checker = Checker(self._redis, self._keys, self._scripts, repair=repair, now=self._clock())
        return checker.run(embedder=embedder, dimension=dimension)

    def compact(self) -> tuple[int, int]:
        """Forget old idempotency keys and have the server give back memory; return its bytes in use."""
        keys_before = self._clock() - self._options.idempotency_ttl_s
        return compact(self._redis, self._keys, keys_before=keys_before, wait_s=self._options.disk_wait_s)

    def doctor(self) -> list[Finding]:
        """Return what an operator should know."""
        return doctor(self._redis)

    def close(self) -> None:
        """Release the connections; may be called twice."""
        self._redis.close()

    def _about(self, owner: OwnerId, now: float) -> list[bytes | str | int]:
        """The arguments that every writing script starts with; the first makes it repeatable."""
        return [uuid.uuid4().hex, repr(float(now)), encode_owner(owner), owner, self._options.feed_retention]

    def _present(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> dict[FactId, Present]:
        return {
            fact_id: present(self.location, owner, fact_id, record)
            for fact_id, record in self._records(owner, fact_ids)
        }

    def _records(self, owner: OwnerId, fact_ids: Iterable[FactId]) -> Iterator[tuple[FactId, bytes]]:
        key = f"{self._keys.of(owner)}records"
        for chunk in chunks(fact_ids):
            records = self._redis.do("hmget", key, chunk)
            for fact_id, record in zip(chunk, records, strict=True):
                if record is not None:
                    yield fact_id, record

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError) as error:
            raise StoreDamaged(
                f"{self.location} holds something that was not written like this ({error}):"
                " run `memstore verify --repair`"
            ) from error

    def _facts(self, owner: OwnerId, reply: Sequence[bytes]) -> list[Fact]:
        return [unsealed(self.location, owner, fact_id.decode(), record) for fact_id, record in _pairs(reply)]


def _pairs(reply: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(reply[::2], reply[1::2], strict=True)
