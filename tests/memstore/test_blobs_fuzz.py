"""A damaged `data.mdb`: refused by name, set aside, repaired, or read exactly; never other tensors, a hang, a crash."""

import functools
import multiprocessing
import random
import struct
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from small_kv import encoding, kv

from memstore import (
    BlobStoreError,
    CorruptBlob,
    Encoding,
    FactId,
    KVBlobs,
    MemStoreSettings,
    OwnerId,
)

PAGE = 4096
MUTATIONS = 300
SETTINGS = MemStoreSettings(blob_map_size_bytes=8 * 2**20)
OWNERS = (OwnerId("ana"), OwnerId("bo"))
KIND = {"fingerprint": "model-a", "policy": "anchor:4"}
ANCHORS = (FactId("0"), FactId("2"))
DROPPED = range(60, 90)
NUMBERS = range(90)


@functools.cache
def described(number: int) -> Encoding:
    tokens = 60 if number % 9 == 0 else 5  # in pages of their own, or in one with others
    saw = tuple((FactId(str(n)), 1) for n in range(number % 3))
    owner = OWNERS[number % 2]
    return encoding(number, owner=owner, fact_id=FactId(str(number)), saw=saw, token_ids=tuple(range(tokens)))


@functools.cache
def tensors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return kv(number, torch.float32, len(described(number).token_ids))


def fill(path: Path) -> bytes:
    """A store of some levels of pages, some of them free; returns its file."""
    with KVBlobs(path, settings=SETTINGS) as blobs:
        for number in NUMBERS:
            blobs.put(described(number), *tensors(number))
        for owner in OWNERS:
            blobs.set_anchors(owner, "anchor:4", ANCHORS)
        for number in DROPPED:
            blobs.drop_encoding(described(number).id)
    return (path / "data.mdb").read_bytes()


def flip_a_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def flip_a_bit_of_a_page_header(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data) // PAGE) * PAGE + rng.randrange(64)] ^= 1 << rng.randrange(8)


def flip_a_bit_of_the_first_pages(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(2) * PAGE + rng.randrange(160)] ^= 1 << rng.randrange(8)


def overwrite_a_run(data: bytearray, rng: random.Random) -> None:
    start, length = rng.randrange(len(data)), rng.choice((2, 8, 64, 1000))
    data[start : start + length] = rng.randbytes(len(data[start : start + length]))


def blank_a_page(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) // PAGE) * PAGE
    data[start : start + PAGE] = bytes(PAGE)


def copy_a_page(data: bytearray, rng: random.Random) -> None:
    source, target = (rng.randrange(len(data) // PAGE) * PAGE for _ in range(2))
    data[target : target + PAGE] = data[source : source + PAGE]


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def cut_at_a_page(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data) // PAGE) * PAGE :]


MUTATORS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_a_bit,
    flip_a_bit,
    flip_a_bit_of_a_page_header,
    flip_a_bit_of_the_first_pages,
    overwrite_a_run,
    blank_a_page,
    copy_a_page,
    cut,
    cut_at_a_page,
)


def check(path: Path) -> str:
    """Use a store in every way; returns how its damage showed."""
    try:
        blobs = KVBlobs(path, settings=SETTINGS)
    except BlobStoreError:
        return "refused"
    with blobs:
        was_damaged = blobs.corrupt_count > 0
        for owner in OWNERS:
            for fact_id, rungs in blobs.current(owner, [(FactId(str(n)), 1) for n in NUMBERS], **KIND).items():
                want = described(int(fact_id))
                [(rung, got)] = rungs.items()
                assert rung == 0
                for name in ("id", "owner", "fact_id", "fact_version", "token_ids", "saw", "fingerprint", "policy"):
                    assert getattr(got, name) == getattr(want, name), name
            assert blobs.anchors(owner, "anchor:4") in ((), ANCHORS)
            blobs.dependents(owner, FactId("0"))
        loaded_count = 0
        for number in NUMBERS:
            try:
                loaded = blobs.load(described(number).id)
            except CorruptBlob:
                assert not blobs.has(described(number).id)
                continue
            if loaded is not None:
                loaded_count += 1
                assert torch.equal(loaded.k, tensors(number)[0]), number
                assert torch.equal(loaded.v, tensors(number)[1]), number
                assert loaded.token_ids == described(number).token_ids
        report = blobs.verify(repair=True)
        assert blobs.verify(repair=False)[1:5] == (0, 0, 0, 0)
        for number in (0, 9, 75):
            assert blobs.put(described(number), *tensors(number))
            again = blobs.load(described(number).id)
            assert again is not None
            assert torch.equal(again.k, tensors(number)[0])
        blobs.drop_owner(OWNERS[0])
        assert blobs.verify(repair=False)[1:5] == (0, 0, 0, 0)
        if was_damaged:
            return "set aside"
        return "repaired" if report.repaired or blobs.corrupt_count else f"intact:{loaded_count}"


def work(path: Path, data: bytes, pipe: Connection) -> None:
    """Runs in the other process: one mutation for each seed that comes in."""
    torch.set_num_threads(1)
    while (seed := pipe.recv()) is not None:
        rng = random.Random(seed)
        damaged = bytearray(data)
        MUTATORS[seed % len(MUTATORS)](damaged, rng)
        directory = path / str(seed)
        directory.mkdir()
        (directory / "data.mdb").write_bytes(damaged)
        try:
            pipe.send(check(directory))
        except Exception as error:
            pipe.send(error)


def test_damage_of_any_kind(tmp_path: Path) -> None:
    """Case M16."""
    data = fill(tmp_path / "whole")
    assert check(tmp_path / "whole") == f"intact:{len(NUMBERS) - len(DROPPED)}"
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=work, args=(tmp_path, data, theirs))
    process.start()
    theirs.close()
    outcomes = Counter[str]()
    for seed in range(MUTATIONS):
        what = f"seed {seed}, {MUTATORS[seed % len(MUTATORS)].__name__}"
        pipe.send(seed)
        if not pipe.poll(60):
            process.kill()
            pytest.fail(f"{what}: hangs")
        try:
            outcome = pipe.recv()
        except EOFError:
            process.join()
            pytest.fail(f"{what}: the process ended with {process.exitcode}")
        if isinstance(outcome, Exception):
            pipe.send(None)
            raise AssertionError(what) from outcome
        outcomes[outcome.split(":")[0]] += 1
    pipe.send(None)
    process.join()
    # Each way out is taken often: the mutations reach the pages, the values and the free space.
    assert min(outcomes[kind] for kind in ("set aside", "repaired", "intact")) >= MUTATIONS // 30, outcomes


def overlap_two_nodes(data: bytearray) -> None:
    """Make keys of the table `order` reach into the next row: in bounds and in order, but not to be deleted."""
    data[:] = data.replace(struct.pack("=HHHH", 0, 0, 0, 8 + 32), struct.pack("=HHHH", 0, 0, 0, 8 + 32 + 2))


def make_the_free_list_hold_duplicates(data: bytearray) -> None:
    for page in range(2):
        data[page * PAGE + 16 + 24 + 4] |= 4


def move_a_separator(data: bytearray) -> None:
    """Make the second key of a branch larger than the first that it leads to."""
    for page in range(2, len(data) // PAGE):
        start = page * PAGE
        number, _, flags, lower, _ = struct.unpack_from("=QHHHH", data, start)
        if number == page and flags == 1 and lower == 16 + 2 * 2:
            (node,) = struct.unpack_from("=H", data, start + 18)
            (key_size,) = struct.unpack_from("=H", data, start + node + 6)
            data[start + node + 8 : start + node + 8 + key_size] = b"\xff" * key_size


@pytest.mark.parametrize("damage", [overlap_two_nodes, make_the_free_list_hold_duplicates, move_a_separator])
def test_a_file_that_lmdb_would_trip_over_is_set_aside(
    tmp_path: Path, damage: Callable[[bytearray], None], caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray(fill(tmp_path / "whole"))
    damage(data)
    (tmp_path / "data.mdb").write_bytes(data)
    with KVBlobs(tmp_path, settings=SETTINGS) as blobs:
        assert blobs.corrupt_count == 1
        assert blobs.stats().encodings == 0
    assert (tmp_path / "data.mdb.damaged").read_bytes() == data
    assert "is damaged" in caplog.text
