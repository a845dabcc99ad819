"""The splice of int8 against fp64: dequantised, rotated, and rounded once to the pool's dtype."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kv_splice import ArenaScales, RopeSpec, SpliceError, splice, splice_reference, warm_up

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Root mean square of the error over that of the result: rounding once gives a third of an epsilon.
RMS = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
ABSENT = float("nan")


@dataclass
class Call:
    """Arguments of one splice over pools that hold NaN."""

    arena_k: Tensor
    arena_v: Tensor
    scales: ArenaScales
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
            scales=self.scales,
            rows=self.rows,
            is_neox=self.is_neox,
        )

    def run_reference(self) -> None:
        splice_reference(
            self.arena_k,
            self.arena_v,
            scales=self.scales,
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
    is_neox: bool = True,
    padding: int = 0,
) -> Call:
    """`padding` elements lie between two tokens of a pool. There are seven sets of key scales, one of them tiny."""
    torch.manual_seed(3)
    capacity, num_slots, num_sets = num_tokens + 9, num_tokens + 31, 7
    arena_k, arena_v = torch.randint(-127, 128, (2, layers, capacity, heads, head_dim), dtype=torch.int8)
    key_scales = torch.rand(layers, num_sets, heads, head_dim) / 50
    key_scales[:, 3] *= 1e-5  # subnormal in fp16
    key_scales[:, 4, :, ::5] = 0
    value_scales = torch.rand(layers, capacity, heads) / 50
    value_scales[:, ::6] = 2.0**-24
    scales = ArenaScales(key_scales.half(), torch.randint(0, num_sets, (num_tokens,)), value_scales.half())
    spec = RopeSpec(head_dim=head_dim, rotary_dim=rotary_dim or head_dim, is_neox=is_neox, base=1e4)

    def pool() -> Tensor:
        memory = torch.full((num_slots, heads * head_dim + padding), ABSENT, dtype=dtype)
        return memory[:, : heads * head_dim].unflatten(1, (heads, head_dim))

    return Call(
        arena_k,
        arena_v,
        scales,
        spec.cos_sin(torch.randint(0, 4000, (num_tokens,))),
        torch.randperm(num_slots)[:num_tokens],
        [pool() for _ in range(layers)],
        [pool() for _ in range(layers)],
        torch.randperm(capacity)[:num_tokens],
        is_neox,
    )


def expected(it: Call, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[num_tokens, num_kv_heads, head_dim]` in fp64, element by element pair as RoPE is defined."""
    rows = torch.arange(it.slots.numel()) if it.rows is None else it.rows
    keys = it.arena_k[layer, rows].double() * it.scales.keys[layer, it.scales.sets].double()
    values = it.arena_v[layer, rows].double() * it.scales.values[layer, rows].double()[..., None]
    half = it.cos_sin.shape[1] // 2
    cos, sin = it.cos_sin.double()[:, None, :half], it.cos_sin.double()[:, None, half:]
    first, second = (
        (slice(half), slice(half, 2 * half)) if it.is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    rotated = keys.clone()
    rotated[..., first] = keys[..., first] * cos - keys[..., second] * sin
    rotated[..., second] = keys[..., second] * cos + keys[..., first] * sin
    return rotated, values


def check(it: Call, run: Callable[[Call], None] = Call.run) -> None:
    run(it)
    dtype = it.k_pools[0].dtype
    untouched = torch.ones(it.k_pools[0].shape[0], dtype=torch.bool)
    untouched[it.slots] = False
    for layer, (k_pool, v_pool) in enumerate(zip(it.k_pools, it.v_pools, strict=True)):
        want_keys, want_values = expected(it, layer)
        keys = k_pool[it.slots].double()
        torch.testing.assert_close(keys, want_keys, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 1e-2)
        if keys.numel():
            assert (keys - want_keys).square().mean().sqrt() <= RMS[dtype] * want_keys.square().mean().sqrt()
        # The product is exact in fp32, so there is one right value.
        assert torch.equal(v_pool[it.slots], want_values.to(dtype))
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
    between = [pool.as_strided((pool.shape[0], 32), (pool.stride(0), 1), 192) for pool in it.k_pools + it.v_pools]
    for gap in between:
        gap.fill_(7.0)
    check(it)
    assert all(bool((gap == 7.0).all()) for gap in between)


@PATHS
def test_keys_values_and_scales_may_share_their_memory(run: Callable[[Call], None]) -> None:
    it = call(dtype=torch.bfloat16)
    _, capacity, heads, head_dim = it.arena_k.shape
    slab = torch.cat((it.arena_k.flatten(2), it.arena_v.flatten(2)), dim=2)
    num_sets = it.scales.keys.shape[1]
    slab = torch.cat((slab, it.scales.keys.flatten(2).view(torch.int8)), dim=1)
    keys, values = slab.unflatten(2, (2, heads, head_dim)).unbind(2)
    in_slab = slab.view(torch.float16).unflatten(2, (heads, head_dim))
    per_row = torch.cat((it.scales.values, it.scales.values[:, :num_sets]), dim=1)
    scales = ArenaScales(in_slab, it.scales.sets + capacity, per_row)
    check(replace(it, arena_k=keys, arena_v=values, scales=scales), run)


def test_a_blob_needs_no_rows() -> None:
    it = call(dtype=torch.bfloat16)
    values = it.scales.values[:, :63].contiguous()
    it = replace(it, rows=None, arena_k=it.arena_k[:, :63].contiguous(), arena_v=it.arena_v[:, :63].contiguous())
    check(replace(it, scales=it.scales._replace(values=values)))


def test_a_view_of_a_larger_arena() -> None:
    it = call(dtype=torch.bfloat16)
    scales = it.scales._replace(values=it.scales.values[:, 4:67])
    check(replace(it, rows=None, arena_k=it.arena_k[:, 4:67], arena_v=it.arena_v[:, 4:67], scales=scales))


def test_facts_one_after_the_other() -> None:
    it = call(1000, dtype=torch.bfloat16)
    check(replace(it, scales=it.scales._replace(sets=torch.arange(1000) // 143)))


def test_work_is_shared_among_threads_whatever_their_number() -> None:
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            check(call(1000, layers=5, heads=3, dtype=torch.bfloat16))
            check(call(3000, layers=1, heads=3, dtype=torch.bfloat16))
    finally:
        torch.set_num_threads(before)


def test_warm_up_runs_for_every_dtype() -> None:
    for dtype in DTYPES:
        warm_up(torch.int8, dtype)


def scaled(it: Call, **fields: Tensor) -> Call:
    return replace(it, scales=it.scales._replace(**fields))


MISTAKES: dict[str, tuple[Callable[[Call], Call], str]] = {
    "int8 without scales": (lambda it: replace(it, scales=None), "arena_k is torch.int8; int8 takes scales"),
    "scales of another dtype": (lambda it: replace(it, arena_k=it.arena_k.bfloat16()), "arena_k is torch.bfloat16"),
    "values of another dtype": (lambda it: replace(it, arena_v=it.arena_v.bfloat16()), "arena_v is torch.bfloat16"),
    "key scales in fp32": (lambda it: scaled(it, keys=it.scales.keys.float()), "scales.keys is torch.float32"),
    "value scales in fp32": (lambda it: scaled(it, values=it.scales.values.float()), "scales.values is torch.float32"),
    "key scales of a layer less": (lambda it: scaled(it, keys=it.scales.keys[1:]), "scales.keys has shape"),
    "key scales of one fact": (lambda it: scaled(it, keys=it.scales.keys[:, 0]), "scales.keys has shape"),
    "value scales of a row less": (lambda it: scaled(it, values=it.scales.values[:, 1:]), "scales.values has shape"),
    "key scales with heads apart": (
        lambda it: scaled(it, keys=it.scales.keys.transpose(2, 3).contiguous().transpose(2, 3)),
        "scales.keys has strides",
    ),
    "value scales with heads apart": (
        lambda it: scaled(it, values=it.scales.values.transpose(1, 2).contiguous().transpose(1, 2)),
        "scales.values has strides",
    ),
    "set past the end": (lambda it: scaled(it, sets=it.scales.sets + 1), "scales.sets from .* leave"),
    "negative set": (lambda it: scaled(it, sets=it.scales.sets - 1), "scales.sets from -1"),
    "sets of int32": (lambda it: scaled(it, sets=it.scales.sets.int()), "scales.sets is torch.int32"),
    "too few sets": (lambda it: scaled(it, sets=it.scales.sets[1:]), "scales.sets of 62 tokens for 63 slots"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_writes_nothing(name: str) -> None:
    it = call(dtype=torch.bfloat16)
    change, message = MISTAKES[name]
    wrong = change(it)
    with pytest.raises(SpliceError, match=message):
        wrong.run()
    assert all(bool(pool.isnan().all()) for pool in (*it.k_pools, *it.v_pools))
