"""Small inputs with one right outcome: what users of memory stores ran into, and what adversarial reading found."""

import multiprocessing
import pickle
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from bigrams import BigramEmbedder
from redis_server import RedisServer

from memstore import (
    ChangeKind,
    DuplicateFact,
    FactNotFound,
    FactState,
    InvalidFact,
    InvalidOwner,
    InvalidQuery,
    MemStore,
    NewFact,
    StoreDamaged,
    StoreUnreachable,
)
from memstore.records.sqlite import FILE_NAME
from memstore.searchable import vectors_name


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


# ---- owners ----


def test_nobody_changes_what_is_anothers(store: MemStore) -> None:
    """Case M6."""
    fact = store.add("ana", "mine", metadata={"owner": "bo"})
    said = set()
    for owner, fact_id in (("bo", fact.id), ("ana", "unknown"), ("bo", "unknown")):
        for call in (
            lambda owner, fact_id: store.update(owner, fact_id, text="changed", metadata={"owner": "bo"}),
            lambda owner, fact_id: store.supersede(owner, fact_id, "changed"),
            lambda owner, fact_id: store.delete(owner, fact_id),
            lambda owner, fact_id: store.history(owner, fact_id),
            lambda owner, fact_id: store.get(owner, fact_id),
        ):
            with pytest.raises(FactNotFound) as caught:
                call(owner, fact_id)
            said.add(str(caught.value).replace(fact_id, "ID"))
    assert len(said) == 1
    assert store.get_many("bo", [fact.id]) == store.changes(0, owner="bo") == []
    assert store.list("ana") == [fact]


def test_a_purge_leaves_the_others_alone(store: MemStore) -> None:
    """Case M7."""
    mine = [store.add("ana", f"fact {n}", idempotency_key=str(n)) for n in range(3)]
    store.update("ana", mine[0].id, text="changed")
    store.supersede("ana", mine[1].id, "succeeded")
    theirs = store.add_many("bo", [NewFact(f"fact {n}") for n in range(3)])
    before = store.stats("bo"), store.changes(0, owner="bo")
    receipt = store.purge("ana")
    assert (receipt.owner, receipt.at, receipt.encodings) == ("ana", 1000.0, 0)
    assert receipt.records[:6] == (4, 2, 3, 6, 3, 1)
    assert store.list("ana", superseded=True) == store.search("ana", "fact", k=9) == []
    assert [change.kind for change in store.changes(0, owner="ana")] == [ChangeKind.PURGED]
    assert store.list("bo") == theirs
    assert (store.stats("bo"), store.changes(0, owner="bo")) == before
    assert {hit.fact.id for hit in store.search("bo", "fact", k=9)} == {fact.id for fact in theirs}


@pytest.mark.parametrize("owner", ["a-b", "a:b", "a/b", "a|b", "a*", "a b"])
def test_each_owner_sees_their_own(store: MemStore, owner: str) -> None:
    """Case M8."""
    others = [other for other in ("a-b", "a:b", "a/b", "a|b", "a*", "a b") if other != owner]
    for other in [*others, owner]:
        store.add(other, f"secret of {other}")
    [mine] = store.list(owner)
    assert mine.text == f"secret of {owner}"
    for mode in ("vector", "keyword", "hybrid"):
        assert [hit.fact for hit in store.search(owner, "secret", k=9, mode=mode)] == [mine]
    assert [change.fact_id for change in store.changes(0, owner=owner)] == [mine.id]
    store.purge(owner)
    assert store.owners() == sorted(others)
    with pytest.raises(InvalidOwner):
        store.add("", "nobody's")


# ---- freshness ----


def test_only_what_holds_now_is_found(store: MemStore) -> None:
    """Case M9."""
    old = store.add("ana", "Office is on floor 2", metadata={"tag": 1}, time="2023-05-08")
    new = store.supersede("ana", old.id, "Office is on floor 5")
    assert (new.metadata, new.time, new.supersedes) == ({"tag": 1}, None, old.id)
    for mode in ("vector", "keyword", "hybrid"):
        assert [hit.fact for hit in store.search("ana", "Office is on floor 2", k=9, mode=mode)] == [new]
    past = store.get("ana", old.id)
    assert (past.text, past.state, past.version) == (old.text, FactState.SUPERSEDED, 2)
    assert store.history("ana", new.id) == [old, past, new]
    assert store.list("ana") == [new]


def test_a_changed_text_is_found_and_the_old_one_is_not(store: MemStore) -> None:
    """Case M10; that the KV goes with the old text is in `test_memstore`."""
    fact = store.add("ana", "blue locker", stream="D1", speaker="Ana", metadata={"tags": ["x", "y"]})
    assert [hit.fact for hit in store.search("ana", "blue locker", k=1, mode="keyword")] == [fact]
    changed = store.update("ana", fact.id, text="red door")
    assert (changed.metadata, changed.stream, changed.speaker) == ({"tags": ["x", "y"]}, "D1", "Ana")
    assert store.search("ana", "blue locker", k=9, mode="keyword") == []
    assert [hit.fact for hit in store.search("ana", "red door", k=9, mode="keyword")] == [changed]
    [hit] = store.search("ana", "Ana: red door", k=9)
    assert (hit.fact, hit.score) == (changed, pytest.approx(1.0))
    assert store.search("ana", "Ana: blue locker", k=9)[0].score < 0.9


# ---- many at once ----


@pytest.fixture(params=["sqlite", "redis"])
def fast_location(request: pytest.FixtureRequest) -> Iterator[str]:
    """As `location`, but not on a disk."""
    if request.param == "redis":
        yield request.getfixturevalue("redis_url")
        return
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None) as name:
        yield f"sqlite:///{name}/store"


def test_a_search_beside_ten_thousand_writes(fast_location: str) -> None:
    """Case M12."""
    deleted: set[str] = set()
    done = threading.Event()
    with MemStore(fast_location, embedder=BigramEmbedder(16)) as store:
        base = {fact.id for fact in store.add_many("ana", [NewFact(f"fact {n}") for n in range(20)])}

        def search() -> int:
            count = 0
            while not done.is_set():
                gone = set(deleted)
                found = {hit.fact.id for hit in store.search("ana", "fact", k=1000)}
                assert not gone & found
                assert base <= found
                assert len(found) <= len(base) + 1
                count += 1
            return count

        with ThreadPoolExecutor(1) as pool:
            searching = pool.submit(search)
            try:
                for number in range(5000):
                    fact = store.add("ana", f"fact and {number}")
                    store.delete("ana", fact.id)
                    deleted.add(fact.id)
            finally:
                done.set()
            assert searching.result() > 10
        assert store.count("ana") == len(base)
        assert {hit.fact.id for hit in store.search("ana", "fact", k=1000)} == base
        kinds = Counter(change.kind for change in store.changes(0, limit=20_000))
        assert kinds == {ChangeKind.ADDED: 5020, ChangeKind.DELETED: 5000}


def add_together(location: str, owners: int, pipe: Connection) -> None:
    """Runs in another process: eight threads add one fact each, when told to."""
    with MemStore(location, embedder=BigramEmbedder(32)) as store, ThreadPoolExecutor(8) as pool:
        pipe.send("ready")
        pipe.recv()
        adding = [pool.submit(store.add, f"owner {number % owners}", "the same words") for number in range(8)]
        pipe.send([future.result().id for future in adding])


@pytest.mark.parametrize("owners", [1, 8])
def test_two_processes_of_eight_threads_add_one_fact(fast_location: str, owners: int) -> None:
    """Case M11; with sixteen threads of one process in `test_memstore`."""
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for _ in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=add_together, args=(fast_location, owners, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    for pipe in pipes:
        pipe.send("go")
    ids = [fact_id for pipe in pipes for fact_id in pipe.recv()]
    for pipe, process in zip(pipes, processes, strict=True):
        process.join()
        process.close()
        pipe.close()
    assert (len(ids), len(set(ids))) == (16, owners)
    with MemStore(fast_location, embedder=BigramEmbedder(32)) as store:
        assert [store.count(owner) for owner in store.owners()] == [1] * owners
        assert len(store.changes(0)) == owners


# ---- text ----


def test_no_end_of_a_text_is_cut_off(tmp_path: Path) -> None:
    """Cases M13 and M15."""
    text = " ".join(["the meeting went on"] * 2500 + ["hazelnuts kill Petra"])
    with MemStore(tmp_path, embedder=BigramEmbedder(512, max_tokens=64)) as store:
        store.add_many("ana", [NewFact(f"the meeting number {number} went on and on") for number in range(30)])
        [addition] = store.ingest("ana", [NewFact(text)])
        assert addition.chunks >= 10_000 / 64
        assert addition.fact.text == text
        assert store.search("ana", "hazelnuts kill Petra", k=1)[0].fact == addition.fact
        assert store.search("ana", "hazelnuts", k=1, mode="keyword")[0].fact == addition.fact
        assert len(store.search("ana", "the meeting", k=99)) == 31


# ---- damage ----


def test_a_text_that_is_no_text_any_more_is_set_aside_alone(tmp_path: Path) -> None:
    with MemStore(tmp_path, embedder=BigramEmbedder(32)) as store:
        broken, whole = store.add("ana", "broken"), store.add("ana", "whole")
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("UPDATE facts SET record = CAST(CAST(record AS BLOB) || x'ff' AS TEXT) WHERE seq = ?", [broken.seq])
    db.close()
    with MemStore(tmp_path, embedder=BigramEmbedder(32)) as store:
        with pytest.raises(StoreDamaged):
            store.get("ana", broken.id)
        arguments = {"embedder": vectors_name(store.embedder), "dimension": 32}
        [problem] = store.records.check(**arguments, repair=True)  # type: ignore[arg-type]
        assert (problem.kind, problem.fact_id, problem.repaired) == ("damaged-record", broken.id, True)
        assert store.list("ana") == [hit.fact for hit in store.search("ana", "broken", k=9)] == [whole]
        assert store.records.check(**arguments, repair=False) == []  # type: ignore[arg-type]


def damage_feed_of_sqlite(path: Path) -> None:
    with sqlite3.connect(path / "store" / FILE_NAME) as db:
        db.execute("UPDATE changes SET kind = 'adbed' WHERE position = 2")
    db.close()


@pytest.mark.parametrize("backend", ["sqlite", "redis"])
def test_a_damaged_feed_starts_anew_after_the_damage(
    request: pytest.FixtureRequest, tmp_path: Path, backend: str
) -> None:
    server: RedisServer | None = request.getfixturevalue("redis_server") if backend == "redis" else None
    location = request.getfixturevalue("redis_url") if backend == "redis" else str(tmp_path / "store")
    with MemStore(location, embedder=BigramEmbedder(32)) as store:
        facts = store.add_many("ana", [NewFact("one"), NewFact("two"), NewFact("three")])
        if server is None:
            damage_feed_of_sqlite(tmp_path)
        else:
            with server.client() as client:
                for key in client.keys("*feed") + client.keys("*changes"):
                    entries = client.xrange(key)
                    client.delete(key)
                    for position, fields in entries:
                        client.xadd(key, {**fields, b"kind": b"adbed"} if position == b"2-0" else fields, id=position)
        with pytest.raises(StoreDamaged):
            store.changes(0)
        problems = store.records.check(embedder=None, dimension=None, repair=True)
        assert {problem.kind for problem in problems} == {"damaged-change"}
        assert store.records.check(embedder=None, dimension=None, repair=False) == []
        assert [change.fact_id for change in store.changes(2)] == [facts[2].id]
        assert {hit.fact.id for hit in store.search("ana", "one", k=9)} == {fact.id for fact in facts}


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
        return Path.touch, (self.path,)


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    """Case M26; under a key of the KV cache in the tests of the blobs."""
    trap = pickle.dumps(Planted(tmp_path / "sprung"))
    with MemStore(tmp_path / "store", embedder=BigramEmbedder(32)) as store:
        facts = store.add_many("ana", [NewFact("one"), NewFact("two")])
    for name in ("index.pkl", "index.faiss", "metadata.pickle", "records.pkl"):
        (tmp_path / "store" / name).write_bytes(trap)
    with sqlite3.connect(tmp_path / "store" / FILE_NAME) as db:
        db.execute("UPDATE vectors SET data = ? WHERE id / 256 = ?", [trap, facts[0].seq])
        db.execute("UPDATE facts SET record = CAST(? AS TEXT) WHERE seq = ?", [trap, facts[1].seq])
    db.close()
    with MemStore(tmp_path / "store", embedder=BigramEmbedder(32)) as store:
        with pytest.raises(StoreDamaged):
            store.search("ana", "two", k=9)
        problems = store.records.check(embedder=vectors_name(store.embedder), dimension=32, repair=True)
        assert {problem.kind for problem in problems} >= {"damaged-record"}
        assert [hit.fact for hit in store.search("ana", "one", k=9)] == [facts[0]]
        assert store.add("ana", "three").seq > facts[1].seq
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / FILE_NAME).write_bytes(trap * 100)
    with pytest.raises(StoreDamaged):
        MemStore(tmp_path / "cut", embedder=BigramEmbedder(32))
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists(), "the trap works"


def test_a_password_is_in_no_message() -> None:
    """Case M25."""
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1:1") as caught:
        MemStore("redis://ana:hunter2@127.0.0.1:1/0", embedder=BigramEmbedder(32))
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__
