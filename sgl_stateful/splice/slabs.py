"""The memory of the fact arena: rows of keys and values, as the KV pool has them or in int8 with their scales."""

from __future__ import annotations

from typing import Protocol

import torch

from kv_splice import ArenaScales, KVScales


class Slabs(Protocol):
    """``keys`` and ``values``, each ``[num_layers, capacity, num_kv_heads, head_dim]``.

    A fact takes ``extra_rows`` rows more than it has tokens; they come first.
    """

    keys: torch.Tensor
    values: torch.Tensor
    extra_rows: int

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scales: KVScales | None) -> None:
        """Copy a fact's ``[num_layers, num_tokens, num_kv_heads, head_dim]`` to ``rows``, all that it takes."""
        ...

    def scales(self, rows: torch.Tensor) -> ArenaScales | None:
        """What the splice of these tokens' ``rows`` needs besides keys and values."""
        ...


class NativeSlabs:
    """Two slabs of one dtype."""

    extra_rows = 0

    def __init__(self, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)  # before rotation
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scales: KVScales | None) -> None:
        """Round to the slabs' dtype, and copy."""
        _copy(keys, self.keys, rows)
        _copy(values, self.values, rows)

    def scales(self, rows: torch.Tensor) -> None:
        """Nothing."""


class Int8Slabs:
    """One slab of rows: a token's keys and values in int8, or the scales of a fact's keys, which are as many bytes.

    So nobody has to know beforehand how long facts are. Values' scales have a slab of their own.
    """

    extra_rows = 1

    def __init__(self, shape: tuple[int, int, int, int], *, device: torch.device | str) -> None:
        num_layers, capacity, num_kv_heads, head_dim = shape
        width = num_kv_heads * head_dim
        rows = torch.empty((num_layers, capacity, 2 * width), dtype=torch.int8, device=device)
        # Keys before rotation.
        self.keys, self.values = rows.view(num_layers, capacity, 2, num_kv_heads, head_dim).unbind(2)
        self._key_scales = rows.view(torch.float16).view(shape)
        self._value_scales = torch.empty((num_layers, capacity, num_kv_heads), dtype=torch.float16, device=device)
        self._scale_rows = torch.empty(capacity, dtype=torch.int64, device=device)  # of the token in each row

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scales: KVScales | None) -> None:
        """Copy as it is."""
        assert scales is not None, "int8 without scales"
        first, rows = rows[0], rows[1:]
        self._key_scales[:, first] = scales.keys.to(self.keys.device)
        self._scale_rows[rows] = first.to(self.keys.device)
        _copy(keys, self.keys, rows)
        _copy(values, self.values, rows)
        _copy(scales.values, self._value_scales, rows)

    def scales(self, rows: torch.Tensor) -> ArenaScales:
        """All of the arena's, and where those of these rows are."""
        return ArenaScales(self._key_scales, self._scale_rows[rows], self._value_scales)


def runs_of(rows: torch.Tensor) -> list[tuple[int, int]]:
    """Runs ``[start, end)`` of consecutive numbers that ``rows [num_rows]`` consists of, in its order."""
    runs: list[tuple[int, int]] = []
    for row in rows.tolist():
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def _copy(source: torch.Tensor, slab: torch.Tensor, rows: torch.Tensor) -> None:
    """``slab[:, rows] = source``, run by run: on a CPU, writing by an index takes ten times as long as a slice."""
    at = 0
    for start, end in runs_of(rows):
        slab[:, start:end] = source[:, at : at + end - start]
        at += end - start


def bytes_per_row(num_layers: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype) -> int:
    """Bytes of one token in all layers; of int8, also of the scales of one fact's keys."""
    numbers = num_layers * num_kv_heads * head_dim
    if dtype != torch.int8:
        return 2 * numbers * dtype.itemsize
    return 2 * numbers + num_layers * num_kv_heads * torch.float16.itemsize + torch.int64.itemsize


def new_slabs(
    capacity: int,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Slabs:
    """Memory for ``capacity`` rows, which is touched as they are written."""
    shape = (num_layers, capacity, num_kv_heads, head_dim)
    return Int8Slabs(shape, device=device) if dtype == torch.int8 else NativeSlabs(shape, dtype=dtype, device=device)
