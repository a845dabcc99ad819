"""Snapshots on disk: what a reader gets, whatever happened to a file, and which files are there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from memstore import OwnerId
from memstore.kv.session_files import PART, drop_session_files, session_file, session_of
from memstore.session_log import SessionId
from sgl_stateful.sessions.snapshot_file import (
    SnapshotDamaged,
    SnapshotHeader,
    read_header,
    read_layers,
    tokens_digest,
    write_snapshot,
)
from sgl_stateful.sessions.snapshots import MIN_TOKENS, Rate, Rates, SnapshotFolder

ANA, BO = OwnerId("ana"), OwnerId("bo")
NAME = "session.kv"
SHAPE = (2, 5, 1, 4)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(SHAPE, generator=made).to(dtype) for _ in range(2))
    return keys, values


def header(dtype: str = "float32", fingerprint: str = "f") -> SnapshotHeader:
    return SnapshotHeader(fingerprint, tokens_digest([1, 2, 3, 4, 5]), SHAPE, dtype)


def write(folder: Path, name: str = NAME, *, dtype: str = "float32", fingerprint: str = "f") -> Path:
    write_snapshot(folder / name, name, header(dtype, fingerprint), *tensors(DTYPES[dtype]))
    return folder / name


def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    layers = [(keys.clone(), values.clone()) for keys, values in read_layers(path)]
    return torch.stack([keys for keys, _ in layers]), torch.stack([values for _, values in layers])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_is_read_is_what_was_written(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path, dtype=dtype)
    for got, wanted in zip(read(path), tensors(DTYPES[dtype]), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    assert read_header(path) == header(dtype)


def test_it_is_safetensors(tmp_path: Path) -> None:
    keys, values = tensors()
    with safe_open(write(tmp_path), framework="pt") as file:  # type: ignore[no-untyped-call]
        assert torch.equal(file.get_tensor("k"), keys)
        assert torch.equal(file.get_tensor("v"), values)


def test_any_flipped_byte_is_seen_or_changes_nothing(tmp_path: Path) -> None:
    """What is not sealed are the lines for other readers of safetensors: where the tensors are, which is known."""
    path = write(tmp_path)
    whole = path.read_bytes()
    payload = len(whole) - header().payload_bytes
    unseen = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            got = read(path)
        except SnapshotDamaged:
            continue
        unseen += 1
        assert at < payload, f"byte {at} of the tensors"
        assert read_header(path) == header()
        assert all(torch.equal(*pair) for pair in zip(got, tensors(), strict=True))
    assert unseen < 200


def test_any_truncation_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(SnapshotDamaged):
            read(path)


def test_a_file_of_another_session_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path).rename(tmp_path / "other.kv")
    with pytest.raises(SnapshotDamaged, match="header is not as it was written"):
        read_header(tmp_path / "other.kv")


def test_a_digest_tells_tokens_and_their_order() -> None:
    digests = {tokens_digest(ids) for ids in ([1, 2, 3], [1, 3, 2], [1, 2], [1, 2, 3, 0], [])}
    assert len(digests) == 5


# ---- the folder ----


def test_a_scan_finds_what_can_be_read_and_removes_what_nobody_can(tmp_path: Path) -> None:
    good, foreign, later, broken, fresh, old = (session_file(ANA, SessionId(i)) for i in "abcdef")
    write(tmp_path, good)
    write(tmp_path, foreign, fingerprint="another model")
    write(tmp_path, later, fingerprint="f+weights that were given to a server that is gone")
    write(tmp_path, broken).write_bytes(b"\0" * 100)
    (tmp_path / (fresh + PART)).touch()
    (tmp_path / (old + PART)).touch()
    os.utime(tmp_path / (old + PART), (0, 0))
    (tmp_path / "notes.txt").touch()
    assert SnapshotFolder(tmp_path, budget_bytes=1).scan("f") == {"a": header()}
    assert {file.name for file in tmp_path.iterdir()} == {good, foreign, fresh + PART, "notes.txt"}


def test_one_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    names = [session_file(ANA, SessionId(i)) for i in "abc"]
    write(tmp_path, names[0])
    (tmp_path / names[1]).mkdir()
    write(tmp_path, names[2])
    folder = SnapshotFolder(tmp_path, budget_bytes=1)
    assert folder.scan("f") == {"a": header(), "c": header()}
    with pytest.raises(OSError, match=names[1]):
        folder.remove_orphans(folder.names(), set())
    assert folder.names() == [names[1]]


def test_after_an_update_of_the_weights_others_are_looked_for(tmp_path: Path) -> None:
    base, mine, theirs = (session_file(ANA, SessionId(i)) for i in "abc")
    write(tmp_path, base)
    write(tmp_path, mine, fingerprint="f+mine")
    write(tmp_path, theirs, fingerprint="f+theirs")
    folder = SnapshotFolder(tmp_path, budget_bytes=1)
    assert set(folder.scan("f", weights="+mine")) == {"b"}
    assert set(folder.names()) == {base, mine}


def test_a_purge_removes_one_owner_s(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    mine = [session_file(ANA, SessionId(i)) for i in "ab"]
    others = session_file(BO, SessionId("c"))
    for name in (mine[0], mine[1] + PART, others):
        (folder / name).touch()
    assert drop_session_files(tmp_path, ANA) == 2
    assert [file.name for file in folder.iterdir()] == [others]
    assert drop_session_files(tmp_path / "no such cache", ANA) == 0


def test_names_tell_the_session() -> None:
    name = session_file(ANA, SessionId("5c0e"))
    assert (session_of(name), session_of(name + PART), session_of("data.mdb")) == ("5c0e", "5c0e", None)
    assert "ana" not in name


def test_orphans_go(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path, budget_bytes=1)
    kept, gone = session_file(ANA, SessionId("kept")), session_file(BO, SessionId("gone"))
    for name in (kept, gone, gone + PART):
        (tmp_path / name).touch()
    assert folder.remove_orphans([kept, gone], {SessionId("kept")}) == 1
    assert folder.names() == [kept]


class Budget:
    """Files of 100 bytes in a folder for 300."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = SnapshotFolder(path, budget_bytes=300)
        for session_id, used_at in (("old", 1000), ("older", 500), ("new", 2000)):
            name = session_file(ANA, SessionId(session_id))
            (path / name).write_bytes(bytes(100))
            self.folder.touch(name, used_at)

    def make_room(self, session_id: str, size: int, used_at: float, **used: float) -> list[str] | None:
        known = {SessionId(name): at for name, at in used.items()}
        name = session_file(ANA, SessionId(session_id))
        gone = self.folder.make_room(name, size, used_at=used_at, used=known)
        return None if gone is None else [str(session_of(file)) for file in gone]

    def left(self) -> set[str]:
        return {str(session_of(name)) for name in self.folder.names()}


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    return Budget(tmp_path)


def test_the_oldest_used_go_first(budget: Budget) -> None:
    assert budget.make_room("newest", 150, 3000) == ["older", "old"]
    assert budget.left() == {"new"}


def test_what_a_server_knows_of_use_comes_before_the_file_s_time(budget: Budget) -> None:
    assert budget.make_room("newest", 100, 3000, older=2500) == ["old"]


def test_nothing_used_since_gives_way(budget: Budget) -> None:
    assert budget.make_room("between", 150, 800) is None
    assert budget.make_room("too large", 301, 3000) is None
    assert budget.left() == {"old", "older", "new"}


def test_a_file_takes_the_place_of_its_former_self(budget: Budget) -> None:
    assert budget.make_room("new", 100, 2000) == ["new"], "there is no room for both, and no other has to go for it"
    assert budget.make_room("new", 100, 2000) == []
    assert budget.left() == {"old", "older"}


def test_a_former_file_counts_until_the_new_one_is_there(budget: Budget) -> None:
    assert budget.make_room("old", 150, 1000) == ["older", "old"]
    assert budget.left() == {"new"}


def test_a_former_file_stays_where_both_fit(budget: Budget) -> None:
    (budget.path / session_file(ANA, SessionId("older"))).unlink()
    half = session_file(ANA, SessionId("new")) + PART
    (budget.path / half).write_bytes(bytes(250))  # what a crash has left: the new one takes its place
    assert budget.make_room("new", 100, 2000) == []
    assert budget.left() == {"old", "new"}


# ---- rates ----


def test_reading_is_tried_until_both_rates_are_known() -> None:
    rates = Rates()
    assert rates.least_tokens(10**9) == MIN_TOKENS
    rates.prefilled_tokens.saw(2000, seconds=2.0)
    assert rates.least_tokens(10**9) == MIN_TOKENS
    rates.read_bytes.saw(10**8, seconds=0.1)  # 1 GB takes a second, in which 1,000 tokens are prefilled
    assert rates.least_tokens(10**9) == 1000
    assert rates.least_tokens(10**6) == MIN_TOKENS


def test_a_rate_follows_what_is_measured_and_is_forgotten() -> None:
    now = time.monotonic()
    rate = Rate(clock=lambda: now)
    assert rate.value() is None
    rate.saw(100, seconds=1.0)
    rate.saw(300, seconds=1.0)
    assert rate.value() == 200
    now += 601
    assert rate.value() is None
