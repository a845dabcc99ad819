"""What somebody else writes between two steps of one call; the steps are met through the embedder and the records."""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bigrams import BigramEmbedder

from memstore import FactNotFound, FactState, MemStore, MemStoreSettings, NewFact, StoreBusy
from memstore.embedding import Vectors
from memstore.records.sqlite import FILE_NAME


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Interrupted(BigramEmbedder):
    """Lets something else happen while it embeds, once."""

    meanwhile: Callable[[], object] | None = None

    def embed(self, texts: Sequence[str]) -> Vectors:
        happen, self.meanwhile = self.meanwhile, None
        if happen is not None:
            happen()
        return super().embed(texts)


class Before:
    """Stands in front of an object, and calls `happen` before each call of one of its methods."""

    def __init__(self, inner: object, method: str, happen: Callable[[], object]) -> None:
        self._inner, self._method, self._happen = inner, method, happen

    def __getattr__(self, name: str) -> object:
        if name == self._method:
            self._happen()
        return getattr(self._inner, name)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def embedder() -> Interrupted:
    return Interrupted()


@pytest.fixture
def store(location: str, clock: Clock, embedder: Interrupted) -> MemStore:
    return MemStore(location, embedder=embedder, clock=clock)


@pytest.fixture
def other(location: str, clock: Clock) -> MemStore:
    return MemStore(location, embedder=BigramEmbedder(), clock=clock)


def test_a_twin_that_expires_while_others_are_embedded_is_stored_again(
    store: MemStore, clock: Clock, embedder: Interrupted
) -> None:
    store.add("ana", "rent", expires_at=1500.0)
    embedder.meanwhile = lambda: setattr(clock, "now", 1600.0)
    added = store.add_many("ana", [NewFact("rent"), NewFact("other")])
    assert [(fact.text, fact.expires_at) for fact in added] == [("rent", None), ("other", None)]
    assert store.list("ana") == sorted(added, key=lambda fact: fact.seq)


@pytest.mark.parametrize("change", ["delete", "update", "supersede", "purge"])
def test_a_twin_that_goes_while_others_are_embedded_is_stored_again(
    store: MemStore, other: MemStore, embedder: Interrupted, change: str
) -> None:
    twin = store.add("ana", "rent")
    embedder.meanwhile = {
        "delete": lambda: other.delete("ana", twin.id),
        "update": lambda: other.update("ana", twin.id, text="rent, changed"),
        "supersede": lambda: other.supersede("ana", twin.id, "rent, changed"),
        "purge": lambda: other.purge("ana"),
    }[change]
    added = store.add_many("ana", [NewFact("rent"), NewFact("other")])
    assert [fact.text for fact in added] == ["rent", "other"]
    assert added[0].id != twin.id
    assert [fact.state for fact in store.get_many("ana", [fact.id for fact in added])] == [FactState.CURRENT] * 2


def test_a_repeated_request_keeps_what_the_first_one_was_promised(store: MemStore, clock: Clock) -> None:
    rent = store.add("ana", "rent", expires_at=1500.0)
    for _ in range(2):
        added = store.add("ana", "rent", idempotency_key="k")
        assert (added.id, added.expires_at) == (rent.id, None)
    clock.now = 1600.0
    assert store.get("ana", rent.id).expires_at is None


def test_facts_that_came_together_stay_as_long_as_any_of_them(store: MemStore) -> None:
    facts = [NewFact("rent", expires_at=1500.0), NewFact("rent"), NewFact("rent", expires_at=1200.0)]
    for key in (None, "k"):
        added = store.ingest("ana" if key is None else "bo", facts, idempotency_key=key)
        assert [(one.created, one.fact.expires_at) for one in added] == [(True, None), (False, None), (False, None)]
        assert len({one.fact.id for one in added}) == 1


def test_a_fact_whose_time_was_extended_does_not_expire(store: MemStore, other: MemStore, clock: Clock) -> None:
    fact = store.add("ana", "rent", expires_at=1500.0)
    gone = store.add("ana", "gone", expires_at=1500.0)
    extended = []

    def extend() -> None:
        if not extended:
            clock.now = 1400.0
            extended.append(other.update("ana", fact.id, expires_at=None))
            clock.now = 1600.0

    clock.now = 1600.0
    store._lifecycle._records = Before(store.records, "apply", extend)  # type: ignore[assignment]
    assert store.expire("ana") == 1
    assert store.list("ana") == extended
    with pytest.raises(FactNotFound):
        store.get("ana", gone.id)


def test_what_cannot_be_removed_yet_is_in_nobodys_way(tmp_path: Path, clock: Clock) -> None:
    """Reads wait for no writer, and an expired fact takes no place among the best."""
    with MemStore(
        tmp_path, embedder=BigramEmbedder(), clock=clock, settings=MemStoreSettings(busy_timeout_s=0.01)
    ) as store:
        store.add("ana", "rent is due", expires_at=1500.0)
        kept = store.add("ana", "something else")
        clock.now = 1600.0
        writer = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        for mode in ("vector", "hybrid"):
            assert [hit.fact for hit in store.search("ana", "rent is due", k=1, mode=mode)] == [kept]
        assert store.search("ana", "rent", k=1, mode="keyword") == []
        assert [hit.fact for hit in store.search("ana", "rent", k=5, where={"stream": ""})] == [kept]
        assert store.list("ana", limit=1) == [kept]
        assert store.count("ana") == 1
        with pytest.raises(StoreBusy):
            store.expire()
        writer.execute("ROLLBACK")
        writer.close()
        assert store.expire() == 1
        assert store.records.count(kept.owner) == 1


def test_facts_that_never_hold_still_are_said_to(store: MemStore, other: MemStore) -> None:
    facts = store.add_many("ana", [NewFact(f"fact number {i}") for i in range(5)])
    turn = iter(range(1000))

    def change() -> None:
        other.update("ana", facts[0].id, metadata={"turn": next(turn)})

    store._searcher._records = Before(store.records, "get_by_seqs", change)  # type: ignore[assignment]
    with pytest.raises(StoreBusy, match="faster"):
        store.search("ana", "fact number 0", k=3)
    store._searcher._records = store.records
    assert len(store.search("ana", "fact number 0", k=3)) == 3


def test_a_near_duplicate_still_holds(store: MemStore, other: MemStore) -> None:
    near = store.add("ana", "the office is on floor 2 of the old house")
    done = []

    def change() -> None:
        if not done:
            done.append(other.supersede("ana", near.id, "nothing of the kind"))

    store._searcher._records = Before(store.records, "get_by_seqs", change)  # type: ignore[assignment]
    [added] = store.ingest("ana", [NewFact("the office is on floor 2 of the old house!")])
    assert (added.created, added.near_duplicates) == (True, ())
