"""Facts out of the pool on a GPU, in one launch: gathered, their keys' rotation undone, and in int8 where wanted."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton import cdiv

from kv_splice.errors import QuantiseError, SpliceError
from kv_splice.facts import FactScales
from kv_splice.gpu.kernels import capture_kernel
from kv_splice.gpu.launch import CHOICES, ELEMENTS, LAUNCHES, check_device, kind_of, on_device
from kv_splice.gpu.pools import ALIGNMENT, angle_alignment, check_alignment, table_of
from kv_splice.gpu.quantise_kernel import quantise_kernel
from kv_splice.gpu.tiles import Tile, blocks_of, quantise_blocks_of
from kv_splice.quantise import LARGEST_QUANTISED, KVScales
from kv_splice.validate import check_capture, check_offsets

__all__ = [
    "Captured",
    "capture_quantised",
    "launch_capture",
    "launch_quantise",
    "quantise_fact",
    "unrotate_capture",
]


class Captured(NamedTuple):
    """Facts in int8: `k` and `v` `[num_layers, num_tokens, num_kv_heads, head_dim]`, and their scales."""

    k: Tensor
    v: Tensor
    scales: FactScales


def unrotate_capture(
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    slots: Tensor,
    cos_sin: Tensor,
    *,
    positions: Tensor | None = None,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Keys before rotation and values of the tokens in `slots`, all layers, as `unrotate_keys` defines it.

    Parameters
    ----------
    k_pools, v_pools
        One `[num_slots, num_kv_heads, head_dim]` a layer, fp32, bf16 or fp16.
    slots
        `[num_tokens]` int64.
    cos_sin, positions
        Of the places that the keys were rotated to: `[num_tokens, rotary_dim]` fp32, or the model's table and
        `[num_tokens]` int64.
    is_neox
        Pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).

    Returns
    -------
    Two tensors `[num_layers, num_tokens, num_kv_heads, head_dim]` of the pools' dtype; keys are rounded once.

    Raises
    ------
    SpliceError
        A wrong dtype, shape, device, stride or alignment, or an index out of range.
    UnsupportedDevice
        Tensors that are not on a GPU.
    """
    check_device(k_pools)
    check_capture(k_pools, v_pools, slots, cos_sin, positions)
    return launch_capture(k_pools, v_pools, slots, cos_sin, positions=positions, is_neox=is_neox)


def launch_capture(
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    slots: Tensor,
    cos_sin: Tensor,
    *,
    positions: Tensor | None = None,
    is_neox: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """As `unrotate_capture`, of arguments that have been checked; `tile` overrules what was measured.

    Raises
    ------
    SpliceError
        What is not aligned to 16 bytes.
    """
    table = table_of(k_pools, v_pools)
    shape = (table.num_layers, slots.numel(), table.num_kv_heads, table.head_dim)
    k, v = (torch.empty(shape, dtype=table.dtype, device=slots.device) for _ in range(2))
    if k.numel() == 0:
        return k, v
    rotary_dim = cos_sin.shape[1]
    kind = kind_of("capture", table.dtype, table, rotary_dim, slots.numel(), is_neox=is_neox)
    tile = CHOICES.tile(kind) if tile is None else tile
    blocks = blocks_of(
        tile,
        num_kv_heads=table.num_kv_heads,
        head_dim=table.head_dim,
        rotary_dim=rotary_dim,
        element_size=table.dtype.itemsize,
    )
    grid = (cdiv(slots.numel(), blocks.tokens), cdiv(table.num_kv_heads, blocks.heads), table.num_layers)
    cos_sin = cos_sin if cos_sin.stride(1) == 1 else cos_sin.contiguous()
    with on_device(slots.device):
        capture_kernel[grid](
            k,
            v,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            table.k_addresses,
            table.v_addresses,
            table.k_stride,
            table.v_stride,
            slots.contiguous(),
            cos_sin,
            cos_sin.stride(0),
            None if positions is None else positions.contiguous(),
            slots.numel(),
            POOL=ELEMENTS[table.dtype],
            H=table.num_kv_heads,
            D=table.head_dim,
            R=rotary_dim,
            IS_NEOX=is_neox,
            ANGLE_ALIGNMENT=angle_alignment(cos_sin),
            BLOCK_T=blocks.tokens,
            BLOCK_H=blocks.heads,
            BLOCK_HALF=blocks.half,
            BLOCK_TAIL=blocks.tail,
            num_warps=tile.num_warps,
        )
    LAUNCHES["capture"] += 1
    return k, v


def capture_quantised(
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    slots: Tensor,
    cos_sin: Tensor,
    *,
    offsets: Tensor,
    positions: Tensor | None = None,
    is_neox: bool,
) -> Captured:
    """Facts out of the pool in int8: each is `quantise` of what `unrotate_capture` returns of it, bit for bit.

    Parameters
    ----------
    offsets
        `[F + 1]` int64 on the pools' device: fact f is the tokens `[offsets[f], offsets[f + 1])` of `slots`.

    The other parameters and the errors are those of `unrotate_capture`.

    Raises
    ------
    QuantiseError
        A fact holds NaN, infinity, or a magnitude above `LARGEST_QUANTISED`; which, is in the message. To know, the
        device is waited for.
    """
    check_device(k_pools)
    check_capture(k_pools, v_pools, slots, cos_sin, positions)
    check_offsets(offsets, num_tokens=slots.numel(), device=slots.device)
    captured, refused = launch_quantise(k_pools, v_pools, slots, cos_sin, positions, offsets, is_neox=is_neox)
    _raise_where(refused)
    return captured


def quantise_fact(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, KVScales]:
    """As `kv_splice.quantise`, bit for bit, in one launch.

    Parameters
    ----------
    k, v
        `[num_layers, num_tokens, num_kv_heads, head_dim]`, fp32, bf16 or fp16; K before rotation.

    Raises
    ------
    QuantiseError
        NaN, infinity, a magnitude above `LARGEST_QUANTISED`, no elements, or tensors of two shapes.
    SpliceError
        Tensors that are not aligned to 16 bytes, or on two devices.
    UnsupportedDevice
        Tensors that are not on a GPU.
    """
    if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype or k.dtype not in ELEMENTS or 0 in k.shape:
        raise QuantiseError(
            f"K is {k.dtype} {list(k.shape)} and V is {v.dtype} {list(v.shape)}: both must be [num_layers, num_tokens, "
            "num_kv_heads, head_dim], of one dtype out of float32, bfloat16 and float16, and not empty"
        )
    k_layers, v_layers = list(k.contiguous()), list(v.contiguous())
    check_device(k_layers)
    if v.device != k.device:
        raise SpliceError(f"V is on {v.device}, not on {k.device} as K is")
    offsets = torch.tensor([0, k.shape[1]], device=k.device)
    captured, refused = launch_quantise(k_layers, v_layers, None, None, None, offsets, is_neox=True)
    _raise_where(refused)
    return captured.k, captured.v, KVScales(captured.scales.keys[:, 0], captured.scales.values)


def launch_quantise(
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    slots: Tensor | None,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    offsets: Tensor,
    *,
    is_neox: bool,
) -> tuple[Captured, Tensor]:
    """As `capture_quantised`, of arguments that have been checked; without slots and angles, of layers of plain keys.

    Returns
    -------
    The facts, and `[F]` int32 on the device: 1 where a fact holds what int8 does not, and its output means nothing.

    Raises
    ------
    SpliceError
        What is not aligned to 16 bytes.
    """
    table, device = table_of(k_pools, v_pools), k_pools[0].device
    if cos_sin is not None and cos_sin.stride(1) != 1:
        cos_sin = cos_sin.contiguous()
    num_facts = offsets.numel() - 1
    num_tokens = table.num_slots if slots is None else slots.numel()
    rotary_dim = table.head_dim if cos_sin is None else cos_sin.shape[1]
    num_layers, num_heads, head_dim = table.num_layers, table.num_kv_heads, table.head_dim
    k, v = (torch.empty((num_layers, num_tokens, num_heads, head_dim), dtype=torch.int8, device=device) for _ in "kv")
    check_alignment("facts in int8", k)
    scales = FactScales(
        torch.empty((num_layers, num_facts, num_heads, head_dim), dtype=torch.float16, device=device),
        torch.empty((num_layers, num_tokens, num_heads), dtype=torch.float16, device=device),
    )
    refused = torch.zeros(num_facts, dtype=torch.int32, device=device)
    blocks = quantise_blocks_of(head_dim=head_dim, rotary_dim=rotary_dim)
    with on_device(device):
        quantise_kernel[(num_facts, num_heads, num_layers)](
            k,
            v,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            table.k_addresses,
            table.v_addresses,
            table.k_stride,
            table.v_stride,
            None if slots is None else slots.contiguous(),
            cos_sin,
            0 if cos_sin is None else cos_sin.stride(0),
            None if positions is None else positions.contiguous(),
            offsets.contiguous(),
            refused,
            scales.keys,
            scales.keys.stride(0),
            scales.keys.stride(1),
            scales.values,
            scales.values.stride(0),
            scales.values.stride(1),
            POOL=ELEMENTS[table.dtype],
            D=head_dim,
            R=rotary_dim,
            IS_NEOX=is_neox,
            ANGLE_ALIGNMENT=ALIGNMENT if cos_sin is None else angle_alignment(cos_sin),
            LARGEST=float(LARGEST_QUANTISED),
            BLOCK_T=blocks.tokens,
            BLOCK_HALF=blocks.half,
            BLOCK_TAIL=blocks.tail,
            BLOCK_D=blocks.width,
            num_warps=blocks.num_warps,
        )
    LAUNCHES["quantise"] += 1
    return Captured(k, v, scales), refused


def _raise_where(refused: Tensor) -> None:
    if wrong := refused.nonzero().flatten().tolist():
        raise QuantiseError(
            f"facts {wrong} hold NaN, infinity or more than int8 takes, magnitudes up to {LARGEST_QUANTISED:.0f}"
        )
