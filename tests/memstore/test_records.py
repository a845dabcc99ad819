"""The contract of `RecordStore`, over every backend."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memstore.records import Draft, RecordStore, SQLiteRecords
from memstore.types import Fact, FactId, NewFact, OwnerId

ANA, BO = OwnerId("ana"), OwnerId("bo")


@pytest.fixture(params=["sqlite"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RecordStore]:
    backends = {"sqlite": lambda: SQLiteRecords(tmp_path / "store", clock=lambda: 1000.0)}
    opened = backends[request.param]()
    yield opened
    opened.close()


def insert(records: RecordStore, owner: OwnerId, *texts: str, stream: str = "") -> list[Fact]:
    drafts = [Draft(NewFact(text, stream=stream), vector(len(text))) for text in texts]
    return [insertion.fact for insertion in records.insert(owner, drafts)]


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(4).astype(np.float32)


def test_every_field_comes_back_as_it_went_in(records: RecordStore) -> None:
    new = NewFact(
        "鍵 🔑 café",
        stream="D1",
        speaker="Ana",
        time="1:56 pm on 8 May, 2023",
        metadata={"z": [1, 2.5, None, True], "a": {"ü": "NUL \0 inside JSON"}},
    )
    [insertion] = records.insert(ANA, [Draft(new, vector(0))])
    fact = insertion.fact
    assert insertion.created
    assert records.get(ANA, fact.id) == fact
    assert (fact.text, fact.stream, fact.speaker, fact.time) == (new.text, new.stream, new.speaker, new.time)
    assert fact.metadata == new.metadata
    assert list(fact.metadata) == ["z", "a"]
    assert (fact.owner, fact.version, fact.created_at, fact.updated_at) == (ANA, 1, 1000.0, 1000.0)
    assert fact.id[14] == "7", "a UUIDv7"


def test_seqs_grow_over_all_owners_and_are_never_reused(records: RecordStore) -> None:
    first, second = insert(records, ANA, "one", "two")
    [third] = insert(records, BO, "three")
    assert first.seq < second.seq < third.seq
    records.delete(BO, third.id)
    [fourth] = insert(records, ANA, "four")
    assert fourth.seq > third.seq


def test_the_same_content_is_one_record_per_owner(records: RecordStore) -> None:
    twice = records.insert(ANA, [Draft(NewFact("again"), vector(1)), Draft(NewFact("again"), vector(1))])
    assert [insertion.created for insertion in twice] == [True, False]
    assert twice[0].fact == twice[1].fact
    assert records.insert(BO, [Draft(NewFact("again"), vector(1))])[0].created
    assert records.find_identical(ANA, [NewFact("again"), NewFact("never")]) == [twice[0].fact, None]
    assert records.find_identical(ANA, [NewFact("again", speaker="Ana"), NewFact("again", time="noon")]) == [None, None]


def test_key_order_of_metadata_is_no_difference(records: RecordStore) -> None:
    one = records.insert(ANA, [Draft(NewFact("x", metadata={"a": 1, "b": 2}), vector(1))])[0]
    other = records.insert(ANA, [Draft(NewFact("x", metadata={"b": 2, "a": 1}), vector(1))])[0]
    assert (one.fact, other.created) == (other.fact, False)


def test_an_insert_that_fails_leaves_nothing(records: RecordStore) -> None:
    insert(records, ANA, "before")
    with pytest.raises(UnicodeEncodeError):
        insert(records, ANA, "good", "lone \ud800 surrogate")
    assert [fact.text for fact in records.page(ANA, stream=None, limit=9, after_seq=0)] == ["before"]
    insert(records, ANA, "after")
    assert records.count(ANA) == 2


def test_another_owners_id_is_unknown(records: RecordStore) -> None:
    [fact] = insert(records, ANA, "mine")
    assert records.get(BO, fact.id) is None
    assert records.get_many(BO, [fact.id]) == []
    assert records.get_by_seqs(BO, [fact.seq]) == {}
    assert records.delete(BO, fact.id) is None
    assert records.get(ANA, fact.id) == fact


def test_get_many_keeps_the_order_asked_for(records: RecordStore) -> None:
    one, two, three = insert(records, ANA, "one", "two", "three")
    assert records.get_many(ANA, [three.id, FactId("unknown"), one.id]) == [three, one]
    assert records.get_by_seqs(ANA, [two.seq, 10**15]) == {two.seq: two}
    many = [f.id for f in insert(records, ANA, *(f"fact {i}" for i in range(1500)))]
    assert [f.id for f in records.get_many(ANA, many)] == many


def test_pages_and_predecessors_follow_the_stream(records: RecordStore) -> None:
    a = insert(records, ANA, "a1", "a2", stream="a")
    b = insert(records, ANA, "b1", stream="b")
    a += insert(records, ANA, "a3", "a4", stream="a")
    insert(records, BO, "other", stream="a")
    assert records.page(ANA, stream="a", limit=9, after_seq=0) == a
    assert records.page(ANA, stream="a", limit=2, after_seq=a[0].seq) == a[1:3]
    assert records.page(ANA, stream=None, limit=9, after_seq=a[1].seq) == [*b, *a[2:]]
    assert records.page(ANA, stream="", limit=9, after_seq=0) == []
    assert records.preceding(ANA, "a", seq=a[3].seq, limit=2) == a[1:3]
    assert records.preceding(ANA, "a", seq=a[0].seq, limit=2) == []


def test_vectors_are_bit_exact(records: RecordStore) -> None:
    assert records.vectors(ANA, dimension=4).vectors.shape == (0, 4)
    facts = insert(records, ANA, "1", "22", "333")
    stored = records.vectors(ANA, dimension=4)
    assert stored.seqs.tolist() == [fact.seq for fact in facts]
    np.testing.assert_array_equal(stored.vectors, np.stack([vector(1), vector(2), vector(3)]))


def test_delete_returns_the_fact_once(records: RecordStore) -> None:
    [fact] = insert(records, ANA, "gone")
    assert records.delete(ANA, fact.id) == fact
    assert records.delete(ANA, fact.id) is None
    assert (records.count(ANA), list(records.owners())) == (0, [])


def test_epochs_are_per_owner(records: RecordStore) -> None:
    assert records.epoch(ANA) == 0
    assert [records.bump_epoch(ANA), records.bump_epoch(ANA)] == [1, 2]
    assert (records.epoch(ANA), records.epoch(BO)) == (2, 0)


def test_fingerprint_is_unset_until_set(records: RecordStore) -> None:
    assert records.embedder_fingerprint() is None
    records.set_embedder_fingerprint("x:d4")
    assert records.embedder_fingerprint() == "x:d4"


def test_owners_are_sorted(records: RecordStore) -> None:
    for name in ("b", "a", "a-b", "a:b"):
        insert(records, OwnerId(name), "x")
    assert list(records.owners()) == ["a", "a-b", "a:b", "b"]
