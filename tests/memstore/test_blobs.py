"""`KVBlobs`: what is put comes back bit for bit, or not at all."""

import dataclasses
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_kv import TOKENS, encoding, entries, flipped, kv, overwrite, raw

from memstore import (
    BlobStoreDamaged,
    BlobStoreError,
    BlobStoreInUse,
    CorruptBlob,
    EncodingId,
    FactId,
    InvalidEncoding,
    KVBlobs,
    MemStoreSettings,
    OwnerId,
)

ANA, BO, FACT = OwnerId("ana"), OwnerId("bo"), FactId("fact")
KIND = {"fingerprint": "model-a", "policy": "anchor:4"}


ONE = {"slots": 1, "ids": 1, "order": 1, "blobs": 1, "saw": 0, "anchors": 0}
NOTHING = dict.fromkeys(("slots", "ids", "order", "blobs", "saw", "anchors"), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_are_bit_exact(blobs: KVBlobs, dtype: torch.dtype) -> None:
    k, v = kv(1, dtype)
    k[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-38]).to(dtype)
    assert blobs.put(encoding(1), k, v)
    loaded = blobs.load(encoding(1).id)
    assert loaded is not None
    for got, want in ((loaded.k, k), (loaded.v, v)):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    assert loaded.token_ids == encoding(1).token_ids


def test_views_and_one_tensor_for_both(blobs: KVBlobs) -> None:
    both = torch.arange(2 * 3 * TOKENS * 2 * 8, dtype=torch.float32).reshape(3, TOKENS, 2, 2, 8)
    k, v = both[:, :, 0], both[:, :, 1]
    assert not k.is_contiguous()
    blobs.put(encoding(1), k, v)
    blobs.put(encoding(2, rung=1), k, k)
    first, second = blobs.load(encoding(1).id), blobs.load(encoding(2).id)
    assert first is not None
    assert second is not None
    assert torch.equal(first.k, k)
    assert torch.equal(first.v, v)
    assert torch.equal(second.v, k)


def test_loaded_tensors_are_the_callers_own(blobs: KVBlobs) -> None:
    k, v = kv(1)
    blobs.put(encoding(1), k, v)
    first = blobs.load(encoding(1).id)
    assert first is not None
    first.k.zero_()
    second = blobs.load(encoding(1).id)
    assert second is not None
    assert torch.equal(second.k, k)


def test_the_description_comes_back(blobs: KVBlobs) -> None:
    described = encoding(1, rung=3, saw=((FactId("before"), 2), (FactId("鍵"), 1)), owner=OwnerId("é" * 256))
    k, v = kv(1)
    blobs.put(described, k, v)
    found = blobs.current(described.owner, [(FACT, 1)], **KIND)
    assert found == {FACT: {3: dataclasses.replace(described, nbytes=k.nbytes + v.nbytes)}}


@pytest.mark.parametrize(
    ("fields", "k", "v"),
    [
        ({"id": EncodingId("XYZ")}, kv(1)[0], kv(1)[1]),
        ({"id": EncodingId("")}, kv(1)[0], kv(1)[1]),
        ({"id": EncodingId("a" * 129)}, kv(1)[0], kv(1)[1]),
        ({"token_ids": (1, 2)}, kv(1)[0], kv(1)[1]),
        ({"rung": -1}, kv(1)[0], kv(1)[1]),
        ({}, kv(1)[0], kv(1)[1][:2]),
        ({}, kv(1)[0], kv(1)[1].float()),
        ({}, kv(1)[0][0], kv(1)[1][0]),
        ({"token_ids": ()}, kv(1, tokens=0)[0], kv(1, tokens=0)[1]),
    ],
)
def test_what_does_not_fit_is_refused(
    blobs: KVBlobs, fields: dict[str, object], k: torch.Tensor, v: torch.Tensor
) -> None:
    with pytest.raises(InvalidEncoding):
        blobs.put(encoding(1, **fields), k, v)
    assert entries(blobs) == NOTHING


def test_a_flipped_bit_is_found_wherever_it_is(blobs: KVBlobs) -> None:
    rng = random.Random(7)
    blobs.put(encoding(1), *kv(1))
    [(key, value)] = raw(blobs).items()
    bits = [*range(24 * 8), *rng.sample(range(len(value) * 8), 300), len(value) * 8 - 1]
    for number, bit in enumerate(bits, 1):
        overwrite(blobs, key, flipped(value, bit))
        with pytest.raises(CorruptBlob):
            blobs.load(encoding(1).id)
        assert blobs.corrupt_count == number
        assert blobs.load(encoding(1).id) is None
        assert blobs.current(ANA, [(FACT, 1)], **KIND) == {}
        blobs.put(encoding(1), *kv(1))


@pytest.mark.parametrize("size", [0, 3, 20, 60, -1])
def test_a_cut_value_is_found(blobs: KVBlobs, size: int) -> None:
    blobs.put(encoding(1), *kv(1))
    [(key, value)] = raw(blobs).items()
    overwrite(blobs, key, value[:size])
    with pytest.raises(CorruptBlob):
        blobs.load(encoding(1).id)


def test_the_value_of_another_encoding_is_damage(blobs: KVBlobs) -> None:
    blobs.put(encoding(1), *kv(1))
    blobs.put(encoding(2, fact_id=FactId("other")), *kv(2))
    (key, _), (_, other) = raw(blobs).items()
    overwrite(blobs, key, other)
    with pytest.raises(CorruptBlob):
        blobs.load(EncodingId(key[32:-3].decode()))


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was loaded",)


def test_a_planted_pickle_is_damage(blobs: KVBlobs) -> None:
    """Case M26."""
    blobs.put(encoding(1), *kv(1))
    [key] = raw(blobs)
    overwrite(blobs, key, pickle.dumps(Bomb()))
    with pytest.raises(CorruptBlob):
        blobs.load(encoding(1).id)


def test_a_damaged_description_is_absent_and_can_be_dropped(blobs: KVBlobs) -> None:
    blobs.put(encoding(1), *kv(1))
    [(slot, value)] = raw(blobs, "slots").items()
    overwrite(blobs, slot, value.replace(b'"fact"', b'"tact"'), table="slots")
    assert blobs.current(ANA, [(FACT, 1)], **KIND) == {}
    assert blobs.corrupt_count == 1
    assert blobs.drop_fact(ANA, FACT) == 1
    assert entries(blobs) == NOTHING


def test_a_put_replaces_the_older_encoding(blobs: KVBlobs) -> None:
    blobs.put(encoding(1, saw=((FactId("x"), 1),)), *kv(1))
    blobs.put(encoding(2, saw=((FactId("y"), 1),)), *kv(2))
    assert blobs.current(ANA, [(FACT, 1)], **KIND)[FACT][0].id == encoding(2).id
    assert blobs.load(encoding(1).id) is None
    assert blobs.dependents(ANA, FactId("x")) == []
    assert entries(blobs) == ONE | {"saw": 1}


def test_a_replaced_version_is_never_returned(blobs: KVBlobs) -> None:
    blobs.put(encoding(1), *kv(1))
    assert blobs.current(ANA, [(FACT, 2)], **KIND) == {}
    assert blobs.put(encoding(2, fact_version=2), *kv(2))
    assert not blobs.put(encoding(3, fact_version=1), *kv(3)), "a late encoder"
    assert blobs.current(ANA, [(FACT, 1)], **KIND) == {}
    assert blobs.current(ANA, [(FACT, 2)], **KIND)[FACT][0].id == encoding(2).id
    assert blobs.load(encoding(3).id) is None


def test_fingerprint_policy_rung_and_owner_keep_encodings_apart(blobs: KVBlobs) -> None:
    blobs.put(encoding(1), *kv(1))
    blobs.put(encoding(2, rung=1), *kv(2))
    blobs.put(encoding(3, fingerprint="model-b"), *kv(3))
    blobs.put(encoding(4, policy="window:8"), *kv(4))
    blobs.put(encoding(5, owner=BO), *kv(5))
    blobs.put(encoding(6, fingerprint="model-", policy="aanchor:4"), *kv(6))
    found = blobs.current(ANA, [(FACT, 1), (FactId("unknown"), 1)], **KIND)
    assert {rung: e.id for rung, e in found[FACT].items()} == {0: encoding(1).id, 1: encoding(2).id}
    assert set(found) == {FACT}
    assert blobs.current(ANA, [(FACT, 1)], fingerprint="model-a", policy="window:8")[FACT][0].id == encoding(4).id
    assert blobs.drop_owner(ANA) == 5
    assert blobs.current(BO, [(FACT, 1)], **KIND)[FACT][0].id == encoding(5).id
    assert entries(blobs) == ONE


def test_dependents_are_those_that_saw_it(blobs: KVBlobs) -> None:
    seen = FactId("seen")
    blobs.put(encoding(1, fact_id=seen, saw=((seen, 1),)), *kv(1))
    blobs.put(encoding(2, fact_id=FactId("a"), saw=((seen, 1), (FactId("b"), 1))), *kv(2))
    blobs.put(encoding(3, fact_id=FactId("b"), saw=((seen, 2),)), *kv(3))
    blobs.put(encoding(4, fact_id=FactId("c")), *kv(4))
    blobs.put(encoding(5, owner=BO, saw=((seen, 1),)), *kv(5))
    assert {e.fact_id for e in blobs.dependents(ANA, seen)} == {"a", "b"}
    blobs.drop_fact(ANA, seen)
    assert {e.fact_id for e in blobs.dependents(ANA, seen)} == {"a", "b"}, "to be encoded anew"
    blobs.drop_fact(ANA, FactId("a"))
    assert {e.fact_id for e in blobs.dependents(ANA, seen)} == {"b"}
    assert blobs.drop_encoding(encoding(3).id)
    assert not blobs.drop_encoding(encoding(3).id)
    assert blobs.dependents(ANA, seen) == []


def test_stats(blobs: KVBlobs) -> None:
    assert blobs.stats() == (0, 0, 64 * 2**20, 0)
    k, v = kv(1, torch.float32, 400)
    blobs.put(encoding(1, token_ids=tuple(range(400))), k, v)
    count, size, _, _ = blobs.stats()
    assert count == 1
    assert k.nbytes + v.nbytes <= size <= 2 * (k.nbytes + v.nbytes)


def test_one_instance_per_process(blobs: KVBlobs, tmp_path: Path, settings: MemStoreSettings) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "kv")
    for path in (tmp_path / "kv", tmp_path / "alias"):
        with pytest.raises(BlobStoreInUse):
            KVBlobs(path, settings=settings)
    blobs.close()
    with pytest.raises(BlobStoreError):
        blobs.stats()
    KVBlobs(tmp_path / "kv", settings=settings).close()


def test_read_only(read_only_directory: Path, run_unprivileged: Callable[[str], str]) -> None:
    for path in (read_only_directory, read_only_directory / "inside"):
        code = f"""
from memstore import KVBlobs, StoreError
try:
    KVBlobs({str(path)!r})
except StoreError as error:
    print(type(error).__name__)
"""
        assert run_unprivileged(code) == "BlobStoreReadOnly"


def test_dropping_older_versions_keeps_the_newer_and_other_facts(blobs: KVBlobs) -> None:
    old = encoding(1, policy="window:2", saw=((FactId("seen"), 1),))
    new = encoding(2, fact_version=2)
    other = encoding(3, fact_id=FactId("other"))
    for number, one in enumerate((old, new, other), start=1):
        blobs.put(one, *kv(number))
    assert blobs.drop_older(ANA, FACT, 1) == 0
    assert blobs.drop_older(ANA, FACT, 2) == 1
    assert [blobs.has(one.id) for one in (old, new, other)] == [False, True, True]
    assert blobs.dependents(ANA, FactId("seen")) == []
    report = blobs.verify(repair=False)
    assert (report.encodings, report.corrupt, report.dangling) == (2, 0, 0)


@pytest.mark.parametrize("damage", ["noise", "short", "pickle"])
def test_a_damaged_environment_is_moved_aside(
    tmp_path: Path, settings: MemStoreSettings, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with KVBlobs(tmp_path, settings=settings) as blobs:
        blobs.put(encoding(1), *kv(1))
    data = tmp_path / "data.mdb"
    content = data.read_bytes()
    damaged = {"noise": b"\xa5" * len(content), "short": content[:1000], "pickle": pickle.dumps(Bomb())}[damage]
    data.write_bytes(damaged)
    with KVBlobs(tmp_path, settings=settings) as blobs:
        assert blobs.corrupt_count == 1
        assert blobs.stats().encodings == 0
        assert blobs.put(encoding(2), *kv(2))
    assert "is damaged" in caplog.text
    assert (tmp_path / "data.mdb.damaged").read_bytes() == damaged
    with KVBlobs(tmp_path, settings=settings) as blobs:
        assert blobs.load(encoding(2).id) is not None


def test_a_cache_of_another_release_is_moved_aside_but_is_no_damage(
    tmp_path: Path, settings: MemStoreSettings, caplog: pytest.LogCaptureFixture
) -> None:
    with KVBlobs(tmp_path, settings=settings) as blobs:
        blobs.put(encoding(1), *kv(1))
        with blobs._env.transaction(write=True) as txn:
            txn.put(b"format", b"1")
    with caplog.at_level("INFO"), KVBlobs(tmp_path, settings=settings) as blobs:
        assert blobs.corrupt_count == 0
        assert blobs.stats().encodings == 0
    assert "another release" in caplog.text
    assert "damaged" not in caplog.text
    assert (tmp_path / "data.mdb.other-release").exists()


@pytest.mark.parametrize("damage", ["noise", "other release"])
def test_a_cache_that_is_not_to_be_replaced_stays_as_it_is(
    tmp_path: Path, settings: MemStoreSettings, damage: str
) -> None:
    with KVBlobs(tmp_path, settings=settings) as blobs:
        blobs.put(encoding(1), *kv(1))
        if damage == "other release":
            with blobs._env.transaction(write=True) as txn:
                txn.put(b"format", b"1")
    data = tmp_path / "data.mdb"
    if damage == "noise":
        data.write_bytes(b"\xa5" * data.stat().st_size)
    before, names = data.read_bytes(), sorted(tmp_path.iterdir())
    with pytest.raises(BlobStoreDamaged, match=r"(is damaged|another release).*memstore verify --repair"):
        KVBlobs(tmp_path, settings=settings, replace_damaged=False)
    assert (data.read_bytes(), sorted(tmp_path.iterdir())) == (before, names)
    with KVBlobs(tmp_path, settings=settings) as blobs:
        assert blobs.replaced is not None
        assert blobs.stats().encodings == 0
    with KVBlobs(tmp_path, settings=settings, replace_damaged=False) as blobs:
        assert blobs.replaced is None


def test_an_environment_that_lost_its_end(tmp_path: Path, settings: MemStoreSettings) -> None:
    """Reading behind the end of a mapped file would end the process: a miss or an error is right."""
    with KVBlobs(tmp_path / "whole", settings=settings) as blobs:
        for number in range(12):
            blobs.put(encoding(number, fact_id=FactId(str(number))), *kv(number, torch.float32, TOKENS))
    whole = (tmp_path / "whole" / "data.mdb").read_bytes()
    for pages in range(2, len(whole) // 4096):
        path = tmp_path / str(pages)
        path.mkdir()
        (path / "data.mdb").write_bytes(whole[: pages * 4096])
        with KVBlobs(path, settings=settings) as blobs:
            for number in range(12):
                try:
                    loaded = blobs.load(encoding(number).id)
                except BlobStoreError:
                    continue
                if loaded is not None:
                    assert torch.equal(loaded.k, kv(number, torch.float32)[0])


def test_shards_keep_their_own_heads(tmp_path: Path, settings: MemStoreSettings) -> None:
    for shard in (1, 0):
        with KVBlobs(tmp_path, shard=shard, settings=settings) as blobs:
            blobs.put(encoding(7), *kv(100 + shard))
    for shard in (0, 1):
        with KVBlobs(tmp_path, shard=shard, settings=settings) as blobs:
            loaded = blobs.load(encoding(7).id)
            assert loaded is not None
            assert torch.equal(loaded.k, kv(100 + shard)[0])
    with KVBlobs(tmp_path, shard=2, settings=settings) as blobs:
        assert blobs.load(encoding(7).id) is None
    with KVBlobs(tmp_path, settings=settings) as blobs:
        blobs.put(encoding(8), *kv(8))
        assert entries(blobs) == ONE, "the older one went with all its shards"
