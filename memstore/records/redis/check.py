"""Whether the keys of a store fit together, and mending what does not."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memstore.records.base import Problem
from memstore.records.codec import unseal
from memstore.records.redis.check_feed import check_feed, check_head
from memstore.records.redis.check_ids import stray_ids
from memstore.records.redis.check_vectors import check_vectors
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import (
    OWNER_KEYS,
    IndexEntry,
    Keys,
    decode_owner,
    encode_owner,
    index_entry,
    read_entry,
)
from memstore.records.redis.scripts import Scripts
from memstore.records.redis.walk import all_keys, chunks, fields, members
from memstore.types import ChangeKind, FactId, OwnerId

_STORE_KEYS = {
    "meta": "hash",
    "ids": "hash",
    "embedders": "hash",
    "seq": "string",
    "position": "string",
    "feed": "stream",
    "sessions": "zset",
    "session": "hash",
    "session-log": "hash",
}


class _Row(NamedTuple):
    """What all keys say of one fact, read at one moment."""

    fact_id: bytes
    record: bytes
    expected: IndexEntry | None
    """None where the record is damaged."""

    entry: bytes | None
    current: float | None
    superseded: float | None
    expiry: float | None
    is_in_stream: bool
    twin: bytes | None
    has_id: bool
    """Whether the id is known to be this owner's."""

    def fits(self) -> bool:
        """Return whether they all say what the record says."""
        wanted = self.expected
        assert wanted is not None, "a damaged record"
        is_current = wanted.state == "c"
        return (
            self.entry == str(wanted).encode()
            and self.current == (wanted.seq if is_current else None)
            and self.superseded == (None if is_current else wanted.seq)
            and self.expiry == wanted.expires_at
            and self.is_in_stream
            and self.has_id
            and (not is_current or self.twin == self.fact_id)
        )


class Checker:
    """One pass over a store, owner by owner, in batches that let other clients in between."""

    def __init__(
        self, connections: RedisConnections, keys: Keys, scripts: Scripts, *, repair: bool, now: float
    ) -> None:
        self._redis = connections
        self._keys = keys
        self._scripts = scripts
        self._repair = repair
        self._now = now

    def run(self, *, embedder: str | None, dimension: int | None) -> list[Problem]:
        """Return the problems of all owners, and of what they share."""
        owners, refused, problems = self._owners()
        for owner in sorted(owners):
            for ids in self._ids(owner):
                problems += self._facts(owner, ids)
            problems += self._strays(owner)
            problems += self._history(owner)
            problems += self._listing(owner)
            problems += check_head(self._redis, self._keys, owner, repair=self._repair)
            if embedder is not None and dimension is not None:
                problems += check_vectors(
                    self._redis, self._keys, owner, embedder=embedder, dimension=dimension, repair=self._repair
                )
        problems += self._stray_ids(refused)
        problems += check_feed(self._redis, self._keys, owners, repair=self._repair)
        return problems + self._counters(owners)

    # ---- keys ----

    def _owners(self) -> tuple[set[OwnerId], set[OwnerId | None], list[Problem]]:
        """Return the owners whose keys have the right types, the other ones, and what their keys are."""
        names = {name for batch in all_keys(self._redis, self._keys) for name in batch}
        listed = {OwnerId(name.decode()) for batch in members(self._redis, self._keys.owners) for name, _ in batch}
        owners, refused, problems = set(listed), set[OwnerId | None](), []
        for chunk in chunks(sorted(names)):
            kinds = self._redis.at_one_moment(*[("type", name) for name in chunk])
            for name, kind in zip(chunk, kinds, strict=True):
                owner, wanted = self._meaning(name)
                if owner is not None:
                    owners.add(owner)
                if kind not in (b"none", wanted):
                    refused.add(owner)
                    detail = f"{name.decode(errors='replace')} is a {kind.decode()}, of another program"
                    problems.append(Problem("foreign-key", owner, None, detail, repaired=False))
        return owners - refused, refused, problems

    def _meaning(self, name: bytes) -> tuple[OwnerId | None, bytes | None]:
        """Return whose key this is and the type it should have, None being that there should be none."""
        first, _, rest = name.decode(errors="replace").removeprefix(self._keys.root).partition(":")
        if first != "o":
            kinds = {**_STORE_KEYS, "owners": "zset"} | dict.fromkeys(("seq", "position", "request", "probe"), "string")
            return None, kinds[first].encode() if first in kinds else None
        encoded, _, part = rest.partition(":")
        try:
            owner = decode_owner(encoded)
        except ValueError:
            return None, None
        kind = "hash" if part.startswith("vectors:") else OWNER_KEYS.get(part)
        return owner, None if kind is None else kind.encode()

    def _counters(self, owners: set[OwnerId]) -> list[Problem]:
        seq = position = 0
        for owner in owners:
            own = self._keys.of(owner)
            *last, said = self._redis.at_one_moment(
                ("zrange", f"{own}current", -1, -1, False, True),
                ("zrange", f"{own}superseded", -1, -1, False, True),
                ("hget", f"{own}head", "position"),
            )
            seq = max([seq, *(int(found[0][1]) for found in last if found)])
            position = max(position, int(said) if said is not None and said.isdigit() else 0)
        problems = []
        # The largest in use first, the counter after it: it only grows.
        for name, least in (("seq", seq), ("position", position)):
            value = self._redis.do("get", f"{self._keys.root}{name}") or b"0"
            if not value.isdigit() or int(value) < least:
                if self._repair:
                    self._scripts.run("counter", None, [name, least])
                detail = f"the counter {name} is behind what was counted, {least}"
                problems.append(Problem("wrong-counter", None, None, detail, self._repair))
        return problems

    def _listing(self, owner: OwnerId) -> list[Problem]:
        has_facts, listed = self._redis.at_one_moment(
            ("hlen", f"{self._keys.of(owner)}records"), ("zscore", self._keys.owners, owner)
        )
        if bool(has_facts) == (listed is not None):
            return []
        detail = "the owner has facts and is not listed" if has_facts else "the owner is listed and has no facts"
        return [Problem("wrong-index", owner, None, detail, self._mend(owner, b"", b"", None))]

    # ---- facts ----

    def _ids(self, owner: OwnerId) -> Iterator[list[bytes]]:
        for batch in fields(self._redis, f"{self._keys.of(owner)}records"):
            yield [fact_id for fact_id, _ in batch]

    def _facts(self, owner: OwnerId, ids: list[bytes]) -> list[Problem]:
        problems = []
        for row in self._rows(owner, ids):
            fact_id = FactId(row.fact_id.decode(errors="replace"))
            if row.expected is None:
                mended = self._mend(owner, row.fact_id, row.record, None, kind=ChangeKind.DELETED, known=row.entry)
                problems.append(Problem("damaged-record", owner, fact_id, "the record fails its checksum", mended))
            elif not row.fits():
                mended = self._mend(owner, row.fact_id, row.record, row.expected, kind=ChangeKind.UPDATED)
                detail = f"what leads to seq {row.expected.seq} is not what its record says"
                problems.append(Problem("wrong-index", owner, fact_id, detail, mended))
        return problems

    def _rows(self, owner: OwnerId, ids: list[bytes]) -> list[_Row]:
        """Return what all keys say of these facts, but for those that another writer changes meanwhile."""
        own = self._keys.of(owner)
        first = self._redis.do("hmget", f"{own}records", ids)
        wanted = [
            None if record is None else _expected(record, owner, name) for name, record in zip(ids, first, strict=True)
        ]
        # Any name will do where a damaged record gives none.
        places = [
            f"{'' if entry is None else entry.stream_member}{name.decode(errors='replace')}"
            for entry, name in zip(wanted, ids, strict=True)
        ]
        digests = ["" if entry is None else entry.digest for entry in wanted]
        records, entries, current, superseded, expiry, in_streams, twins, holders = self._redis.at_one_moment(
            ("hmget", f"{own}records", ids),
            ("hmget", f"{own}index", ids),
            ("zmscore", f"{own}current", ids),
            ("zmscore", f"{own}superseded", ids),
            ("zmscore", f"{own}expiry", ids),
            ("zmscore", f"{own}streams", places),
            ("hmget", f"{own}digests", digests),
            ("hmget", self._keys.ids, ids),
        )
        holder = encode_owner(owner).encode()
        return [
            _Row(
                ids[i],
                records[i],
                wanted[i],
                entries[i],
                current[i],
                superseded[i],
                expiry[i],
                in_streams[i] is not None,
                twins[i],
                holders[i] == holder,
            )
            for i in range(len(ids))
            if records[i] is not None and records[i] == first[i]
        ]

    def _strays(self, owner: OwnerId) -> list[Problem]:
        """What leads to no fact, or to one that says something else."""
        own = self._keys.of(owner)
        problems = []
        for name, pairs in self._leads(owner):
            ids = [fact_id for fact_id, _ in pairs]
            records, entries = self._redis.at_one_moment(("hmget", f"{own}records", ids), ("hmget", f"{own}index", ids))
            for (fact_id, lead), record, entry in zip(pairs, records, entries, strict=True):
                if record is not None and (name not in ("streams", "digests") or _implies(entry, name, lead, fact_id)):
                    continue
                if not self._still_leads(own, name, lead, fact_id):
                    continue
                if record is None:
                    mended = self._mend(owner, fact_id, b"", None, strays=[(name, lead)])
                else:
                    wanted = _expected(record, owner, fact_id)
                    mended = wanted is not None and self._mend(owner, fact_id, record, wanted, strays=[(name, lead)])
                detail = f"{name} leads to a fact that is not there, or says something else"
                problems.append(Problem("wrong-index", owner, FactId(fact_id.decode(errors="replace")), detail, mended))
        return problems

    def _leads(self, owner: OwnerId) -> Iterator[tuple[str, list[tuple[bytes, bytes]]]]:
        """Yield pairs of a fact's id and what leads to it, with the key that they are of."""
        own = self._keys.of(owner)
        for index in fields(self._redis, f"{own}index"):
            yield "index", [(fact_id, fact_id) for fact_id, _ in index]
        for name in ("current", "superseded", "expiry"):
            for scored in members(self._redis, f"{own}{name}"):
                yield name, [(fact_id, fact_id) for fact_id, _ in scored]
        for scored in members(self._redis, f"{own}streams"):
            yield "streams", [(member.split(b":", 3)[-1], member) for member, _ in scored]
        for twins in fields(self._redis, f"{own}digests"):
            yield "digests", [(fact_id, digest) for digest, fact_id in twins]

    def _still_leads(self, own: str, name: str, lead: bytes, fact_id: bytes) -> bool:
        """Return whether this is so at one moment too, and not the trace of a writer between two reads."""
        key = f"{own}{name}"
        found, record, entry = self._redis.at_one_moment(
            ("hget", key, lead) if name in ("index", "digests") else ("zscore", key, lead),
            ("hget", f"{own}records", fact_id),
            ("hget", f"{own}index", fact_id),
        )
        if found is None or (name == "digests" and found != fact_id):
            return False
        return record is None or (name in ("streams", "digests") and not _implies(entry, name, lead, fact_id))

    def _stray_ids(self, refused: set[OwnerId | None]) -> list[Problem]:
        problems = []
        for fact_id, owner in stray_ids(self._redis, self._keys, refused):
            if owner is not None:
                mended = self._mend(owner, fact_id, b"", None)
            else:
                mended = self._repair and bool(self._redis.do("hdel", self._keys.ids, fact_id))
            detail = "the id is kept for an owner who has no such fact"
            problems.append(Problem("wrong-index", owner, FactId(fact_id.decode(errors="replace")), detail, mended))
        return problems

    def _history(self, owner: OwnerId) -> list[Problem]:
        key = f"{self._keys.of(owner)}history"
        problems = []
        for batch in fields(self._redis, key):
            for name, record in batch:
                fact_id, _, version = name.decode(errors="replace").rpartition(":")
                if _expected(record, owner, fact_id.encode()) is not None:
                    continue
                if self._repair:
                    self._redis.do("hdel", key, name)
                detail = f"former version {version} is damaged"
                problems.append(Problem("damaged-history", owner, FactId(fact_id), detail, self._repair))
        return problems

    def _mend(
        self,
        owner: OwnerId,
        fact_id: bytes,
        record: bytes,
        entry: IndexEntry | None,
        *,
        kind: ChangeKind | None = None,
        known: bytes | None = None,
        strays: Sequence[tuple[str, bytes]] = (),
    ) -> bool:
        """Have the other keys say `entry`; without one, set the record aside and remove what leads to it."""
        if not self._repair:
            return False
        seq, version = (entry.seq, entry.version) if entry is not None else _name(known, record)
        aside = entry is None and record != b""
        arguments: list[bytes | str | int] = [repr(self._now), encode_owner(owner), owner, fact_id, record]
        arguments += [kind.value if kind is not None else "", seq, version, int(aside), int(entry is not None)]
        arguments += entry or ()
        arguments.append(len(strays))
        for name, lead in strays:
            arguments += [name, lead]
        return int(self._scripts.run("mend", owner, arguments)) == 1


def _expected(record: bytes, owner: OwnerId, fact_id: bytes) -> IndexEntry | None:
    try:
        fact = unseal(record.decode(), owner=owner)
        return index_entry(fact) if fact.id.encode() == fact_id else None
    except (ValueError, TypeError, KeyError):
        return None


def _implies(raw: bytes | None, name: str, lead: bytes, fact_id: bytes) -> bool:
    entry = read_entry(raw)
    if entry is None:
        return False
    if name == "streams":
        return lead == entry.stream_member.encode() + fact_id
    return entry.state == "c" and lead == entry.digest.encode()


def _name(known: bytes | None, record: bytes) -> tuple[int, int]:
    """Return seq and version of a fact whose record is damaged, as far as something says them."""
    entry = read_entry(known)
    if entry is not None:
        return entry.seq, entry.version
    seq = record.partition(b":")[0]
    return int(seq) if seq.isdigit() and len(seq) < 16 else 0, 0
