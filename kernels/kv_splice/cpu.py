"""The splice on a CPU: one pass over memory, each token's row read, rotated in registers, rounded and written.

Torch needs six passes for the same work and a barrier after each. These loops are compiled by Numba, release the GIL
and run on plain threads, one contiguous share of all layers' tokens each, so they neither wait for torch's OpenMP team
nor keep it from the model. Rows and slots may be in any order; the rows ahead are prefetched, which makes a permuted
splice nearly as fast as a contiguous one.
"""

# mypy: disable-error-code="import-untyped, untyped-decorator"

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from kv_splice.elements import as_elements, narrow, prefetch, widen

__all__ = ["share_out", "splice_cpu"]

# Tokens ahead whose rows are asked for, and elements between two asked-for cache lines (64 bytes of 16 bits).
_AHEAD = 3
_LINE = 32

# Below this much data, handing work to a thread costs more than it saves.
_PARALLEL_BYTES = 1 << 20


@njit(nogil=True, cache=True)
def _ask(source: Any, target: Any, source_at: int, target_at: int, width: int) -> None:
    for i in range(0, width, _LINE):
        prefetch(source, source_at + i)
        prefetch(target, target_at + i)


@njit(nogil=True, cache=True)
def _rotate_rows(
    source: Any,
    source_stride: int,
    rows: Any,
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
    half = cos_sin.shape[1] // 2
    for t in range(start, end):
        if t + _AHEAD < end:
            source_at, target_at = rows[t + _AHEAD] * source_stride, slots[t + _AHEAD] * target_stride
            _ask(source, target, source_at, target_at, num_heads * head_dim)
        cos, sin = cos_sin[t, :half], cos_sin[t, half:]
        for h in range(num_heads):
            x = source[rows[t] * source_stride + h * head_dim :][:head_dim]
            y = target[slots[t] * target_stride + h * head_dim :][:head_dim]
            if is_neox:
                x1, x2, y1, y2 = x[:half], x[half : 2 * half], y[:half], y[half : 2 * half]
                for i in range(half):
                    a, b = widen(x1[i]), widen(x2[i])
                    y1[i] = narrow(a * cos[i] - b * sin[i], y1[i])
                    y2[i] = narrow(b * cos[i] + a * sin[i], y2[i])
            else:
                for i in range(half):
                    a, b = widen(x[2 * i]), widen(x[2 * i + 1])
                    y[2 * i] = narrow(a * cos[i] - b * sin[i], y[2 * i])
                    y[2 * i + 1] = narrow(b * cos[i] + a * sin[i], y[2 * i + 1])
            for i in range(2 * half, head_dim):
                y[i] = narrow(widen(x[i]), y[i])


@njit(nogil=True, cache=True)
def _copy_rows(
    source: Any,
    source_stride: int,
    rows: Any,
    target: Any,
    target_stride: int,
    slots: Any,
    width: int,
    exact: bool,
    start: int,
    end: int,
) -> None:
    for t in range(start, end):
        if t + _AHEAD < end:
            source_at, target_at = rows[t + _AHEAD] * source_stride, slots[t + _AHEAD] * target_stride
            _ask(source, target, source_at, target_at, width)
        x, y = source[rows[t] * source_stride :][:width], target[slots[t] * target_stride :][:width]
        if exact:
            for i in range(width):
                y[i] = x[i]
        else:
            for i in range(width):
                y[i] = narrow(widen(x[i]), y[i])


def splice_cpu(
    arena_k: Tensor,
    arena_v: Tensor,
    *,
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
    slot_ids, angles = slots.contiguous().numpy(), cos_sin.contiguous().numpy()
    exact = arena_v.dtype == v_pools[0].dtype

    def write(layer: int, start: int, end: int) -> None:
        k_from, k_to, v_from, v_to = arena_k[layer], k_pools[layer], arena_v[layer], v_pools[layer]
        source, target = as_elements(k_from), as_elements(k_to)
        strides = k_from.stride(0), k_to.stride(0)
        _rotate_rows(
            source, strides[0], row_ids, target, strides[1], slot_ids, angles, num_heads, head_dim, is_neox, start, end
        )
        source, target = as_elements(v_from), as_elements(v_to)
        strides = v_from.stride(0), v_to.stride(0)
        width = num_heads * head_dim
        _copy_rows(source, strides[0], row_ids, target, strides[1], slot_ids, width, exact, start, end)

    share_out(write, num_layers=len(k_pools), num_tokens=num_tokens, token_bytes=2 * k_pools[0][0].nbytes)


def share_out(write: Callable[[int, int, int], None], *, num_layers: int, num_tokens: int, token_bytes: int) -> None:
    """Call `write(layer, first token, end token)` for all tokens of all layers, on as many threads as torch has."""

    def write_share(share: Iterator[tuple[int, int, int]]) -> None:
        for layer, start, end in share:
            write(layer, start, end)

    total = num_layers * num_tokens
    num_shares = torch.get_num_threads() if total * token_bytes >= _PARALLEL_BYTES else 1
    bounds = [total * i // num_shares for i in range(num_shares + 1)]
    shares = [_layer_ranges(a, b, num_tokens) for a, b in pairwise(bounds)]
    pending = [_workers(os.getpid(), num_shares).submit(write_share, share) for share in shares[1:]]
    write_share(shares[0])
    for future in pending:
        future.result()


def _layer_ranges(start: int, end: int, num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """`[start, end)` of all layers' tokens laid end to end, as `(layer, first token, end token)`."""
    while start < end:
        layer, token = divmod(start, num_tokens)
        stop = min(num_tokens, token + end - start)
        yield layer, token, stop
        start += stop - token


@cache
def _workers(_process: int, num_threads: int) -> ThreadPoolExecutor:
    # Keyed by process: the threads of a pool do not survive a fork.
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kv_splice")
