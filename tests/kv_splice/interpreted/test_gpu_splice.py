"""The splice kernel, interpreted, against the reference: not one bit differs, nothing else is written."""

from typing import Any

import pytest
import torch
from gpu_cases import Case, assert_same_bits, case, pools
from torch import Tensor

from kv_splice import ArenaScales, RopeSpec
from kv_splice.facts import Facts, FactScales
from kv_splice.gpu import LAUNCHES, TILES, Tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INT8 = pytest.mark.parametrize("source", [None, torch.int8], ids=["native", "int8"])
NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])


def check(it: Case, **changes: Any) -> None:
    before = LAUNCHES["splice"]
    it.run(**changes)
    assert LAUNCHES["splice"] == before + 1
    k_pools, v_pools = it.expected()
    assert_same_bits(it.k_pools, k_pools)
    assert_same_bits(it.v_pools, v_pools)


@INT8
@NEOX
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (64, 16), (80, 80), (80, 32), (96, 96), (96, 48), (128, 128), (128, 64), (256, 256), (256, 64)],
)
def test_shapes(head_dim: int, rotary_dim: int, dtype: torch.dtype, is_neox: bool, source: torch.dtype | None) -> None:
    check(case(head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, source=source, is_neox=is_neox))


@INT8
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 63])
def test_lengths_and_heads(num_tokens: int, heads: int, source: torch.dtype | None) -> None:
    check(case(num_tokens, layers=1, heads=heads, source=source))


@NEOX
@INT8
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_that_is_tried(tile: Tile, source: torch.dtype | None, is_neox: bool) -> None:
    it = case(21, heads=3, head_dim=80, rotary_dim=32, source=source, is_neox=is_neox)
    it.launch(tile)
    k_pools, v_pools = it.expected()
    assert_same_bits(it.k_pools, k_pools)
    assert_same_bits(it.v_pools, v_pools)


@NEOX
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_source_in_fp32_is_rounded_once(dtype: torch.dtype, is_neox: bool) -> None:
    check(case(dtype=dtype, source=torch.float32, rotary_dim=32, is_neox=is_neox))


@INT8
def test_what_lies_between_tokens_stays(source: torch.dtype | None) -> None:
    it = case(source=source, padding=32)
    width = it.k_pools[0][0].numel()
    gaps = [pool.as_strided((pool.shape[0], 32), (pool.stride(0), 1), width) for pool in it.k_pools + it.v_pools]
    check(it)
    assert all(bool(gap.isnan().all()) for gap in gaps)


def test_keys_and_values_may_be_differently_far_apart() -> None:
    it = case()
    it.v_pools = pools(2, it.k_pools[0].shape[0], 2, 64, dtype=torch.bfloat16, padding=64)
    it.arena_v = torch.cat((it.arena_v, it.arena_v), dim=1)[:, : it.arena_k.shape[1]]
    assert it.arena_k.stride() != it.arena_v.stride()
    check(it)


def test_pools_may_lie_in_each_others_gaps() -> None:
    """A page as some engines lay it out: of each token, all layers' keys and values."""
    it = case()
    page = torch.full((11, 2, 2, 2, 64), float("nan"), dtype=torch.bfloat16)
    it.k_pools, it.v_pools = list(page[:, :, 0].unbind(1)), list(page[:, :, 1].unbind(1))
    check(it)


@INT8
def test_a_blob_needs_no_rows(source: torch.dtype | None) -> None:
    it = case(source=source)
    it.rows, it.arena_k, it.arena_v = None, it.arena_k[:, 2:7], it.arena_v[:, 2:7]
    if it.scales is not None:
        it.scales = it.scales._replace(values=it.scales.values[:, 2:7])
    check(it)


def test_keys_values_and_scales_of_one_slab() -> None:
    it = case(source=torch.int8, heads=3)
    assert it.scales is not None
    _, capacity, heads, head_dim = it.arena_k.shape
    slab = torch.cat((it.arena_k.flatten(2), it.arena_v.flatten(2)), dim=2)
    slab = torch.cat((slab, it.scales.keys.flatten(2).view(torch.int8)), dim=1)
    it.arena_k, it.arena_v = slab.unflatten(2, (2, heads, head_dim)).unbind(2)
    values = torch.cat((it.scales.values, it.scales.values[:, :3]), dim=1)
    keys = slab.view(torch.float16).unflatten(2, (heads, head_dim))
    it.scales = ArenaScales(keys, it.scales.sets + capacity, values)
    check(it)


@pytest.mark.parametrize("dtype", DTYPES)
@NEOX
def test_angles_out_of_the_models_table(dtype: torch.dtype, is_neox: bool) -> None:
    it = case(rotary_dim=32, is_neox=is_neox)
    spec = RopeSpec(head_dim=64, rotary_dim=32, is_neox=is_neox, base=1e4)
    table, positions = spec.cos_sin(torch.arange(50)).to(dtype), torch.tensor([49, 0, 7, 7, 31])
    it.cos_sin = table[positions].float()
    check(it, cos_sin=table, positions=positions)


LENGTHS = [[5], [1, 4], [3, 0, 2, 0, 0, 1], [0, 0, 4], [1] * 9, [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]


def ragged(lengths: list[int], source: torch.dtype | None) -> tuple[Case, dict[str, Any]]:
    """Facts of these lengths, in shuffled places with gaps between them; and the same said with rows."""
    it = case(sum(lengths), source=source)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    order = torch.randperm(len(lengths)).tolist()
    first_rows = torch.zeros(len(lengths), dtype=torch.int64)
    end = 0
    for fact in order:
        end += 2
        first_rows[fact] = end
        end += lengths[fact]
    shape = (2, 2, end, 2, 64)
    numbers = torch.randn(shape).bfloat16() if source is None else torch.randint(-127, 128, shape, dtype=source)
    it.arena_k, it.arena_v = numbers
    of_fact = [(int(first_rows[f]) + i, f) for f, length in enumerate(lengths) for i in range(length)]
    it.rows = torch.tensor([row for row, _ in of_fact])
    scales: FactScales | None = None
    if it.scales is not None:
        keys, values = torch.rand(2, len(lengths), 2, 64).half(), torch.rand(2, end, 2).half()
        it.scales, scales = ArenaScales(keys, torch.tensor([f for _, f in of_fact]), values), FactScales(keys, values)
    return it, {"rows": None, "facts": Facts(offsets, first_rows), "scales": scales}


@INT8
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_facts_of_any_length_by_their_offsets(lengths: list[int], source: torch.dtype | None) -> None:
    it, by_offsets = ragged(lengths, source)
    check(it, **by_offsets)


def test_nothing_to_splice_is_no_launch() -> None:
    it = case(0)
    before = LAUNCHES["splice"]
    it.run()
    assert LAUNCHES["splice"] == before
    assert all(bool(pool.isnan().all()) for pool in it.k_pools + it.v_pools)


def test_nan_and_infinity_stay_what_they_are() -> None:
    it = case()
    it.arena_k[:], it.arena_v[:] = float("nan"), float("inf")
    it.run()
    assert it.k_pools[1][it.slots].isnan().all()
    assert it.v_pools[1][it.slots].isposinf().all()


def test_halves_are_rounded_to_even() -> None:
    it = case(1, layers=1, heads=1, source=torch.float32)
    it.rows, it.cos_sin = torch.tensor([0]), torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
    # Of bf16's eight bits, the last of 1 + 2**-7 is odd and that of 1 + 2**-6 even; 2 - 2**-8 carries to the exponent.
    numbers = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20])
    it.arena_k[0, 0, 0, :5] = it.arena_v[0, 0, 0, :5] = numbers
    it.run()
    want = torch.tensor([1.0, 1 + 2**-6, 2.0, -1.0, 1 + 2**-7])
    assert torch.equal(it.k_pools[0][it.slots[0], 0, :5].float(), want)
    assert torch.equal(it.v_pools[0][it.slots[0], 0, :5].float(), want)


def test_a_pool_of_more_than_2_to_the_31_elements() -> None:
    """Memory that nobody writes is never there: these two pools take 8 GiB of addresses and two pages each."""
    it = case(3, layers=1, heads=16, head_dim=128)
    slots = 2**31 // (16 * 128) + 8
    it.slots = torch.tensor([2, 0, 1])
    want_k, want_v = (pools[0][it.slots] for pools in it.expected())
    it.slots = torch.tensor([slots - 1, 2, slots - 5])
    it.k_pools, it.v_pools = ([huge(slots)] for _ in range(2))
    assert it.k_pools[0][slots - 1].storage_offset() > 2**31
    it.run()
    assert torch.equal(it.k_pools[0][it.slots], want_k)
    assert torch.equal(it.v_pools[0][it.slots], want_v)


def huge(slots: int) -> Tensor:
    return torch.empty(slots, 16, 128, dtype=torch.bfloat16)
