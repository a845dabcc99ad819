"""`KVBlobs.verify`: what is damaged, belongs to nothing, or is of facts that are gone."""

import gc
import pickle
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest
import torch
from small_kv import delete, encoding, entries, flipped, kv, overwrite, raw

from memstore import CorruptBlob, Encoding, FactId, KVBlobs, MemStore, MemStoreSettings, OwnerId
from memstore.kv.verify import BlobReport
from memstore.verify import alive_in

ANA, BO, SEEN = OwnerId("ana"), OwnerId("bo"), FactId("seen")
KIND = {"fingerprint": "model-a", "policy": "anchor:4"}
LONG_AGO = (1).to_bytes(8, "big")


@pytest.fixture
def filled(blobs: KVBlobs) -> KVBlobs:
    """Encodings 0 to 9 of Ana's facts "0" to "9", each of which saw `SEEN`, and 10 of Bo's."""
    for number in range(10):
        blobs.put(encoding(number, fact_id=FactId(str(number)), saw=((SEEN, 1),)), *kv(number))
    blobs.put(encoding(10, owner=BO, fact_id=FactId("0"), saw=((FactId("1"), 1),)), *kv(10))
    blobs.set_anchors(ANA, "anchor:4", [FactId("0"), FactId("1")])
    return blobs


def loadable(blobs: KVBlobs) -> set[int]:
    found = set()
    for number in range(11):
        loaded = blobs.load(encoding(number).id)
        if loaded is not None:
            assert torch.equal(loaded.k, kv(number)[0])
            assert torch.equal(loaded.v, kv(number)[1])
            found.add(number)
    return found


def key_of(blobs: KVBlobs, number: int, table: str) -> bytes:
    """The one key in a table that belongs to an encoding."""
    name = encoding(number).id.encode()
    if table == "slots":
        return raw(blobs, "ids")[name][:52]
    [key] = [key for key in raw(blobs, table) if name in key]
    return key


def flip_blob(blobs: KVBlobs) -> None:
    key = key_of(blobs, 3, "blobs")
    overwrite(blobs, key, flipped(raw(blobs)[key], 5000))


def plant_pickle(blobs: KVBlobs) -> None:
    overwrite(blobs, key_of(blobs, 3, "blobs"), pickle.dumps({"k": 1}))


def exchange_blobs(blobs: KVBlobs) -> None:
    overwrite(blobs, key_of(blobs, 3, "blobs"), raw(blobs)[key_of(blobs, 4, "blobs")])


def flip_description(blobs: KVBlobs) -> None:
    slot = key_of(blobs, 3, "slots")
    overwrite(blobs, slot, flipped(raw(blobs, "slots")[slot], 300), table="slots")


def empty_description(blobs: KVBlobs) -> None:
    overwrite(blobs, key_of(blobs, 3, "slots"), b"", table="slots")


def lose(table: str) -> Callable[[KVBlobs], None]:
    def damage(blobs: KVBlobs) -> None:
        delete(blobs, key_of(blobs, 3, table), table=table)

    damage.__name__ = f"lose_{table}"
    return damage


def misplace(blobs: KVBlobs) -> None:
    overwrite(blobs, encoding(3).id.encode(), raw(blobs, "ids")[encoding(4).id.encode()], table="ids")


def cut_place(blobs: KVBlobs) -> None:
    overwrite(blobs, encoding(3).id.encode(), b"short", table="ids")


ENCODING_3 = [
    (flip_blob, "corrupt"),
    (plant_pickle, "corrupt"),
    (exchange_blobs, "corrupt"),
    (flip_description, "corrupt"),
    (empty_description, "corrupt"),
    *((lose(table), "dangling") for table in ("ids", "order", "blobs", "saw")),
    (misplace, "dangling"),
    (cut_place, "dangling"),
]


@pytest.mark.parametrize(("damage", "counted_as"), ENCODING_3, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_encoding_is_removed_and_can_be_put_anew(
    filled: KVBlobs, damage: Callable[[KVBlobs], None], counted_as: str
) -> None:
    """Case M16: of one encoding; the others stay as they are."""
    damage(filled)
    before = {table: raw(filled, table) for table in entries(filled)}
    report = filled.verify(repair=False)
    assert getattr(report, counted_as) >= 1
    assert (report.encodings, report.orphans, report.repaired) == (11, 0, 0)
    assert report.corrupt == (counted_as == "corrupt")
    assert {table: raw(filled, table) for table in entries(filled)} == before

    corrupt_before = filled.corrupt_count
    repaired = filled.verify(repair=True)
    assert repaired.repaired >= 1
    assert filled.corrupt_count == corrupt_before + (counted_as == "corrupt")
    left = {"slots": 10, "ids": 10, "order": 10, "blobs": 10, "saw": 10, "anchors": 1}
    assert entries(filled) == left
    clean = filled.verify(repair=False)
    assert clean == BlobReport(10, 0, 0, 0, 0, sum(map(len, raw(filled).values())))
    assert loadable(filled) == set(range(11)) - {3}
    assert filled.current(ANA, [(FactId("3"), 1)], **KIND) == {}

    assert filled.put(encoding(3, fact_id=FactId("3"), saw=((SEEN, 1),)), *kv(3))
    assert loadable(filled) == set(range(11))
    assert filled.verify(repair=False)[:5] == (11, 0, 0, 0, 0)


def test_a_description_that_is_lost_takes_its_rows_along_once_no_shard_can_be_waiting(filled: KVBlobs) -> None:
    name = encoding(3).id.encode()
    delete(filled, key_of(filled, 3, "slots"), table="slots")
    assert filled.verify(repair=True).dangling == 1, "the row in `saw`, as shard 0 writes it with the description"
    assert filled.has(encoding(3).id)
    slot = raw(filled, "ids")[name][:52]
    delete(filled, key_of(filled, 3, "order"), table="order")
    overwrite(filled, name, slot + LONG_AGO, table="ids")
    overwrite(filled, LONG_AGO + name, b"", table="order")
    report = filled.verify(repair=True)
    assert (report.dangling, report.repaired) == (1, 1)
    assert entries(filled) == {"slots": 10, "ids": 10, "order": 10, "blobs": 10, "saw": 10, "anchors": 1}


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("ids", b"f" * 32, b"\0" * 52 + LONG_AGO),
        ("order", LONG_AGO + b"f" * 32, b""),
        ("order", b"\xff\xfe", b""),
        ("blobs", b"\1" * 32 + b"f" * 32 + b"/\0\0", b"value"),
        ("blobs", b"short", b"value"),
        ("saw", b"\1" * 32 + b"f" * 32, b""),
        ("saw", b"\1" * 32 + b"0" * 31 + b"3", b""),
        ("slots", b"\1" * 52, b"value"),
    ],
)
def test_a_row_that_belongs_to_nothing_is_removed(filled: KVBlobs, table: str, key: bytes, value: bytes) -> None:
    before = {name: raw(filled, name) for name in entries(filled)}
    overwrite(filled, key, value, table=table)
    report = filled.verify(repair=True)
    assert report.dangling + report.corrupt == report.repaired == 1
    assert {name: raw(filled, name) for name in entries(filled)} == before


def test_anchors_of_nobody_are_removed_but_not_while_they_may_be_waiting_for_encodings(filled: KVBlobs) -> None:
    filled.set_anchors(OwnerId("new"), "anchor:4", [FactId("0")])
    assert filled.verify(repair=True)[1:5] == (0, 0, 0, 0)
    assert filled.anchors(OwnerId("new"), "anchor:4") == ("0",)
    [key] = [key for key in raw(filled, "anchors") if not any(s.startswith(key[:16]) for s in raw(filled, "slots"))]
    overwrite(filled, key, flipped(raw(filled, "anchors")[key], 100), table="anchors")
    assert filled.anchors(OwnerId("new"), "anchor:4") == ()
    assert filled.verify(repair=True)[1:5] == (1, 0, 0, 1)
    assert filled.anchors(ANA, "anchor:4") == ("0", "1")


def test_encodings_of_facts_that_are_gone_are_orphans(filled: KVBlobs) -> None:
    filled.put(encoding(20, fact_id=FactId("5"), policy="window:8"), *kv(20))
    filled.put(encoding(21, fact_id=FactId("6"), policy="window:8", fact_version=2), *kv(21))
    asked: dict[OwnerId, list[tuple[FactId, int]]] = {}

    def alive(owner: OwnerId, facts: Sequence[tuple[FactId, int]]) -> Collection[FactId]:
        assert len({fact_id for fact_id, _ in facts}) == len(facts)
        asked.setdefault(owner, []).extend(facts)
        # Ana's fact 5 is gone, 6 is at version 2, 7 at version 4.
        at = {FactId(str(number)): 1 for number in range(10)} | {FactId("6"): 2, FactId("7"): 4}
        return {fact_id for fact_id, version in facts if fact_id != "5" and at[fact_id] == version}

    report = filled.verify(alive=alive, repair=False)
    assert report[:5] == (13, 0, 4, 0, 0)
    assert sorted(asked[ANA]) == sorted([*((FactId(str(number)), 1) for number in range(10)), (FactId("6"), 2)])
    assert asked[BO] == [(FactId("0"), 1)]
    assert filled.verify(alive=alive, repair=True)[:5] == (13, 0, 4, 0, 4)
    assert loadable(filled) == {0, 1, 2, 3, 4, 8, 9, 10}
    assert filled.load(encoding(20).id) is None
    assert filled.load(encoding(21).id) is not None
    assert filled.verify(alive=alive, repair=True)[:5] == (9, 0, 0, 0, 0)


def test_the_records_are_asked_in_batches_and_outside_of_transactions(
    blobs: KVBlobs,
) -> None:
    for number in range(1100):
        blobs.put(encoding(number, fact_id=FactId(str(number))), *kv(1))
    batches = []

    def alive(_: OwnerId, facts: Sequence[tuple[FactId, int]]) -> Collection[FactId]:
        batches.append(len(facts))
        blobs.compact()  # which waits until no transaction is open
        return [fact_id for fact_id, _ in facts]

    assert blobs.verify(alive=alive, repair=True)[:5] == (1100, 0, 0, 0, 0)
    assert sum(batches) == 1100
    assert max(batches) <= 500


def test_an_encoding_that_was_exchanged_meanwhile_is_not_removed_for_the_old_one(filled: KVBlobs) -> None:
    def alive(owner: OwnerId, facts: Sequence[tuple[FactId, int]]) -> Collection[FactId]:
        if owner == ANA:
            filled.put(encoding(30, fact_id=FactId("3"), fact_version=2), *kv(30))
        return {fact_id for fact_id, version in facts if fact_id != "3"}

    assert filled.verify(alive=alive, repair=True)[:5] == (11, 0, 1, 0, 0)
    assert filled.load(encoding(30).id) is not None


def test_alive_is_what_the_records_have_at_that_version(store: MemStore) -> None:
    fact, changed = store.add(ANA, "Rex is two"), store.add(ANA, "Tom is a cat")
    store.update(ANA, changed.id, text="Tom is a dog")
    alive = alive_in(store)
    assert set(alive(ANA, [(fact.id, 1), (changed.id, 1), (FactId("gone"), 1)])) == {fact.id}
    assert set(alive(ANA, [(fact.id, 2), (changed.id, 2)])) == {changed.id}
    assert not alive(BO, [(fact.id, 1)])


def test_kv_that_a_server_keeps_for_itself_is_no_orphan(store: MemStore) -> None:
    assert set(alive_in(store)(OwnerId("\0server"), [(FactId("a"), 1), (FactId("b"), 2)])) == {"a", "b"}


def test_no_description_is_kept_for_the_comparison_with_the_records(filled: KVBlobs) -> None:
    def descriptions() -> int:
        gc.collect()
        return sum(type(one) is Encoding for one in gc.get_objects())

    before, during = descriptions(), []

    def alive(_: OwnerId, facts: Sequence[tuple[FactId, int]]) -> Collection[FactId]:
        during.append(descriptions())
        return [fact_id for fact_id, _ in facts]

    assert filled.verify(alive=alive, repair=False)[:5] == (11, 0, 0, 0, 0)
    assert during == [before] * 2


def test_every_shard_is_read(tmp_path: Path, settings: MemStoreSettings) -> None:
    for shard in (1, 0):
        with KVBlobs(tmp_path, shard=shard, settings=settings) as blobs:
            blobs.put(encoding(1), *kv(shard))
    with KVBlobs(tmp_path, settings=settings) as blobs:
        assert blobs.verify(repair=False)[1:5] == (0, 0, 0, 0)
        [key] = [key for key in raw(blobs) if key.endswith(b"\0\1")]
        overwrite(blobs, key, flipped(raw(blobs)[key], 999))
        assert blobs.verify(repair=True)[:5] == (1, 1, 0, 0, 1)
        assert set(entries(blobs).values()) == {0}


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def test_no_pickle_is_ever_loaded(tmp_path: Path, settings: MemStoreSettings) -> None:
    """Case M26."""
    marker, directory = tmp_path / "marker", tmp_path / "kv"
    planted = pickle.dumps(Marker(marker))
    pickle.loads(planted).close()
    assert marker.exists(), "the pickle does what it is planted for"
    marker.unlink()
    with KVBlobs(directory, settings=settings) as blobs:
        blobs.set_anchors(ANA, "anchor:4", [FactId("0")])
        for number in range(3):
            blobs.put(encoding(number, fact_id=FactId(str(number))), *kv(number))
        overwrite(blobs, key_of(blobs, 0, "blobs"), planted)
        overwrite(blobs, key_of(blobs, 1, "slots"), planted, table="slots")
        overwrite(blobs, key_of(blobs, 2, "ids"), planted, table="ids")
        overwrite(blobs, next(iter(raw(blobs, "anchors"))), planted, table="anchors")
        with pytest.raises(CorruptBlob):
            blobs.load(encoding(0).id)
        assert blobs.load(encoding(2).id) is None
        assert set(blobs.current(ANA, [(FactId(str(number)), 1) for number in range(3)], **KIND)) == {"2"}
        assert blobs.anchors(ANA, "anchor:4") == ()
        assert blobs.verify(repair=True)[1:5] == (2, 0, 2, 4)
        assert entries(blobs) == dict.fromkeys(entries(blobs), 0)
    names = ("x.pkl", "data.mdb.compacting", "lock.mdb", "open.lock", "data.mdb.damaged", "data.mdb")
    for name in names:
        (directory / name).write_bytes(planted)
        with KVBlobs(directory, settings=settings) as blobs:
            blobs.put(encoding(1), *kv(1))
            assert blobs.verify(repair=True)[1:5] == (0, 0, 0, 0)
            assert blobs.load(encoding(1).id) is not None
            assert blobs.corrupt_count == (name == "data.mdb")
    assert not marker.exists()
