"""The splice of int8 on a CPU: as `kv_splice.cpu`, with each row multiplied by its scales on the way.

A key's row is dequantised into a buffer that stays in the nearest cache, and rotated out of it. All of it is fp32,
where the product of an int8 and an fp16 is exact, up to the one rounding to the pool's dtype.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from torch import Tensor

from kv_splice.cpu import share_out
from kv_splice.elements import as_elements, narrow, prefetch, widen
from kv_splice.quantise import ArenaScales

__all__ = ["splice_cpu_int8"]

# Tokens ahead whose rows are asked for, and elements between two asked-for cache lines of 64 bytes.
_AHEAD = 3
_SOURCE_LINE, _TARGET_LINE = 64, 32


@njit(nogil=True, cache=True)
def _ask(source: Any, target: Any, source_at: int, target_at: int, width: int) -> None:
    for i in range(0, width, _SOURCE_LINE):
        prefetch(source, source_at + i)
    for i in range(0, width, _TARGET_LINE):
        prefetch(target, target_at + i)


@njit(nogil=True, cache=True)
def _rotate_rows(
    source: Any,
    source_stride: int,
    rows: Any,
    scales: Any,
    scales_stride: int,
    sets: Any,
    target: Any,
    target_stride: int,
    slots: Any,
    cos_sin: Any,
    num_heads: int,
    head_dim: int,
    is_neox: bool,
    start: int,
    end: int,
) -> None:
    half, width = cos_sin.shape[1] // 2, num_heads * head_dim
    wide_scales, row = np.empty(width, np.float32), np.empty(width, np.float32)
    widened = -1
    for t in range(start, end):
        if t + _AHEAD < end:
            source_at, target_at = rows[t + _AHEAD] * source_stride, slots[t + _AHEAD] * target_stride
            _ask(source, target, source_at, target_at, width)
        if sets[t] != widened:  # tokens of one fact follow one another
            widened = sets[t]
            narrow_scales = scales[widened * scales_stride :][:width]
            for i in range(width):
                wide_scales[i] = widen(narrow_scales[i])
        stored = source[rows[t] * source_stride :][:width]
        for i in range(width):
            row[i] = widen(stored[i]) * wide_scales[i]
        cos, sin = cos_sin[t, :half], cos_sin[t, half:]
        for h in range(num_heads):
            x = row[h * head_dim :][:head_dim]
            y = target[slots[t] * target_stride + h * head_dim :][:head_dim]
            if is_neox:
                x1, x2, y1, y2 = x[:half], x[half : 2 * half], y[:half], y[half : 2 * half]
                for i in range(half):
                    a, b = x1[i], x2[i]
                    y1[i] = narrow(a * cos[i] - b * sin[i], y1[i])
                    y2[i] = narrow(b * cos[i] + a * sin[i], y2[i])
            else:
                for i in range(half):
                    a, b = x[2 * i], x[2 * i + 1]
                    y[2 * i] = narrow(a * cos[i] - b * sin[i], y[2 * i])
                    y[2 * i + 1] = narrow(b * cos[i] + a * sin[i], y[2 * i + 1])
            for i in range(2 * half, head_dim):
                y[i] = narrow(x[i], y[i])


@njit(nogil=True, cache=True)
def _scale_rows(
    source: Any,
    source_stride: int,
    rows: Any,
    scales: Any,
    scales_stride: int,
    target: Any,
    target_stride: int,
    slots: Any,
    num_heads: int,
    head_dim: int,
    start: int,
    end: int,
) -> None:
    for t in range(start, end):
        if t + _AHEAD < end:
            source_at, target_at = rows[t + _AHEAD] * source_stride, slots[t + _AHEAD] * target_stride
            _ask(source, target, source_at, target_at, num_heads * head_dim)
        for h in range(num_heads):
            x = source[rows[t] * source_stride + h * head_dim :][:head_dim]
            y = target[slots[t] * target_stride + h * head_dim :][:head_dim]
            scale = widen(scales[rows[t] * scales_stride + h])
            for i in range(head_dim):
                y[i] = narrow(widen(x[i]) * scale, y[i])


def splice_cpu_int8(
    arena_k: Tensor,
    arena_v: Tensor,
    *,
    scales: ArenaScales,
    rows: Tensor | None,
    cos_sin: Tensor,
    slots: Tensor,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    is_neox: bool,
) -> None:
    """As `splice_reference`, which it equals to the last rounding. Heads and elements are contiguous everywhere."""
    num_tokens, (num_heads, head_dim) = slots.numel(), k_pools[0].shape[1:]
    row_ids = np.arange(num_tokens) if rows is None else rows.contiguous().numpy()
    set_ids, slot_ids = scales.sets.contiguous().numpy(), slots.contiguous().numpy()
    angles = cos_sin.contiguous().numpy()

    def write(layer: int, start: int, end: int) -> None:
        k_from, k_scales, k_to = arena_k[layer], scales.keys[layer], k_pools[layer]
        _rotate_rows(
            as_elements(k_from),
            k_from.stride(0),
            row_ids,
            as_elements(k_scales),
            k_scales.stride(0),
            set_ids,
            as_elements(k_to),
            k_to.stride(0),
            slot_ids,
            angles,
            num_heads,
            head_dim,
            is_neox,
            start,
            end,
        )
        v_from, v_scales, v_to = arena_v[layer], scales.values[layer][..., None], v_pools[layer]
        _scale_rows(
            as_elements(v_from),
            v_from.stride(0),
            row_ids,
            as_elements(v_scales),
            v_scales.stride(0),
            as_elements(v_to),
            v_to.stride(0),
            slot_ids,
            num_heads,
            head_dim,
            start,
            end,
        )

    share_out(write, num_layers=len(k_pools), num_tokens=num_tokens, token_bytes=2 * k_pools[0][0].nbytes)
