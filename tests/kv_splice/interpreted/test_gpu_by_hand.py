"""The kernels, interpreted, against RoPE written out in fp64, a number at a time: nothing of the package is asked.

RoPE: Su et al., RoFormer, equations 15 and 34: pair i of position m turns by m * base**(-2 i / rotary_dim).
"""

import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kv_splice import ArenaScales
from kv_splice.facts import Facts, FactScales
from kv_splice.gpu import splice, unrotate_capture

BASE = 1e4
# What rounding to a dtype may take off a number of one, and what angles in fp32 may.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
OF_ANGLES = 2.0**-21


class Drawn(NamedTuple):
    """A splice drawn at random: facts, some of no tokens, anywhere in the arena, their tokens at any positions."""

    lengths: list[int]
    first_rows: list[int]
    positions: list[int]
    slots: list[int]
    num_rows: int
    layers: int
    heads: int
    head_dim: int
    rotary_dim: int
    is_neox: bool
    dtype: torch.dtype
    source: torch.dtype

    @property
    def rows(self) -> list[int]:
        """Each token's row of the arena."""
        return [first + i for first, length in zip(self.first_rows, self.lengths, strict=True) for i in range(length)]

    @property
    def fact_of_token(self) -> list[int]:
        return [fact for fact, length in enumerate(self.lengths) for _ in range(length)]


def drawn(seed: int) -> Drawn:
    rng = random.Random(seed)
    lengths = [rng.choice((0, 0, 1, 1, 2, 7, 16, 17)) for _ in range(rng.randint(1, 6))]
    lengths[rng.randrange(len(lengths))] += seed % 2  # an odd seed has a token at least
    order = rng.sample(range(len(lengths)), len(lengths))
    first_rows, end = [0] * len(lengths), rng.randint(0, 2)
    for fact in order:
        first_rows[fact], end = end, end + lengths[fact] + rng.randint(0, 2)
    num_tokens = sum(lengths)
    head_dim, rotary_dim = rng.choice(
        ((64, 64), (64, 16), (80, 80), (80, 20), (96, 24), (96, 48), (128, 64), (256, 256))
    )
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    return Drawn(
        lengths,
        first_rows,
        [rng.choice((0, 1, 99, rng.randrange(100))) for _ in range(num_tokens)],
        rng.sample(range(num_tokens + 5), num_tokens),
        max(end, 1),
        rng.randint(1, 3),
        rng.choice((1, 2, 3, 4)),
        head_dim,
        rotary_dim,
        rng.random() < 0.5,
        dtype,
        rng.choice((dtype, torch.float32, torch.int8)),
    )


def pairs_of(it: Drawn) -> Iterator[tuple[int, int, float]]:
    """Which two elements turn together, and by how many radians a position."""
    half = it.rotary_dim // 2
    for i in range(half):
        first, second = (i, i + half) if it.is_neox else (2 * i, 2 * i + 1)
        yield first, second, BASE ** (-2 * i / it.rotary_dim)


def turned(head: list[float], it: Drawn, position: int) -> list[float]:
    out = list(head)
    for first, second, radians in pairs_of(it):
        cos, sin = math.cos(position * radians), math.sin(position * radians)
        out[first] = head[first] * cos - head[second] * sin
        out[second] = head[second] * cos + head[first] * sin
    return out


def table_of_angles(it: Drawn) -> Tensor:
    """Of positions 0 to 99, `[100, rotary_dim]` fp32: cosines of all pairs, then sines."""
    radians = [radians for _, _, radians in pairs_of(it)]
    rows = [[f(m * r) for f in (math.cos, math.sin) for r in radians] for m in range(100)]
    return torch.tensor(rows, dtype=torch.float64).float()


def pools_of(it: Drawn) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """NaN, and pools in it: of a token, all layers' keys and values with gaps between them."""
    width = it.heads * it.head_dim
    memory = torch.full((len(it.slots) + 5, it.layers, 2, width + 16), float("nan"), dtype=it.dtype)
    keys, values = (
        [memory[:, layer, of, :width].unflatten(1, (it.heads, it.head_dim)) for layer in range(it.layers)]
        for of in range(2)
    )
    return memory, keys, values


def assert_near(got: Tensor, want: list[float], dtype: torch.dtype, *, slack: float) -> None:
    """Each number within half a unit of its dtype, and `slack` times the largest for angles in fp32."""
    for ours, theirs in zip(got.double().tolist(), want, strict=True):
        allowed = abs(theirs) * ROUNDING[dtype] * (1 + 1e-3) + slack * max(map(abs, want)) + 2.0**-25
        assert abs(ours - theirs) <= allowed, (ours, theirs)


@pytest.mark.parametrize("by", ["rows", "facts"])
@pytest.mark.parametrize("seed", range(16))
def test_a_splice(seed: int, by: str) -> None:
    it = drawn(seed)
    torch.manual_seed(seed)
    shape = (2, it.layers, it.num_rows, it.heads, it.head_dim)
    num_facts = len(it.lengths)
    rows, sets = (torch.tensor(x, dtype=torch.int64) for x in (it.rows, it.fact_of_token))
    scales: Any = None
    if it.source == torch.int8:
        arena = torch.randint(-127, 128, shape, dtype=torch.int8)
        key_scales = torch.rand(it.layers, num_facts, it.heads, it.head_dim).half()
        value_scales = torch.rand(it.layers, it.num_rows, it.heads).half()
        of_facts = FactScales(key_scales, value_scales)
        scales = of_facts if by == "facts" else ArenaScales(key_scales, sets, value_scales)
    else:
        arena = torch.randn(shape).to(it.source)
    offsets = torch.tensor([0, *it.lengths]).cumsum(0)
    where: Any = {"rows": rows} if by == "rows" else {"facts": Facts(offsets, torch.tensor(it.first_rows))}
    memory, k_pools, v_pools = pools_of(it)
    splice(
        arena[0],
        arena[1],
        table_of_angles(it),
        torch.tensor(it.slots, dtype=torch.int64),
        k_pools,
        v_pools,
        scales=scales,
        positions=torch.tensor(it.positions, dtype=torch.int64),
        is_neox=it.is_neox,
        **where,
    )
    for layer in range(it.layers):
        for t, slot in enumerate(it.slots):
            for head in range(it.heads):
                key, value = (of[layer, it.rows[t], head].double() for of in arena)
                if it.source == torch.int8:
                    key = key * key_scales[layer, it.fact_of_token[t], head].double()
                    value = value * value_scales[layer, it.rows[t], head].double()
                want = turned(key.tolist(), it, it.positions[t])
                assert_near(k_pools[layer][slot, head], want, it.dtype, slack=OF_ANGLES)
                assert_near(v_pools[layer][slot, head], value.tolist(), it.dtype, slack=0)
    untouched = [slot for slot in range(memory.shape[0]) if slot not in it.slots]
    assert bool(memory[untouched].isnan().all())
    assert bool(memory[..., it.heads * it.head_dim :].isnan().all())


@pytest.mark.parametrize("seed", range(24, 32))
def test_a_capture(seed: int) -> None:
    it = drawn(seed)
    torch.manual_seed(seed)
    _, k_pools, v_pools = pools_of(it)
    plain = torch.randn(2, it.layers, len(it.slots), it.heads, it.head_dim).to(it.dtype)
    # Turned in fp64 and rounded to the pool's dtype: what comes back may be off by as much.
    for layer in range(it.layers):
        for t, slot in enumerate(it.slots):
            v_pools[layer][slot] = plain[1, layer, t]
            for head in range(it.heads):
                key = turned(plain[0, layer, t, head].tolist(), it, it.positions[t])
                k_pools[layer][slot, head] = torch.tensor(key, dtype=torch.float64).to(it.dtype)
    slots, positions = (torch.tensor(x, dtype=torch.int64) for x in (it.slots, it.positions))
    k, v = unrotate_capture(k_pools, v_pools, slots, table_of_angles(it), positions=positions, is_neox=it.is_neox)
    assert torch.equal(v, plain[1])
    slack = OF_ANGLES + 2 * ROUNDING[it.dtype]
    for got, want in zip(k.flatten(0, 2), plain[0].flatten(0, 2), strict=True):
        assert_near(got, want.double().tolist(), it.dtype, slack=slack)
