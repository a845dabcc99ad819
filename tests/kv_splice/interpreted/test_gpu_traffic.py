"""What the kernels read and write, address by address: every element once, and as many bytes as the formula says."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_cases import Case, case
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from kv_splice.facts import Facts, FactScales
from kv_splice.gpu import Tile, capture_quantised, capture_traffic, splice_traffic, unrotate_capture

NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])


class Accesses:
    """How often each address was read and written, and how many bytes stand there."""

    def __init__(self) -> None:
        self.read: Counter[int] = Counter()
        self.written: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def note(self, counter: Counter[int], pointers: Any, mask: Any) -> None:
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        chosen = addresses[np.broadcast_to(mask.data, addresses.shape)].tolist()
        counter.update(chosen)
        self._sizes.update(dict.fromkeys(chosen, pointers.get_element_ty().primitive_bitwidth // 8))

    def distinct_bytes(self, counter: Counter[int]) -> int:
        return sum(self._sizes[address] for address in counter)


@pytest.fixture
def accesses(monkeypatch: pytest.MonkeyPatch) -> Accesses:
    """Of the launches of this test."""
    seen = Accesses()
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def noted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        seen.note(seen.read, pointers, mask)
        return load(pointers, mask, *rest)

    def noted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.note(seen.written, pointers, mask)
        return store(pointers, value, mask, *rest)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", noted_load)
    monkeypatch.setattr(interpreter_builder, "create_masked_store", noted_store)
    return seen


def addresses(x: Tensor, rows: Tensor) -> Iterable[int]:
    """Of all elements of these rows of `x [num_rows, num_kv_heads, head_dim]`."""
    places = torch.arange(x.shape[0])[:, None, None] * x.stride(0)
    places = places + torch.arange(x.shape[1])[:, None] * x.stride(1) + torch.arange(x.shape[2])
    return (x.data_ptr() + places[rows].flatten() * x.element_size()).tolist()


def check_once(it: Case, seen: Accesses) -> None:
    """Every element that is spliced was read once and written once, and no pool element was touched besides."""
    assert it.rows is not None
    for arena in (it.arena_k, it.arena_v):
        for layer in arena:
            assert {seen.read[address] for address in addresses(layer, it.rows)} == {1}
    written = {address for pool in it.k_pools + it.v_pools for address in addresses(pool, it.slots)}
    assert set(seen.written) == written
    assert set(seen.written.values()) == {1}


@NEOX
@pytest.mark.parametrize("source", [None, torch.float32, torch.int8], ids=["native", "fp32", "int8"])
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(3, 80, 32), (2, 64, 64)])
def test_a_splice(
    accesses: Accesses, heads: int, head_dim: int, rotary_dim: int, source: torch.dtype | None, is_neox: bool
) -> None:
    it = case(7, heads=heads, head_dim=head_dim, rotary_dim=rotary_dim, source=source, is_neox=is_neox, padding=8)
    if it.scales is not None:
        it.scales = it.scales._replace(sets=torch.arange(7) % 3)
    it.launch(Tile(1, 1))
    check_once(it, accesses)
    traffic = splice_traffic(
        num_layers=2,
        num_tokens=7,
        num_kv_heads=heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        source=it.arena_k.dtype,
        pool=torch.bfloat16,
        num_indices=3 if it.scales is not None else 2,
        num_facts=3,
    )
    assert accesses.distinct_bytes(accesses.read) == traffic.read
    assert accesses.distinct_bytes(accesses.written) == traffic.written


def test_a_splice_of_facts_out_of_the_models_table(accesses: Accesses) -> None:
    it = case(6, source=torch.int8)
    assert it.scales is not None
    table, positions = torch.rand(40, 64).bfloat16(), torch.tensor([1, 3, 5, 7, 9, 11])
    facts = Facts(torch.tensor([0, 1, 4, 6]), torch.tensor([6, 1, 4]))
    scales = FactScales(it.scales.keys, it.scales.values)
    it.run(rows=None, facts=facts, scales=scales, cos_sin=table, positions=positions)
    it.rows = torch.tensor([6, 1, 2, 3, 4, 5])
    check_once(it, accesses)
    traffic = splice_traffic(
        num_layers=2,
        num_tokens=6,
        num_kv_heads=2,
        head_dim=64,
        rotary_dim=64,
        source=torch.int8,
        pool=torch.bfloat16,
        angle=torch.bfloat16,
        num_facts=3,
    )
    # Slots and positions are the formula's two indices; the search reads all offsets but the last, and first rows.
    assert accesses.distinct_bytes(accesses.read) == traffic.read + 8 * (3 + 3)
    assert accesses.distinct_bytes(accesses.written) == traffic.written


@NEOX
@pytest.mark.parametrize("out", [torch.bfloat16, torch.int8], ids=["native", "int8"])
def test_a_capture(accesses: Accesses, out: torch.dtype, is_neox: bool) -> None:
    it = case(9, heads=3, head_dim=80, rotary_dim=32, padding=8)
    for pool in it.k_pools + it.v_pools:
        pool[:] = 1
    offsets = torch.tensor([0, 4, 9])
    if out == torch.int8:
        got = capture_quantised(it.k_pools, it.v_pools, it.slots, it.cos_sin, offsets=offsets, is_neox=is_neox)
        k, v = got.k, got.v
    else:
        k, v = unrotate_capture(it.k_pools, it.v_pools, it.slots, it.cos_sin, is_neox=is_neox)
    traffic = capture_traffic(
        num_layers=2,
        num_tokens=9,
        num_kv_heads=3,
        head_dim=80,
        rotary_dim=32,
        pool=torch.bfloat16,
        out=out,
        num_facts=2,
    )
    assert accesses.distinct_bytes(accesses.read) == traffic.read
    assert accesses.distinct_bytes(accesses.written) == traffic.written
    assert set(accesses.written.values()) == {1}
    assert {a for x in (*k, *v) for a in addresses(x, torch.arange(9))} <= set(accesses.written)
    of_keys, of_values = (
        {accesses.read[a] for pool in pools for a in addresses(pool, it.slots)} for pools in (it.k_pools, it.v_pools)
    )
    # Into int8, keys are read for their scales first.
    assert (of_keys, of_values) == (({2}, {1}) if out == torch.int8 else ({1}, {1}))


def test_the_formula_by_hand() -> None:
    """Llama-3.1-8B, 2,000 tokens: 131,072 bytes a token in bf16, and an eighth of a per cent beside them."""
    shape: dict[str, Any] = {
        "num_layers": 32,
        "num_tokens": 2000,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rotary_dim": 128,
    }
    native = splice_traffic(**shape, source=torch.bfloat16, pool=torch.bfloat16, num_indices=3)
    assert native == (262_144_000 + 1_024_000 + 48_000 + 512, 262_144_000)
    int8 = splice_traffic(**shape, source=torch.int8, pool=torch.bfloat16, num_indices=4, num_facts=72)
    assert int8 == (131_072_000 + 1_024_000 + 64_000 + 512 + 4_718_592 + 1_024_000, 262_144_000)
    assert native.total == 525_360_512
    assert native.floor_ms(4.8e12) == pytest.approx(0.10945, abs=1e-5)
