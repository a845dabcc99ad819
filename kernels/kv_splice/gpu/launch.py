"""The splice on a GPU: what does not fit is refused, then one launch moves all layers, keys and values."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv, knobs

from kv_splice.errors import SpliceError, UnsupportedDevice
from kv_splice.facts import Facts, FactScales
from kv_splice.gpu.kernels import splice_kernel
from kv_splice.gpu.pools import PoolTable, angle_alignment, check_alignment, table_of
from kv_splice.gpu.tiles import Choices, Kind, Tile, blocks_of
from kv_splice.quantise import ArenaScales
from kv_splice.validate import check_splice

__all__ = ["CHOICES", "ELEMENTS", "LAUNCHES", "check_device", "kind_of", "launch_splice", "on_device", "splice"]

LAUNCHES: Counter[str] = Counter()
"""Kernels launched by this process, by name: `splice`, `capture`, `quantise`."""

CHOICES = Choices()
"""Tiles that were measured on this process's GPU."""

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Pools' dtypes, as Triton calls them."""

_NO_FACTS = (None, None, 0, 0)


def splice(
    arena_k: Tensor,
    arena_v: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    *,
    scales: ArenaScales | FactScales | None = None,
    rows: Tensor | None = None,
    facts: Facts | None = None,
    positions: Tensor | None = None,
    is_neox: bool,
) -> None:
    """As `kv_splice.splice`, and with the model's own table of angles, and facts by their offsets.

    Checking indices waits for the device once, and with facts some times more; `launch_splice` is the same without.

    Parameters
    ----------
    arena_k, arena_v
        `[num_layers, capacity, num_kv_heads, head_dim]` on the pools' device, or in pinned host memory, which the
        kernel then reads itself. Of the pools' dtype, fp32, or int8.
    cos_sin
        `[num_tokens, rotary_dim]` fp32; with `positions`, the model's table `[max_position, rotary_dim]`, fp32, bf16 or
        fp16.
    slots, k_pools, v_pools
        As `kv_splice.splice`. Tokens of all layers are equally far apart.
    scales
        Of int8: `ArenaScales` with rows, `FactScales` with facts.
    rows, facts
        Where tokens are in the arenas: a row each, or facts by their offsets; neither for a blob of `num_tokens`.
    positions
        `[num_tokens]` int64, of each token's new place.

    Raises
    ------
    SpliceError
        As `kv_splice.splice`; also heads, tokens, layers or memory that are not aligned to 16 bytes.
    UnsupportedDevice
        Tensors that are not on a GPU.
    """
    check_device(k_pools)
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
        facts=facts,
    )
    launch_splice(
        arena_k,
        arena_v,
        scales=scales,
        rows=rows,
        cos_sin=cos_sin,
        slots=slots,
        k_pools=k_pools,
        v_pools=v_pools,
        positions=positions,
        facts=facts,
        is_neox=is_neox,
    )


def launch_splice(
    arena_k: Tensor,
    arena_v: Tensor,
    *,
    scales: ArenaScales | FactScales | None = None,
    rows: Tensor | None = None,
    facts: Facts | None = None,
    cos_sin: Tensor,
    positions: Tensor | None = None,
    slots: Tensor,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    is_neox: bool,
    tile: Tile | None = None,
    table: PoolTable | None = None,
) -> None:
    """As `splice`, of arguments that have been checked: the device is not waited for, and nothing is allocated.

    `tile` overrules what was measured; `table` spares the look-up of `table_of(k_pools, v_pools)`.

    Raises
    ------
    SpliceError
        What is not aligned to 16 bytes.
    """
    table = table_of(k_pools, v_pools) if table is None else table
    check_alignment("arena_k", arena_k)
    check_alignment("arena_v", arena_v)
    num_tokens = slots.numel()
    if num_tokens == 0:
        return
    cos_sin = cos_sin if cos_sin.stride(1) == 1 else cos_sin.contiguous()
    rotary_dim = cos_sin.shape[1]
    kind = kind_of("splice", arena_k.dtype, table, rotary_dim, num_tokens, is_neox=is_neox)
    tile = CHOICES.tile(kind) if tile is None else tile
    blocks = blocks_of(
        tile,
        num_kv_heads=table.num_kv_heads,
        head_dim=table.head_dim,
        rotary_dim=rotary_dim,
        element_size=table.dtype.itemsize,
    )
    grid = (cdiv(num_tokens, blocks.tokens), cdiv(table.num_kv_heads, blocks.heads), table.num_layers)
    with on_device(slots.device):
        splice_kernel[grid](
            arena_k,
            arena_v,
            arena_k.stride(0),
            arena_k.stride(1),
            arena_v.stride(0),
            arena_v.stride(1),
            table.k_addresses,
            table.v_addresses,
            table.k_stride,
            table.v_stride,
            slots.contiguous(),
            cos_sin,
            cos_sin.stride(0),
            None if positions is None else positions.contiguous(),
            num_tokens,
            None if rows is None else rows.contiguous(),
            *_fact_arguments(facts),
            *_scale_arguments(scales),
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
    LAUNCHES["splice"] += 1


def _fact_arguments(facts: Facts | None) -> tuple[Any, ...]:
    """First rows, offsets, their number, and the power of two that the search for a token's fact begins with."""
    if facts is None:
        return _NO_FACTS
    num_facts = facts.first_rows.numel()
    span = 1 << (num_facts - 1).bit_length() >> 1
    return facts.first_rows.contiguous(), facts.offsets.contiguous(), num_facts, span


def _scale_arguments(scales: ArenaScales | FactScales | None) -> tuple[Any, ...]:
    if scales is None:
        return None, None, 0, 0, None, 0, 0
    check_alignment("scales.keys", scales.keys)
    sets = scales.sets.contiguous() if isinstance(scales, ArenaScales) else None
    of_keys, of_values = scales.keys.stride(), scales.values.stride()
    return sets, scales.keys, of_keys[0], of_keys[1], scales.values, of_values[0], of_values[1]


def kind_of(
    kernel: str, source: torch.dtype, table: PoolTable, rotary_dim: int, num_tokens: int, *, is_neox: bool
) -> Kind:
    """The kind of a launch, as tiles are chosen by."""
    size = 1 << num_tokens.bit_length() >> 1
    return Kind(kernel, source, table.dtype, table.num_kv_heads, table.head_dim, rotary_dim, is_neox, size)


def check_device(k_pools: Sequence[Tensor]) -> None:
    """Check that a kernel can run where the pools are: on a GPU, or anywhere that Triton interprets.

    Raises
    ------
    UnsupportedDevice
        Naming the device.
    SpliceError
        No pools.
    """
    if not k_pools:
        raise SpliceError("0 key pools; needs one a layer")
    device = k_pools[0].device
    if device.type != "cuda" and not (device.type == "cpu" and knobs.runtime.interpret):
        raise UnsupportedDevice(f"pools are on {device}; these kernels run on GPUs")


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
