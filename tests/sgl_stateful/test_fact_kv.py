"""Facts between a KV pool of tensors, blobs and arena, apart from the engine: native and in int8."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_splice import RopeSpec, quantise, unrotate_keys
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
    return span_of(encoding_id, at, offset=0, length=len(SPANS[encoding_id]))


def span_of(encoding_id: EncodingId, at: int, *, offset: int, length: int, cut: tuple[int, int] = (0, 0)) -> FactPart:
    """``length`` tokens of a fact from its token ``offset`` on, at ``at``; without ``cut`` of them at either end."""
    first = SPANS[encoding_id].start + offset
    ids = array("q", PROMPT[first : first + length])
    return FactPart(encoding_id, ids, offset, at, at + cut[0], at + length - cut[1])


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


@pytest.mark.parametrize(
    ("position", "refused", "kept", "tokens"), [(5, LONG, SHORT, 7), (25, SHORT, LONG, 20)], ids=["first", "second"]
)
def test_a_fact_that_int8_does_not_hold_is_refused_alone(
    blobs: KVBlobs,
    slots: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
    position: int,
    refused: EncodingId,
    kept: EncodingId,
    tokens: int,
) -> None:
    pool = pool_of(torch.float32)
    pool.v_pools[1][slots[position]] = math.inf
    facts = facts_of(pool, blobs, is_int8=True)
    # As in the test of bytes.
    size = 2 * LAYERS * tokens * HEADS * DIM + 2 * LAYERS * HEADS * DIM + 2 * LAYERS * tokens * HEADS
    assert capture(facts, slots) == {"captured": 1, "captured_bytes": size, "refused": [refused]}
    assert facts.missing([LONG, SHORT]) == [refused]
    assert facts.rows([part(kept, 50)]) is not None
    assert (facts.stats()["captured"], facts.stats()["refused"], facts.stats()["arena"]["tokens"]) == (1, 1, tokens)
    assert "V holds inf" in caplog.text


@pytest.mark.parametrize("is_int8", [False, True], ids=["native", "int8"])
def test_rows_of_a_part_are_those_of_its_own_tokens(blobs: KVBlobs, slots: torch.Tensor, is_int8: bool) -> None:
    facts = facts_of(pool_of(torch.float32), blobs, is_int8=is_int8)
    capture(facts, slots)
    whole = {}
    for name in (LONG, SHORT):
        owned = facts.arena.rows(name)
        assert owned is not None
        whole[name] = owned.tolist()
    # Of the long fact: tokens 4 to 15, at 100; then 6 to 9, at 112, the first of them cached, and the last in the page
    # that the block ends in.
    parts = [
        span_of(LONG, 100, offset=4, length=12),
        span_of(LONG, 112, offset=6, length=4, cut=(1, 1)),
        span_of(SHORT, 116, offset=0, length=7, cut=(5, 0)),
    ]
    found = facts.rows(parts)
    assert found is not None
    rows, positions = found
    tokens = [(LONG, i) for i in range(4, 16)] + [(LONG, 7), (LONG, 8)] + [(SHORT, 5), (SHORT, 6)]
    assert rows.tolist() == [whole[name][i] for name, i in tokens]
    assert positions.tolist() == [*range(100, 112), 113, 114, 121, 122]


def test_a_part_is_spliced_as_it_is_in_the_whole_fact(blobs: KVBlobs, slots: torch.Tensor) -> None:
    """Tokens 4 to 15 of the long fact, without the first three: the same keys and values at the same positions."""
    pool = pool_of(torch.float32)
    facts = facts_of(pool, blobs, is_int8=False)
    capture(facts, slots)
    want_keys, want_values = expected(pool, slots, is_int8=False)  # the long fact is at 57: token 7 at 64
    found = facts.rows([span_of(LONG, 61, offset=4, length=12, cut=(3, 0))])
    assert found is not None
    into = torch.arange(9)
    facts.splice(found[0], into, found[1])
    keys = torch.stack([p[into] for p in pool.k_pools])
    assert (keys.double() - want_keys[:, 14:23]).abs().max() <= 1e-5
    assert torch.equal(torch.stack([p[into] for p in pool.v_pools]), want_values[:, 14:23].float())


@pytest.mark.parametrize(
    ("first", "offset", "length"),
    [(4, 5, 6), (5, 4, 6), (0, 14, 6), (14, 14, 7), (18, 18, 5)],
    ids=["an offset more", "an offset less", "those of the beginning", "a token past the end", "mostly past the end"],
)
def test_right_ids_at_the_wrong_offset_are_not_spliced(
    blobs: KVBlobs, slots: torch.Tensor, first: int, offset: int, length: int
) -> None:
    facts = facts_of(pool_of(torch.float32), blobs, is_int8=False)
    capture(facts, slots)
    assert len(SPANS[LONG]) == 20
    at = SPANS[LONG].start
    ids = array("q", PROMPT[at + first : at + first + length])
    # Only the first tokens are asked for: what follows them in the span must be right all the same.
    assert facts.rows([FactPart(LONG, ids, offset, 50, 50, 52)]) is None
    right = array("q", PROMPT[at + offset : min(at + offset + length, at + 20)])
    assert facts.rows([FactPart(LONG, right, offset, 50, 50, 52)]) is not None


def test_what_is_read_is_on_the_cpu_in_the_dtypes_of_its_storage(blobs: KVBlobs, slots: torch.Tensor) -> None:
    for is_int8, dtype in ((False, torch.bfloat16), (True, torch.int8)):
        blob = facts_of(pool_of(torch.bfloat16), blobs, is_int8=is_int8)._read(slots[3:23], 3, tuple(PROMPT[3:23]))
        assert (blob.k.dtype, blob.v.dtype) == (dtype, dtype)
        assert {tensor.device.type for tensor in (blob.k, blob.v, *(blob.scales or ()))} == {"cpu"}


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
