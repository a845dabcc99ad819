"""Arguments of a splice, and what the reference makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kv_splice import ArenaScales, RopeSpec, splice_reference
from kv_splice.gpu import Tile, launch_splice, splice

ABSENT = float("nan")


@dataclass
class Case:
    """Arguments of one splice over pools that hold NaN, their gaps too."""

    arena_k: Tensor
    arena_v: Tensor
    cos_sin: Tensor
    slots: Tensor
    k_pools: list[Tensor]
    v_pools: list[Tensor]
    rows: Tensor | None
    scales: ArenaScales | None
    is_neox: bool

    def arguments(self, **changes: Any) -> dict[str, Any]:
        return {**vars(self), **changes}

    def run(self, **changes: Any) -> None:
        splice(**self.arguments(**changes))

    def launch(self, tile: Tile) -> None:
        launch_splice(**vars(self), tile=tile)

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        """Pools as the reference leaves them."""
        k_pools, v_pools = ([absent_like(pool) for pool in pools] for pools in (self.k_pools, self.v_pools))
        splice_reference(**self.arguments(k_pools=k_pools, v_pools=v_pools))
        return k_pools, v_pools


def case(
    num_tokens: int = 5,
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    source: torch.dtype | None = None,
    is_neox: bool = True,
    padding: int = 0,
) -> Case:
    """`padding` elements lie between two tokens of a pool; an int8 `source` has three sets of key scales."""
    torch.manual_seed(5)
    capacity, num_slots = num_tokens + 3, num_tokens + 6
    shape = (2, layers, capacity, heads, head_dim)
    scales = None
    if source == torch.int8:
        arena_k, arena_v = torch.randint(-127, 128, shape, dtype=torch.int8)
        key_scales, value_scales = torch.rand(layers, 3, heads, head_dim) / 50, torch.rand(layers, capacity, heads) / 50
        key_scales[:, 1, :, ::5] = 0
        value_scales[:, ::4] = 2.0**-24  # fp16's smallest
        scales = ArenaScales(key_scales.half(), torch.randint(0, 3, (num_tokens,)), value_scales.half())
    else:
        arena_k, arena_v = torch.randn(shape).to(source or dtype)
    return Case(
        arena_k,
        arena_v,
        angles(torch.randint(0, 4000, (num_tokens,)), rotary_dim or head_dim),
        torch.randperm(num_slots)[:num_tokens],
        pools(layers, num_slots, heads, head_dim, dtype=dtype, padding=padding),
        pools(layers, num_slots, heads, head_dim, dtype=dtype, padding=padding),
        torch.randperm(capacity)[:num_tokens],
        scales,
        is_neox,
    )


def angles(positions: Tensor, rotary_dim: int) -> Tensor:
    """`[num_tokens, rotary_dim]` fp32."""
    return RopeSpec(head_dim=rotary_dim, rotary_dim=rotary_dim, is_neox=True, base=1e4).cos_sin(positions)


def pools(
    layers: int, num_slots: int, heads: int, head_dim: int, *, dtype: torch.dtype, padding: int = 0
) -> list[Tensor]:
    """Pools of NaN, with `padding` elements of NaN between tokens."""
    width = heads * head_dim
    memory = [torch.full((num_slots, width + padding), ABSENT, dtype=dtype) for _ in range(layers)]
    return [pool[:, :width].unflatten(1, (heads, head_dim)) for pool in memory]


def absent_like(pool: Tensor) -> Tensor:
    """NaN, strided like `pool`."""
    memory = torch.full(((pool.shape[0] - 1) * pool.stride(0) + pool[0].numel(),), ABSENT, dtype=pool.dtype)
    return memory.as_strided(pool.shape, pool.stride())


def assert_same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Equal everywhere; what neither wrote is NaN in both."""
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
