"""The splice, on whichever device the tensors are."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kv_splice.cpu import splice_cpu
from kv_splice.cpu_int8 import splice_cpu_int8
from kv_splice.errors import UnsupportedDevice
from kv_splice.quantise import ArenaScales
from kv_splice.reference import splice_reference
from kv_splice.validate import check_splice

__all__ = ["splice", "warm_up"]

# Devices without data: a splice there could only pretend.
_EMPTY_DEVICES = ("meta",)


def splice(
    arena_k: Tensor,
    arena_v: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    *,
    scales: ArenaScales | None = None,
    rows: Tensor | None = None,
    is_neox: bool,
) -> None:
    """Write stored tokens into a KV pool at new positions: keys rotated, values copied, all layers.

    Token i is row `rows[i]` of the arenas and lands in slot `slots[i]` of each layer's pools. Keys are rotated in fp32
    and rounded once; values of the pool's own dtype are copied bit for bit. Of int8 both are multiplied by their scales
    in fp32, which is exact, before keys are rotated, and rounded once. Other slots are not touched.

    Parameters
    ----------
    arena_k, arena_v
        `[num_layers, capacity, num_kv_heads, head_dim]`, keys before rotation and values; of the pools' dtype or fp32,
        or int8.
    cos_sin
        `[num_tokens, rotary_dim]` fp32, rotation of each token's new position: cosines of all pairs, then sines.
    slots
        `[num_tokens]` int64, in any order, each once.
    k_pools, v_pools
        One `[num_slots, num_kv_heads, head_dim]` per layer, fp32, bf16 or fp16. Tokens may be strided; heads and
        elements of a token are contiguous.
    scales
        Of arenas in int8, and of no others.
    rows
        `[num_tokens]` int64, in any order; None for a blob of exactly `num_tokens`.
    is_neox
        Pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).

    Raises
    ------
    SpliceError
        A wrong dtype, shape, device or stride, an index out of range or a repeated slot; nothing was written.
    UnsupportedDevice
        Tensors on the meta device.
    """
    if arena_k.device.type in _EMPTY_DEVICES:
        raise UnsupportedDevice(f"tensors on {arena_k.device} hold no data to splice")
    check_splice(
        arena_k, arena_v, scales=scales, rows=rows, cos_sin=cos_sin, slots=slots, k_pools=k_pools, v_pools=v_pools
    )
    if slots.numel() == 0:
        return
    path: Callable[..., None]
    if arena_k.device.type != "cpu":
        path = partial(splice_reference, scales=scales)
    elif scales is None:
        path = splice_cpu
    else:
        path = partial(splice_cpu_int8, scales=scales)
    path(
        arena_k,
        arena_v,
        rows=rows,
        cos_sin=cos_sin,
        slots=slots,
        k_pools=k_pools,
        v_pools=v_pools,
        is_neox=is_neox,
    )


def warm_up(source_dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Compile the loops for these dtypes, about a second once per machine: the result is kept on disk."""
    source, pool = (torch.zeros(1, 1, 1, 2, dtype=dtype) for dtype in (source_dtype, pool_dtype))
    rows, cos_sin = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2)
    scales = None
    if source_dtype == torch.int8:
        scales = ArenaScales(source.half(), rows, torch.zeros(1, 1, 1, dtype=torch.float16))
    splice(source, source, cos_sin, rows, [pool[0]], [pool[0]], scales=scales, rows=rows, is_neox=True)
