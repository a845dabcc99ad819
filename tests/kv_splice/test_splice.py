"""The splice against RoPE of the stored key at its new position, and what it must never touch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_neox

from kv_splice import RopeSpec, SpliceError, UnsupportedDevice, splice, splice_reference, warm_up

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Root mean square of the error over that of the result: rounding once gives a third of an epsilon.
RMS = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
ABSENT = float("nan")


@dataclass
class Call:
    """Arguments of one splice over pools that hold NaN."""

    arena_k: Tensor
    arena_v: Tensor
    cos_sin: Tensor
    slots: Tensor
    k_pools: list[Tensor]
    v_pools: list[Tensor]
    rows: Tensor | None
    is_neox: bool = True

    def run(self) -> None:
        splice(
            self.arena_k,
            self.arena_v,
            self.cos_sin,
            self.slots,
            self.k_pools,
            self.v_pools,
            rows=self.rows,
            is_neox=self.is_neox,
        )

    def run_reference(self) -> None:
        splice_reference(
            self.arena_k,
            self.arena_v,
            rows=self.rows,
            cos_sin=self.cos_sin,
            slots=self.slots,
            k_pools=self.k_pools,
            v_pools=self.v_pools,
            is_neox=self.is_neox,
        )


def call(
    num_tokens: int = 63,
    *,
    layers: int = 3,
    heads: int = 3,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    source: torch.dtype | None = None,
    is_neox: bool = True,
    padding: int = 0,
) -> Call:
    """`padding` elements lie between two tokens of a pool."""
    torch.manual_seed(3)
    capacity, num_slots = num_tokens + 9, num_tokens + 31
    arena_k, arena_v = torch.randn(2, layers, capacity, heads, head_dim).to(source or dtype)
    spec = RopeSpec(head_dim=head_dim, rotary_dim=rotary_dim or head_dim, is_neox=is_neox, base=1e4)

    def pool() -> Tensor:
        memory = torch.full((num_slots, heads * head_dim + padding), ABSENT, dtype=dtype)
        return memory[:, : heads * head_dim].unflatten(1, (heads, head_dim))

    return Call(
        arena_k,
        arena_v,
        spec.cos_sin(torch.randint(0, 4000, (num_tokens,))),
        torch.randperm(num_slots)[:num_tokens],
        [pool() for _ in range(layers)],
        [pool() for _ in range(layers)],
        torch.randperm(capacity)[:num_tokens],
        is_neox,
    )


def expected_keys(it: Call, layer: int) -> Tensor:
    """RoPE of the stored keys, by transformers, in fp32."""
    rows = torch.arange(it.slots.numel()) if it.rows is None else it.rows
    keys = it.arena_k[layer, rows].float().transpose(0, 1)[None]
    rotary_dim = it.cos_sin.shape[1]
    cos, sin = (torch.cat((half, half), dim=-1)[None] for half in it.cos_sin.chunk(2, dim=-1))
    turn = apply_neox if it.is_neox else apply_interleaved
    rotated, _ = turn(keys[..., :rotary_dim], keys[..., :rotary_dim], cos, sin)
    return torch.cat((rotated, keys[..., rotary_dim:]), dim=-1)[0].transpose(0, 1)


def check(it: Call, run: Callable[[Call], None] = Call.run) -> None:
    run(it)
    dtype = it.k_pools[0].dtype
    rows = torch.arange(it.slots.numel()) if it.rows is None else it.rows
    untouched = torch.ones(it.k_pools[0].shape[0], dtype=torch.bool)
    untouched[it.slots] = False
    for layer, (k_pool, v_pool) in enumerate(zip(it.k_pools, it.v_pools, strict=True)):
        keys, expected = k_pool[it.slots].float(), expected_keys(it, layer)
        torch.testing.assert_close(keys, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        if keys.numel():
            assert (keys - expected).square().mean().sqrt() <= RMS[dtype] * expected.square().mean().sqrt()
        assert torch.equal(v_pool[it.slots], it.arena_v[layer, rows].to(dtype))
        assert k_pool[untouched].isnan().all()
        assert v_pool[untouched].isnan().all()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
PATHS = pytest.mark.parametrize("run", [Call.run, Call.run_reference], ids=["fast", "reference"])


@PATHS
@NEOX
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
def test_shapes(head_dim: int, partial: bool, dtype: torch.dtype, is_neox: bool, run: Callable[[Call], None]) -> None:
    rotary_dim = head_dim // 2 if partial else head_dim
    check(call(head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, is_neox=is_neox), run)


@PATHS
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 1000])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_lengths_and_heads(num_tokens: int, heads: int, run: Callable[[Call], None]) -> None:
    check(call(num_tokens, heads=heads, dtype=torch.bfloat16), run)


@PATHS
@NEOX
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_source_is_rounded_once(dtype: torch.dtype, is_neox: bool, run: Callable[[Call], None]) -> None:
    check(call(dtype=dtype, source=torch.float32, is_neox=is_neox), run)


@pytest.mark.parametrize("dtype", DTYPES)
@NEOX
def test_the_fast_path_rounds_like_the_reference(dtype: torch.dtype, is_neox: bool) -> None:
    fast, plain = (call(1000, dtype=dtype, is_neox=is_neox) for _ in range(2))
    fast.run()
    plain.run_reference()
    for ours, theirs in zip(fast.k_pools + fast.v_pools, plain.k_pools + plain.v_pools, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if dtype == torch.float32 else 0, equal_nan=True)


def test_pools_whose_tokens_are_apart_keep_what_lies_between() -> None:
    it = call(dtype=torch.bfloat16, padding=32)
    between = [pool.as_strided((pool.shape[0], 32), (pool.stride(0), 1), 192) for pool in it.k_pools]
    for gap in between:
        gap.fill_(7.0)
    check(it)
    assert all(bool((gap == 7.0).all()) for gap in between)


def test_a_blob_needs_no_rows() -> None:
    it = call(dtype=torch.bfloat16)
    it.rows = None
    it.arena_k, it.arena_v = it.arena_k[:, :63].contiguous(), it.arena_v[:, :63].contiguous()
    check(it)


def test_a_view_of_a_larger_arena() -> None:
    it = call(dtype=torch.bfloat16)
    it.rows = None
    it.arena_k, it.arena_v = it.arena_k[:, 4:67], it.arena_v[:, 4:67]
    check(it)


def test_work_is_shared_among_threads_whatever_their_number() -> None:
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            check(call(1000, layers=5, heads=3, dtype=torch.bfloat16))
            check(call(3000, layers=1, heads=3, dtype=torch.bfloat16))
    finally:
        torch.set_num_threads(before)


def test_nan_and_infinity_stay_what_they_are() -> None:
    it = call(4, layers=1, heads=1, dtype=torch.bfloat16)
    it.arena_k[:] = torch.tensor(float("nan"))
    it.arena_v[:] = torch.tensor(float("inf"))
    it.run()
    assert it.k_pools[0][it.slots].isnan().all()
    assert it.v_pools[0][it.slots].isposinf().all()


def test_warm_up_runs_for_every_dtype() -> None:
    for dtype in DTYPES:
        warm_up(dtype, dtype)
        warm_up(torch.float32, dtype)


def with_slots(it: Call, index: int, value: int) -> Call:
    slots = it.slots.clone()
    slots[index] = value
    return replace(it, slots=slots)


def with_rows(it: Call, index: int, value: int) -> Call:
    rows = it.slots.clone() if it.rows is None else it.rows.clone()
    rows[index] = value
    return replace(it, rows=rows)


MISTAKES: dict[str, tuple[Callable[[Call], Call], str]] = {
    "slot past the pool": (lambda it: with_slots(it, 5, it.k_pools[0].shape[0]), "slots from .* leave"),
    "negative slot": (lambda it: with_slots(it, 5, -1), "slots from -1"),
    "repeated slot": (lambda it: with_slots(it, 5, int(it.slots[9])), "slots repeat"),
    "slots of int32": (lambda it: replace(it, slots=it.slots.int()), "slots is torch.int32"),
    "slots in two dimensions": (lambda it: replace(it, slots=it.slots[None]), "slots is .* of shape"),
    "row past the arena": (lambda it: with_rows(it, 5, it.arena_k.shape[1]), "rows from .* leave"),
    "negative row": (lambda it: with_rows(it, 5, -3), "rows from -3"),
    "too few rows": (lambda it: replace(it, rows=torch.arange(7)), "7 rows for 63 slots"),
    "blob of another length": (lambda it: replace(it, rows=None), "a blob of 72 tokens"),
    "cos_sin too short": (lambda it: replace(it, cos_sin=it.cos_sin[:-1]), "cos_sin has shape"),
    "cos_sin too wide": (lambda it: replace(it, cos_sin=it.cos_sin.repeat(1, 2)), "cos_sin turns 128 of 64"),
    "cos_sin of odd width": (lambda it: replace(it, cos_sin=it.cos_sin[:, :5]), "cos_sin turns 5"),
    "cos_sin in bf16": (lambda it: replace(it, cos_sin=it.cos_sin.bfloat16()), "cos_sin is torch.bfloat16"),
    "arena of another dtype": (lambda it: replace(it, arena_k=it.arena_k.half()), "arena_k is torch.float16"),
    "arenas of two shapes": (lambda it: replace(it, arena_v=it.arena_v[:, :-1]), "arenas have shapes"),
    "arena of three dimensions": (
        lambda it: replace(it, arena_k=it.arena_k[0], arena_v=it.arena_v[0]),
        "arenas have shapes",
    ),
    "arena with heads apart": (
        lambda it: replace(it, arena_v=it.arena_v.transpose(2, 3).contiguous().transpose(2, 3)),
        "arena_v has strides",
    ),
    "too few pools": (lambda it: replace(it, k_pools=it.k_pools[:2]), "2 key and 3 value pools"),
    "no pools": (lambda it: replace(it, k_pools=[], v_pools=[]), "0 key and 0 value pools"),
    "pool of another shape": (
        lambda it: replace(it, v_pools=[*it.v_pools[:2], it.v_pools[2][:, :2]]),
        r"v_pools\[2\] has shape",
    ),
    "pool of another dtype": (
        lambda it: replace(it, v_pools=[*it.v_pools[:2], it.v_pools[2].float()]),
        r"v_pools\[2\] is torch.float32",
    ),
    "pool with heads apart": (
        lambda it: replace(it, k_pools=[p.transpose(1, 2).contiguous().transpose(1, 2) for p in it.k_pools]),
        r"k_pools\[0\] has strides",
    ),
    "pools of fp64": (
        lambda it: replace(it, k_pools=[p.double() for p in it.k_pools], v_pools=[p.double() for p in it.v_pools]),
        "pools are torch.float64",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_writes_nothing(name: str) -> None:
    it = call(dtype=torch.bfloat16)
    change, message = MISTAKES[name]
    wrong = change(it)
    pools = [*it.k_pools, *it.v_pools, *wrong.k_pools, *wrong.v_pools]
    before = [bits(pool) for pool in pools]
    with pytest.raises(SpliceError, match=message):
        wrong.run()
    assert all(torch.equal(bits(pool), was) for pool, was in zip(pools, before, strict=True))


def test_refuses_a_device_without_data() -> None:
    it = call()
    moved: dict[str, Any] = {name: getattr(it, name).to("meta") for name in ("arena_k", "arena_v", "cos_sin", "slots")}
    with pytest.raises(UnsupportedDevice, match="meta"):
        replace(it, **moved).run()


def bits(pool: Tensor) -> Tensor:
    return pool.contiguous().view(torch.uint8).clone()
