"""Two processes on one store: what one does the other finds, or finds no more, at once."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from bigrams import BigramEmbedder

from memstore import MemStore, MemStoreSettings, NewFact

EMBEDDER = BigramEmbedder(128)
RETENTION = 40
SETTINGS = MemStoreSettings(feed_retention=RETENTION)
QUERIES = ("the cello is in tune", "locker 7", "number 33", "rent")


def serve(location: str, pipe: Connection) -> None:
    """Runs in the other process: calls methods of its store, on request."""
    with MemStore(location, embedder=EMBEDDER, settings=SETTINGS) as store:
        pipe.send("ready")
        while (request := pipe.recv()) is not None:
            name, arguments, options = request
            pipe.send(getattr(store, name)(*arguments, **options))


class Other:
    """The store of another process."""

    def __init__(self, location: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(location, theirs))
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def __call__(self, name: str, *arguments: object, **options: object) -> Any:
        self._pipe.send((name, arguments, options))
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join()
        self._pipe.close()
        self._process.close()


@pytest.fixture
def other(location: str) -> Iterator[Other]:
    started = Other(location)
    yield started
    started.end()


@pytest.fixture
def store(location: str, other: Other) -> Iterator[MemStore]:
    with MemStore(location, embedder=EMBEDDER, settings=SETTINGS) as opened:
        yield opened


def texts(hits: list[Any]) -> list[str]:
    return [hit.fact.text for hit in hits]


@pytest.mark.parametrize("mode", ["vector", "keyword", "hybrid"])
def test_each_finds_at_once_what_the_other_did(store: MemStore, other: Other, mode: str) -> None:
    def mine() -> list[str]:
        return texts(store.search("ana", "cello locker rent", k=99, mode=mode))

    def theirs() -> list[str]:
        return texts(other("search", "ana", "cello locker rent", k=99, mode=mode))

    assert mine() == theirs() == []
    for number in range(10):
        here = store.add("ana", f"cello {number}")
        assert here.text in theirs()
        there = other("add", "ana", f"locker {number}")
        assert there.text in mine()
        changed = other("update", "ana", here.id, text=f"rent {number}")
        assert changed.text in mine()
        assert here.text not in mine()
        successor = store.supersede("ana", there.id, f"locker {number}, painted")
        assert successor.text in theirs()
        assert there.text not in theirs()
        store.delete("ana", changed.id)
        assert changed.text not in theirs()
        assert sorted(mine()) == sorted(theirs()) == sorted(f"locker {n}, painted" for n in range(number + 1))
    store.purge("ana")
    assert theirs() == []


def test_who_fell_behind_the_feed_finds_what_a_new_store_finds(store: MemStore, other: Other, location: str) -> None:
    kept = store.add_many("ana", [NewFact(text) for text in QUERIES])
    store.add("bo", "of bo")
    assert texts(other("search", "ana", "rent", k=1)) == ["rent"]
    assert texts(other("search", "bo", "of", k=9)) == ["of bo"]
    for number in range(3 * RETENTION):
        store.add("ana", f"fact number {number}", metadata={"n": number})
    store.update("ana", kept[1].id, text="locker 8")
    store.delete("ana", kept[0].id)
    assert len(store.changes(store.records.last_position() - RETENTION)) == RETENTION
    with MemStore(location, embedder=EMBEDDER, settings=SETTINGS) as fresh:
        for mode in ("vector", "keyword", "hybrid"):
            for query in QUERIES:
                for where in (None, {"metadata.n": {"lt": 50}}):
                    expected = fresh.search("ana", query, k=200, mode=mode, where=where)
                    assert other("search", "ana", query, k=200, mode=mode, where=where) == expected
                    assert store.search("ana", query, k=200, mode=mode, where=where) == expected
        assert len(fresh.search("ana", "rent", k=200)) == 3 * RETENTION + len(QUERIES) - 1
    assert texts(other("search", "bo", "of", k=9)) == ["of bo"]
