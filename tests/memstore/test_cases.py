"""Small inputs with one right outcome: what users of memory stores ran into, and what adversarial reading found."""

from collections.abc import Iterator

import pytest
from bigrams import BigramEmbedder

from memstore import (
    DuplicateFact,
    FactNotFound,
    InvalidFact,
    InvalidQuery,
    MemStore,
    NewFact,
)


class Clock:
    """Unix seconds, as a test sets them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(location: str, clock: Clock) -> Iterator[MemStore]:
    with MemStore(location, embedder=BigramEmbedder(32), clock=clock) as opened:
        yield opened


# ---- expiry and identical facts ----


@pytest.mark.parametrize("keyed", [False, True])
def test_of_identical_facts_the_one_that_stays_longest_counts(store: MemStore, keyed: bool) -> None:
    fact = store.add("ana", "the rent is due", expires_at=2000.0)
    expiries = [5000.0, 1500.0, None, 3000.0]
    facts = [NewFact("the rent is due", expires_at=at) for at in expiries] + [NewFact("other", expires_at=1500.0)] * 2
    added = store.add_many("ana", facts, idempotency_key="key" if keyed else None)
    assert [(one.text, one.expires_at) for one in added] == [("the rent is due", None)] * 4 + [("other", 1500.0)] * 2
    assert {one.id for one in added[:4]} == {fact.id}
    assert (store.get("ana", fact.id), fact.version) == (added[0], added[0].version)


def test_a_repeated_request_does_not_keep_a_fact_longer(store: MemStore) -> None:
    fact = store.add("ana", "the rent is due", idempotency_key="key")
    store.update("ana", fact.id, expires_at=1500.0)
    assert store.add("ana", "the rent is due", idempotency_key="key").expires_at == 1500.0
    assert store.get("ana", fact.id).expires_at == 1500.0


def test_a_repeated_request_does_not_return_what_has_expired(store: MemStore, clock: Clock) -> None:
    fact = store.add("ana", "the rent is due", idempotency_key="key")
    store.update("ana", fact.id, expires_at=1500.0)
    clock.now = 1500.0
    for _ in range(2):
        with pytest.raises(FactNotFound):
            store.add("ana", "the rent is due", idempotency_key="key")
        assert store.count("ana") == 0


def test_an_expired_twin_does_not_stand_in_the_way_of_an_update(store: MemStore, clock: Clock) -> None:
    store.add("ana", "the rent is due", expires_at=1500.0)
    other = store.add("ana", "other")
    with pytest.raises(DuplicateFact):
        store.update("ana", other.id, text="the rent is due")
    clock.now = 1500.0
    changed = store.update("ana", other.id, text="the rent is due")
    assert (changed.id, changed.version) == (other.id, 2)
    assert store.list("ana") == [changed]


def test_a_twin_that_takes_a_place_stays_as_long_as_was_asked(store: MemStore) -> None:
    old, twin = store.add("ana", "floor 2"), store.add("ana", "floor 5", expires_at=1500.0)
    successor = store.supersede("ana", old.id, "floor 5")
    assert (successor.id, successor.supersedes, successor.expires_at) == (twin.id, old.id, None)
    assert store.list("ana") == [successor]


# ---- numbers and ids beyond what a backend can hold ----


def test_counts_may_be_as_large_as_one_likes(store: MemStore) -> None:
    fact = store.add("ana", "red cello")
    for k in (2**53, 2**63, 10**30):
        for mode in ("vector", "keyword", "hybrid"):
            assert [hit.fact for hit in store.search("ana", "red", k=k, mode=mode)] == [fact]
        assert store.list("ana", limit=k) == [fact]
        assert store.list("ana", after_seq=k) == store.list("ana", stream="", after_seq=k) == []
        assert [change.fact_id for change in store.changes(0, limit=k)] == [fact.id]
        assert store.changes(k) == store.changes(k, owner="ana") == []


@pytest.mark.parametrize("expires_at", [10**30, 10**400, 2**53 + 1, float("inf"), float("nan"), True, "2000", 999.0])
def test_expiries_that_are_refused(store: MemStore, expires_at: float) -> None:
    fact = store.add("ana", "red")
    with pytest.raises(InvalidFact):
        store.add("ana", "blue", expires_at=expires_at)
    with pytest.raises(InvalidFact):
        store.update("ana", fact.id, expires_at=expires_at)
    assert store.list("ana") == [fact]


@pytest.mark.parametrize("fact_id", ["", "\0", "\ud800", "x" * 100_000, "*", None, 7])
def test_what_can_be_no_id_is_unknown(store: MemStore, fact_id: str) -> None:
    fact = store.add("ana", "red")
    for call in (store.get, store.delete, store.history):
        with pytest.raises(FactNotFound):
            call("ana", fact_id)
    with pytest.raises(FactNotFound):
        store.update("ana", fact_id, text="blue")
    with pytest.raises(FactNotFound):
        store.supersede("ana", fact_id, "blue")
    assert store.get_many("ana", [fact_id, fact.id]) == store.list("ana") == [fact]


def test_questions_that_are_refused(store: MemStore) -> None:
    for stream in ("\ud800", "\0", 7):
        with pytest.raises(InvalidQuery):
            store.list("ana", stream=stream)  # type: ignore[arg-type]
    with pytest.raises(InvalidQuery):
        store.search("ana", "red", k=1, min_score="0.5")  # type: ignore[arg-type]


def test_true_and_one_are_two_values(store: MemStore) -> None:
    fact = store.add("ana", "red", metadata={"n": 1})
    changed = store.update("ana", fact.id, metadata={"n": True})
    assert (changed.version, changed.metadata["n"] is True) == (2, True)
    assert store.get("ana", fact.id).metadata["n"] is True
    assert [hit.fact for hit in store.search("ana", "red", k=1, where={"metadata.n": True})] == [changed]
    assert store.search("ana", "red", k=1, where={"metadata.n": 1}) == []
