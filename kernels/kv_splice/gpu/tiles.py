"""How much of the work one program does, and which of a few such shapes is the fastest for a kind of launch.

Choosing takes launches, so it is done when the server starts (`kv_splice.gpu.warm_up`); a launch only looks up.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["DEFAULT_TILE", "TILES", "Blocks", "Choices", "Kind", "Tile", "blocks_of"]

_WARP_SIZE = 64 if torch.version.hip else 32
_VECTOR_BYTES = 16
_SHORTEST_TAIL = 16


_QUANTISED_PAIRS = 8

QUANTISE_TOKENS = 16
"""Tokens of a fact that a program of `quantise_kernel` reads at once."""


class Tile(NamedTuple):
    """Vectors of 16 bytes that a thread moves of each of its streams, and warps a program."""

    vectors: int
    num_warps: int


TILES = (Tile(1, 2), Tile(1, 4), Tile(1, 8), Tile(2, 4), Tile(2, 8))
"""What is tried, as far as it suits the kind of launch (`Kind.tiles`)."""

DEFAULT_TILE = Tile(1, 4)
"""What is used of a kind that nothing was measured for."""


class Kind(NamedTuple):
    """What the choice of a tile depends on. `size` is the power of two at or below the number of tokens."""

    kernel: str
    source: torch.dtype
    target: torch.dtype
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    is_neox: bool
    size: int

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """What is tried of this kind, so that a thread has fewer than 128 registers and spills none.

        Two vectors are too many where elements are read wider than they are written, and beside a part of a head that
        does not rotate. So are eight warps where int8 becomes fp32 beside such a part: ptxas aims at 48 registers for
        sm_80 then, and spills two.
        """
        is_whole = self.rotary_dim == self.head_dim
        if is_whole and self.source.itemsize <= self.target.itemsize:
            return TILES
        is_wide = not is_whole and self.source.itemsize == 1 and self.target.itemsize == 4
        return tuple(tile for tile in TILES if tile.vectors == 1 and not (is_wide and tile.num_warps == 8))


class Blocks(NamedTuple):
    """Tokens and heads of a program, and the widths of half the rotated part and of the rest; all powers of two."""

    tokens: int
    heads: int
    half: int
    tail: int


class QuantiseBlocks(NamedTuple):
    """Tokens of a fact that are read at once; half the rotated part, the rest, all of a head; warps a program."""

    tokens: int
    half: int
    tail: int
    width: int
    num_warps: int


class Choices:
    """The fastest tile of each kind, as far as it was measured."""

    def __init__(self) -> None:
        self._tiles: dict[Kind, Tile] = {}

    def __len__(self) -> int:
        return len(self._tiles)

    def tile(self, kind: Kind) -> Tile:
        """The tile for `kind`: that of the nearest size measured, or the default."""
        if kind in self._tiles:
            return self._tiles[kind]
        sizes = [known.size for known in self._tiles if known == kind._replace(size=known.size)]
        if not sizes:
            return DEFAULT_TILE
        nearest = min(sizes, key=lambda size: abs(size.bit_length() - kind.size.bit_length()))
        self._tiles[kind] = self._tiles[kind._replace(size=nearest)]
        return self._tiles[kind]

    def choose(self, kind: Kind, time_ms: Callable[[Tile], float]) -> Tile:
        """Measure every tile of the kind with `time_ms`, and keep the fastest."""
        self._tiles[kind] = min(kind.tiles, key=time_ms)
        return self._tiles[kind]

    def items(self) -> list[tuple[Kind, Tile]]:
        """Kinds and their tiles."""
        return list(self._tiles.items())


def blocks_of(
    tile: Tile,
    *,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    element_size: int,
    warp_size: int = _WARP_SIZE,
) -> Blocks:
    """Blocks of a program: as many heads as there are, then as many tokens as `tile` has room for."""
    half = _power_of_two(rotary_dim // 2)
    tail = min(_power_of_two(max(1, head_dim - rotary_dim)), max(2 * half, _SHORTEST_TAIL))
    width = max(half, tail // 2)
    pairs = tile.vectors * tile.num_warps * warp_size * (_VECTOR_BYTES // element_size)
    heads = min(_power_of_two(num_kv_heads), max(1, pairs // width))
    return Blocks(max(1, pairs // (width * heads)), heads, half, tail)


def quantise_blocks_of(*, head_dim: int, rotary_dim: int, warp_size: int = _WARP_SIZE) -> QuantiseBlocks:
    """Blocks of a program of `quantise_kernel`: eight pairs of keys a thread, or as few as there are."""
    half, tail = _power_of_two(rotary_dim // 2), _power_of_two(max(1, head_dim - rotary_dim))
    width = _power_of_two(head_dim)
    num_warps = max(1, QUANTISE_TOKENS * width // (2 * _QUANTISED_PAIRS * warp_size))
    return QuantiseBlocks(QUANTISE_TOKENS, half, tail, width, num_warps)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
