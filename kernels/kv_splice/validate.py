"""What must hold before a splice writes: everything is checked first, so that an error leaves the pools untouched."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kv_splice.errors import SpliceError
from kv_splice.facts import Facts, FactScales
from kv_splice.quantise import ArenaScales

__all__ = ["Range", "check_angles", "check_capture", "check_offsets", "check_pools", "check_ranges", "check_splice"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Range(NamedTuple):
    """Indices `[n]` int64 that must lie in `[0, limit)`."""

    name: str
    indices: Tensor
    limit: int


def check_splice(
    arena_k: Tensor,
    arena_v: Tensor,
    *,
    scales: ArenaScales | FactScales | None = None,
    rows: Tensor | None,
    cos_sin: Tensor,
    slots: Tensor,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    positions: Tensor | None = None,
    facts: Facts | None = None,
) -> None:
    """Check what `kv_splice.splice` and `kv_splice.gpu.splice` document. Keys, values and angles are not looked at.

    Raises
    ------
    SpliceError
        With the offending values in the message.
    """
    _check_sources(arena_k, arena_v, k_pools, v_pools, is_quantised=scales is not None)
    check_pools(k_pools, v_pools, shape=arena_k.shape[2:])
    _check_apart(arena_k, arena_v, k_pools, v_pools)
    first = k_pools[0]
    num_tokens = slots.numel()
    ranges = [Range("slots", slots, first.shape[0])]
    if facts is not None:
        if rows is not None:
            raise SpliceError("rows and facts both say where tokens are; give one of them")
        _check_facts(facts, num_tokens=num_tokens, capacity=arena_k.shape[1], device=first.device)
    elif rows is not None:
        ranges.append(Range("rows", rows, arena_k.shape[1]))
        if rows.numel() != num_tokens:
            raise SpliceError(f"{rows.numel()} rows for {num_tokens} slots")
    elif arena_k.shape[1] != num_tokens:
        raise SpliceError(f"a blob of {arena_k.shape[1]} tokens for {num_tokens} slots; give rows to take some of them")
    check_angles(cos_sin, positions, num_tokens=num_tokens, head_dim=first.shape[2], device=first.device)
    if positions is not None:
        ranges.append(Range("positions", positions, cos_sin.shape[0]))
    if scales is not None and not isinstance(scales, ArenaScales | FactScales):
        raise SpliceError(f"scales are {type(scales).__name__}: those of an arena, or of facts, say which row is whose")
    if isinstance(scales, FactScales) != (scales is not None and facts is not None):
        raise SpliceError("scales of facts go with facts, and those of an arena with its rows")
    if scales is not None:
        _check_scales(scales, arena_k, num_tokens=num_tokens, device=first.device, facts=facts)
    if isinstance(scales, ArenaScales):
        ranges.append(Range("scales.sets", scales.sets, scales.keys.shape[1]))
    check_ranges(ranges, device=first.device, distinct=slots)


def check_capture(
    k_pools: Sequence[Tensor], v_pools: Sequence[Tensor], slots: Tensor, cos_sin: Tensor, positions: Tensor | None
) -> None:
    """Check what `kv_splice.unrotate_capture` documents. Keys, values and angles are not looked at.

    Raises
    ------
    SpliceError
        With the offending values in the message.
    """
    check_pools(k_pools, v_pools)
    first = k_pools[0]
    check_angles(cos_sin, positions, num_tokens=slots.numel(), head_dim=first.shape[2], device=first.device)
    ranges = [Range("slots", slots, first.shape[0])]
    if positions is not None:
        ranges.append(Range("positions", positions, cos_sin.shape[0]))
    check_ranges(ranges, device=first.device)


def check_pools(k_pools: Sequence[Tensor], v_pools: Sequence[Tensor], *, shape: Sequence[int] | None = None) -> None:
    """Check that pools are one `[num_slots, *shape]` a layer, `shape` being heads and width, alike in all else.

    Raises
    ------
    SpliceError
        With the first pool that is not.
    """
    if len(k_pools) != len(v_pools) or not k_pools:
        raise SpliceError(f"{len(k_pools)} key and {len(v_pools)} value pools; needs one of each a layer")
    first = k_pools[0]
    want = (first.shape[0], *(first.shape[1:] if shape is None else shape))
    if len(want) != 3:
        raise SpliceError(f"k_pools[0] has shape {tuple(first.shape)}, not [num_slots, num_kv_heads, head_dim]")
    if first.dtype not in _DTYPES:
        raise SpliceError(f"pools are {first.dtype}; supported are float32, bfloat16 and float16")
    for layer, pools in enumerate(zip(k_pools, v_pools, strict=True)):
        for name, pool in zip(("k_pools", "v_pools"), pools, strict=True):
            if pool.shape != want:
                raise SpliceError(f"{name}[{layer}] has shape {tuple(pool.shape)}, not {want}")
            if pool.dtype != first.dtype or pool.device != first.device:
                raise SpliceError(
                    f"{name}[{layer}] is {pool.dtype} on {pool.device}, not {first.dtype} on {first.device}"
                )
            _check_layout(f"{name}[{layer}]", pool)


def check_ranges(ranges: Sequence[Range], *, device: torch.device, distinct: Tensor | None = None) -> None:
    """Check all of `ranges`, and that no number is twice in `distinct`; the device is waited for once.

    Raises
    ------
    SpliceError
        With the bounds of the first that are out of range, or a number that repeats.
    """
    for name, indices, _ in ranges:
        if indices.dtype != torch.int64 or indices.dim() != 1:
            raise SpliceError(f"{name} is {indices.dtype} of shape {tuple(indices.shape)}, not int64 [num_tokens]")
        if indices.device != device:
            raise SpliceError(f"{name} is on {indices.device}, not on {device}")
    filled = [of for of in ranges if of.indices.numel()]
    found = [bound for of in filled for bound in of.indices.aminmax()]
    ordered = None
    if distinct is not None and distinct.numel() > 1:
        ordered = distinct.sort().values
        found.append((ordered[1:] == ordered[:-1]).sum())
    numbers = torch.stack(found).tolist() if found else []
    for (name, _, limit), low, high in zip(filled, numbers[0::2], numbers[1::2], strict=False):
        if low < 0 or high >= limit:
            raise SpliceError(f"{name} from {low} to {high} leave [0, {limit})")
    if ordered is not None and numbers[-1]:
        repeated = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
        raise SpliceError(f"slots repeat: {repeated} is written more than once")


def check_angles(
    cos_sin: Tensor, positions: Tensor | None, *, num_tokens: int, head_dim: int, device: torch.device
) -> None:
    """Check rows of angles, one a token, or a model's table `[max_position, rotary_dim]` with `positions` in it.

    Raises
    ------
    SpliceError
        Too short, too wide, or of another dtype: fp32, and a table as the model has it.
    """
    dtypes = (torch.float32,) if positions is None else _DTYPES
    if cos_sin.dtype not in dtypes or cos_sin.device != device:
        raise SpliceError(f"cos_sin is {cos_sin.dtype} on {cos_sin.device}, not float32 on {device}")
    if cos_sin.dim() != 2 or (positions is None and cos_sin.shape[0] != num_tokens):
        raise SpliceError(f"cos_sin has shape {tuple(cos_sin.shape)}, not [{num_tokens}, rotary_dim]")
    if cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= head_dim:
        raise SpliceError(f"cos_sin turns {cos_sin.shape[1]} of {head_dim} elements; needs an even number up to that")
    if positions is not None and positions.numel() != num_tokens:
        raise SpliceError(f"{positions.numel()} positions for {num_tokens} slots")


def check_offsets(offsets: Tensor, *, num_tokens: int, device: torch.device) -> None:
    """Check that `offsets [F + 1]` share `num_tokens` out among facts.

    Raises
    ------
    SpliceError
        Where they fall, or do not go from 0 to `num_tokens`.
    """
    check_ranges([Range("offsets", offsets, num_tokens + 1)], device=device)
    if offsets.numel() < 2 or int(offsets[0]) != 0 or int(offsets[-1]) != num_tokens:
        raise SpliceError(f"{offsets.numel()} offsets do not go from 0 to {num_tokens}")
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise SpliceError("offsets fall: a fact would end before it begins")


def _check_sources(
    arena_k: Tensor, arena_v: Tensor, k_pools: Sequence[Tensor], v_pools: Sequence[Tensor], *, is_quantised: bool
) -> None:
    if arena_k.dim() != 4 or arena_k.shape != arena_v.shape:
        raise SpliceError(
            f"arenas have shapes {tuple(arena_k.shape)} and {tuple(arena_v.shape)}, not one "
            "[num_layers, capacity, num_kv_heads, head_dim]"
        )
    if not len(k_pools) == len(v_pools) == arena_k.shape[0] or not k_pools:
        raise SpliceError(f"{len(k_pools)} key and {len(v_pools)} value pools for {arena_k.shape[0]} layers")
    dtype, device = k_pools[0].dtype, k_pools[0].device
    for name, arena in (("arena_k", arena_k), ("arena_v", arena_v)):
        if is_quantised or arena.dtype == torch.int8:
            if not is_quantised or arena.dtype != torch.int8:
                raise SpliceError(f"{name} is {arena.dtype}; int8 takes scales, and nothing else does")
        elif dtype in _DTYPES and arena.dtype not in (dtype, torch.float32):
            raise SpliceError(f"{name} is {arena.dtype}; pools of {dtype} take {dtype} or float32")
        if arena.device != device and not arena.is_pinned():
            raise SpliceError(f"{name} is on {arena.device}, neither on {device} nor in pinned memory")
        _check_layout(name, arena[0])


def _check_apart(arena_k: Tensor, arena_v: Tensor, k_pools: Sequence[Tensor], v_pools: Sequence[Tensor]) -> None:
    """Check that no byte of a pool is in another one, or between the first and the last of an arena."""
    first = k_pools[0]
    shared = _sharing(
        tuple(
            (pool.data_ptr(), pool.stride(0) * pool.element_size()) for pools in (k_pools, v_pools) for pool in pools
        ),
        first.shape[0],
        first.shape[1] * first.shape[2] * first.element_size(),
        tuple((arena.data_ptr(), arena.data_ptr() + _extent_bytes(arena)) for arena in (arena_k, arena_v)),
    )
    if shared is not None:
        names = [f"{of}_pools[{layer}]" for of in "kv" for layer in range(len(k_pools))] + ["arena_k", "arena_v"]
        raise SpliceError(f"{names[shared[0]]} and {names[shared[1]]} share memory")


@lru_cache(maxsize=64)
def _sharing(
    pools: tuple[tuple[int, int], ...], num_slots: int, token_bytes: int, arenas: tuple[tuple[int, int], ...]
) -> tuple[int, int] | None:
    """Which two overlap, of pools by address and stride of tokens, in bytes, then arenas by first and last address.

    Pools of one stride may lie in each other's gaps, as the layers of a page do.
    """
    if num_slots == 0:
        return None
    spans = [(start, start + (num_slots - 1) * stride + token_bytes) for start, stride in pools]
    for i, (start, end) in enumerate(spans):
        stride = pools[i][1]
        for j, (other_start, other_end) in enumerate((*spans, *arenas)):
            if j <= i or other_end <= start or end <= other_start:
                continue
            is_in_gaps = (
                j < len(pools)
                and pools[j][1] == stride
                and (token_bytes <= (other_start - start) % stride <= stride - token_bytes)
            )
            if not is_in_gaps:
                return i, j
    return None


def _extent_bytes(x: Tensor) -> int:
    """From the first byte of `x` to the end of its last, where nothing runs backwards."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _check_facts(facts: Facts, *, num_tokens: int, capacity: int, device: torch.device) -> None:
    check_offsets(facts.offsets, num_tokens=num_tokens, device=device)
    num_facts = facts.offsets.numel() - 1
    check_ranges([Range("first_rows", facts.first_rows, capacity + 1)], device=device)
    if facts.first_rows.numel() != num_facts:
        raise SpliceError(f"{facts.first_rows.numel()} first rows for {num_facts} facts")
    end = int((facts.first_rows + facts.offsets.diff()).max())
    if end > capacity:
        raise SpliceError(f"a fact ends at row {end} of {capacity}")


def _check_scales(
    scales: ArenaScales | FactScales, arena: Tensor, *, num_tokens: int, device: torch.device, facts: Facts | None
) -> None:
    num_layers, capacity, num_heads, head_dim = arena.shape
    num_sets = scales.keys.shape[1] if scales.keys.dim() == 4 else 0
    for name, tensor, shape in (
        ("scales.keys", scales.keys, (num_layers, num_sets, num_heads, head_dim)),
        ("scales.values", scales.values, (num_layers, capacity, num_heads)),
    ):
        if tensor.dtype != torch.float16 or tensor.device != device:
            raise SpliceError(f"{name} is {tensor.dtype} on {tensor.device}, not float16 on {device}")
        if tensor.shape != shape:
            raise SpliceError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    _check_layout("scales.keys", scales.keys[0])
    _check_layout("scales.values", scales.values[0][..., None])
    if facts is not None:
        if num_sets != facts.first_rows.numel():
            raise SpliceError(f"{num_sets} sets of scales for {facts.first_rows.numel()} facts")
        return
    assert isinstance(scales, ArenaScales), type(scales)
    if scales.sets.numel() != num_tokens:
        raise SpliceError(f"scales.sets of {scales.sets.numel()} tokens for {num_tokens} slots")


def _check_layout(name: str, tokens: Tensor) -> None:
    """Tokens may be apart, or padded; within a token, heads and elements lie next to each other."""
    head_dim = tokens.shape[2]
    width = tokens.shape[1] * head_dim
    if tokens.stride(2) != 1 or tokens.stride(1) != head_dim or tokens.stride(0) < width:
        raise SpliceError(f"{name} has strides {tokens.stride()}; needs (at least {width}, {head_dim}, 1)")
