"""What is kept in memory of an owner, and for how long."""

import threading
from pathlib import Path

import numpy as np
import pytest
from bigrams import BigramEmbedder

from memstore import MemStore, MemStoreSettings, NewFact
from memstore.search.views import Views


def opened(store: MemStore) -> Views:
    return store._searcher._views


def test_memory_follows_the_owners_in_use(location: str) -> None:
    with MemStore(location, embedder=BigramEmbedder(), settings=MemStoreSettings(max_open_indexes=3)) as store:
        for number in range(10):
            store.add_many(f"owner {number}", [NewFact(f"fact {i}") for i in range(10)])
        sizes = []
        for number in range(10):
            assert len(store.search(f"owner {number}", "fact 3", k=50)) == 10
            sizes.append(store.index_bytes())
        one = 10 * (256 * 4 + 8 + 100)
        assert sizes == [one, 2 * one, *[3 * one] * 8]
        assert len(opened(store)) == 3
        assert [hit.fact.text for hit in store.search("owner 0", "fact 3", k=1)] == ["fact 3"]


def test_the_budget_is_in_bytes_too(location: str) -> None:
    one = 10 * (256 * 4 + 8 + 100)
    settings = MemStoreSettings(max_index_bytes=2 * one + 1)
    with MemStore(location, embedder=BigramEmbedder(), settings=settings) as store:
        for number in range(4):
            store.add_many(f"owner {number}", [NewFact(f"fact {i}") for i in range(10)])
            store.search(f"owner {number}", "fact", k=1)
        assert (len(opened(store)), store.index_bytes()) == (2, 2 * one)
        store.search("owner 3", "fact", k=1, mode="keyword")
        assert len(opened(store)) == 1, "words count"
        store.add_many("large", [NewFact(f"fact {i}") for i in range(100)])
        assert len(store.search("large", "fact", k=200)) == 100, "one owner is served whatever they take"


def test_owners_without_facts_push_nobody_out(store: MemStore) -> None:
    store.add("ana", "one")
    store.search("ana", "one", k=1)
    for number in range(50):
        assert store.search(f"nobody {number}", "one", k=1) == []
    assert len(opened(store)) == 1


def test_a_view_that_failed_is_read_anew(location: str) -> None:
    class Failing(BigramEmbedder):
        fails = False

        @property
        def dimension(self) -> int:
            if self.fails:
                raise OSError("out of luck")
            return 256

        @dimension.setter
        def dimension(self, value: int) -> None: ...

    embedder = Failing()
    with MemStore(location, embedder=embedder) as store:
        store.add("ana", "one")
        store.search("ana", "one", k=1)
        vector = np.ones(256)
        store.add("ana", "two")
        with opened(store).opened(store.owners()[0], store.records.head(store.owners()[0])):
            pass
        store.add("ana", "three")
        head = store.records.head(store.owners()[0])
        embedder.fails = True
        with pytest.raises(OSError, match="luck"), opened(store).opened(store.owners()[0], head):
            pass
        embedder.fails = False
        assert len(store.search_vector("ana", vector, 9)) == 3


def test_many_threads_and_few_views(location: str) -> None:
    with MemStore(location, embedder=BigramEmbedder(), settings=MemStoreSettings(max_open_indexes=2)) as store:
        for number in range(6):
            store.add_many(f"owner {number}", [NewFact(f"{number} fact {i}") for i in range(20)])
        wrong: list[object] = []

        def search(thread: int) -> None:
            for step in range(60):
                number = (thread + step) % 6
                mode = ("vector", "keyword", "hybrid")[step % 3]
                hits = store.search(f"owner {number}", f"{number} fact 7", k=20, mode=mode)
                if hits[0].fact.text != f"{number} fact 7" or len(hits) != 20:
                    wrong.append((number, mode, hits[0]))

        threads = [threading.Thread(target=search, args=[n]) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(opened(store)) <= 2


def test_many_changes_are_read_as_a_whole(tmp_path: Path) -> None:
    with MemStore(tmp_path, embedder=BigramEmbedder()) as store, MemStore(tmp_path, embedder=BigramEmbedder()) as other:
        kept = store.add("ana", "kept")
        assert [hit.fact for hit in other.search("ana", "kept", k=9)] == [kept]
        facts = store.add_many("ana", [NewFact(f"fact {i}") for i in range(1500)])
        assert len(other.search("ana", "fact", k=9999)) == 1501
        for fact in facts[:20]:
            store.delete("ana", fact.id)
        assert {hit.fact.id for hit in other.search("ana", "fact", k=9999)} == {kept.id, *(f.id for f in facts[20:])}
