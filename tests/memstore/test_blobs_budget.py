"""The budget of `KVBlobs`: what was used longest ago goes first, what is held stays."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_kv import encoding, entries, kv, raw
from test_two_processes import Other

from memstore import BlobStoreFull, Encoding, EncodingId, FactId, KVBlobs, MemStoreSettings, OwnerId
from memstore.kv.eviction import Holds, Recency

ANA = OwnerId("ana")
KIND = {"fingerprint": "model-a", "policy": "anchor:4"}
SMALL = MemStoreSettings(blob_map_size_bytes=2**20)
FITTING = 6
"""157 kB of tensors in an encoding: six of them and their descriptions fit into 1 MiB, seven do not."""


def large(number: int, **fields: object) -> Encoding:
    return encoding(
        number, fact_id=FactId(str(number)), saw=((FactId("seen"), 1),), token_ids=tuple(range(400)), **fields
    )


def tensors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return kv(number, torch.float32, 400)


def put(blobs: KVBlobs, *numbers: int) -> None:
    for number in numbers:
        assert blobs.put(large(number), *tensors(number))


def present(blobs: KVBlobs) -> set[int]:
    """What is there, found without a use of it."""
    facts = [(FactId(str(number)), 1) for number in range(40)]
    return {int(fact_id) for fact_id in blobs.current(ANA, facts, **KIND)}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[KVBlobs]:
    with KVBlobs(tmp_path / "small", settings=SMALL) as opened:
        yield opened


def test_what_was_used_longest_ago_is_evicted_with_all_its_rows(small: KVBlobs) -> None:
    put(small, *range(FITTING))
    small.load(large(0).id)
    put(small, 6)
    assert present(small) == {0, 2, 3, 4, 5, 6}
    assert small.load(large(1).id) is None
    assert not small.has(large(1).id)
    assert {e.fact_id for e in small.dependents(ANA, FactId("seen"))} == set("023456")
    assert entries(small) == dict.fromkeys(("slots", "ids", "order", "blobs", "saw"), FITTING) | {"anchors": 0}
    assert small.evicted_count == small.stats().evicted == 1
    for number in present(small):
        loaded = small.load(large(number).id)
        assert loaded is not None
        assert torch.equal(loaded.k, tensors(number)[0])


def test_a_look_up_is_no_use_but_a_touch_is(small: KVBlobs) -> None:
    put(small, *range(FITTING))
    assert small.has(large(0).id)
    assert present(small) == set(range(FITTING))
    small.touch([large(1).id, EncodingId("0" * 8)])
    put(small, 6, 7)
    assert present(small) == {1, 3, 4, 5, 6, 7}


def test_all_shards_go_together(tmp_path: Path) -> None:
    for shard in (1, 0):
        with KVBlobs(tmp_path, shard=shard, settings=SMALL) as blobs:
            put(blobs, 0, 1)
    with KVBlobs(tmp_path, settings=SMALL) as blobs:
        put(blobs, 2, 3)
        assert present(blobs) == {0, 1, 2, 3}
        put(blobs, 4)
        assert present(blobs) == {1, 2, 3, 4}
        assert entries(blobs) == {"slots": 4, "ids": 4, "order": 4, "blobs": 5, "saw": 4, "anchors": 0}


def test_a_shard_without_a_description_can_be_evicted(tmp_path: Path) -> None:
    with KVBlobs(tmp_path, shard=1, settings=SMALL) as blobs:
        put(blobs, *range(FITTING + 2))
        assert blobs.load(large(0).id) is None
        assert entries(blobs) == {"slots": 0, "ids": 6, "order": 6, "blobs": 6, "saw": 0, "anchors": 0}


def test_recency_survives_a_reopen(tmp_path: Path) -> None:
    with KVBlobs(tmp_path, settings=SMALL) as blobs:
        put(blobs, *range(FITTING))
        blobs.load(large(0).id)
        blobs.load(large(2).id)
    with KVBlobs(tmp_path, settings=SMALL) as blobs:
        put(blobs, 6, 7, 8, 9)
        assert present(blobs) == {0, 2, 6, 7, 8, 9}
        put(blobs, 10)
        assert present(blobs) == {2, 6, 7, 8, 9, 10}


def test_a_load_writes_nothing_until_it_is_flushed(small: KVBlobs) -> None:
    put(small, 0, 1)
    before = raw(small, "order")
    for number in (0, 1, 0):
        small.load(large(number).id)
    assert raw(small, "order") == before
    small.flush()
    assert [key[8:].decode() for key in raw(small, "order")] == [large(1).id, large(0).id]
    flushed = raw(small, "order")
    small.flush()
    assert raw(small, "order") == flushed


def test_a_load_in_one_process_counts_in_another_once_it_is_flushed(tmp_path: Path) -> None:
    with KVBlobs(tmp_path, settings=SMALL) as blobs:
        put(blobs, *range(FITTING))
        other = Other(tmp_path, SMALL)
        try:
            # `Other` compares with tensors of another size; that the id was found is what matters here.
            other.ask("load", 0)
            put(blobs, 6)
            assert present(blobs) == {1, 2, 3, 4, 5, 6}, "its stamp is still in the memory of the other process"
            other.ask("load", 1)
            blobs.load(large(2).id)
            blobs.flush()
        finally:
            other.end()  # closes
        put(blobs, 7)
        assert present(blobs) == {1, 2, 4, 5, 6, 7}
        put(blobs, 8, 9, 10, 11)
        assert present(blobs) == {2, 7, 8, 9, 10, 11}, "stamped when it was loaded, not when that was flushed"


def test_nothing_changes_where_everything_is_held(small: KVBlobs) -> None:
    put(small, *range(FITTING))
    held = [large(number).id for number in range(FITTING)]
    small.acquire(held)
    small.acquire(held[:1])
    before = {table: raw(small, table) for table in entries(small)}
    with pytest.raises(BlobStoreFull, match="blob_map_size_bytes"):
        put(small, 6)
    assert {table: raw(small, table) for table in entries(small)} == before
    assert small.evicted_count == 0
    small.release(held[:2])
    put(small, 6)
    assert present(small) == {0, 2, 3, 4, 5, 6}, "0 is held once more"
    small.release([held[0], *held[2:]])
    put(small, 7)
    assert present(small) == {2, 3, 4, 5, 6, 7}


def test_a_release_without_a_hold_is_refused(small: KVBlobs) -> None:
    small.acquire([large(0).id])
    with pytest.raises(AssertionError, match="held 1 times, and released 2 times"):
        small.release([large(0).id, large(0).id])
    small.release([large(0).id])
    with pytest.raises(AssertionError, match=large(0).id):
        small.release([large(0).id])


def test_what_is_larger_than_the_budget_evicts_nothing(small: KVBlobs) -> None:
    put(small, 0, 1)
    for tokens in (2670, 4000):  # less than the budget without its pages and description, and more than it
        described = encoding(9, fact_id=FactId("9"), token_ids=tuple(range(tokens)))
        with pytest.raises(BlobStoreFull):
            small.put(described, *kv(9, torch.float32, tokens))
        assert present(small) == {0, 1}
        assert entries(small)["blobs"] == 2


def test_look_ups_that_are_never_spliced_hold_nothing(small: KVBlobs) -> None:
    """Case M19."""
    put(small, *range(FITTING))
    for number in range(1000):
        found = small.current(ANA, [(FactId(str(number % FITTING)), 1)], **KIND)
        ids = [rungs[0].id for rungs in found.values()]
        assert [small.has(encoding_id) for encoding_id in ids] == [True]
        small.acquire(ids)
        small.release(ids)
    assert len(small._writer.holds) == 0
    put(small, *range(10, 10 + FITTING))
    assert present(small) == set(range(10, 10 + FITTING))


def test_a_hundred_loads_leave_an_encoding_as_it_is(small: KVBlobs) -> None:
    """Case M18."""
    put(small, 0)

    def state() -> tuple[list[str], int, int]:
        return [hashlib.sha256(v).hexdigest() for v in raw(small).values()], *small.stats()[:2]

    before = state()
    for _ in range(100):
        loaded = small.load(large(0).id)
        assert loaded is not None
        loaded.k.add_(1)
    small.flush()
    assert state() == before


def test_sizes_that_differ_do_not_fill_the_file_with_gaps(tmp_path: Path) -> None:
    """A value needs free pages side by side; where the file has none left, more is evicted."""
    rng = random.Random(3)
    with KVBlobs(tmp_path, settings=MemStoreSettings(blob_map_size_bytes=64 * 2**20)) as blobs:
        for number in range(400):
            tokens = rng.randint(150, 6400)  # up to a twenty-fifth of the budget
            described = encoding(number, fact_id=FactId(str(number)), token_ids=tuple(range(tokens)))
            k = torch.full((3, tokens, 2, 8), float(number))
            assert blobs.put(described, k, k)
            loaded = blobs.load(described.id)
            assert loaded is not None
            assert torch.equal(loaded.k, k)
            blobs.load(encoding(rng.randrange(number + 1)).id)
        assert blobs.stats().encodings + blobs.evicted_count == 400
        assert blobs.stats().blob_bytes <= 64 * 2**20


def test_stamps_grow_whatever_the_clock_does() -> None:
    times = iter([100, 50, 50, 1000, 7])
    recency = Recency(60, clock=lambda: next(times))
    assert [recency.stamp(), recency.stamp(), recency.stamp(200), recency.stamp(), recency.stamp()] == [
        100,
        101,
        201,
        1000,
        1001,
    ]


def test_a_use_during_a_flush_is_not_lost() -> None:
    recency = Recency(0, clock=lambda: 0)
    first, second = EncodingId("a"), EncodingId("b")
    recency.use(first)
    recency.use(second)
    written = recency.pending()
    assert written == {first: 1, second: 2}
    recency.use(first)
    recency.settle(written)
    assert recency.pending() == {first: 3}


def test_holds_are_counted() -> None:
    holds = Holds()
    first, second = EncodingId("a"), EncodingId("b")
    holds.acquire([first, first, second])
    holds.release([first, second])
    assert (first in holds, second in holds, len(holds)) == (True, False, 1)
    holds.release([first])
    assert first not in holds
