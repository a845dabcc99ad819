"""The splice, on whichever device the tensors are."""

from collections.abc import Sequence

from torch import Tensor

from kv_splice.cpu import splice_cpu
from kv_splice.errors import UnsupportedDevice
from kv_splice.reference import splice_reference
from kv_splice.validate import check_splice

__all__ = ["splice"]

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
    rows: Tensor | None = None,
    is_neox: bool,
) -> None:
    """Write stored tokens into a KV pool at new positions: keys rotated, values copied, all layers.

    Token i is row `rows[i]` of the arenas and lands in slot `slots[i]` of each layer's pools. Keys are rotated in fp32
    and rounded once; values of the pool's own dtype are copied bit for bit. Other slots are not touched.

    Parameters
    ----------
    arena_k, arena_v
        `[num_layers, capacity, num_kv_heads, head_dim]`, keys before rotation and values; of the pools' dtype or fp32.
    cos_sin
        `[num_tokens, rotary_dim]` fp32, rotation of each token's new position: cosines of all pairs, then sines.
    slots
        `[num_tokens]` int64, in any order, each once.
    k_pools, v_pools
        One `[num_slots, num_kv_heads, head_dim]` per layer, fp32, bf16 or fp16. Tokens may be strided; heads and
        elements of a token are contiguous.
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
    check_splice(arena_k, arena_v, rows=rows, cos_sin=cos_sin, slots=slots, k_pools=k_pools, v_pools=v_pools)
    if slots.numel() == 0:
        return
    path = splice_cpu if arena_k.device.type == "cpu" else splice_reference
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
