"""Facts in host memory, read in place and copied in layers; and what is measured before a server's first request."""

from typing import Any

import pytest
import torch
from gpu_cases import Case, angles, assert_same_bits, case, pools

from kv_splice import SpliceError
from kv_splice.facts import Facts, FactScales
from kv_splice.gpu import CHOICES, LAUNCHES, TILES, HostTier, table_of, warm_up
from kv_splice.gpu.launch import kind_of

LAYERS = 5
# Keys and values of a layer of `blob`: 4 tokens of 2 heads of 64.
LAYER_BYTES = {torch.bfloat16: 2 * 4 * 2 * 64 * 2, torch.int8: 2 * 4 * 2 * 64}
INT8 = pytest.mark.parametrize("source", [torch.bfloat16, torch.int8], ids=["native", "int8"])


def blob(source: torch.dtype = torch.bfloat16) -> Case:
    it = case(4, layers=LAYERS, source=source)
    it.rows, it.arena_k, it.arena_v = None, it.arena_k[:, :4].contiguous(), it.arena_v[:, :4].contiguous()
    if it.scales is not None:
        it.scales = it.scales._replace(values=it.scales.values[:, :4])
    return it


def tier(*, layers: int, source: torch.dtype, threshold: int | None = 0) -> HostTier:
    made = HostTier(torch.device("cpu"), buffer_bytes=layers * LAYER_BYTES[source] + 100)
    made.threshold_bytes = threshold
    return made


def check(it: Case, by: HostTier, *, launches: int, **changes: Any) -> None:
    before = LAUNCHES["splice"]
    by.splice(**it.arguments(**changes))
    assert LAUNCHES["splice"] == before + launches
    k_pools, v_pools = it.expected()
    assert_same_bits(it.k_pools, k_pools)
    assert_same_bits(it.v_pools, v_pools)


@INT8
@pytest.mark.parametrize(("layers", "launches"), [(1, 5), (2, 3), (3, 2), (5, 1), (9, 1)])
def test_layers_are_copied_as_many_as_fit(layers: int, launches: int, source: torch.dtype) -> None:
    check(blob(source), tier(layers=layers, source=source), launches=launches)


@INT8
def test_buffers_are_used_again(source: torch.dtype) -> None:
    by = tier(layers=1, source=source)
    for _ in range(2):
        it = blob(source)
        it.arena_k = it.arena_k.flip(0)
        check(it, by, launches=5)


def test_below_the_threshold_one_launch_reads_it_in_place() -> None:
    it = blob()
    nbytes = it.arena_k.nbytes + it.arena_v.nbytes
    check(blob(), tier(layers=1, source=torch.bfloat16, threshold=nbytes + 1), launches=1)
    check(blob(), tier(layers=1, source=torch.bfloat16, threshold=nbytes), launches=5)


def test_before_anything_was_measured_it_is_read_in_place() -> None:
    check(blob(), tier(layers=1, source=torch.bfloat16, threshold=None), launches=1)


def test_a_layer_larger_than_a_buffer_is_read_in_place() -> None:
    check(blob(), tier(layers=0, source=torch.bfloat16), launches=1)


def test_rows_of_an_arena_are_read_in_place() -> None:
    check(case(4, layers=LAYERS), tier(layers=1, source=torch.bfloat16), launches=1)


def test_facts_are_read_in_place() -> None:
    it = blob(torch.int8)
    assert it.scales is not None
    scales = FactScales(it.scales.keys[:, :2], it.scales.values)
    it.scales = it.scales._replace(keys=scales.keys, sets=torch.tensor([0, 1, 1, 1]))
    facts = Facts(torch.tensor([0, 1, 4]), torch.tensor([0, 1]))
    check(it, tier(layers=1, source=torch.int8), launches=1, facts=facts, scales=scales)


@INT8
def test_calibration_measures_both_ways(source: torch.dtype) -> None:
    by = tier(layers=2, source=source, threshold=7)
    k_pools, v_pools = (pools(LAYERS, 8, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    before = LAUNCHES["splice"]
    by.calibrate(k_pools, v_pools, source, angles(torch.arange(9), 64), is_neox=True, sizes=(1, 2), repeats=1)
    # Of each way two runs that do not count and one that does; a launch, and one or more.
    assert LAUNCHES["splice"] - before >= 2 * 3 * 2
    sizes = [LAYERS * LAYER_BYTES[source] // 4 * tokens for tokens in (1, 2)]
    assert by.threshold_bytes in (None, *sizes)


def test_calibration_writes_no_slot_that_is_not_there() -> None:
    """Of memory behind the pools: 3 slots of 8 tokens' memory are a pool's."""
    by = tier(layers=5, source=torch.bfloat16, threshold=7)
    memory = [pools(LAYERS, 8, 2, 64, dtype=torch.bfloat16) for _ in "kv"]
    k_pools, v_pools = ([pool[:3] for pool in of] for of in memory)
    by.calibrate(k_pools, v_pools, torch.bfloat16, angles(torch.arange(9), 64), is_neox=True, sizes=(2, 4), repeats=1)
    assert all(bool(pool[3:].isnan().all()) for of in memory for pool in of)
    assert not any(bool(pool[:2].isnan().any()) for of in memory for pool in of)


def test_calibration_takes_no_pools_that_do_not_fit() -> None:
    it, by = blob(), tier(layers=1, source=torch.bfloat16)
    with pytest.raises(SpliceError, match="5 key and 4 value pools"):
        by.calibrate(it.k_pools, it.v_pools[1:], torch.bfloat16, it.cos_sin, is_neox=True)


@INT8
def test_a_server_measures_before_its_first_request(source: torch.dtype) -> None:
    k_pools, v_pools = (pools(2, 3, 1, 32, dtype=torch.bfloat16) for _ in range(2))
    table = angles(torch.arange(5), 16)
    warm_up(k_pools, v_pools, source, table, is_neox=True, sizes=(2, 1 << 30), repeats=1)
    kind = kind_of("splice", source, table_of(k_pools, v_pools), 16, 2, is_neox=True)
    chosen = dict(CHOICES.items())
    assert chosen[kind] in TILES
    assert {known.size for known in chosen if known.source == source} == {2}
    if source == torch.bfloat16:
        assert chosen[kind._replace(kernel="capture")] in TILES
    assert all(bool(pool.isnan().all()) for pool in k_pools + v_pools)
    # A request of another length takes the nearest that was measured.
    assert CHOICES.tile(kind._replace(size=1024)) == chosen[kind]
