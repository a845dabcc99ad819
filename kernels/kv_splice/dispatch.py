"""The splice, on whichever device the tensors are."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kv_splice.errors import UnsupportedDevice
from kv_splice.quantise import ArenaScales
from kv_splice.reference import splice_reference
from kv_splice.streams import on_stream
from kv_splice.validate import check_splice

__all__ = ["splice", "warm_up", "warm_up_pools"]

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
    positions: Tensor | None = None,
    is_neox: bool,
    stream: Any = None,
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
        `[num_tokens, rotary_dim]` fp32, rotation of each token's new position: cosines of all pairs, then sines. With
        `positions`, the model's own table `[max_position, rotary_dim]`, fp32, bf16 or fp16.
    slots
        `[num_tokens]` int64, in any order, each once.
    k_pools, v_pools
        One `[num_slots, num_kv_heads, head_dim]` per layer, fp32, bf16 or fp16. Tokens may be strided; heads and
        elements of a token are contiguous.
    scales
        Of arenas in int8, and of no others.
    rows
        `[num_tokens]` int64, in any order; None for a blob of exactly `num_tokens`.
    positions
        `[num_tokens]` int64, each token's row of the table.
    is_neox
        Pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).
    stream
        What the pools are written on, behind the current stream (`on_stream`), which arguments are checked on. Not for
        tensors on a CPU.

    Raises
    ------
    SpliceError
        A wrong dtype, shape, device or stride, an index out of range, a repeated slot, or a pool that shares memory
        with another or an arena; nothing was written. On a GPU also tokens, heads or layers that do not start at
        multiples of 16 bytes.
    UnsupportedDevice
        Tensors on the meta device.
    """
    if arena_k.device.type in _EMPTY_DEVICES:
        raise UnsupportedDevice(f"tensors on {arena_k.device} hold no data to splice")
    check_splice(
        arena_k,
        arena_v,
        scales=scales,
        rows=rows,
        cos_sin=cos_sin,
        slots=slots,
        k_pools=k_pools,
        v_pools=v_pools,
        positions=positions,
    )
    if slots.numel() == 0:
        return
    device = k_pools[0].device.type
    if device == "cuda":
        # Neither Triton nor, for GPUs, Numba is imported before it is needed.
        from kv_splice.gpu import launch_splice

        path: Callable[..., None] = partial(launch_splice, scales=scales, positions=positions)
    else:
        if positions is not None:
            cos_sin = cos_sin[positions].float()
        path = _path_without_triton(device, scales)
    indices = (slots, rows, positions, None if scales is None else scales.sets)
    with on_stream(stream, cos_sin, *(index for index in indices if index is not None)):
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


def _path_without_triton(device: str, scales: ArenaScales | None) -> Callable[..., None]:
    if device != "cpu":
        return partial(splice_reference, scales=scales)
    if scales is None:
        from kv_splice.cpu import splice_cpu

        return splice_cpu
    from kv_splice.cpu_int8 import splice_cpu_int8

    return partial(splice_cpu_int8, scales=scales)


def warm_up(source_dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Compile the loops for these dtypes, about a second once per machine: the result is kept on disk."""
    source, k_pool, v_pool = (torch.zeros(1, 1, 1, 2, dtype=dtype) for dtype in (source_dtype, pool_dtype, pool_dtype))
    rows, cos_sin = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2)
    scales = None
    if source_dtype == torch.int8:
        scales = ArenaScales(source.half(), rows, torch.zeros(1, 1, 1, dtype=torch.float16))
    splice(source, source, cos_sin, rows, [k_pool[0]], [v_pool[0]], scales=scales, rows=rows, is_neox=True)


def warm_up_pools(
    k_pools: Sequence[Tensor], v_pools: Sequence[Tensor], source_dtype: torch.dtype, angles: Tensor, *, is_neox: bool
) -> None:
    """Prepare splices of `source_dtype` into these pools, which are not touched.

    On a CPU that is `warm_up`. On a GPU kernels are compiled and measured for the pools' shape, some seconds
    (`kv_splice.gpu.warm_up`), so that no request waits for either.

    Parameters
    ----------
    k_pools, v_pools
        One `[num_slots, num_kv_heads, head_dim]` a layer.
    source_dtype
        Of the arenas.
    angles
        The model's table `[max_position, rotary_dim]`; its contents do not matter.
    is_neox
        As for `splice`.
    """
    match k_pools[0].device.type:
        case "cpu":
            warm_up(source_dtype, k_pools[0].dtype)
        case "cuda":
            from kv_splice import gpu

            gpu.warm_up(k_pools, v_pools, source_dtype, angles, is_neox=is_neox)
