"""What SGLang's own prefill budget makes of tokens between spliced facts: its adder, over an empty cache and a pool."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from kv_splice import RopeSpec
from memstore import Encoding, EncodingId, FactId, KVBlobs, OwnerId
from sgl_stateful.directive import DIRECTIVE_KEY, Span, Splice, dump_directive
from sgl_stateful.sglang_adapter.fact_kv import FactKV
from sgl_stateful.sglang_adapter.holes import HOLES, Run, around_replay_len
from sgl_stateful.sglang_adapter.kv_pool import KVPool
from sgl_stateful.sglang_adapter.prefix_cache import StatefulRadixCache
from sgl_stateful.splice import FactArena

LAYERS, HEADS, DIM, SLOTS = 1, 1, 8, 20_000
FACT = EncodingId("aa")
FACT_TOKENS = 10


@pytest.fixture(autouse=True)
def sglang_with_the_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Without the hooks of an engine that an earlier test has started in this process.
    original = inspect.unwrap(PrefillAdder._replay_len)
    monkeypatch.setattr(
        PrefillAdder, "_replay_len", lambda adder, req, prefix_len: around_replay_len(original, adder, req, prefix_len)
    )
    with get_context().override_server_args():
        yield


@pytest.fixture
def cache(blobs: KVBlobs) -> StatefulRadixCache:
    """A cache with one fact of ten tokens, [1000, 1010)."""
    pool = MHATokenToKVPool(
        SLOTS,
        page_size=1,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    allocator = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", pool, need_sort=False)
    cache = StatefulRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, 5000, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
        )
    )
    rope = RopeSpec(head_dim=DIM, rotary_dim=DIM, is_neox=True, base=1e4)
    views = KVPool((pool.get_key_buffer(0),), (pool.get_value_buffer(0),), rope, rope.cos_sin(torch.arange(5000)), None)
    arena = FactArena(
        budget_bytes=1 << 20, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, device="cpu"
    )
    ids = tuple(range(1000, 1000 + FACT_TOKENS))
    k, v = torch.randn(2, LAYERS, FACT_TOKENS, HEADS, DIM)
    blobs.put(Encoding(FACT, OwnerId("ana"), FactId("fact"), 1, "f", "window:0", ids), k, v)
    cache.attach(FactKV(pool=views, arena=arena, blobs=blobs), {}, num_slots=SLOTS + 1)
    return cache


def request(cache: StatefulRadixCache, name: str, *, before: int, behind: int) -> Req:
    """A request that has been matched: so many tokens, the fact, and so many tokens."""
    ids = array("q", [*range(before), *range(1000, 1000 + FACT_TOKENS), *range(5000, 5000 + behind)])
    splice = Splice((Span(FACT, before + 2, before + FACT_TOKENS, 2),), fingerprint="f")
    params = SamplingParams(max_new_tokens=1, custom_params={DIRECTIVE_KEY: dump_directive(splice)})
    req = Req(name, "", ids, params, vocab_size=32_000)
    req.init_next_round_input(cache)
    return req


def step(cache: StatefulRadixCache, chunk: int | None) -> PrefillAdder:
    return PrefillAdder(1, cache, cache.token_to_kv_pool_allocator, None, 1.0, 16_384, chunk)


def add(adder: PrefillAdder, req: Req) -> AddReqResult:
    return adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)


def test_holes_take_their_share_of_a_chunk(cache: StatefulRadixCache) -> None:
    adder = step(cache, 100)
    first = request(cache, "first", before=28, behind=20)
    # A repair has left out the fact's first two tokens: 30 tokens are computed before it, and 20 behind.
    assert add(adder, first) is AddReqResult.CONTINUE
    assert first.__dict__[HOLES] == [Run(0, 30)]
    assert (adder.rem_chunk_tokens, adder.rem_input_tokens) == (50, 16_334)
    assert (adder.log_input_tokens, adder.log_replay_tokens) == (20, 30)
    # What is left has room for the holes of the second, and for ten of its own tokens.
    second = request(cache, "second", before=38, behind=20)
    add(adder, second)
    assert adder.rem_chunk_tokens == 0
    assert (second.prefix_len, second.extend_end) == (48, 58)
    assert adder.new_chunked_req is second


def test_a_request_waits_where_its_holes_alone_are_more_than_what_is_left(cache: StatefulRadixCache) -> None:
    adder = step(cache, 100)
    assert add(adder, request(cache, "first", before=28, behind=20)) is AddReqResult.CONTINUE
    second = request(cache, "second", before=48, behind=20)
    assert add(adder, second) is AddReqResult.OTHER
    assert HOLES not in second.__dict__, "nothing has been spliced for it"
    assert adder.can_run_list[1:] == []
    assert add(step(cache, 100), second) is AddReqResult.CONTINUE


@pytest.mark.parametrize(
    ("before", "behind", "left", "extend"),
    [(500, 20, 0, 20), (98, 100, 0, 100), (98, 300, 0, 100), (48, 30, 20, 30)],
    ids=["holes longer than a chunk", "no room beside a whole chunk", "more than a chunk", "room enough"],
)
def test_the_first_of_a_step_is_never_refused_for_its_holes(
    cache: StatefulRadixCache, before: int, behind: int, left: int, extend: int
) -> None:
    adder = step(cache, 100)
    req = request(cache, "first", before=before, behind=behind)
    add(adder, req)
    assert adder.can_run_list == [req]
    assert req.__dict__[HOLES] == [Run(0, before + 2)]
    assert adder.rem_chunk_tokens == left
    assert req.extend_end - req.prefix_len == extend


def test_without_chunks_holes_count_as_input(cache: StatefulRadixCache) -> None:
    adder = step(cache, None)
    add(adder, request(cache, "first", before=28, behind=20))
    assert adder.rem_input_tokens == 16_384 - 50


def test_a_splice_that_fails_is_charged_as_the_text_that_it_becomes(cache: StatefulRadixCache, blobs: KVBlobs) -> None:
    adder = step(cache, 1000)
    req = request(cache, "first", before=28, behind=20)
    blobs.drop_encoding(FACT)
    add(adder, req)
    assert HOLES not in req.__dict__
    assert (adder.rem_chunk_tokens, adder.log_replay_tokens) == (1000 - 58, 0)


def test_a_request_without_facts_is_charged_as_ever(cache: StatefulRadixCache) -> None:
    adder = step(cache, 100)
    req = Req("plain", "", array("q", range(40)), SamplingParams(max_new_tokens=1), vocab_size=32_000)
    req.init_next_round_input(cache)
    assert add(adder, req) is AddReqResult.CONTINUE
    assert (adder.rem_chunk_tokens, adder.log_replay_tokens) == (60, 0)
