"""What a server does before its first request: compile the kernels for its shapes, and choose their tiles."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kv_splice.gpu.capture import launch_capture, launch_quantise
from kv_splice.gpu.launch import CHOICES, check_device, kind_of, launch_splice
from kv_splice.gpu.pools import table_of
from kv_splice.gpu.tiles import Tile
from kv_splice.gpu.timing import median_ms
from kv_splice.quantise import ArenaScales

__all__ = ["warm_up"]

_SIZES = (64, 512, 2048)


def warm_up(
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    source: torch.dtype,
    angles: Tensor,
    *,
    is_neox: bool,
    sizes: Sequence[int] = _SIZES,
    budget_bytes: int = 256 << 20,
    repeats: int = 10,
) -> None:
    """Compile for these pools, and measure every tile on scratch memory of the same shape; the pools are not touched.

    Some seconds, once a server: later launches of such pools neither compile nor measure, whatever their number of
    tokens. What is compiled is a splice out of an arena, `rows` and `positions` given, and the capture of a fact.

    Parameters
    ----------
    k_pools, v_pools
        One `[num_slots, num_kv_heads, head_dim]` a layer.
    source
        Of the stored keys and values: the pools' dtype or fp32, or int8.
    angles
        The model's table `[max_position, rotary_dim]`; its contents do not matter.
    sizes
        Numbers of tokens to measure at. Those that do not fit into the budget are left out, but for the smallest.
    budget_bytes
        Scratch memory to take at most, given back afterwards.
    repeats
        Of each measurement.
    """
    check_device(k_pools)
    table, device = table_of(k_pools, v_pools), k_pools[0].device
    width = table.num_kv_heads * table.head_dim
    bytes_per_token = 2 * table.num_layers * width * (source.itemsize + table.dtype.itemsize)
    fitting = [size for size in sizes if size * bytes_per_token <= budget_bytes] or [min(sizes)]
    for size in fitting:
        arena_shape = (table.num_layers, size, table.num_kv_heads, table.head_dim)
        arena_k, arena_v = (torch.zeros(arena_shape, dtype=source, device=device) for _ in range(2))
        scratch_k, scratch_v = (list(torch.zeros(arena_shape, dtype=table.dtype, device=device)) for _ in range(2))
        # In no order: that is how the cells of a pool are handed out after a while.
        rows, slots = (torch.randperm(size, device=device) for _ in range(2))
        positions = torch.zeros(size, dtype=torch.int64, device=device)
        scales = None
        if source == torch.int8:
            scales = ArenaScales(
                torch.zeros((table.num_layers, 1, *arena_shape[2:]), dtype=torch.float16, device=device),
                positions,
                torch.zeros(arena_shape[:3], dtype=torch.float16, device=device),
            )
        run_splice = partial(
            launch_splice,
            arena_k,
            arena_v,
            scales=scales,
            rows=rows,
            cos_sin=angles,
            positions=positions,
            slots=slots,
            k_pools=scratch_k,
            v_pools=scratch_v,
            is_neox=is_neox,
        )
        run_capture = partial(launch_capture, scratch_k, scratch_v, slots, angles, positions=positions, is_neox=is_neox)

        def splice_ms(tile: Tile, run: partial[None] = run_splice) -> float:
            return median_ms(partial(run, tile=tile), device, repeats=repeats)

        def capture_ms(tile: Tile, run: partial[tuple[Tensor, Tensor]] = run_capture) -> float:
            return median_ms(partial(run, tile=tile), device, repeats=repeats)

        rotary_dim = angles.shape[1]
        CHOICES.choose(kind_of("splice", source, table, rotary_dim, size, is_neox=is_neox), splice_ms)
        if source == torch.int8:
            offsets = torch.tensor([0, size], device=device)
            launch_quantise(scratch_k, scratch_v, slots, angles, positions, offsets, is_neox=is_neox)
        else:
            CHOICES.choose(kind_of("capture", table.dtype, table, rotary_dim, size, is_neox=is_neox), capture_ms)
