"""The layers of a KV pool as a kernel takes them: an address each, and one stride for all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from kv_splice.errors import SpliceError

__all__ = ["ALIGNMENT", "PoolTable", "angle_alignment", "check_alignment", "table_of"]

ALIGNMENT = 16
"""Bytes of the widest load and store of a thread."""


@dataclass(frozen=True, slots=True)
class PoolTable:
    """Addresses of the pools of all layers. Whoever has a table keeps the pools alive.

    Attributes
    ----------
    k_addresses, v_addresses: `[num_layers]` int64, on the pools' device.
    k_stride, v_stride: elements from one token to the next, the same in all layers.
    num_slots, num_kv_heads, head_dim, dtype: of every pool.
    """

    k_addresses: Tensor
    v_addresses: Tensor
    k_stride: int
    v_stride: int
    num_slots: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self.k_addresses.shape[0]

    def layers(self, start: int, end: int) -> Self:
        """The table of layers `[start, end)`."""
        return replace(self, k_addresses=self.k_addresses[start:end], v_addresses=self.v_addresses[start:end])


def table_of(k_pools: Sequence[Tensor], v_pools: Sequence[Tensor]) -> PoolTable:
    """Table of pools `[num_slots, num_kv_heads, head_dim]`, one key and one value pool a layer; made once for each.

    Raises
    ------
    SpliceError
        Pools that are not aligned to 16 bytes, or whose tokens are not equally far apart in all layers.
    """
    first = k_pools[0]
    places = (tuple((pool.data_ptr(), pool.stride(0)) for pool in pools) for pools in (k_pools, v_pools))
    return _table(*places, first.shape, first.dtype, first.device)


@lru_cache(maxsize=64)
def _table(
    k_places: tuple[tuple[int, int], ...],
    v_places: tuple[tuple[int, int], ...],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> PoolTable:
    """Of pools by their addresses and strides, which are all that a table knows of them."""
    tables = []
    for name, places in (("k_pools", k_places), ("v_pools", v_places)):
        strides = sorted({stride for _, stride in places})
        if len(strides) != 1:
            raise SpliceError(f"tokens of {name} are {strides} elements apart, which must not differ by layer")
        for layer, (address, stride) in enumerate(places):
            _check(f"{name}[{layer}]", address, heads=shape[2], others=(stride,), element_size=dtype.itemsize)
        tables.append((torch.tensor([address for address, _ in places], dtype=torch.int64, device=device), strides[0]))
    (k_addresses, k_stride), (v_addresses, v_stride) = tables
    return PoolTable(k_addresses, v_addresses, k_stride, v_stride, *shape, dtype)


def check_alignment(name: str, tokens: Tensor) -> None:
    """Every token and head of `tokens [..., num_kv_heads, head_dim]` must start at a multiple of 16 bytes.

    Raises
    ------
    SpliceError
        Naming the tensor, and what is not such a multiple.
    """
    others = tokens.stride()[:-2]
    _check(name, tokens.data_ptr(), heads=tokens.shape[-1], others=others, element_size=tokens.element_size())


def _check(name: str, address: int, *, heads: int, others: Sequence[int], element_size: int) -> None:
    if address % ALIGNMENT:
        raise SpliceError(f"{name} starts {address % ALIGNMENT} bytes past a multiple of {ALIGNMENT}")
    for what, stride in (("heads", heads), *(("tokens or layers", stride) for stride in others)):
        if stride * element_size % ALIGNMENT:
            raise SpliceError(
                f"{what} of {name} are {stride * element_size} bytes apart, not a multiple of {ALIGNMENT}"
            )


def angle_alignment(cos_sin: Tensor) -> int:
    """The power of two, up to 16, that every row of `cos_sin [n, rotary_dim]` starts at a multiple of, bytes."""
    misaligned = cos_sin.data_ptr() | cos_sin.stride(0) * cos_sin.element_size() | ALIGNMENT
    return misaligned & -misaligned
