"""Directives on the real engine, in fp32: what is spliced equals what full prefill computes, where it must."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from engines import RunningEngine

from memstore import EncodingId, NewFact
from sgl_stateful.directive import Capture, CaptureItem, KeepProbe, Span, Splice
from sgl_stateful.engine_port import PrefillResult
from sgl_stateful.idle import IdleTime
from sgl_stateful.params import MemoryParams
from sgl_stateful.promotion import Promoter
from sgl_stateful.repair import parse_repair

pytestmark = pytest.mark.engine

_TOP = 200
_FACTS = [
    f"Fact {i}: {name} keeps {i + 3} {thing} in the {place}."
    for i, (name, thing, place) in enumerate(
        (name, thing, place)
        for name in ("Ada", "Bo", "Cleo", "Dan", "Eva")
        for thing, place in (("boats", "harbour"), ("lamps", "cellar"), ("maps", "study"), ("jars", "kitchen"))
    )
]
_QUESTION = "Who keeps lamps, and how many?\n"


def max_difference(a: PrefillResult, b: PrefillResult) -> float:
    """Largest difference of log probabilities over the tokens that both list."""
    shared = a.top_logprobs.keys() & b.top_logprobs.keys()
    assert len(shared) > _TOP // 2
    return max(abs(a.top_logprobs[t] - b.top_logprobs[t]) for t in shared)


def spliced_tokens(engine: RunningEngine, spans: Sequence[Span]) -> int:
    """Tokens that can be spliced: with pages of several tokens the splice ends on a page boundary."""
    end = spans[-1].end // engine.page_size * engine.page_size
    return sum(max(min(span.end, end) - span.start, 0) for span in spans)


class Prompt:
    """``[context][fact 0]...[fact n][question]``, with the place of each fact, encoded from one exact prefill."""

    def __init__(self, engine: RunningEngine, name: str, texts: list[str]) -> None:
        engine.run(engine.service.start())
        self.engine, self.name, self.codec = engine, name, engine.service.codec
        self.ids = list(self.codec.context)
        self.spans: list[Span] = []
        for i, text in enumerate(texts):
            tokens = self.codec.encode_text(text + "\n")
            # Ids of this test alone: hex of the name, then the number of the fact.
            encoding_id = EncodingId(name.encode().hex() + f"{i:04x}")
            self.spans.append(Span(encoding_id, len(self.ids), len(self.ids) + len(tokens)))
            self.ids += tokens
        self.block_end = len(self.ids)
        self.ids += self.codec.encode_text(_QUESTION)

    def capture(self, which: list[int] | None = None) -> None:
        items = tuple(
            CaptureItem(span, self._described(span, i))
            for i, span in enumerate(self.spans)
            if which is None or i in which
        )
        result = self.prefill(self.ids[: self.block_end], "capture", Capture(items, publish=False), top=0)
        assert result.scheduler["captured"] == len(items)

    def repaired(self, repair: str, spans: Sequence[Span]) -> tuple[Span, ...]:
        """What stays spliced of ``spans``, which are whole facts."""
        kept = parse_repair(repair).kept([len(span) for span in spans])
        return tuple(
            Span(span.encoding_id, span.start + run.start, span.start + run.stop, run.start)
            for span, runs in zip(spans, kept, strict=True)
            for run in runs
        )

    def _described(self, span: Span, number: int) -> dict[str, object]:
        return {
            "id": span.encoding_id,
            "owner": "engine-test",
            "fact_id": f"{self.name}-{number}",
            "fact_version": 1,
            "fingerprint": "test",
            "policy": "test",
            "saw": [],
        }

    def prefill(self, ids: list[int], salt: str, directive: object = None, top: int = _TOP) -> PrefillResult:
        return self.engine.run(
            self.engine.port.prefill(ids, salt=f"{self.name}:{salt}", directive=directive, top_logprobs=top)
        )


def test_layer_0_of_every_spliced_fact_equals_full_prefill(engine: RunningEngine) -> None:
    served = Prompt(engine, "layer0", _FACTS)
    captured = Prompt(engine, "layer0", list(reversed(_FACTS)))  # other positions, other neighbours
    by_text = dict(zip(reversed(_FACTS), captured.spans, strict=True))
    captured.capture()
    spans = tuple(
        Span(by_text[text].encoding_id, span.start, span.end) for text, span in zip(_FACTS, served.spans, strict=True)
    )
    keep = KeepProbe("layer0", spans[0].start, spans[-1].end)
    served.prefill(served.ids, "exact", keep)
    found = served.prefill(served.ids, "spliced", Splice(spans, probe="layer0")).scheduler
    assert found["spliced_tokens"] == spliced_tokens(engine, spans)
    assert found["k_error"] <= 1e-5 * found["k_scale"]
    assert found["v_error"] <= 1e-5 * found["v_scale"]


def test_facts_at_their_original_positions_equal_full_prefill(engine: RunningEngine) -> None:
    prompt = Prompt(engine, "original", _FACTS)
    prompt.capture()
    prompt.prefill(prompt.ids[: prompt.spans[0].start], "spliced", top=0)  # the prefix is cached: no holes
    exact = prompt.prefill(prompt.ids, "exact")
    spliced = prompt.prefill(prompt.ids, "spliced", Splice(tuple(prompt.spans)))
    assert spliced.scheduler["tier"] == "spliced"
    page_end = prompt.block_end // engine.page_size * engine.page_size
    assert spliced.prompt_tokens - spliced.cached_tokens == len(prompt.ids) - page_end
    assert max_difference(exact, spliced) <= 1e-4


def test_a_cold_prefix_is_computed_in_front_of_the_facts(engine: RunningEngine) -> None:
    prompt = Prompt(engine, "cold", _FACTS)
    prompt.capture()
    spliced = prompt.prefill(prompt.ids, "cold", Splice(tuple(prompt.spans)))
    assert spliced.scheduler["spliced_tokens"] == spliced_tokens(engine, prompt.spans)
    assert max_difference(prompt.prefill(prompt.ids, "exact"), spliced) <= 1e-4


@pytest.mark.parametrize("missing", [[0], [7], [3, 4, 11], [len(_FACTS) - 1]])
def test_facts_without_kv_are_computed_in_place(engine: RunningEngine, missing: list[int]) -> None:
    prompt = Prompt(engine, f"holes{missing[0]}-{len(missing)}", _FACTS)
    prompt.capture([i for i in range(len(_FACTS)) if i not in missing])
    spans = tuple(span for i, span in enumerate(prompt.spans) if i not in missing)
    spliced = prompt.prefill(prompt.ids, "holes", Splice(spans))
    assert spliced.scheduler["spliced_tokens"] == spliced_tokens(engine, spans)
    assert max_difference(prompt.prefill(prompt.ids, "exact"), spliced) <= 1e-4


@pytest.mark.parametrize("repair", ["first:3", "last:40", "first:5+last:60"])
def test_a_block_of_exact_encodings_stays_exact_under_repair(engine: RunningEngine, repair: str) -> None:
    """Wrong rows, positions or slots of what stays spliced would show: spans begin and end inside of facts."""
    prompt = Prompt(engine, f"repair-{repair}", _FACTS)
    prompt.capture()
    spans = prompt.repaired(repair, prompt.spans)
    found = prompt.prefill(prompt.ids, "repaired", Splice(spans))
    assert found.scheduler["tier"] == "spliced"
    assert found.scheduler["spliced_tokens"] == spliced_tokens(engine, spans) < spliced_tokens(engine, prompt.spans)
    assert max_difference(prompt.prefill(prompt.ids, "exact"), found) <= 1e-4


def test_a_repaired_block_and_a_spliced_one_never_find_each_other_s_kv(engine: RunningEngine) -> None:
    prompt = Prompt(engine, "kinds", _FACTS)
    encoded = Prompt(engine, "kinds", list(reversed(_FACTS)))  # approximate KV
    encoded.capture()
    by_text = dict(zip(reversed(_FACTS), encoded.spans, strict=True))
    whole = [
        Span(by_text[text].encoding_id, span.start, span.end) for text, span in zip(_FACTS, prompt.spans, strict=True)
    ]
    kinds = {repair: prompt.repaired(repair, whole) for repair in ("none", "first:3", "last:40")}
    alone = {repair: prompt.prefill(prompt.ids, f"alone-{repair}", Splice(spans)) for repair, spans in kinds.items()}
    assert max_difference(alone["none"], alone["first:3"]) > 0.01, "the test could not tell a leak"
    assert max_difference(alone["none"], alone["last:40"]) > 0.01, "the test could not tell a leak"
    for repair in ("last:40", "none", "first:3", "none"):  # all in one salt
        found = prompt.prefill(prompt.ids, "shared", Splice(kinds[repair]))
        assert max_difference(found, alone[repair]) <= 1e-4, repair
    exact = prompt.prefill(prompt.ids, "cold")
    assert max_difference(prompt.prefill(prompt.ids, "shared"), exact) <= 1e-4


def test_a_plain_request_never_finds_spliced_kv(engine: RunningEngine) -> None:
    prompt = Prompt(engine, "poison", _FACTS)
    encoded = Prompt(engine, "poison", list(reversed(_FACTS)))  # approximate KV: other facts stood in front
    encoded.capture()
    by_text = dict(zip(reversed(_FACTS), encoded.spans, strict=True))
    spans = tuple(
        Span(by_text[text].encoding_id, span.start, span.end) for text, span in zip(_FACTS, prompt.spans, strict=True)
    )
    cold = prompt.prefill(prompt.ids, "cold")
    spliced = prompt.prefill(prompt.ids, "shared", Splice(spans))
    assert spliced.scheduler["tier"] == "spliced"
    assert max_difference(spliced, cold) > 0.05, "the test could not tell a leak"
    plain = prompt.prefill(prompt.ids, "shared")
    assert plain.cached_tokens <= prompt.spans[0].start
    assert max_difference(plain, cold) <= 1e-4
    again = prompt.prefill(prompt.ids, "shared", Splice(spans))
    assert again.scheduler["tier"] == "exact"  # by now full prefill has cached these ids, and exact comes first


def test_the_same_splice_hits_its_own_kv(engine: RunningEngine) -> None:
    prompt = Prompt(engine, "again", _FACTS)
    prompt.capture()
    first = prompt.prefill(prompt.ids, "same", Splice(tuple(prompt.spans)))
    second = prompt.prefill(prompt.ids, "same", Splice(tuple(prompt.spans)))
    assert first.scheduler["spliced_tokens"] > 0
    assert second.scheduler["spliced_tokens"] == 0
    assert second.scheduler["tier"] == "spliced"
    assert second.cached_tokens >= len(prompt.ids) - engine.page_size
    assert max_difference(first, second) <= 1e-4


def test_an_unknown_encoding_falls_back_to_full_prefill(engine: RunningEngine) -> None:
    prompt = Prompt(engine, "unknown", _FACTS[:5])
    found = prompt.prefill(prompt.ids, "unknown", Splice(tuple(prompt.spans)))
    assert found.scheduler["tier"] == "text"
    assert found.scheduler["reason"] == "not_encoded:5"
    assert max_difference(found, prompt.prefill(prompt.ids, "exact")) <= 1e-4


def test_other_token_ids_than_the_encoding_s_are_never_spliced(engine: RunningEngine) -> None:
    prompt = Prompt(engine, "tokens", _FACTS[:5])
    prompt.capture()
    ids = list(prompt.ids)
    ids[prompt.spans[2].start + 1] += 1
    found = prompt.prefill(ids, "tokens", Splice(tuple(prompt.spans)))
    assert found.scheduler["tier"] == "text"
    assert found.scheduler["reason"] == "facts_lost"
    assert max_difference(found, prompt.prefill(ids, "exact")) <= 1e-4


def test_a_load_that_fails_behind_a_spliced_prefix_leaves_no_trace(engine: RunningEngine) -> None:
    """Three facts are spliced and cached; a fourth whose tokens do not fit its encoding must not build on them."""
    prompt = Prompt(engine, "partial", _FACTS[:5])
    encoded = Prompt(engine, "partial", list(reversed(_FACTS[:5])))
    encoded.capture()
    by_text = dict(zip(reversed(_FACTS[:5]), encoded.spans, strict=True))
    spans = [
        Span(by_text[text].encoding_id, span.start, span.end)
        for text, span in zip(_FACTS[:5], prompt.spans, strict=True)
    ]
    three = [*prompt.ids[: spans[2].end], *prompt.codec.encode_text(_QUESTION)]
    assert prompt.prefill(three, "same", Splice(tuple(spans[:3]))).scheduler["tier"] == "spliced"
    ids = list(prompt.ids)
    ids[spans[3].start + 1] += 1  # the fourth fact's encoding is of other tokens: loading it fails
    failed = prompt.prefill(ids, "same", Splice(tuple(spans)))
    assert (failed.scheduler["tier"], failed.scheduler["reason"]) == ("text", "facts_lost")
    exact = prompt.prefill(ids, "cold")
    assert max_difference(failed, exact) <= 1e-4
    plain = prompt.prefill(ids, "same")
    assert plain.cached_tokens >= len(ids) - engine.page_size  # what was prefilled exactly is found under its real ids
    assert max_difference(plain, exact) <= 1e-4
    engine.engine.flush_cache()  # refused, or fatal, where a slot has two owners
    assert max_difference(prompt.prefill(ids, "same"), exact) <= 1e-4


def test_memory_in_the_engine_s_own_api(engine: RunningEngine) -> None:
    service = engine.service
    engine.run(service.start())
    facts = [NewFact("The lighthouse keeper is called Ottoline."), NewFact("It rained.")]
    added = engine.run(service.facts.add("engine-owner", facts))
    assert engine.run(service.wait_for_kv("engine-owner", [addition.fact.id for addition in added])) == []
    reply = engine.engine.generate(
        prompt="{{memory}}Who keeps the lighthouse?\n",
        sampling_params={
            "max_new_tokens": 4,
            "temperature": 0,
            "custom_params": {"memory": {"owner": "engine-owner", "k": 2}},
        },
    )
    report = reply["meta_info"]["memory"]
    assert [fact["id"] for fact in report["facts"]] == [added[1].fact.id, added[0].fact.id], "the best one last"
    assert (report["tier"], report["policy"]) == ("spliced", "ladder:live+4+32")
    first, second = (len(service.codec.encode_fact(one.fact).token_ids) for one in reversed(added))
    page_end = second // engine.page_size * engine.page_size
    assert report["tokens"]["spliced"] in range(page_end - engine.page_size, second + 1)
    assert report["tokens"]["prefilled"] >= first
    alone = engine.engine.generate(
        prompt="{{memory}}Who keeps the lighthouse?\n",
        sampling_params={"max_new_tokens": 1, "custom_params": {"memory": {"owner": "engine-owner", "k": 1}}},
    )["meta_info"]["memory"]
    assert (alone["tier"], alone["reason"]) == ("text", "first_fact_computed"), "nothing is spliced of one fact"


def test_encodings_of_other_weights_are_never_spliced(engine: RunningEngine) -> None:
    prompt = Prompt(engine, "fence", _FACTS[:5])
    prompt.capture()
    spans = tuple(prompt.spans)
    try:
        engine.run(engine.port.control("fence", {"fingerprint": "new"}))
        found = prompt.prefill(prompt.ids, "old", Splice(spans, fingerprint="old"))
        assert (found.scheduler["tier"], found.scheduler["reason"]) == ("text", "weights_changed")
        assert prompt.prefill(prompt.ids, "new", Splice(spans, fingerprint="new")).scheduler["tier"] == "spliced"
        engine.run(engine.port.control("fence", {"fingerprint": None}))  # while weights change
        assert prompt.prefill(prompt.ids, "none", Splice(spans, fingerprint="new")).scheduler["tier"] == "text"
    finally:
        engine.run(engine.service.weights_changed())
    assert prompt.prefill(prompt.ids, "after", Splice(spans, fingerprint="new")).scheduler["tier"] == "text"


def test_a_block_that_recurs_is_exact_from_then_on(engine: RunningEngine) -> None:
    service, owner = engine.service, "promotion-owner"
    engine.run(service.start())
    added = engine.run(service.facts.add(owner, [NewFact(text) for text in _FACTS]))
    assert engine.run(service.wait_for_kv(owner, [addition.fact.id for addition in added])) == []
    events: list[str] = []
    engine.engine.flush_cache()
    own = service.promoter
    idle = IdleTime(engine.port, idle_s=0.01)
    service.promoter = Promoter(engine.port, budget_tokens=2000, on_event=events.append, idle=idle)
    running = engine.engine.loop.create_task(service.promoter.run())

    def ask(question: str) -> dict[str, Any]:
        memory = {"owner": owner, "k": 12, "query": "lamps", "mode": "splice"}
        sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"memory": memory}}
        report: dict[str, Any] = engine.engine.generate(prompt="{{memory}}" + question, sampling_params=sampling)[
            "meta_info"
        ]["memory"]
        return report

    async def promoted() -> None:
        while not events:
            await asyncio.sleep(0.02)

    try:
        assert [ask(f"Question {n}?\n")["tier"] for n in range(2)] == ["spliced", "spliced"]
        engine.run(asyncio.wait_for(promoted(), 30))
        exact = ask(_QUESTION)
        assert (exact["tier"], events) == ("exact", ["promoted", "hit"])
        tokens = exact["tokens"]
        question = len(service.codec.encode_text(_QUESTION))
        assert (tokens["spliced"], tokens["prefilled"]) == (
            0,
            question + (tokens["prompt"] - question) % engine.page_size,
        )
        # The same prompt on a server that has never seen it, hence from nothing.
        params = MemoryParams(owner=owner, k=12, query="lamps", mode="splice")
        prepared = service.prepare_ids(
            params, head=[], tail=service.codec.encode_text(_QUESTION), query="lamps", reserve_tokens=1
        )
        assert len(prepared.token_ids) == tokens["prompt"]
        found, cold = (
            engine.run(engine.port.prefill(prepared.token_ids, salt=salt, directive=None, top_logprobs=_TOP))
            for salt in (prepared.salt, "never seen")
        )
        assert found.cached_tokens >= tokens["prompt"] - question - engine.page_size
        assert cold.cached_tokens == 0
        assert max_difference(found, cold) <= 1e-4
    finally:
        running.cancel()
        service.promoter = own
