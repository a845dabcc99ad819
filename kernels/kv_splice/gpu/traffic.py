"""Bytes that a launch has to move: the floor under its time, whatever the kernel does.

Each stored key and value is read once and each pool element written once. Rows of the rotary table, indices and the
scales of keys are counted once, although every layer or token asks for them again: they come out of the cache then.
"""

from typing import NamedTuple

import torch

__all__ = ["Traffic", "capture_traffic", "splice_traffic"]

_INDEX = torch.int64.itemsize
_SCALE = torch.float16.itemsize


class Traffic(NamedTuple):
    """Bytes from and to memory."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Of both directions."""
        return self.read + self.written

    def floor_ms(self, bytes_per_s: float) -> float:
        """Milliseconds that a memory of that bandwidth, both directions together, takes at least."""
        return self.total / bytes_per_s * 1e3


def splice_traffic(
    *,
    num_layers: int,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    source: torch.dtype,
    pool: torch.dtype,
    angle: torch.dtype = torch.float32,
    num_indices: int = 2,
    num_facts: int = 0,
) -> Traffic:
    """Bytes of one splice of N tokens: `2LNHD (source + pool)` for keys and values, and what stands beside them.

    That is `N R` of cosines and sines, `8 N` for an index a token (slots always; rows, positions, sets where given),
    16 L of pools' addresses, and of int8 `2LFHD` scales of keys and `2LNH` of values.
    """
    elements = 2 * num_layers * num_tokens * num_kv_heads * head_dim
    read = elements * source.itemsize + num_tokens * (rotary_dim * angle.itemsize + num_indices * _INDEX)
    read += 2 * num_layers * _INDEX
    if source == torch.int8:
        read += num_layers * num_kv_heads * (num_facts * head_dim + num_tokens) * _SCALE
    return Traffic(read, elements * pool.itemsize)


def capture_traffic(
    *,
    num_layers: int,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    pool: torch.dtype,
    out: torch.dtype,
    angle: torch.dtype = torch.float32,
    num_indices: int = 1,
    num_facts: int = 1,
) -> Traffic:
    """Bytes of one capture: those of a splice the other way round.

    Into int8, keys are read twice by the same program, the second time out of the cache, which is not counted; scales
    are written, and 8 (F + 1) bytes of facts' offsets read.
    """
    elements = 2 * num_layers * num_tokens * num_kv_heads * head_dim
    read = elements * pool.itemsize + num_tokens * (rotary_dim * angle.itemsize + num_indices * _INDEX)
    read += 2 * num_layers * _INDEX
    written = elements * out.itemsize
    if out == torch.int8:
        read += (num_facts + 1) * _INDEX
        written += num_layers * num_kv_heads * (num_facts * head_dim + num_tokens) * _SCALE
    return Traffic(read, written)
