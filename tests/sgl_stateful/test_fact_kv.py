"""Facts between a KV pool of tensors, blobs and arena, apart from the engine: native and in int8."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_splice import QuantiseError, RopeSpec, quantise, unrotate_keys
from memstore import EncodingId, KVBlobs, MemStoreSettings
from sgl_stateful.directive import Capture, CaptureItem, Span
from sgl_stateful.sglang_adapter.fact_kv import FactKV, FactPart
from sgl_stateful.sglang_adapter.kv_pool import KVPool
from sgl_stateful.splice import FactArena

LAYERS, HEADS, DIM, SLOTS = 3, 2, 16, 120
ROPE = RopeSpec(head_dim=DIM, rotary_dim=DIM, is_neox=True, base=1e4)
PROMPT = list(range(1000, 1040))
LONG, SHORT = EncodingId("aa"), EncodingId("bb")
SPANS = {LONG: Span(LONG, 3, 23), SHORT: Span(SHORT, 23, 30)}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pool_of(dtype: torch.dtype) -> KVPool:
    """A pool of random keys and values."""
    generator = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, LAYERS, SLOTS, HEADS, DIM, generator=generator).to(dtype)
    return KVPool(tuple(k), tuple(v), ROPE, ROPE.cos_sin(torch.arange(500)), forward_stream=None)


def facts_of(pool: KVPool, blobs: KVBlobs, *, is_int8: bool, arena_bytes: int = 1 << 20) -> FactKV:
    arena = FactArena(
        budget_bytes=arena_bytes,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.int8 if is_int8 else pool.dtype,
        device="cpu",
    )
    return FactKV(pool=pool, arena=arena, blobs=blobs)


@pytest.fixture
def slots() -> torch.Tensor:
    """Where the pool has the prompt's tokens."""
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(6))[: len(PROMPT)]


def capture(facts: FactKV, slots: torch.Tensor) -> dict[str, Any]:
    items = []
    for number, span in enumerate(SPANS.values()):
        described = {
            "id": span.encoding_id,
            "owner": "ana",
            "fact_id": f"fact-{number}",
            "fact_version": 1,
            "fingerprint": "f",
            "policy": "window:0",
            "saw": [],
        }
        items.append(CaptureItem(span, described))
    return facts.at_finish(Capture(tuple(items)), slots, PROMPT)


def part(encoding_id: EncodingId, at: int) -> FactPart:
    """The whole fact, at prompt position ``at``."""
    span = SPANS[encoding_id]
    ids = array("q", PROMPT[span.start : span.end])
    return FactPart(encoding_id, ids, at, at, at + len(span))


def splice(facts: FactKV, into: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The short fact, then the long one, from position 50 on; returns keys and values as the pool then has them."""
    found = facts.rows([part(SHORT, 50), part(LONG, 57)])
    assert found is not None
    facts.splice(found[0], into, found[1])
    return torch.stack([p[into] for p in facts.pool.k_pools]), torch.stack([p[into] for p in facts.pool.v_pools])


def expected(pool: KVPool, slots: torch.Tensor, *, is_int8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in fp64, from the pool as it was captured."""
    keys, values = [], []
    for encoding_id, at in ((SHORT, 50), (LONG, 57)):
        span = SPANS[encoding_id]
        k, v = (torch.stack([p[slots[span.start : span.end]] for p in pools]) for pools in (pool.k_pools, pool.v_pools))
        k = unrotate_keys(k, ROPE.cos_sin(torch.arange(span.start, span.end)), is_neox=True).to(pool.dtype)
        if is_int8:
            k, v, scales = quantise(k, v)
            k, v = k.double() * scales.keys[:, None].double(), v.double() * scales.values[..., None].double()
        cos, sin = ROPE.cos_sin(torch.arange(at, at + len(span))).double()[:, None].chunk(2, -1)
        a, b = k.double().chunk(2, -1)
        keys.append(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
        values.append(v.double())
    return torch.cat(keys, 1), torch.cat(values, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_int8", [False, True], ids=["native", "int8"])
@pytest.mark.parametrize("source", ["arena", "blobs"])
def test_what_is_captured_is_spliced_elsewhere(
    blobs: KVBlobs, slots: torch.Tensor, dtype: torch.dtype, is_int8: bool, source: str
) -> None:
    pool = pool_of(dtype)
    facts = facts_of(pool, blobs, is_int8=is_int8)
    want_keys, want_values = expected(pool, slots, is_int8=is_int8)
    capture(facts, slots)
    if source == "blobs":
        facts = facts_of(pool, blobs, is_int8=is_int8)
    into = torch.tensor([i for i in range(SLOTS) if i not in slots.tolist()])[:27].flip(0)
    keys, values = splice(facts, into)
    epsilon = torch.finfo(dtype).eps
    assert (keys.double() - want_keys).abs().max() <= epsilon / 2 * want_keys.abs().max() + 1e-6
    assert torch.equal(values, want_values.to(dtype))


def test_int8_is_as_near_as_its_scales_allow(blobs: KVBlobs, slots: torch.Tensor) -> None:
    pool = pool_of(torch.float32)
    exact_keys, exact_values = expected(pool, slots, is_int8=False)
    facts = facts_of(pool, blobs, is_int8=True)
    capture(facts, slots)
    keys, values = splice(facts, torch.arange(SLOTS)[:27])
    # Half a scale of the largest of all; a key's pair turns, and has the errors of two.
    step = exact_keys.abs().max() * math.sqrt(2) / 127
    assert 0 < (keys - exact_keys).abs().max() <= step / math.sqrt(2) * (1 + 2**-10)
    assert 0 < (values - exact_values).abs().max() <= exact_values.abs().max() / 254 * (1 + 2**-10)


def test_its_bytes_are_those_of_int8_and_scales(blobs: KVBlobs, slots: torch.Tensor) -> None:
    pool = pool_of(torch.bfloat16)
    facts = facts_of(pool, blobs, is_int8=True)
    # 20 and 7 tokens: keys and values of a byte; scales of two, one a key channel and one a token's head.
    sizes = [2 * LAYERS * n * HEADS * DIM + 2 * LAYERS * HEADS * DIM + 2 * LAYERS * n * HEADS for n in (20, 7)]
    assert capture(facts, slots) == {"captured": 2, "captured_bytes": sum(sizes)}
    blob = blobs.load(LONG)
    assert blob is not None
    assert blob.nbytes == sizes[0]
    arena = facts.stats()["arena"]
    row = 2 * LAYERS * HEADS * DIM + 2 * LAYERS * HEADS + 8
    assert (arena["tokens"], arena["bytes"]) == (27, (27 + 2) * row)


@pytest.mark.parametrize("is_int8", [False, True], ids=["native server", "int8 server"])
def test_kv_of_the_other_kind_is_not_spliced(blobs: KVBlobs, slots: torch.Tensor, is_int8: bool) -> None:
    pool = pool_of(torch.bfloat16)
    capture(facts_of(pool, blobs, is_int8=not is_int8), slots)
    facts = facts_of(pool, blobs, is_int8=is_int8)
    assert facts.rows([part(LONG, 50)]) is None
    assert facts.stats()["arena"]["facts"] == 0


def test_kv_that_int8_does_not_hold_is_refused_before_anything_is_kept(blobs: KVBlobs, slots: torch.Tensor) -> None:
    pool = pool_of(torch.float32)
    pool.v_pools[1][slots[25]] = math.inf
    facts = facts_of(pool, blobs, is_int8=True)
    with pytest.raises(QuantiseError, match="V holds inf"):
        capture(facts, slots)
    assert blobs.has(LONG), "the other fact of the prompt came first"
    assert not blobs.has(SHORT)
    assert SHORT not in facts.arena


def test_a_fact_that_does_not_fit_the_arena_is_kept_in_blobs(
    tmp_path: Path, slots: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    row = 2 * LAYERS * HEADS * DIM + 2 * LAYERS * HEADS + 8
    with KVBlobs(tmp_path / "small", settings=MemStoreSettings(blob_map_size_bytes=8 << 20)) as blobs:
        facts = facts_of(pool_of(torch.bfloat16), blobs, is_int8=True, arena_bytes=20 * row)  # a row short
        capture(facts, slots)
        assert LONG not in facts.arena
        assert SHORT in facts.arena
        assert facts.rows([part(LONG, 50)]) is None
        assert "raise --arena-mib" in caplog.text
