"""The contract of `RecordStore`, over every backend."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from memstore.errors import (
    DuplicateFact,
    EmbedderMismatch,
    FactNotFound,
    FeedGap,
    IdempotencyConflict,
    InvalidFact,
    VersionConflict,
)
from memstore.records import (
    Batch,
    Draft,
    IdempotencyKey,
    RecordStore,
    Replacement,
    RestoredFact,
    SQLiteRecords,
    VectorUpdate,
)
from memstore.types import ChangeKind, Fact, FactId, FactState, NewFact, OwnerId

ANA, BO = OwnerId("ana"), OwnerId("bo")
EMBEDDER = "x:d4"


class Clock:
    """Unix seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "redis"])
def open_records(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Callable[..., RecordStore]]:
    """Opens the same store once more at each call."""
    opened: list[RecordStore] = []
    if request.param == "redis":
        from memstore.records.redis import RedisOptions, RedisRecords

        url = request.getfixturevalue("redis_url")

    def open_once(**options: float) -> RecordStore:
        if request.param == "sqlite":
            opened.append(SQLiteRecords(tmp_path / "store", clock=clock, **options))
        else:
            opened.append(RedisRecords(url, options=RedisOptions(**options), clock=clock))
        return opened[-1]

    yield open_once
    for records in opened:
        records.close()


@pytest.fixture
def records(open_records: Callable[..., RecordStore]) -> RecordStore:
    opened = open_records()
    assert opened.claim_embedder(EMBEDDER) == EMBEDDER
    return opened


def vector(seed: int) -> np.ndarray:
    row = np.random.default_rng(seed).standard_normal((1, 4))
    return (row / np.linalg.norm(row)).astype(np.float32)


def draft(text: str, *, stream: str = "", expires_at: float | None = None) -> Draft:
    return Draft(NewFact(text, stream=stream, expires_at=expires_at), vector(len(text)))


def insert(records: RecordStore, owner: OwnerId, *texts: str, stream: str = "") -> list[Fact]:
    batch = Batch(drafts=[draft(text, stream=stream) for text in texts])
    return [insertion.fact for insertion in records.apply(owner, batch, embedder=EMBEDDER).insertions]


def remove(records: RecordStore, owner: OwnerId, *fact_ids: str) -> list[Fact]:
    return records.apply(owner, Batch(removals=[FactId(f) for f in fact_ids]), embedder=EMBEDDER).removed


def replace(records: RecordStore, old: Fact, vectors: np.ndarray | None = None, **fields: object) -> Fact:
    new = dataclasses.replace(old, version=old.version + 1, **fields)
    records.apply(old.owner, Batch(replacements=[Replacement(new, old, vectors)]), embedder=EMBEDDER)
    return new


def page(records: RecordStore, owner: OwnerId, **options: object) -> list[Fact]:
    return records.page(owner, **({"stream": None, "limit": 99, "after_seq": 0} | options))


def kinds(records: RecordStore, owner: OwnerId | None = None) -> list[tuple[ChangeKind, int | None, int | None]]:
    return [(change.kind, change.seq, change.version) for change in records.changes(0, owner=owner)]


def test_every_field_comes_back_as_it_went_in(records: RecordStore) -> None:
    new = NewFact(
        "鍵 🔑 café",
        stream="D1",
        speaker="Ana",
        time="1:56 pm on 8 May, 2023",
        metadata={"z": [1, 2.5, None, True, 2**53 + 1], "a": {"ü": "NUL \0 inside JSON", "e": {}, "l": []}},
        expires_at=2000.5,
    )
    [insertion] = records.apply(ANA, Batch(drafts=[Draft(new, vector(0), event_at=5.25)]), embedder=EMBEDDER).insertions
    fact = insertion.fact
    assert insertion.created
    assert records.get_many(ANA, [fact.id]) == [fact]
    assert (fact.text, fact.stream, fact.speaker, fact.time) == (new.text, new.stream, new.speaker, new.time)
    assert fact.metadata == new.metadata
    assert list(fact.metadata) == ["z", "a"]
    assert (fact.owner, fact.version, fact.created_at, fact.updated_at) == (ANA, 1, 1000.0, 1000.0)
    assert (fact.state, fact.event_at, fact.expires_at, fact.supersedes) == (FactState.CURRENT, 5.25, 2000.5, None)
    assert fact.id[14] == "7", "a UUIDv7"


def test_what_one_process_wrote_another_reads(open_records: Callable[..., RecordStore]) -> None:
    one, other = open_records(), open_records()
    assert one.claim_embedder(EMBEDDER) == other.claim_embedder("another") == EMBEDDER
    [fact] = insert(one, ANA, "hello")
    assert other.get_many(ANA, [fact.id]) == [fact]
    remove(other, ANA, fact.id)
    assert one.get_many(ANA, [fact.id]) == []
    assert [c.kind for c in one.changes(0)] == [c.kind for c in other.changes(0)] == ["added", "deleted"]


def test_seqs_grow_over_all_owners_and_are_never_reused(open_records: Callable[..., RecordStore]) -> None:
    records = open_records()
    records.claim_embedder(EMBEDDER)
    first, second = insert(records, ANA, "one", "two")
    [third] = insert(records, BO, "three")
    assert first.seq < second.seq < third.seq
    remove(records, BO, third.id)
    [fourth] = insert(open_records(), ANA, "four")
    assert fourth.seq > third.seq


def test_the_same_content_is_one_record_per_owner(records: RecordStore) -> None:
    twice = records.apply(ANA, Batch(drafts=[draft("again"), draft("again")]), embedder=EMBEDDER).insertions
    assert [insertion.created for insertion in twice] == [True, False]
    assert twice[0].fact == twice[1].fact
    assert records.apply(BO, Batch(drafts=[draft("again")]), embedder=EMBEDDER).insertions[0].created
    assert records.find_identical(ANA, [NewFact("again"), NewFact("never")]) == [twice[0].fact, None]
    assert records.find_identical(ANA, [NewFact("again", speaker="Ana"), NewFact("again", time="noon")]) == [None, None]
    assert records.count(ANA) == 1


def test_key_order_of_metadata_is_no_difference(records: RecordStore) -> None:
    drafts = [Draft(NewFact("x", metadata=m), vector(1)) for m in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    one, other = records.apply(ANA, Batch(drafts=drafts), embedder=EMBEDDER).insertions
    assert (one.fact, other.created) == (other.fact, False)


def test_sixteen_threads_add_one_record(open_records: Callable[..., RecordStore]) -> None:
    stores = [open_records() for _ in range(4)]
    stores[0].claim_embedder(EMBEDDER)
    start = threading.Barrier(16)
    seen: list[tuple[str, bool]] = []

    def add(number: int) -> None:
        start.wait()
        result = stores[number % 4].apply(ANA, Batch(drafts=[draft("once")]), embedder=EMBEDDER)
        seen.extend((insertion.fact.id, insertion.created) for insertion in result.insertions)

    threads = [threading.Thread(target=add, args=[number]) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 16
    assert len({fact_id for fact_id, _ in seen}) == 1
    assert sum(created for _, created in seen) == 1
    assert stores[0].count(ANA) == 1


def test_a_batch_happens_as_a_whole_or_not_at_all(records: RecordStore) -> None:
    kept, other = insert(records, ANA, "kept", "other")
    stale = Replacement(dataclasses.replace(other, text="new", version=8), dataclasses.replace(other, version=7))
    batch = Batch(removals=[kept.id], replacements=[stale], drafts=[draft("fresh")])
    with pytest.raises(VersionConflict):
        records.apply(ANA, batch, embedder=EMBEDDER)
    with pytest.raises(UnicodeEncodeError):
        insert(records, ANA, "good", "lone \ud800 surrogate")
    assert page(records, ANA) == [kept, other]
    assert len(records.changes(0)) == 2
    applied = records.apply(
        ANA, Batch(removals=[kept.id, FactId("unknown")], drafts=[draft("fresh")]), embedder=EMBEDDER
    )
    assert applied.removed == [kept]
    assert page(records, ANA) == [other, applied.insertions[0].fact]


def test_another_owners_id_is_unknown(records: RecordStore) -> None:
    [fact] = insert(records, ANA, "mine")
    assert records.get_many(BO, [fact.id]) == []
    assert records.get_by_seqs(BO, [fact.seq]) == {}
    assert remove(records, BO, fact.id) == []
    assert records.history(BO, fact.id) == []
    stolen = dataclasses.replace(fact, owner=BO, text="yours", version=2)
    with pytest.raises(VersionConflict):
        records.apply(
            BO, Batch(replacements=[Replacement(stolen, dataclasses.replace(fact, owner=BO))]), embedder=EMBEDDER
        )
    assert records.put_vectors(BO, [VectorUpdate(fact.seq, 1, vector(9))], embedder=EMBEDDER) == 0
    assert records.vectors_of(BO, [fact.seq], embedder=EMBEDDER, dimension=4).seqs.tolist() == []
    assert records.get_many(ANA, [fact.id]) == [fact]
    assert kinds(records, BO) == []


@pytest.mark.parametrize("other", ["a:b", "a/b", "a|b", "a*", "a b", "a", "a-", "A-B", "a-b\n", "🔑", "a-b" * 100])
def test_every_owner_sees_their_own(records: RecordStore, other: str) -> None:
    first, second = OwnerId("a-b"), OwnerId(other)
    [fact] = insert(records, first, "of the first")
    assert (page(records, second), records.count(second), records.head(second).position) == ([], 0, 0)
    [theirs] = insert(records, second, "of the second")
    assert page(records, first) == [fact]
    assert records.purge(second).facts == 1
    assert page(records, first) == [fact]
    assert records.owners() == [first]
    assert theirs.seq not in records.get_by_seqs(first, [theirs.seq])


def test_get_many_keeps_the_order_asked_for(records: RecordStore) -> None:
    one, two, three = insert(records, ANA, "one", "two", "three")
    assert records.get_many(ANA, [three.id, FactId("unknown"), one.id]) == [three, one]
    assert records.get_many(ANA, []) == []
    assert records.get_by_seqs(ANA, [two.seq, 10**15]) == {two.seq: two}
    many = [f.id for f in insert(records, ANA, *(f"fact {i}" for i in range(1500)))]
    assert [f.id for f in records.get_many(ANA, many)] == many


def test_pages_follow_the_stream(records: RecordStore) -> None:
    a = insert(records, ANA, "a1", "a2", stream="a")
    b = insert(records, ANA, "b1", stream="b")
    a += insert(records, ANA, "a3", "a4", stream="a")
    insert(records, BO, "other", stream="a")
    assert page(records, ANA, stream="a") == a
    assert page(records, ANA, stream="a", limit=2, after_seq=a[0].seq) == a[1:3]
    assert page(records, ANA, after_seq=a[1].seq) == [*b, *a[2:]]
    assert page(records, ANA, stream="") == []
    assert page(records, ANA, limit=0) == []
    assert page(records, ANA, limit=10**30) == sorted(a + b, key=lambda fact: fact.seq)


def test_a_page_has_superseded_facts_only_if_asked(records: RecordStore) -> None:
    old, other = insert(records, ANA, "old", "other", stream="s")
    gone = replace(records, old, state=FactState.SUPERSEDED)
    assert page(records, ANA) == page(records, ANA, stream="s") == [other]
    assert page(records, ANA, superseded=True) == page(records, ANA, stream="s", superseded=True) == [gone, other]
    assert records.get_many(ANA, [old.id]) == [gone]
    assert (records.count(ANA), records.owners()) == (1, [ANA])


def test_a_replaced_fact_leaves_its_former_version(records: RecordStore) -> None:
    [first] = insert(records, ANA, "first")
    second = replace(records, first, vector(2), text="second", stream="moved")
    third = replace(records, second, metadata={"tag": 1})
    assert records.get_many(ANA, [first.id]) == [third]
    assert records.history(ANA, first.id) == [first, second]
    assert page(records, ANA, stream="moved") == [third]
    assert page(records, ANA, stream="") == []
    assert records.find_identical(ANA, [NewFact("first")]) == [None]
    assert records.stats(ANA)[:4] == (1, 0, 2, len("second"))
    with pytest.raises(VersionConflict):
        replace(records, second, text="too late")


def test_a_change_that_is_no_new_version_leaves_no_history(records: RecordStore) -> None:
    [fact] = insert(records, ANA, "fact")
    later = dataclasses.replace(fact, expires_at=5000.0)
    records.apply(ANA, Batch(replacements=[Replacement(later, fact)]), embedder=EMBEDDER)
    assert records.get_many(ANA, [fact.id]) == [later]
    assert records.history(ANA, fact.id) == []
    assert records.head(ANA).next_expiry == 5000.0
    assert records.vectors(ANA, embedder=EMBEDDER, dimension=4).seqs.tolist() == [fact.seq]


def test_a_change_of_the_expiry_alone_is_not_overwritten(records: RecordStore) -> None:
    [fact] = records.apply(ANA, Batch(drafts=[draft("fact", expires_at=2000.0)]), embedder=EMBEDDER).insertions
    read = fact.fact
    for_ever = dataclasses.replace(read, expires_at=None)
    records.apply(ANA, Batch(replacements=[Replacement(for_ever, read)]), embedder=EMBEDDER)
    for late in (dataclasses.replace(read, expires_at=5000.0), dataclasses.replace(read, text="new", version=2)):
        with pytest.raises(VersionConflict):
            records.apply(ANA, Batch(replacements=[Replacement(late, read)]), embedder=EMBEDDER)
    assert records.get_many(ANA, [read.id]) == [for_ever]


@pytest.mark.parametrize(
    "written", [{"supersedes": "another"}, {"expires_at": 9000}, {"metadata": {"n": True}}, {"updated_at": 1001.0}]
)
def test_a_fact_that_somebody_changed_meanwhile_is_not_overwritten(
    records: RecordStore, written: dict[str, object]
) -> None:
    made = Batch(drafts=[Draft(NewFact("fact", metadata={"n": 1}), vector(1)), draft("other")])
    read, other = (insertion.fact for insertion in records.apply(ANA, made, embedder=EMBEDDER).insertions)
    now = dataclasses.replace(read, **written)  # type: ignore[arg-type]
    records.apply(ANA, Batch(replacements=[Replacement(now, read)]), embedder=EMBEDDER)
    position = records.last_position()
    late = Replacement(dataclasses.replace(read, stream="late"), read)
    rest = Batch(removals=[other.id], drafts=[draft("fresh")])
    for batch in (rest._replace(replacements=[late]), rest._replace(present=[read])):
        with pytest.raises(VersionConflict):
            records.apply(ANA, batch, embedder=EMBEDDER)
    assert repr(page(records, ANA)) == repr([now, other]), "by repr, since to `==` 1 is True"
    assert records.last_position() == position


def test_facts_that_have_to_be_there_are_as_they_were_read(records: RecordStore) -> None:
    one, two = insert(records, ANA, "one", "two")
    [insertion] = records.apply(ANA, Batch(present=[one, two], drafts=[draft("new")]), embedder=EMBEDDER).insertions
    assert kinds(records, ANA) == [("added", fact.seq, 1) for fact in (one, two, insertion.fact)]
    assert records.apply(ANA, Batch(present=[one], removals=[one.id]), embedder=EMBEDDER).removed == [one]
    moved = dataclasses.replace(two, seq=one.seq)
    position = records.last_position()
    for batch in (Batch(present=[two, one]), Batch(present=[moved]), Batch(present=[two], removals=[two.id])):
        if batch.removals:
            assert records.apply(ANA, batch, embedder=EMBEDDER).removed == [two]
            continue
        with pytest.raises(VersionConflict):
            records.apply(ANA, batch._replace(removals=[two.id]), embedder=EMBEDDER)
        assert records.last_position() == position
    [theirs] = insert(records, BO, "theirs")
    with pytest.raises(VersionConflict):
        records.apply(ANA, Batch(present=[theirs]), embedder=EMBEDDER)


def test_only_what_has_expired_is_removed_if_asked(records: RecordStore) -> None:
    texts = {"early": 1100.0, "now": 1200.0, "late": 1200.5, "never": None}
    made = [draft(text, expires_at=expires_at) for text, expires_at in texts.items()]
    early, now, late, never = (i.fact for i in records.apply(ANA, Batch(drafts=made), embedder=EMBEDDER).insertions)
    ids = [fact.id for fact in (never, late, now, early)]
    assert records.apply(ANA, Batch(removals=ids, expired_by=1200.0), embedder=EMBEDDER).removed == [now, early]
    assert page(records, ANA) == [late, never]
    assert records.apply(ANA, Batch(removals=ids, expired_by=1200.0), embedder=EMBEDDER).removed == []
    assert remove(records, ANA, *ids) == [never, late]


def test_a_twin_that_stays_less_long_is_not_taken_for_the_draft(records: RecordStore) -> None:
    [insertion] = records.apply(ANA, Batch(drafts=[draft("said", expires_at=2000.0)]), embedder=EMBEDDER).insertions
    twin, position = insertion.fact, records.last_position()
    for longer in (2000.5, None):
        batch = Batch(drafts=[draft("fresh"), draft("said", expires_at=longer)])
        with pytest.raises(VersionConflict):
            records.apply(ANA, batch, embedder=EMBEDDER)
        assert (page(records, ANA), records.last_position()) == ([twin], position)
    for shorter in (1500.0, 2000.0):
        again = records.apply(ANA, Batch(drafts=[draft("said", expires_at=shorter)]), embedder=EMBEDDER)
        assert again.insertions == [(twin, False)]
    kept = dataclasses.replace(twin, expires_at=None)
    batch = Batch(replacements=[Replacement(kept, twin)], drafts=[draft("said")])
    assert records.apply(ANA, batch, embedder=EMBEDDER).insertions == [(kept, False)]
    assert records.apply(ANA, Batch(drafts=[draft("said", expires_at=9e9)]), embedder=EMBEDDER).insertions == [
        (kept, False)
    ]
    assert page(records, ANA) == [kept]


def test_a_fact_is_replaced_twice_in_one_batch(records: RecordStore) -> None:
    [first] = insert(records, ANA, "first")
    second = dataclasses.replace(first, text="second", version=2)
    third = dataclasses.replace(second, text="third", version=3)
    batch = Batch(replacements=[Replacement(second, first, vector(2)), Replacement(third, second, vector(3))])
    records.apply(ANA, batch, embedder=EMBEDDER)
    assert records.get_many(ANA, [first.id]) == [third]
    assert records.history(ANA, first.id) == [first, second]
    batch = Batch(replacements=[Replacement(third, third), Replacement(third, second)])
    with pytest.raises(VersionConflict):
        records.apply(ANA, batch, embedder=EMBEDDER)
    assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []


def test_two_current_facts_never_say_the_same(records: RecordStore) -> None:
    one, two = insert(records, ANA, "one", "two")
    with pytest.raises(DuplicateFact) as caught:
        replace(records, two, text="one")
    assert caught.value.fact_id == one.id
    assert records.get_many(ANA, [two.id]) == [two]
    replace(records, one, state=FactState.SUPERSEDED)
    [again] = insert(records, ANA, "one")
    assert again.id != one.id


def test_superseding_is_one_step(records: RecordStore) -> None:
    [old] = insert(records, ANA, "floor 2")
    gone = dataclasses.replace(old, state=FactState.SUPERSEDED, version=2)
    successor = draft("floor 5")._replace(supersedes=old.id)
    batch = Batch(replacements=[Replacement(gone, old)], drafts=[successor])
    [insertion] = records.apply(ANA, batch, embedder=EMBEDDER).insertions
    assert insertion.fact.supersedes == old.id
    assert page(records, ANA) == [insertion.fact]
    assert records.vectors(ANA, embedder=EMBEDDER, dimension=4).seqs.tolist() == [insertion.fact.seq]
    assert kinds(records)[1:] == [("superseded", old.seq, 2), ("added", insertion.fact.seq, 1)]
    with pytest.raises(VersionConflict):
        records.apply(ANA, Batch(drafts=[successor]), embedder=EMBEDDER)


def test_delete_removes_the_history_too(records: RecordStore) -> None:
    [fact] = insert(records, ANA, "gone")
    changed = replace(records, fact, vector(3), text="also gone")
    assert remove(records, ANA, fact.id) == [changed]
    assert remove(records, ANA, fact.id) == []
    assert records.history(ANA, fact.id) == []
    assert (records.count(ANA), records.owners()) == (0, [])
    assert records.vectors(ANA, embedder=EMBEDDER, dimension=4).seqs.tolist() == []


def test_expiry_is_known_and_an_expired_twin_does_not_count(records: RecordStore, clock: Clock) -> None:
    early, late = (
        i.fact
        for i in records.apply(
            ANA, Batch(drafts=[draft("soon", expires_at=1100.0), draft("later", expires_at=1200.0)]), embedder=EMBEDDER
        ).insertions
    )
    assert records.head(ANA).next_expiry == 1100.0
    assert records.expired(ANA, now=1099.9) == []
    assert records.expired(ANA, now=1100.0) == [early.id]
    assert records.expired(ANA, now=9999.0) == [early.id, late.id]
    clock.now = 1150.0
    assert records.find_identical(ANA, [NewFact("soon")]) == [early]
    [again] = records.apply(ANA, Batch(drafts=[draft("soon")]), embedder=EMBEDDER).insertions
    assert again.created, "although it stays longer"
    assert again.fact.id != early.id
    assert page(records, ANA) == [late, again.fact]
    assert records.head(ANA).next_expiry == 1200.0
    assert kinds(records)[-2:] == [("deleted", early.seq, 1), ("added", again.fact.seq, 1)]


def test_owners_with_something_expired_are_known(records: RecordStore) -> None:
    assert records.owners_with_expired(now=1e12) == []
    for owner, expires_at in {"b": 1100.0, "a": 1200.0, "c": None, "d:é": 1100.0}.items():
        batch = Batch(drafts=[draft("for ever"), draft("x", expires_at=expires_at)])
        records.apply(OwnerId(owner), batch, embedder=EMBEDDER)
    assert records.owners_with_expired(now=1099.9) == []
    assert records.owners_with_expired(now=1100.0) == ["b", "d:é"]
    assert records.owners_with_expired(now=1200.0) == ["a", "b", "d:é"]
    records.apply(
        OwnerId("b"), Batch(removals=records.expired(OwnerId("b"), now=1100.0), expired_by=1100.0), embedder=EMBEDDER
    )
    assert records.owners_with_expired(now=1100.0) == ["d:é"]


def test_an_idempotency_key_adds_once(records: RecordStore) -> None:
    def add(*texts: str, digest: str = "d", owner: OwnerId = ANA) -> list[tuple[Fact, bool]]:
        batch = Batch(drafts=[draft(text) for text in texts], idempotency=IdempotencyKey("k ü", digest))
        return [tuple(i) for i in records.apply(owner, batch, embedder=EMBEDDER).insertions]

    first = add("one", "two")
    changed = replace(records, first[0][0], vector(7), text="one, changed")
    assert add("one", "two") == [(changed, False), (first[1][0], False)]
    assert records.count(ANA) == 2
    with pytest.raises(IdempotencyConflict):
        add("three", digest="other")
    assert add("one", owner=BO)[0][1], "keys are an owner's own"
    remove(records, ANA, first[1][0].id)
    with pytest.raises(FactNotFound) as caught:
        add("one", "two")
    assert caught.value.fact_id == first[1][0].id
    assert records.count(ANA) == 1


def test_old_idempotency_keys_are_forgotten_as_new_ones_come(
    open_records: Callable[..., RecordStore], clock: Clock
) -> None:
    records = open_records(idempotency_ttl_s=100.0)
    records.claim_embedder(EMBEDDER)

    def add(key: str, owner: OwnerId = ANA) -> bool:
        batch = Batch(drafts=[draft(f"by {key}")], idempotency=IdempotencyKey(key, "d"))
        return records.apply(owner, batch, embedder=EMBEDDER).replayed

    for number in range(5):
        assert not add(f"old {number}")
    add("of bo", BO)
    clock.now += 60.0
    assert not add("middle")
    clock.now += 40.0
    assert not add("new")
    assert add("old 0"), "remembered for as long as was promised"
    clock.now += 1.0
    assert not add("newer")
    assert [add(key) for key in ("middle", "new", "newer")] == [True] * 3
    assert records.purge(ANA).idempotency_keys == 3
    assert add("of bo", BO), "each owner's go with each owner's writes"


def test_two_owners_cannot_be_given_one_id_at_once(open_records: Callable[..., RecordStore]) -> None:
    stores = [open_records() for _ in range(2)]
    stores[0].claim_embedder(EMBEDDER)
    outcomes: list[str] = []
    start = threading.Barrier(2)

    def take(records: RecordStore, owner: OwnerId) -> None:
        start.wait()
        for number in range(50):
            fact = RestoredFact(restored(number, owner=owner), (), vector(1))
            try:
                outcomes.append(str(records.restore(owner, [fact], embedder=EMBEDDER)[0].created))
            except InvalidFact:
                outcomes.append("refused")

    threads = [threading.Thread(target=take, args=pair) for pair in zip(stores, (ANA, BO), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outcomes.count("True"), outcomes.count("refused")) == (50, 50)
    assert stores[0].count(ANA) + stores[0].count(BO) == 50
    assert stores[0].check(embedder=EMBEDDER, dimension=4, repair=False) == []


def test_an_id_is_free_again_once_its_fact_is_gone(records: RecordStore) -> None:
    [one], [two] = restore(records, restored(1)), restore(records, restored(2))
    remove(records, ANA, one.id)
    assert records.held_by_others(BO, [one.id, two.id]) == [two.id]
    restore(records, restored(1, owner=BO), owner=BO)
    records.purge(ANA)
    assert records.held_by_others(BO, [one.id, two.id]) == []
    assert records.held_by_others(ANA, [two.id, one.id]) == [one.id]
    restore(records, restored(2, owner=BO), owner=BO)
    assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []


def test_the_feed_tells_every_change_in_order(records: RecordStore) -> None:
    assert (records.changes(0), records.last_position(), records.head(ANA).position) == ([], 0, 0)
    one, two = insert(records, ANA, "one", "two")
    [other] = insert(records, BO, "other")
    replace(records, one, text="uno")
    remove(records, ANA, two.id)
    changes = records.changes(0)
    assert [(c.kind, c.owner, c.fact_id, c.seq, c.version, c.at) for c in changes] == [
        ("added", ANA, one.id, one.seq, 1, 1000.0),
        ("added", ANA, two.id, two.seq, 1, 1000.0),
        ("added", BO, other.id, other.seq, 1, 1000.0),
        ("updated", ANA, one.id, one.seq, 2, 1000.0),
        ("deleted", ANA, two.id, two.seq, 1, 1000.0),
    ]
    positions = [change.position for change in changes]
    assert positions == sorted(set(positions))
    assert records.changes(positions[2]) == changes[3:]
    assert records.changes(0, limit=2) == changes[:2]
    assert records.changes(0, owner=BO) == [changes[2]]
    assert records.changes(positions[0], owner=ANA, limit=1) == [changes[1]]
    assert records.head(BO).position == positions[2]
    assert records.head(ANA).position == records.last_position() == positions[4]


def test_a_trimmed_feed_says_so(open_records: Callable[..., RecordStore]) -> None:
    records = open_records(feed_retention=10)
    records.claim_embedder(EMBEDDER)
    [first] = insert(records, BO, "first")
    start = records.last_position()
    for number in range(30):
        insert(records, ANA, f"fact {number}")
    last = records.last_position()
    with pytest.raises(FeedGap) as caught:
        records.changes(start, owner=BO)
    assert start < caught.value.floor <= last - 10
    with pytest.raises(FeedGap):
        records.changes(0)
    kept = records.changes(caught.value.floor)
    assert len(kept) == last - caught.value.floor >= 10
    assert records.head(BO).position == start, "an owner without changes is known to be as they were"
    assert records.get_many(BO, [first.id]) == [first]


def restored(number: int, text: str = "", **fields: object) -> Fact:
    """A fact as another store had it: its id ends in `number`, and its seq means nothing here."""
    plain = Fact(
        FactId(f"0190163d-8694-7000-8000-{number:012}"),
        ANA,
        text or f"fact {number}",
        stream="",
        speaker=None,
        time=None,
        metadata={},
        version=1,
        seq=77,
        created_at=10.5,
        updated_at=11.5,
    )
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


def restore(records: RecordStore, *facts: Fact, owner: OwnerId = ANA, history: tuple[Fact, ...] = ()) -> list[Fact]:
    """Restore facts that are not there yet, with the history of the last one."""
    items = [RestoredFact(fact, (), vector(1) if fact.state is FactState.CURRENT else None) for fact in facts]
    items[-1] = items[-1]._replace(history=history)
    done = records.restore(owner, items, embedder=EMBEDDER)
    assert [insertion.created for insertion in done] == [True] * len(facts)
    return [insertion.fact for insertion in done]


def test_a_restored_fact_is_as_it_was(records: RecordStore) -> None:
    [before] = insert(records, ANA, "before")
    old = restored(1, "floor 2 鍵", version=2, state=FactState.SUPERSEDED, metadata={"b": 1, "a": [None]})
    former = [restored(2, "floor 4"), restored(2, "floor 6", version=2, stream="x", expires_at=9.0)]
    new = restored(
        2,
        "floor 5",
        version=3,
        stream="home",
        speaker="Ana",
        time="8 May 2023",
        event_at=4.25,
        expires_at=5000.5,
        supersedes=old.id,
    )
    kept = restore(records, old, new, history=tuple(former))
    assert before.seq < kept[0].seq < kept[1].seq
    assert kept == [dataclasses.replace(fact, seq=of.seq) for fact, of in zip([old, new], kept, strict=True)]
    assert page(records, ANA, superseded=True) == [before, *kept]
    assert page(records, ANA, stream="home") == [kept[1]]
    assert records.get_many(ANA, [new.id, old.id]) == [kept[1], kept[0]]
    assert records.history(ANA, new.id) == [dataclasses.replace(fact, seq=kept[1].seq) for fact in former]
    assert records.history(ANA, old.id) == []
    found = records.vectors(ANA, embedder=EMBEDDER, dimension=4)
    assert (found.seqs.tolist(), found.versions.tolist()) == ([before.seq, kept[1].seq], [1, 3])
    np.testing.assert_array_equal(found.rows[1:], vector(1))
    assert kinds(records)[1:] == [("added", kept[0].seq, 2), ("added", kept[1].seq, 3)]
    assert records.head(ANA)[1:3] == (records.last_position(), 5000.5)
    assert records.stats(ANA)[:4] == (2, 1, 2, len("beforefloor 5"))
    assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []
    later = replace(records, kept[1], vector(9), text="floor 7")
    assert [fact.version for fact in records.history(ANA, new.id)] == [1, 2, 3]
    assert remove(records, ANA, new.id) == [later]
    assert records.history(ANA, new.id) == []
    assert records.expired(ANA, now=1e9) == []


def test_what_is_there_is_not_restored_again(records: RecordStore, clock: Clock) -> None:
    [twin] = insert(records, ANA, "said")
    [soon] = [i.fact for i in records.apply(ANA, Batch(drafts=[draft("s", expires_at=1100.0)]), embedder=EMBEDDER)[0]]
    [kept] = restore(records, restored(1, "kept"))
    clock.now = 1200.0
    position = records.last_position()
    again = [
        restored(1, "kept"),
        restored(1, "kept, but says something else", version=9),
        restored(2, "said", created_at=1.0),
    ]
    done = records.restore(ANA, [RestoredFact(fact, (), vector(2)) for fact in again], embedder=EMBEDDER)
    assert done == [(kept, False), (kept, False), (twin, False)]
    assert records.last_position() == position
    assert records.get_many(ANA, [FactId(again[2].id)]) == []
    gone = restored(3, "said", state=FactState.SUPERSEDED)
    third, fourth = restore(records, gone, restored(4, "s"))
    assert third.state is FactState.SUPERSEDED, "history may say what a current fact says"
    assert page(records, ANA, superseded=True) == [twin, kept, third, fourth], "an expired twin does not count"
    assert kinds(records)[-2:] == [("deleted", soon.seq, 1), ("added", fourth.seq, 1)]
    twice = [RestoredFact(restored(n, "same"), (), vector(3)) for n in (5, 6, 5)]
    assert [i.created for i in records.restore(ANA, twice, embedder=EMBEDDER)] == [True, False, False]
    assert records.restore(ANA, [], embedder=EMBEDDER) == []


def test_an_id_of_another_owner_is_refused_by_name(records: RecordStore) -> None:
    [theirs] = insert(records, BO, "theirs")
    fresh, taken = restored(1), restored(2, id=theirs.id)
    assert records.held_by_others(ANA, [fresh.id, theirs.id]) == [theirs.id]
    assert records.held_by_others(BO, [fresh.id, theirs.id]) == []
    with pytest.raises(InvalidFact, match=theirs.id):
        records.restore(ANA, [RestoredFact(fact, (), vector(1)) for fact in (fresh, taken)], embedder=EMBEDDER)
    assert (page(records, ANA), page(records, BO)) == ([], [theirs])
    assert records.last_position() == records.head(BO).position
    with pytest.raises(EmbedderMismatch):
        records.restore(ANA, [RestoredFact(fresh, (), vector(1))], embedder="y:d4")
    assert page(records, ANA) == []


def test_purge_leaves_nothing_but_the_next_epoch(records: RecordStore) -> None:
    one, two = insert(records, ANA, "one", "two", stream="s")
    replace(records, one, vector(4), text="uno")
    replace(records, two, state=FactState.SUPERSEDED)
    batch = Batch(drafts=[draft("three")], idempotency=IdempotencyKey("k", "d"))
    [three] = records.apply(ANA, batch, embedder=EMBEDDER).insertions
    [theirs] = insert(records, BO, "theirs")
    counts = records.purge(ANA)
    assert counts[:6] == (3, 2, 2, 5, 1, 1)
    assert page(records, ANA, superseded=True) == page(records, ANA, stream="s") == []
    assert records.get_by_seqs(ANA, [one.seq, two.seq, three.fact.seq]) == {}
    assert records.history(ANA, one.id) == []
    assert records.stats(ANA) == (0, 0, 0, 0, 1)
    assert records.find_identical(ANA, [NewFact("uno")]) == [None]
    assert records.owners() == [BO]
    assert [(c.kind, c.owner, c.fact_id) for c in records.changes(0)] == [
        ("added", BO, theirs.id),
        ("purged", ANA, None),
    ]
    assert records.head(ANA).epoch == 1
    assert records.head(ANA).position == records.last_position() == records.changes(0)[-1].position
    assert records.purge(ANA)[:6] == (0, 0, 0, 1, 0, 2)
    assert records.purge(OwnerId("nobody"))[:6] == (0, 0, 0, 0, 0, 1)
    assert records.apply(ANA, batch, embedder=EMBEDDER).insertions[0].created, "keys are gone as well"


def test_vectors_are_bit_exact(records: RecordStore) -> None:
    def stored() -> dict[int, np.ndarray]:
        found = records.vectors(ANA, embedder=EMBEDDER, dimension=4)
        assert found.damaged == []
        assert len(found.seqs) == len(found.versions) == len(found.rows)
        return {seq: found.rows[found.seqs == seq] for seq in found.seqs.tolist()}

    assert records.vectors(ANA, embedder=EMBEDDER, dimension=4).rows.shape == (0, 4)
    chunks = np.concatenate([vector(11), vector(12), vector(13)])
    drafts = [draft("1"), Draft(NewFact("long"), chunks), draft("333")]
    one, long, three = (i.fact for i in records.apply(ANA, Batch(drafts=drafts), embedder=EMBEDDER).insertions)
    assert list(stored()) == [one.seq, long.seq, three.seq]
    np.testing.assert_array_equal(stored()[long.seq], chunks)
    np.testing.assert_array_equal(stored()[one.seq], vector(1))
    replace(records, long, metadata={"tag": 1})
    np.testing.assert_array_equal(stored()[long.seq], chunks, "the text is the same")
    replace(records, one, vector(20), text="uno")
    np.testing.assert_array_equal(stored()[one.seq], vector(20))
    some = records.vectors_of(ANA, [three.seq, long.seq, 10**9], embedder=EMBEDDER, dimension=4)
    assert some.seqs.tolist() == [long.seq] * 3 + [three.seq]
    assert some.versions.tolist() == [2, 2, 2, 1]
    assert records.vectors_of(ANA, [], embedder=EMBEDDER, dimension=4).seqs.tolist() == []


def test_another_embedder_writes_nothing(records: RecordStore) -> None:
    assert records.claim_embedder("y:d4") == EMBEDDER
    [fact] = insert(records, ANA, "fact")
    with pytest.raises(EmbedderMismatch) as caught:
        records.apply(ANA, Batch(drafts=[draft("other")]), embedder="y:d4")
    assert (caught.value.stored, caught.value.offered) == (EMBEDDER, "y:d4")
    with pytest.raises(EmbedderMismatch):
        records.apply(ANA, Batch(removals=[fact.id]), embedder="y:d4")
    assert page(records, ANA) == [fact]
    assert records.vectors(ANA, embedder="y:d4", dimension=4).seqs.tolist() == []
    assert records.head(ANA).embedder == EMBEDDER


def test_an_embedder_is_adopted_once_every_fact_has_its_vectors(records: RecordStore) -> None:
    one, two = insert(records, ANA, "one", "two")
    [gone] = insert(records, ANA, "history")
    replace(records, gone, state=FactState.SUPERSEDED)
    [theirs] = insert(records, BO, "theirs")
    assert records.unindexed(ANA, embedder="y:d2", limit=9) == [one, two]
    assert records.unindexed(ANA, embedder="y:d2", limit=1) == [one]
    assert records.unindexed(ANA, embedder="y:d2", limit=9, after_seq=one.seq) == [two]
    assert records.unindexed(ANA, embedder="y:d2", limit=9, after_seq=two.seq) == []
    assert records.unindexed(ANA, embedder=EMBEDDER, limit=9) == []
    row = np.array([[1, 0]], dtype=np.float32)
    updates = [VectorUpdate(one.seq, 1, row), VectorUpdate(two.seq, 1, row), VectorUpdate(gone.seq, 1, row)]
    with pytest.raises(EmbedderMismatch) as caught:
        records.put_vectors(ANA, updates, embedder="y:d2")
    assert (caught.value.stored, caught.value.offered) == (EMBEDDER, "y:d2")
    assert records.vectors(ANA, embedder="y:d2", dimension=2).seqs.tolist() == []
    assert records.put_vectors(ANA, updates, embedder="y:d2", is_reindex=True) == 2
    assert not records.adopt_embedder("y:d2"), "another owner's fact lacks one"
    assert records.put_vectors(BO, [VectorUpdate(theirs.seq, 1, row)], embedder="y:d2", is_reindex=True) == 1
    changed = replace(records, one, vector(30), text="uno")
    assert records.unindexed(ANA, embedder="y:d2", limit=9) == [changed]
    assert not records.adopt_embedder("y:d2"), "a vector of the former text is none"
    assert records.put_vectors(ANA, [VectorUpdate(one.seq, 1, row)], embedder="y:d2", is_reindex=True) == 0
    assert records.put_vectors(ANA, [VectorUpdate(one.seq, 2, row)], embedder="y:d2", is_reindex=True) == 1
    assert records.vectors(ANA, embedder=EMBEDDER, dimension=4).seqs.tolist() == [one.seq, two.seq]
    assert records.adopt_embedder("y:d2")
    assert records.head(ANA).embedder == records.claim_embedder(EMBEDDER) == "y:d2"
    assert records.vectors(ANA, embedder="y:d2", dimension=2).seqs.tolist() == [one.seq, two.seq]
    assert records.vectors(ANA, embedder=EMBEDDER, dimension=4).seqs.tolist() == []


def test_owners_are_sorted(records: RecordStore) -> None:
    for name in ("b", "a", "a-b", "a:b", "é", "Z"):
        insert(records, OwnerId(name), "x")
    assert records.owners() == sorted(["b", "a", "a-b", "a:b", "é", "Z"])


def test_a_sound_store_has_no_problems_and_can_be_compacted(records: RecordStore) -> None:
    one, two, three = insert(records, ANA, "one", "two", "three", stream="s")
    replace(records, one, vector(4), text="uno")
    replace(records, two, state=FactState.SUPERSEDED)
    remove(records, ANA, three.id)
    records.apply(BO, Batch(drafts=[draft("soon", expires_at=1100.0)]), embedder=EMBEDDER)
    before = page(records, ANA, superseded=True)
    assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []
    assert all(size > 0 for size in records.compact())
    assert records.check(embedder=EMBEDDER, dimension=4, repair=True) == []
    assert page(records, ANA, superseded=True) == before
    assert {finding.level for finding in records.doctor()} <= {"ok", "warning", "error"}


def test_location_names_the_store(records: RecordStore) -> None:
    assert records.location.startswith(("sqlite:///", "redis://"))
