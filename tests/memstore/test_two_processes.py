"""The HTTP process and the scheduler process share one KV cache."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from small_kv import encoding, kv

from memstore import FactId, KVBlobs, MemStoreSettings, OwnerId

ANA = OwnerId("ana")
KIND = {"fingerprint": "model-a", "policy": "anchor:4"}


def serve(path: Path, settings: MemStoreSettings, pipe: Connection) -> None:
    """Runs in the other process: puts, and loads, on request."""
    with KVBlobs(path, settings=settings) as blobs:
        pipe.send("ready")
        while True:
            request, number = pipe.recv()
            if request == "put":
                pipe.send(blobs.put(encoding(number, fact_id=FactId(str(number))), *kv(number)))
            elif request == "load":
                loaded = blobs.load(encoding(number).id)
                pipe.send(loaded is not None and torch.equal(loaded.k, kv(number)[0]))
            elif request == "put without end":
                pipe.send("begun")
                while True:
                    blobs.put(encoding(number, fact_id=FactId(str(number))), *kv(number))
                    number += 1
            else:
                return


class Other:
    def __init__(self, path: Path, settings: MemStoreSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(path, settings, theirs))
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"

    def ask(self, request: str, number: int) -> object:
        self.pipe.send((request, number))
        return self.pipe.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(("end", 0))
            self.process.join()
        self.pipe.close()
        self.process.close()


@pytest.fixture
def other(tmp_path: Path, settings: MemStoreSettings, blobs: KVBlobs) -> Iterator[Other]:
    # `blobs` is open in this process already, and used, when the other one starts.
    blobs.put(encoding(0, fact_id=FactId("0")), *kv(0))
    started = Other(tmp_path / "kv", settings)
    yield started
    started.end()


def test_each_sees_what_the_other_puts_and_drops(blobs: KVBlobs, other: Other) -> None:
    assert other.ask("load", 0)
    assert other.ask("put", 1)
    found = blobs.current(ANA, [(FactId("0"), 1), (FactId("1"), 1)], **KIND)
    assert set(found) == {"0", "1"}
    loaded = blobs.load(encoding(1).id)
    assert loaded is not None
    assert torch.equal(loaded.v, kv(1)[1])
    assert blobs.drop_fact(ANA, FactId("1")) == 1
    assert not other.ask("load", 1)
    for number in range(10, 30):
        assert blobs.put(encoding(number, fact_id=FactId(str(number))), *kv(number))
        assert other.ask("load", number)
        assert other.ask("put", number + 100)
        assert blobs.load(encoding(number + 100).id) is not None


def test_a_killed_writer_leaves_no_lock_and_no_half(
    blobs: KVBlobs, other: Other, tmp_path: Path, settings: MemStoreSettings
) -> None:
    assert other.ask("put without end", 1000) == "begun"
    while blobs.stats().encodings < 20:
        pass
    assert other.process.pid is not None
    os.kill(other.process.pid, signal.SIGKILL)
    other.process.join()
    assert blobs.put(encoding(1, fact_id=FactId("1")), *kv(1))
    count = blobs.stats().encodings
    present = [n for n in range(1000, 1000 + count) if blobs.load(encoding(n).id) is not None]
    assert present == list(range(1000, 1000 + count - 2))
    assert blobs.corrupt_count == 0
    again = Other(tmp_path / "kv", settings)
    assert again.ask("load", 1)
    again.end()
