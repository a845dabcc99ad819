"""Both backends do the same, step by step, with the same random requests."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_facts import EMBEDDER, Clock, vector

from memstore.embedding import Vectors
from memstore.errors import MemStoreError
from memstore.records import (
    Batch,
    Draft,
    IdempotencyKey,
    RecordStore,
    Replacement,
    SQLiteRecords,
    VectorUpdate,
)
from memstore.records.redis import RedisOptions, RedisRecords
from memstore.types import Fact, FactState, NewFact, OwnerId

OWNERS = [OwnerId("ana"), OwnerId("bo:*")]
OTHER = "other:d4"
RETENTION = 40

Fields = dict[str, Any]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stores(redis_url: str, tmp_path: Path, clock: Clock) -> Iterator[list[RecordStore]]:
    opened: list[RecordStore] = [
        SQLiteRecords(tmp_path / "store", feed_retention=RETENTION, clock=clock),
        RedisRecords(redis_url, options=RedisOptions(feed_retention=RETENTION, disk_wait_s=0.0), clock=clock),
    ]
    for store in opened:
        store.claim_embedder(EMBEDDER)
    yield opened
    for store in opened:
        store.close()


def all_facts(store: RecordStore, owner: OwnerId) -> list[Fact]:
    return store.page(owner, stream=None, limit=10_000, after_seq=0, superseded=True)


class Names:
    """Ids differ between the stores: facts are told apart by seq, which does not."""

    def __init__(self) -> None:
        self.seq_of: dict[str, int] = {}

    def learn(self, store: RecordStore) -> None:
        for owner in OWNERS:
            self.seq_of |= {fact.id: fact.seq for fact in all_facts(store, owner)}

    def plain(self, value: object) -> object:
        """Return `value` with every id replaced."""
        if isinstance(value, Fact):
            # A draft that has expired when it comes is gone before the next of the same content.
            self.seq_of.setdefault(value.id, value.seq)
            fields = {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
            return {name: self.plain(field) for name, field in fields.items()}
        if isinstance(value, tuple | list):
            return [self.plain(item) for item in value]
        if isinstance(value, dict):
            return {key: self.plain(item) for key, item in value.items()}
        return self.seq_of.get(value, value) if isinstance(value, str) else value


def attempt(names: Names, store: RecordStore, action: Callable[[RecordStore], object]) -> object:
    try:
        done = action(store)
    except MemStoreError as error:
        names.learn(store)
        return type(error).__name__
    names.learn(store)
    return names.plain(done)


def random_action(rng: random.Random, facts: list[Fact], now: float) -> Callable[[RecordStore], object]:
    """Facts are named by seq, and their ids looked up in the store that the action is for."""
    owner = rng.choice(OWNERS)
    kind = rng.choices(["apply", "purge", "vectors", "adopt"], weights=[30, 1, 3, 1])[0]
    if kind == "purge":
        # Not when the feed is trimmed, which neither promises.
        return lambda store: store.purge(owner)._replace(changes=0, remains=None)
    if kind == "vectors":
        asked = [(fact.seq, rng.choice([fact.version, fact.version, 1])) for fact in facts if rng.random() < 0.7]
        embedder = rng.choice([EMBEDDER, OTHER])
        updates = [VectorUpdate(seq, version, vector(f"{seq}")) for seq, version in asked]
        is_reindex = rng.random() < 0.8
        return lambda store: store.put_vectors(owner, updates, embedder=embedder, is_reindex=is_reindex)
    if kind == "adopt":
        return lambda store: store.adopt_embedder(EMBEDDER)

    present = [fact.seq for fact in rng.sample(facts, min(len(facts), rng.choice([0, 0, 0, 1])))]
    read: Fields = {} if rng.random() < 0.7 else {"event_at": 77.5}
    expired_by = rng.choice([None, None, now])
    removed = [fact.seq for fact in rng.sample(facts, min(len(facts), rng.choice([0, 0, 1, 2])))]
    replaced = [random_replacement(rng, fact) for fact in rng.sample(facts, min(len(facts), rng.choice([0, 0, 1, 2])))]
    drafts = [random_draft(rng, now) for _ in range(rng.choice([0, 1, 1, 2, 4]))]
    superseded = rng.choice([None, *(fact.seq for fact in facts)]) if rng.random() < 0.2 else None
    key = IdempotencyKey(f"k{rng.randrange(4)}", f"d{rng.randrange(2)}") if rng.random() < 0.3 else None

    def apply(store: RecordStore) -> object:
        by_seq = {fact.seq: fact for fact in all_facts(store, owner)}
        replacements = [
            Replacement(dataclasses.replace(fact, **new), dataclasses.replace(fact, **expected), vectors)
            for seq, new, expected, vectors in replaced
            if (fact := by_seq.get(seq)) is not None
        ]
        given = list(drafts)
        if given and superseded in by_seq:
            given[0] = given[0]._replace(supersedes=by_seq[superseded].id)
        batch = Batch(
            present=[dataclasses.replace(by_seq[seq], **read) for seq in present if seq in by_seq],
            removals=[by_seq[seq].id for seq in removed if seq in by_seq],
            expired_by=expired_by,
            replacements=replacements,
            drafts=given,
            idempotency=key,
        )
        return store.apply(owner, batch, embedder=EMBEDDER)

    return apply


def random_replacement(rng: random.Random, fact: Fact) -> tuple[int, Fields, Fields, Vectors | None]:
    """Return a fact's seq, what is new in it, what else than the truth is expected, and its vectors."""
    others: list[Fields] = [{"version": fact.version + 1}, {"expires_at": 1e6}, {"event_at": 77.5}]
    expected = {} if rng.random() < 0.9 else rng.choice(others)
    if rng.random() < 0.3:
        return fact.seq, {"expires_at": rng.choice([None, 1030.0, 1060.0]), "supersedes": None}, expected, None
    state = rng.choice([FactState.CURRENT, FactState.CURRENT, FactState.SUPERSEDED])
    text = rng.choice(["one", "two", "three", fact.text])
    new: Fields = {"text": text, "version": fact.version + 1, "state": state, "supersedes": None}
    return fact.seq, new, expected, vector(text) if rng.random() < 0.5 else None


def random_draft(rng: random.Random, now: float) -> Draft:
    text = rng.choice(["one", "two", "three", "four", "鍵", f"x{rng.random()}"])
    expires_at = rng.choice([None, None, now, now + 5, now + 50])
    new = NewFact(text, stream=rng.choice(["", "s", "t"]), metadata=rng.choice([{}, {"a": []}]), expires_at=expires_at)
    return Draft(new, vector(text), event_at=rng.choice([None, 12.5]))


def everything(names: Names, store: RecordStore) -> object:
    told: list[object] = [
        store.owners(),
        store.owners_with_expired(now=1030.0),
        store.last_position(),
        names.plain(store.changes(max(0, store.last_position() - RETENTION))),
    ]
    for owner in OWNERS:
        facts = all_facts(store, owner)
        told += [
            names.plain(facts),
            names.plain(store.page(owner, stream="s", limit=3, after_seq=2, superseded=True)),
            names.plain(store.page(owner, stream="s", limit=100, after_seq=0)),
            names.plain([store.history(owner, fact.id) for fact in facts]),
            names.plain(store.get_by_seqs(owner, range(60))),
            names.plain(store.find_identical(owner, [NewFact("one"), NewFact("two", stream="s")])),
            sorted(names.plain(store.expired(owner, now=1040.0))),  # type: ignore[type-var]
            store.count(owner),
            store.stats(owner),
            store.head(owner),
        ]
        for embedder in (EMBEDDER, OTHER):
            stored = store.vectors(owner, embedder=embedder, dimension=4)
            told += [stored.seqs.tolist(), stored.versions.tolist(), stored.rows.tolist(), stored.damaged]
            told += [
                names.plain(store.unindexed(owner, embedder=embedder, limit=5, after_seq=after_seq))
                for after_seq in (0, 30)
            ]
    return told


@pytest.mark.parametrize("seed", range(3))
def test_both_backends_do_the_same(stores: list[RecordStore], clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    names = Names()
    refusals = set()
    for _ in range(80):
        clock.now += rng.choice([0.0, 1.0, 10.0]) if rng.random() < 0.2 else 0.0
        facts = [fact for owner in OWNERS for fact in all_facts(stores[0], owner)]
        action = random_action(rng, facts, clock.now)
        outcomes = [attempt(names, store, action) for store in stores]
        assert outcomes[0] == outcomes[1]
        refusals |= {outcomes[0]} if isinstance(outcomes[0], str) else set()
        told = [everything(names, store) for store in stores]
        assert told[0] == told[1]
    for store in stores:
        assert {p.kind for p in store.check(embedder=EMBEDDER, dimension=4, repair=False)} <= {"missing-vector"}
    assert "VersionConflict" in refusals
