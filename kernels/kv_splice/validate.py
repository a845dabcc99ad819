"""What must hold before a splice writes: everything is checked first, so that an error leaves the pools untouched."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_splice.errors import SpliceError
from kv_splice.quantise import ArenaScales

__all__ = ["check_splice"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_splice(
    arena_k: Tensor,
    arena_v: Tensor,
    *,
    scales: ArenaScales | None = None,
    rows: Tensor | None,
    cos_sin: Tensor,
    slots: Tensor,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
) -> None:
    """Check what `kv_splice.splice` documents. Contents of keys, values and angles are not looked at.

    Raises
    ------
    SpliceError
        With the offending values in the message.
    """
    _check_pools(arena_k, arena_v, k_pools, v_pools, is_quantised=scales is not None)
    _check_indices("slots", slots, limit=k_pools[0].shape[0], device=k_pools[0].device)
    num_tokens, head_dim = slots.numel(), k_pools[0].shape[2]
    if rows is not None:
        _check_indices("rows", rows, limit=arena_k.shape[1], device=arena_k.device)
        if rows.numel() != num_tokens:
            raise SpliceError(f"{rows.numel()} rows for {num_tokens} slots")
    elif arena_k.shape[1] != num_tokens:
        raise SpliceError(f"a blob of {arena_k.shape[1]} tokens for {num_tokens} slots; give rows to take some of them")
    if cos_sin.dtype != torch.float32 or cos_sin.device != arena_k.device:
        raise SpliceError(f"cos_sin is {cos_sin.dtype} on {cos_sin.device}, not float32 on {arena_k.device}")
    if cos_sin.dim() != 2 or cos_sin.shape[0] != num_tokens:
        raise SpliceError(f"cos_sin has shape {tuple(cos_sin.shape)}, not [{num_tokens}, rotary_dim]")
    if cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= head_dim:
        raise SpliceError(f"cos_sin turns {cos_sin.shape[1]} of {head_dim} elements; needs an even number up to that")
    if scales is not None:
        _check_scales(scales, arena_k, num_tokens=num_tokens)
    if num_tokens > 1:
        ordered = slots.sort().values
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.numel():
            raise SpliceError(f"slots repeat: {repeated[0].item()} is written more than once")


def _check_pools(
    arena_k: Tensor, arena_v: Tensor, k_pools: Sequence[Tensor], v_pools: Sequence[Tensor], *, is_quantised: bool
) -> None:
    if arena_k.dim() != 4 or arena_k.shape != arena_v.shape:
        raise SpliceError(
            f"arenas have shapes {tuple(arena_k.shape)} and {tuple(arena_v.shape)}, not one "
            "[num_layers, capacity, num_kv_heads, head_dim]"
        )
    if not len(k_pools) == len(v_pools) == arena_k.shape[0] or not k_pools:
        raise SpliceError(f"{len(k_pools)} key and {len(v_pools)} value pools for {arena_k.shape[0]} layers")
    first = k_pools[0]
    if first.dtype not in _DTYPES:
        raise SpliceError(f"pools are {first.dtype}; supported are float32, bfloat16 and float16")
    for name, arena in (("arena_k", arena_k), ("arena_v", arena_v)):
        if is_quantised or arena.dtype == torch.int8:
            if not is_quantised or arena.dtype != torch.int8:
                raise SpliceError(f"{name} is {arena.dtype}; int8 takes scales, and nothing else does")
        elif arena.dtype not in (first.dtype, torch.float32):
            raise SpliceError(f"{name} is {arena.dtype}; pools of {first.dtype} take {first.dtype} or float32")
        _check_layout(name, arena[0])
    for layer, pools in enumerate(zip(k_pools, v_pools, strict=True)):
        for name, pool in zip(("k_pools", "v_pools"), pools, strict=True):
            if pool.shape != (first.shape[0], *arena_k.shape[2:]):
                want = (first.shape[0], *arena_k.shape[2:])
                raise SpliceError(f"{name}[{layer}] has shape {tuple(pool.shape)}, not {want}")
            if pool.dtype != first.dtype or pool.device != arena_k.device or pool.device != arena_v.device:
                raise SpliceError(
                    f"{name}[{layer}] is {pool.dtype} on {pool.device}, not {first.dtype} on {arena_k.device}"
                )
            _check_layout(f"{name}[{layer}]", pool)


def _check_scales(scales: ArenaScales, arena: Tensor, *, num_tokens: int) -> None:
    num_layers, capacity, num_heads, head_dim = arena.shape
    num_sets = scales.keys.shape[1] if scales.keys.dim() == 4 else 0
    for name, tensor, shape in (
        ("scales.keys", scales.keys, (num_layers, num_sets, num_heads, head_dim)),
        ("scales.values", scales.values, (num_layers, capacity, num_heads)),
    ):
        if tensor.dtype != torch.float16 or tensor.device != arena.device:
            raise SpliceError(f"{name} is {tensor.dtype} on {tensor.device}, not float16 on {arena.device}")
        if tensor.shape != shape:
            raise SpliceError(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
    _check_layout("scales.keys", scales.keys[0])
    _check_layout("scales.values", scales.values[0][..., None])
    _check_indices("scales.sets", scales.sets, limit=num_sets, device=arena.device)
    if scales.sets.numel() != num_tokens:
        raise SpliceError(f"scales.sets of {scales.sets.numel()} tokens for {num_tokens} slots")


def _check_layout(name: str, tokens: Tensor) -> None:
    """Tokens may be apart, or padded; within a token, heads and elements lie next to each other."""
    head_dim = tokens.shape[2]
    width = tokens.shape[1] * head_dim
    if tokens.stride(2) != 1 or tokens.stride(1) != head_dim or tokens.stride(0) < width:
        raise SpliceError(f"{name} has strides {tokens.stride()}; needs (at least {width}, {head_dim}, 1)")


def _check_indices(name: str, indices: Tensor, *, limit: int, device: torch.device) -> None:
    if indices.dtype != torch.int64 or indices.dim() != 1:
        raise SpliceError(f"{name} is {indices.dtype} of shape {tuple(indices.shape)}, not int64 [num_tokens]")
    if indices.device != device:
        raise SpliceError(f"{name} is on {indices.device}, not on {device}")
    if indices.numel() == 0:
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < 0 or high >= limit:
        raise SpliceError(f"{name} from {low} to {high} leave [0, {limit})")
