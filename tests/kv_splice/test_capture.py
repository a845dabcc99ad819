"""Facts out of a pool on a CPU, and splices by the model's own table; what a GPU does is tested interpreted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_neox

from kv_splice import (
    ArenaScales,
    QuantiseError,
    RopeSpec,
    SpliceError,
    capture_quantised,
    on_stream,
    quantise,
    splice,
    unrotate_capture,
    warm_up_pools,
)

LAYERS, TOKENS, HEADS, DIM, SLOTS = 2, 9, 3, 64, 20
NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])


class Served(NamedTuple):
    """A pool whose keys transformers has rotated, and what they were."""

    k_pools: list[Tensor]
    v_pools: list[Tensor]
    slots: Tensor
    table: Tensor
    positions: Tensor
    plain_k: Tensor
    plain_v: Tensor


def served(*, is_neox: bool, rotary_dim: int = DIM) -> Served:
    torch.manual_seed(2)
    k, v = torch.randn(2, LAYERS, TOKENS, HEADS, DIM)
    table = RopeSpec(head_dim=DIM, rotary_dim=rotary_dim, is_neox=is_neox, base=1e4).cos_sin(torch.arange(100))
    positions, slots = torch.randint(0, 100, (TOKENS,)), torch.randperm(SLOTS)[:TOKENS]
    cos, sin = (torch.cat((half, half), dim=-1)[None] for half in table[positions].chunk(2, dim=-1))
    turn = apply_neox if is_neox else apply_interleaved
    heads_first = k.transpose(1, 2)
    rotated, _ = turn(heads_first[..., :rotary_dim], heads_first[..., :rotary_dim], cos, sin)
    rotated = torch.cat((rotated, heads_first[..., rotary_dim:]), dim=-1).transpose(1, 2)
    k_pools, v_pools = (list(torch.full((LAYERS, SLOTS, HEADS, DIM), float("nan"))) for _ in range(2))
    for layer in range(LAYERS):
        k_pools[layer][slots], v_pools[layer][slots] = rotated[layer], v[layer]
    return Served(k_pools, v_pools, slots, table, positions, k, v)


@NEOX
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_a_capture_is_the_key_before_rotation(rotary_dim: int, is_neox: bool) -> None:
    it = served(is_neox=is_neox, rotary_dim=rotary_dim)
    for angles, positions in ((it.table[it.positions], None), (it.table, it.positions)):
        k, v = unrotate_capture(it.k_pools, it.v_pools, it.slots, angles, positions=positions, is_neox=is_neox)
        torch.testing.assert_close(k, it.plain_k, rtol=1e-5, atol=1e-5)
        assert torch.equal(v, it.plain_v)


def test_a_capture_in_int8_is_within_half_a_step() -> None:
    it = served(is_neox=True)
    k, v, scales = capture_quantised(*it[:4], positions=it.positions, is_neox=True)
    for got, want, of in ((k, it.plain_k, scales.keys[:, None]), (v, it.plain_v, scales.values[..., None])):
        assert got.dtype == torch.int8
        assert bool(((got * of.float() - want).abs() <= of.float() / 2 + 1e-5).all())


def test_nothing_is_not_a_fact() -> None:
    it = served(is_neox=True)
    with pytest.raises(QuantiseError, match="not empty"):
        capture_quantised(*it[:2], it.slots[:0], it.table, positions=it.positions[:0], is_neox=True)


@NEOX
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_int8", [False, True], ids=["native", "int8"])
def test_a_splice_by_the_models_table_is_one_by_its_rows(
    is_int8: bool, table_dtype: torch.dtype, is_neox: bool
) -> None:
    it = served(is_neox=is_neox)
    k, v, scales = it.plain_k, it.plain_v, None
    if is_int8:
        k, v, of = quantise(k, v)
        scales = ArenaScales(of.keys[:, None], torch.zeros(TOKENS, dtype=torch.int64), of.values)
    table = it.table.to(table_dtype)
    got, want = ([list(torch.zeros(LAYERS, SLOTS, HEADS, DIM)) for _ in "kv"] for _ in range(2))
    splice(k, v, table, it.slots, *got, scales=scales, positions=it.positions, is_neox=is_neox)
    splice(k, v, table[it.positions].float(), it.slots, *want, scales=scales, is_neox=is_neox)
    for ours, theirs in zip(got[0] + got[1], want[0] + want[1], strict=True):
        assert torch.equal(ours, theirs)


def test_a_position_past_the_table_is_named_and_nothing_written() -> None:
    it = served(is_neox=True)
    pools = [list(torch.zeros(LAYERS, SLOTS, HEADS, DIM)) for _ in "kv"]
    positions = it.positions.index_fill(0, torch.tensor([2]), 100)
    with pytest.raises(SpliceError, match=r"positions from \d+ to 100 leave \[0, 100\)"):
        splice(it.plain_k, it.plain_v, it.table, it.slots, *pools, positions=positions, is_neox=True)
    assert not any(bool(pool.any()) for pool in pools[0] + pools[1])


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a negative slot": ({"slots": torch.tensor([0, -1])}, r"slots from -1 to 0 leave \[0, \d+\)"),
    "a slot past the pool": ({"slots": torch.tensor([0, 1 << 40])}, "slots from 0 to 1099511627776"),
    "a negative position": ({"positions": torch.tensor([0, -1])}, "positions from -1 to 0"),
    "no layers": ({"k_pools": [], "v_pools": []}, "0 key and 0 value pools"),
    "too many positions": ({"positions": torch.arange(3)}, "3 positions for 2 slots"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("capture", [unrotate_capture, capture_quantised])
def test_a_capture_reads_nothing_that_is_not_there(capture: Callable[..., Any], name: str) -> None:
    it = served(is_neox=True)
    arguments = {
        "k_pools": it.k_pools,
        "v_pools": it.v_pools,
        "slots": torch.tensor([0, 1]),
        "cos_sin": it.table,
        "positions": torch.tensor([0, 1]),
    }
    changes, message = MISTAKES[name]
    with pytest.raises(SpliceError, match=message):
        capture(**{**arguments, **changes}, is_neox=True)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.int8])
def test_warming_up_leaves_pools_alone(source: torch.dtype) -> None:
    it = served(is_neox=True)
    pools = [pool.to(torch.bfloat16 if source == torch.int8 else source) for pool in it.k_pools]
    before = [pool.clone() for pool in pools]
    warm_up_pools(pools, pools, source, it.table, is_neox=True)
    for pool, was in zip(pools, before, strict=True):
        torch.testing.assert_close(pool, was, rtol=0, atol=0, equal_nan=True)


def test_a_cpu_has_no_streams_to_order() -> None:
    it = served(is_neox=True)
    pools = [list(torch.zeros(LAYERS, SLOTS, HEADS, DIM)) for _ in "kv"]
    no_stream = object()  # never asked for anything
    splice(it.plain_k, it.plain_v, it.table, it.slots, *pools, positions=it.positions, is_neox=True, stream=no_stream)
    assert torch.equal(pools[1][0][it.slots], it.plain_v[0])
    with pytest.raises(ZeroDivisionError), on_stream(no_stream, it.slots):
        _ = 1 // 0
