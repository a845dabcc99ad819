"""`MemStore`: adding, reading, searching, deleting."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bigrams import BigramEmbedder, NaNEmbedder

from memstore import (
    EmbedderMismatch,
    EmbeddingError,
    FactNotFound,
    InvalidFact,
    InvalidOwner,
    InvalidQuery,
    MemStore,
    MemStoreSettings,
    NewFact,
    SentenceTransformerEmbedder,
    StoreClosed,
    reindex,
)


def texts(store: MemStore, owner: str) -> list[str]:
    return [fact.text for fact in store.list(owner)]


def test_deleted_facts_leave_the_others_where_they_are(store: MemStore) -> None:
    """Case M1."""
    a, b, c = (store.add("ana", text) for text in ("the cello is in tune", "locker 7 is blue", "Petra moved to Graz"))
    assert store.search("ana", a.text, k=1)[0].fact == a
    assert store.delete("ana", a.id) == a
    d = store.add("ana", "rent is due on Friday")
    for fact in (b, c, d):
        [hit] = store.search("ana", fact.text, k=1)
        assert (hit.fact, hit.score) == (fact, pytest.approx(1.0))
    assert a not in [hit.fact for hit in store.search("ana", a.text, k=50)]
    assert len({fact.seq for fact in (a, b, c, d)}) == len({fact.id for fact in (a, b, c, d)}) == 4


def test_k_is_exact(store: MemStore) -> None:
    """Case M3."""
    store.add_many("ana", [NewFact("one"), NewFact("two"), NewFact("three")])
    assert [len(store.search("ana", "two", k=k)) for k in (0, 1, 3, 50)] == [0, 1, 3, 3]
    assert store.search("nobody", "two", k=5) == []
    for k in (-1, True, 1.5):
        with pytest.raises(InvalidQuery):
            store.search("ana", "two", k=k)


def test_min_score_only_leaves_out(store: MemStore) -> None:
    store.add_many("ana", [NewFact("blue locker"), NewFact("blue"), NewFact("zzz")])
    hits = store.search("ana", "blue locker", k=3)
    assert store.search("ana", "blue locker", k=3, min_score=hits[1].score) == hits[:2]
    with pytest.raises(InvalidQuery):
        store.search("ana", "blue", k=1, min_score=float("nan"))


def test_a_vector_that_is_no_number_refuses_that_add_alone(tmp_path: Path) -> None:
    """Case M5."""
    with MemStore(tmp_path, embedder=NaNEmbedder()) as store:
        store.add("ana", "solid ground")
        batch = [NewFact("solid ground"), NewFact("fine"), NewFact("the void"), NewFact("also fine")]
        with pytest.raises(EmbeddingError) as caught:
            store.add_many("ana", batch)
        assert caught.value.position == 2
        assert texts(store, "ana") == ["solid ground"]
        assert [hit.fact.text for hit in store.search("ana", "ground", k=9)] == ["solid ground"]
        with pytest.raises(EmbeddingError):
            store.search("ana", "void", k=1)


def test_another_owners_fact_is_the_same_as_none(store: MemStore) -> None:
    """Case M6."""
    fact = store.add("ana", "mine")
    words = set()
    for call in (store.get, store.delete):
        for owner, fact_id in (("bo", fact.id), ("ana", "no-such-id")):
            with pytest.raises(FactNotFound) as caught:
                call(owner, fact_id)
            words.add(str(caught.value).replace(repr(str(fact_id)), "ID"))
    assert len(words) == 1
    assert store.get("ana", fact.id) == fact


def test_owners_that_look_alike_are_apart(store: MemStore) -> None:
    """Case M8; more owners than open indexes."""
    owners = ["a-b", "a:b", "a/b", "a|b", "a*", "a b", "a", "A", "a%", "a_", "é", "e\u0301"]
    for number, owner in enumerate(owners):
        store.add(owner, f"secret {number}")
    for number, owner in enumerate(owners):
        assert texts(store, owner) == [f"secret {number}"]
        assert [hit.fact.text for hit in store.search(owner, "secret", k=50)] == [f"secret {number}"]
    assert set(store.owners()) == set(owners)


@pytest.mark.parametrize("owner", ["", "x" * 513, "é" * 257, "a\0b", "\ud800", 7])
def test_owners_that_are_refused(store: MemStore, owner: str) -> None:
    with pytest.raises(InvalidOwner):
        store.add(owner, "text")
    with pytest.raises(InvalidOwner):
        store.search(owner, "text", k=1)


@pytest.mark.parametrize("text", ["", "   ", "\u2003\n\t", "lone \ud800", "NUL \0 inside", None])
def test_texts_that_are_refused(store: MemStore, text: str) -> None:
    """Case M13; nothing of the batch is stored."""
    with pytest.raises(InvalidFact):
        store.add_many("ana", [NewFact("good"), NewFact(text)])
    assert store.count("ana") == 0


@pytest.mark.parametrize(
    "field",
    [
        {"stream": "\0"},
        {"speaker": "\udfff"},
        {"time": "\0"},
        {"metadata": {"nan": float("nan")}},
        {"metadata": {"set": {1}}},
        {"metadata": {"tuple": (1, 2)}},
        {"metadata": {1: "key"}},
        {"metadata": {"surrogate": "\ud800"}},
        {"metadata": [1]},
    ],
)
def test_fields_that_are_refused(store: MemStore, field: dict[str, object]) -> None:
    with pytest.raises(InvalidFact):
        store.add_many("ana", [NewFact("good", **field)])  # type: ignore[arg-type]
    assert store.count("ana") == 0


def test_text_is_byte_exact_and_found(store: MemStore) -> None:
    fact = store.add("ana", "鍵 🔑 café", time="1:56 pm on 8 May, 2023")
    assert store.get("ana", fact.id).text.encode() == "鍵 🔑 café".encode()
    assert store.get("ana", fact.id).time == "1:56 pm on 8 May, 2023"
    assert store.search("ana", "(1:56 pm on 8 May, 2023) 鍵 🔑 café", k=1)[0].score == pytest.approx(1.0)


@pytest.mark.parametrize("query", ["", "  ", "\0", "\ud800"])
def test_queries_that_are_refused(store: MemStore, query: str) -> None:
    with pytest.raises(InvalidQuery):
        store.search("ana", query, k=1)


def test_search_by_vector(store: MemStore) -> None:
    fact = store.add("ana", "hello")
    vector = store.embedder.embed(["hello"])[0]
    assert store.search_vector("ana", 3 * vector, 5) == [(fact, pytest.approx(1.0), pytest.approx(1.0))]
    for bad in (vector[:5], vector * np.nan, vector * 0):
        with pytest.raises(InvalidQuery):
            store.search_vector("ana", bad, 5)


def test_progress_counts_what_is_embedded(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with MemStore(tmp_path, embedder=BigramEmbedder(), settings=MemStoreSettings(embed_batch=4)) as store:
        known = store.add("ana", "fact 3")
        facts = store.add_many(
            "ana", [NewFact(f"fact {i}") for i in range(10)], on_progress=lambda done, total: seen.append((done, total))
        )
        assert seen == [(4, 9), (8, 9), (9, 9)]
        assert [fact.text for fact in facts] == [f"fact {i}" for i in range(10)]
        assert facts[3] == known
        assert store.add_many("ana", []) == []


def test_list_refuses_a_negative_limit(store: MemStore) -> None:
    with pytest.raises(InvalidQuery):
        store.list("ana", limit=-1)


def test_a_purge_starts_the_next_epoch(store: MemStore) -> None:
    assert store.epoch("ana") == 0
    store.purge("ana")
    assert (store.epoch("ana"), store.epoch("bo")) == (1, 0)


@pytest.mark.parametrize("owners", [1, 16])
def test_sixteen_threads_add_one_fact(store: MemStore, owners: int) -> None:
    """Case M11."""
    together = threading.Barrier(16)

    def add(number: int) -> str:
        together.wait()
        return store.add(f"owner {number % owners}", "the same words").id

    with ThreadPoolExecutor(16) as pool:
        ids = list(pool.map(add, range(16)))
    assert len(set(ids)) == owners
    assert [store.count(owner) for owner in store.owners()] == [1] * owners


def test_searches_beside_adds_and_deletes(store: MemStore) -> None:
    """Case M12, shorter: an fsync for each of 10,000 writes is minutes on a slow disk."""
    deleted: set[str] = set()
    stop = threading.Event()
    base = store.add_many("ana", [NewFact(f"fact number {i}") for i in range(20)])

    def search() -> int:
        searches = 0
        while not stop.is_set():
            gone = set(deleted)
            hits = store.search("ana", "fact number 7", k=10)
            assert len(hits) == 10
            assert not gone & {hit.fact.id for hit in hits}
            searches += 1
        return searches

    with ThreadPoolExecutor(4) as pool:
        searching = [pool.submit(search) for _ in range(3)]
        try:
            for i in range(150):
                fact = store.add("ana", f"fact number 7 and {i}")
                store.delete("ana", fact.id)
                deleted.add(fact.id)
        finally:
            stop.set()
        assert sum(future.result() for future in searching) > 0
    assert store.count("ana") == len(base)
    assert {hit.fact.id for hit in store.search("ana", "fact", k=99)} == {fact.id for fact in base}


def test_another_embedder_of_the_same_dimension_is_refused(tmp_path: Path) -> None:
    """Case M14."""
    with MemStore(tmp_path, embedder=BigramEmbedder(384)) as store:
        store.add("ana", "one")
    with pytest.raises(EmbedderMismatch, match="reindex"):
        MemStore(tmp_path, embedder=BigramEmbedder(384, name="others"))
    with MemStore(tmp_path, embedder=BigramEmbedder(384)) as store:
        assert texts(store, "ana") == ["one"]


def test_facts_outlive_the_store(tmp_path: Path, settings: MemStoreSettings) -> None:
    with MemStore(tmp_path, embedder=BigramEmbedder(), settings=settings) as store:
        kept, gone = store.add("ana", "kept"), store.add("ana", "gone")
        store.delete("ana", gone.id)
        store.purge("bo")
    store.close()
    with pytest.raises(StoreClosed):
        store.count("ana")
    with MemStore(tmp_path, embedder=BigramEmbedder(), settings=settings) as store:
        assert store.list("ana") == [kept]
        assert [hit.fact for hit in store.search("ana", "gone", k=9)] == [kept]
        assert store.epoch("bo") == 1
        assert store.add("ana", "new").seq > gone.seq


def test_with_the_default_model(tmp_path: Path, minilm: SentenceTransformerEmbedder) -> None:
    with MemStore(tmp_path, embedder=minilm) as store:
        facts = store.add_many(
            "ana",
            [
                NewFact("Petra plays the cello in an amateur orchestra"),
                NewFact("The spare key hangs in locker 7"),
                NewFact("Ana is allergic to hazelnuts"),
            ],
        )
        for query, fact in (
            ("which musical instrument does Petra play?", facts[0]),
            ("how do I get into the flat?", facts[1]),
            ("is there a food she cannot eat?", facts[2]),
        ):
            assert store.search("ana", query, k=1)[0].fact == fact


def test_deleting_drops_the_kv(store: MemStore, put_kv: Callable[..., str]) -> None:
    one, two = store.add("ana", "one"), store.add("ana", "two")
    put_kv("ana", one.id, number=1)
    kept = put_kv("ana", two.id, number=2)
    store.delete("ana", one.id)
    assert store.blobs is not None
    assert store.blobs.stats().encodings == 1
    assert store.blobs.load(kept) is not None


def test_a_store_that_changed_over_to_another_embedder_refuses_the_old_one(location: str) -> None:
    with MemStore(location, embedder=BigramEmbedder(64)) as store:
        fact = store.add("ana", "one")
        reindex(store.records, BigramEmbedder(64, name="others"))
        for use in (
            lambda: store.add("ana", "one"),
            lambda: store.add("ana", "two"),
            lambda: store.search("ana", "one", k=1),
            lambda: store.update("ana", fact.id, speaker="Ana"),
            lambda: store.delete("ana", fact.id),
        ):
            with pytest.raises(EmbedderMismatch):
                use()
        assert store.get("ana", fact.id) == fact


@pytest.mark.parametrize("change", ["update", "supersede", "purge"])
def test_a_change_drops_the_kv_in_the_same_call(store: MemStore, put_kv: Callable[..., str], change: str) -> None:
    """Case M10: what was encoded of the former text is gone."""
    one, two = store.add("ana", "one"), store.add("bo", "two")
    gone, kept = put_kv("ana", one.id, number=1), put_kv("bo", two.id, number=2)
    if change == "update":
        store.update("ana", one.id, text="uno")
    elif change == "supersede":
        store.supersede("ana", one.id, "uno")
    else:
        assert store.purge("ana").encodings == 1
    assert store.blobs is not None
    assert store.blobs.load(gone) is None
    assert store.blobs.load(kept) is not None


def test_metadata_has_a_depth_that_every_caller_can_read(store: MemStore) -> None:
    def nested(depth: int) -> dict[str, object]:
        value: object = 1
        for _ in range(depth - 1):
            value = [value]
        return {"a": value}

    fact = store.add("ana", "deep", metadata=nested(100))
    assert store.get("ana", fact.id).metadata == nested(100)
    for depth in (101, 985, 10_000):
        with pytest.raises(InvalidFact, match="nested"):
            store.add("ana", "deeper", metadata=nested(depth))
