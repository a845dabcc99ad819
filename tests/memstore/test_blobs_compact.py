"""`KVBlobs.compact`, and what is left of an owner who was dropped."""

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from small_kv import delete, encoding, entries, kv, overwrite, raw
from test_two_processes import Other

from memstore import BlobStoreError, BlobStoreInUse, EncodingId, FactId, KVBlobs, MemStoreSettings, OwnerId

ANA, BO = OwnerId("ana"), OwnerId("bo")
TOKENS = 400


def id_of(number: int) -> EncodingId:
    return EncodingId(hashlib.sha256(str(number).encode()).hexdigest())


def put(blobs: KVBlobs, number: int, owner: OwnerId = ANA) -> None:
    described = encoding(
        number,
        id=id_of(number),
        owner=owner,
        fact_id=FactId(f"{owner}-fact-{number}"),
        saw=((FactId(f"{owner}-saw-{number}"), 1),),
        token_ids=tuple(range(TOKENS)),
    )
    assert blobs.put(described, *kv(number, torch.float32, TOKENS))


def loadable(blobs: KVBlobs, numbers: range) -> list[int]:
    found = []
    for number in numbers:
        loaded = blobs.load(id_of(number))
        if loaded is not None:
            assert torch.equal(loaded.k, kv(number, torch.float32, TOKENS)[0])
            assert torch.equal(loaded.v, kv(number, torch.float32, TOKENS)[1])
            found.append(number)
    return found


def test_the_file_loses_its_free_pages_and_stays_in_use(tmp_path: Path, settings: MemStoreSettings) -> None:
    data = tmp_path / "data.mdb"
    with KVBlobs(tmp_path, settings=settings) as blobs:
        for number in range(40):
            put(blobs, number)
        for number in range(40):
            if number % 10:
                blobs.drop_encoding(id_of(number))
        size = data.stat().st_size
        before, after = blobs.compact()
        assert (before, after) == (size, data.stat().st_size)
        assert 4 * 2 * 3 * TOKENS * 2 * 8 * 4 < after < before / 5
        assert loadable(blobs, range(40)) == [0, 10, 20, 30]
        put(blobs, 40)
        assert blobs.verify(repair=False)[:5] == (5, 0, 0, 0, 0)
        blobs.compact()
        again = blobs.compact()
        assert again[0] == again[1]
    assert {path.name for path in tmp_path.iterdir()} == {"data.mdb", "lock.mdb", "open.lock"}
    with KVBlobs(tmp_path, settings=settings) as blobs:
        assert loadable(blobs, range(41)) == [0, 10, 20, 30, 40]
        assert blobs.corrupt_count == 0


def test_it_is_refused_while_another_process_has_the_cache_open(tmp_path: Path, settings: MemStoreSettings) -> None:
    with KVBlobs(tmp_path, settings=settings) as blobs:
        put(blobs, 1)
        other = Other(tmp_path, settings)
        try:
            with pytest.raises(BlobStoreInUse, match="stop the server"):
                blobs.compact()
            assert loadable(blobs, range(3)) == [1]
            assert other.ask("put", 2), "the other process, and this one, go on"
            assert blobs.has(encoding(2).id)
            with pytest.raises(BlobStoreInUse):
                blobs.compact()
        finally:
            other.end()
        blobs.compact()
        assert loadable(blobs, range(2)) == [1]
        assert blobs.has(encoding(2).id)


def test_an_opener_that_was_killed_is_none(tmp_path: Path, settings: MemStoreSettings) -> None:
    with KVBlobs(tmp_path, settings=settings) as blobs:
        put(blobs, 1)
        other = Other(tmp_path, settings)
        other.process.kill()
        other.process.join()
        blobs.compact()
        assert loadable(blobs, range(3)) == [1]
        other.end()


def test_a_crash_on_the_way_leaves_the_cache_as_it_was(tmp_path: Path, settings: MemStoreSettings) -> None:
    with KVBlobs(tmp_path, settings=settings) as blobs:
        for number in range(10):
            put(blobs, number)
    whole = (tmp_path / "data.mdb").read_bytes()
    # The kernel ends the process in the middle of the copy, where it writes behind the limit on the size of a file.
    crash = f"""
import resource, signal
from memstore import KVBlobs
with KVBlobs({str(tmp_path)!r}) as blobs:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    blobs.compact()
"""
    done = subprocess.run([sys.executable, "-c", crash], capture_output=True, text=True)
    assert done.returncode == -25, done.stderr
    assert (tmp_path / "data.mdb").read_bytes() == whole
    assert (tmp_path / "data.mdb.compacting").stat().st_size > 0
    with KVBlobs(tmp_path, settings=settings) as blobs:
        assert not (tmp_path / "data.mdb.compacting").exists()
        assert loadable(blobs, range(10)) == list(range(10))
        assert blobs.corrupt_count == 0


def test_a_copy_that_fails_leaves_the_cache_as_it_was(tmp_path: Path, settings: MemStoreSettings) -> None:
    with KVBlobs(tmp_path, settings=settings) as blobs:
        for number in range(10):
            put(blobs, number)
    fail = f"""
import resource
from memstore import BlobStoreError, KVBlobs
with KVBlobs({str(tmp_path)!r}) as blobs:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    try:
        blobs.compact()
    except BlobStoreError as error:
        print(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(blobs.verify(repair=False)[:5], blobs.compact()[1] > 0)
"""
    done = subprocess.run([sys.executable, "-c", fail], capture_output=True, text=True)
    assert done.stdout == "BlobStoreError\n(10, 0, 0, 0, 0) True\n", done.stderr


def test_other_threads_wait_and_go_on(tmp_path: Path, settings: MemStoreSettings) -> None:
    with KVBlobs(tmp_path, settings=settings) as blobs:
        for number in range(8):
            put(blobs, number)
        ended, errors = threading.Event(), list[Exception]()

        def use(number: int) -> None:
            try:
                while not ended.is_set():
                    assert loadable(blobs, range(number, number + 1)) == [number]
                    put(blobs, number)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            blobs.compact()
        ended.set()
        for thread in threads:
            thread.join()
        assert errors == []
        assert loadable(blobs, range(8)) == list(range(8))
        assert blobs.verify(repair=False)[:5] == (8, 0, 0, 0, 0)


def test_a_closed_cache_is_not_compacted(tmp_path: Path, settings: MemStoreSettings) -> None:
    blobs = KVBlobs(tmp_path, settings=settings)
    blobs.close()
    with pytest.raises(BlobStoreError):
        blobs.compact()
    KVBlobs(tmp_path, settings=settings).close()


def traces(number: int, owner: str) -> list[bytes]:
    """Pieces of what is stored of one encoding: its tensors, its tokens, its fact, its owner."""
    pieces = [id_of(number).encode(), f"{owner}-fact-{number}".encode(), f"{owner}-saw-{number}".encode()]
    for tensor in kv(number, torch.float32, TOKENS):
        content = tensor.numpy().tobytes()
        pieces += [content[start : start + 24] for start in range(0, len(content) - 24, 4096)]
    return pieces


def found_in(directory: Path, pieces: list[bytes]) -> set[str]:
    return {
        path.name
        for path in directory.iterdir()
        for content in [path.read_bytes()]
        if any(p in content for p in pieces)
    }


def test_nothing_of_a_dropped_owner_is_left(tmp_path: Path, settings: MemStoreSettings) -> None:
    ana = [piece for number in range(10) for piece in traces(number, "ana")]
    with KVBlobs(tmp_path, settings=settings) as blobs:
        for number in range(10):
            put(blobs, number)
            put(blobs, 100 + number, BO)
        blobs.set_anchors(ANA, "anchor:4", [FactId("ana-fact-0")])
        blobs.set_anchors(BO, "anchor:4", [FactId("bo-fact-100")])
    # A copy that was set aside has all of it too.
    (tmp_path / "data.mdb.damaged").write_bytes((tmp_path / "data.mdb").read_bytes())
    with KVBlobs(tmp_path, settings=settings) as blobs:
        assert found_in(tmp_path, ana) == {"data.mdb", "data.mdb.damaged"}
        assert blobs.drop_owner(ANA) == 10
        assert entries(blobs) == {"slots": 10, "ids": 10, "order": 10, "blobs": 10, "saw": 10, "anchors": 1}
        assert blobs.anchors(ANA, "anchor:4") == ()
        assert blobs.anchors(BO, "anchor:4") == ("bo-fact-100",)
        assert blobs.verify(repair=False)[:5] == (10, 0, 0, 0, 0)
        assert loadable(blobs, range(110)) == list(range(100, 110))
        assert "data.mdb" in found_in(tmp_path, ana), "as free pages"
        blobs.compact()
        assert found_in(tmp_path, ana) == set()
        assert found_in(tmp_path, traces(100, "bo")) == {"data.mdb"}
    assert found_in(tmp_path, ana) == set()


def test_no_key_of_a_dropped_owner_stays_in_the_inner_pages(tmp_path: Path, settings: MemStoreSettings) -> None:
    """Which keep a key as a separator after its row has gone."""
    with KVBlobs(tmp_path, settings=settings) as blobs:
        for number in range(300):
            blobs.put(
                encoding(number, id=id_of(number), owner=(ANA, BO)[number % 2], fact_id=FactId(f"fact-{number}")),
                *kv(number),
            )
        ids = [id_of(number).encode() for number in range(0, 300, 2)]
        assert found_in(tmp_path, ids) == {"data.mdb"}
        blobs.drop_owner(ANA)
        blobs.compact()
        assert found_in(tmp_path, ids) == set()
        assert blobs.verify(repair=False)[:5] == (150, 0, 0, 0, 0)


def test_dropping_an_owner_takes_damaged_rows_along(blobs: KVBlobs) -> None:
    for number in range(4):
        put(blobs, number)
    slots = {raw(blobs, "ids")[id_of(n).encode()][:52]: n for n in range(4)}
    by_number = {number: slot for slot, number in slots.items()}
    overwrite(blobs, by_number[0], b"damaged", table="slots")
    delete(blobs, by_number[1], table="slots")
    delete(blobs, by_number[2], table="slots")
    [key] = [key for key in raw(blobs) if id_of(2).encode() in key]
    delete(blobs, key, table="blobs")
    blobs.drop_owner(ANA)
    assert set(entries(blobs).values()) == {0}
