import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kv_faults import unwritable
from memory_engine import MemoryEngine
from words import ByteTokenizer

from memstore import Fact, InvalidInput, KVBlobs, MemStore, NewFact
from memstore.embedding import Vectors
from sgl_stateful.directive import Capture, Splice
from sgl_stateful.errors import BadMemoryRequest, UnverifiedSplice
from sgl_stateful.params import MemoryParams
from sgl_stateful.planner import Prepared
from sgl_stateful.prompt import render_fact
from sgl_stateful.report import Report
from sgl_stateful.service import MemoryService

pytestmark = pytest.mark.anyio

Make = Callable[..., MemoryService]
HEAD, TAIL = list(b"<user>\n"), list(b"question?\n")
HEADER = b"Notes:\n"
TEXTS = ("red kayak", "red kayak paddle", "red kayak paddle rack", "green bicycle")
QUERY = "red kayak"  # nearest to the first, then the second, then the third


async def started(service: MemoryService, *, encode: bool = True) -> list[Fact]:
    """The four facts of ana, with KV where `encode` says so."""
    await service.start()
    facts = [addition.fact for addition in await service.facts.add("ana", [NewFact(text=text) for text in TEXTS])]
    if encode:
        service.notify("ana")
        assert await service.wait_for_kv("ana", [f.id for f in facts]) == []
    return facts


def prepare(service: MemoryService, *, reserve_tokens: int = 16, query: str = QUERY, **params: Any) -> Prepared:
    values: dict[str, Any] = {"owner": "ana", "k": 3, "search": "vector"}
    return service.prepare_ids(
        MemoryParams(**(values | params)), head=HEAD, tail=TAIL, query=query, reserve_tokens=reserve_tokens
    )


def text_of(prepared: Prepared) -> str:
    return ByteTokenizer().decode(prepared.token_ids)


async def stopped(service: MemoryService) -> None:
    tasks = list(service._tasks.values())
    service.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_spans_hold_the_encoded_facts_best_last(make_service: Make, blobs: KVBlobs) -> None:
    service = make_service()
    facts = await started(service)
    prepared = prepare(service)
    lines = [render_fact(facts[i]) for i in (2, 1, 0)]
    assert text_of(prepared) == f"<user>\nNotes:\n{''.join(lines)}question?\n"
    assert isinstance(prepared.directive, Splice)
    cut = [ByteTokenizer().decode(prepared.token_ids[s.start : s.end]) for s in prepared.directive.spans]
    assert cut == lines
    for span in prepared.directive.spans:
        blob = blobs.load(span.encoding_id)
        assert blob is not None
        assert list(blob.token_ids) == prepared.token_ids[span.start : span.end]
    assert [(shown["id"], shown["encoded"]) for shown in prepared.report.facts] == [
        (facts[i].id, True) for i in (2, 1, 0)
    ]
    assert prepared.report.facts[2]["score"] == pytest.approx(1.0, abs=1e-6)
    assert (prepared.report.not_encoded, prepared.report.reason) == (0, None)
    await stopped(service)


async def test_a_repair_takes_tokens_out_of_the_spans_and_says_how_many(make_service: Make) -> None:
    service = make_service(repair="first:4")
    await started(service)
    whole, first, last = (prepare(service, repair=repair) for repair in ("none", None, "last:20"))
    assert whole.token_ids == first.token_ids == last.token_ids
    spans = [prepared.directive.spans for prepared in (whole, first, last) if isinstance(prepared.directive, Splice)]
    lines = [len(text) + 1 for text in ("red kayak paddle rack", "red kayak paddle", "red kayak")]  # a byte is a token
    assert [len(span) for span in spans[0]] == lines == [22, 17, 10]
    assert [(span.start, span.end, span.offset) for span in spans[1]] == [
        (span.start + 4, span.end, 4) for span in spans[0]
    ]
    # 20 tokens from the end: all 10 of the last fact, and 10 of the one before.
    assert [(span.start, span.end, span.offset) for span in spans[2]] == [
        (spans[0][0].start, spans[0][0].end, 0),
        (spans[0][1].start, spans[0][1].end - 10, 0),
    ]
    assert whole.report.repaired_share == 0
    assert first.report.repaired_share == pytest.approx(12 / 49, abs=1e-6)
    assert last.report.repaired_share == pytest.approx(20 / 49, abs=1e-6)
    assert (whole.report.repair, first.report.repair) == ("none", "first:4")
    everything = prepare(service, repair="last:49")
    assert (everything.directive, everything.report.reason) == (None, "repair_covers_all")
    await stopped(service)


async def test_a_fact_without_kv_is_told_even_where_a_repair_covers_the_others(
    make_service: Make, blobs: KVBlobs
) -> None:
    service = make_service()
    await started(service)
    directive = prepare(service).directive
    assert isinstance(directive, Splice)
    blobs.drop_encoding(directive.spans[0].encoding_id)
    prepared = prepare(service, repair="first:22")  # the longest of the three has 22 tokens
    assert (prepared.directive, prepared.report.reason) == (None, "not_encoded:1")
    assert prepared.report.repaired_share == pytest.approx(27 / 49, abs=1e-6)
    await stopped(service)


async def test_text_mode_sends_the_same_ids_without_a_directive(make_service: Make) -> None:
    service = make_service()
    await started(service)
    spliced, text = prepare(service), prepare(service, mode="text")
    assert text.token_ids == spliced.token_ids
    assert text.directive is None
    assert text.salt == spliced.salt
    await stopped(service)


@pytest.mark.parametrize("params", [{"k": 0}, {"mode": "off"}, {"mode": "off", "k": 0}, {"owner": "bob"}])
async def test_without_facts_the_prompt_is_the_callers_alone(make_service: Make, params: dict[str, Any]) -> None:
    service = make_service(footer="End.\n")
    await started(service)
    prepared = prepare(service, **params)
    assert prepared.token_ids == HEAD + TAIL
    assert prepared.directive is None
    assert prepared.report.facts == []
    await stopped(service)


async def test_facts_below_the_score_are_left_out(make_service: Make) -> None:
    service = make_service()
    facts = await started(service)
    prepared = prepare(service, k=10, min_score=0.9)  # cosines 1, 2/sqrt(6) = 0.82, 2/sqrt(8) = 0.71, 0
    assert [shown["id"] for shown in prepared.report.facts] == [facts[0].id]
    assert len(prepare(service, k=10, min_score=0.75).report.facts) == 2
    assert len(prepare(service, k=10).report.facts) == 4
    await stopped(service)


async def test_the_query_of_the_parameters_comes_before_that_of_the_prompt(make_service: Make) -> None:
    service = make_service()
    facts = await started(service)
    assert prepare(service, k=1, query="green bicycle").report.facts[0]["id"] == facts[3].id
    params = MemoryParams(owner="ana", k=1, query="green bicycle")
    prepared = service.prepare_ids(params, head=[], tail=[], query=QUERY, reserve_tokens=0)
    assert prepared.report.facts[0]["id"] == facts[3].id
    await stopped(service)


async def test_chronological_order_is_that_of_arrival(make_service: Make) -> None:
    service = make_service()
    facts = await started(service)
    prepared = prepare(service, k=4, order="chronological")
    assert [shown["id"] for shown in prepared.report.facts] == [f.id for f in facts]
    await stopped(service)


async def test_named_facts_are_served_in_their_order_and_no_others(make_service: Make) -> None:
    service = make_service()
    facts = await started(service)
    bobs = (await service.facts.add("bob", [NewFact(text="red kayak")]))[0].fact
    named = [facts[3].id, facts[0].id, bobs.id, "no such fact", facts[3].id]
    prepared = prepare(service, facts=named, k=1, min_score=1, where={"stream": "none"})
    lines = [render_fact(facts[i]) for i in (3, 0)]
    assert text_of(prepared) == f"<user>\nNotes:\n{''.join(lines)}question?\n"
    assert [(shown["id"], shown["score"]) for shown in prepared.report.facts] == [
        (facts[3].id, None),
        (facts[0].id, None),
    ]
    assert prepare(service, facts=[]).token_ids == HEAD + TAIL
    assert prepare(service, facts=named, mode="off").token_ids == HEAD + TAIL
    await stopped(service)


async def test_an_unknown_policy_is_named_with_those_there_are(make_service: Make) -> None:
    service = make_service(also_encode="window:1")
    await started(service, encode=False)
    assert prepare(service, policy="window:1").report.policy == "window:1"
    with pytest.raises(BadMemoryRequest, match="'anchor:9' is not served here; choose from anchor:2, window:1"):
        prepare(service, policy="anchor:9")
    await stopped(service)


@pytest.mark.parametrize("owner", ["", "a\0b", "\ud800", "x" * 513])
async def test_an_owner_that_the_store_refuses_is_the_callers_mistake(make_service: Make, owner: str) -> None:
    service = make_service()
    await service.start()
    with pytest.raises(BadMemoryRequest, match=r"custom_params\.memory: owner"):
        prepare(service, owner=owner)
    await stopped(service)


async def test_an_internal_owner_is_refused_without_a_search_too(make_service: Make) -> None:
    service = make_service()
    await service.start()
    try:
        with pytest.raises(BadMemoryRequest, match=r"custom_params\.memory: owner"):
            prepare(service, owner="\0self-test", mode="off")
    finally:
        await stopped(service)


@pytest.mark.parametrize("query", ["", " \n", "a\0b", "\ud800"])
async def test_a_query_that_means_nothing_is_the_callers_mistake(make_service: Make, query: str) -> None:
    service = make_service()
    await service.start()
    with pytest.raises(BadMemoryRequest, match=r"custom_params\.memory: query"):
        prepare(service, query=query)
    await stopped(service)


BEST_TWO = len("red kayak\n") + len("red kayak paddle\n")


@pytest.mark.parametrize(
    ("room", "kept"), [(0, 0), (BEST_TWO - 1, 1), (BEST_TWO, 2), (BEST_TWO + len("red kayak paddle rack\n"), 3)]
)
@pytest.mark.parametrize("tight", ["context", "pool"])
async def test_the_worst_facts_go_where_there_is_no_room(
    tight: str, room: int, kept: int, make_service: Make, engine: MemoryEngine
) -> None:
    size = len(HEAD) + len(HEADER) + room + len(TAIL) + 16 + 1  # 16 for the answer, and one that SGLang wants
    if tight == "pool":
        engine.description["pool_tokens"] = size
    service = make_service(context_len=size if tight == "context" else 10_000)
    await service.start()
    service.store.add_many("ana", [NewFact(text=text) for text in TEXTS])
    prepared = prepare(service)
    assert len(prepared.report.facts) == kept
    assert prepared.report.dropped_for_length == 3 - kept
    assert len(prepared.token_ids) + 16 < size
    if kept:
        assert text_of(prepared).endswith("red kayak\nquestion?\n")
    await stopped(service)


async def test_facts_without_kv_stay_in_the_prompt_and_out_of_the_spans(
    make_service: Make, blobs: KVBlobs, engine: MemoryEngine
) -> None:
    service = make_service()
    facts = await started(service)
    engine.gate = gate = asyncio.Event()  # or the encoder, if it looks once more, finds the fact by itself
    blobs.drop_fact(facts[1].owner, facts[1].id)
    prepared = prepare(service)
    assert isinstance(prepared.directive, Splice)
    assert len(prepared.directive.spans) == 2
    assert prepared.directive.spans[0].end + len(render_fact(facts[1])) == prepared.directive.spans[1].start
    assert (prepared.report.not_encoded, prepared.report.reason) == (1, "not_encoded:1")
    assert [shown["encoded"] for shown in prepared.report.facts] == [True, False, True]
    engine.gate = None
    gate.set()
    service.finish(prepared.report, None, prompt_tokens=9, cached_tokens=0)
    assert await service.wait_for_kv("ana", [facts[1].id]) == [], "a report of lost KV has it encoded again"
    assert prepare(service).report.not_encoded == 0
    await stopped(service)


async def test_a_store_that_fails_costs_the_facts_and_says_so(make_service: Make) -> None:
    service = make_service()
    await started(service)
    service.store.close()
    prepared = prepare(service)
    assert prepared.token_ids == HEAD + TAIL
    assert prepared.directive is None
    shown = service.finish(prepared.report, None, prompt_tokens=17, cached_tokens=0)
    assert (shown["degraded"], shown["reason"]) == (True, "retrieval_failed: StoreClosed")
    assert (shown["tier"], shown["mode"]) == ("none", "text")
    await stopped(service)


async def test_salts_differ_by_owner_epoch_and_server_and_are_stable(make_service: Make, store: MemStore) -> None:
    service = make_service()
    before = {owner: service.salt(owner) for owner in ("ana", "bob", "cleo")}
    assert len(set(before.values())) == 3
    assert {owner: service.salt(owner) for owner in before} == before
    store.purge("ana")
    assert service.salt("ana") not in before.values()
    assert service.salt("bob") == before["bob"]
    assert all("ana" not in salt and "bob" not in salt for salt in before.values())


def report_of(**fields: Any) -> Report:
    return Report("splice", "ana", "anchor:2", [{"id": "x"}], **fields)


async def test_a_report_adds_up() -> None:
    shown = report_of(retrieve_ms=1.23456).finish(
        {"tier": "spliced", "spliced_tokens": 60, "splice_ms": 2.5}, prompt_tokens=100, cached_tokens=75
    )
    assert shown["tokens"] == {"prompt": 100, "cached": 15, "spliced": 60, "prefilled": 25}
    assert sum(shown["tokens"][part] for part in ("cached", "spliced", "prefilled")) == 100
    assert (shown["mode"], shown["tier"], shown["reason"]) == ("splice", "spliced", None)
    assert shown["ms"] == {"retrieve": 1.235, "assemble": 0.0, "splice": 2.5}


async def test_a_spliced_prompt_that_was_repaired_is_of_a_tier_of_its_own() -> None:
    spliced = {"tier": "spliced", "spliced_tokens": 45, "computed_tokens": 15}
    shown = report_of(repair="first:4", repaired_share=0.25).finish(spliced, prompt_tokens=100, cached_tokens=75)
    assert (shown["mode"], shown["tier"], shown["repair"]) == ("splice", "repaired", "first:4")
    assert shown["repaired_share"] == 0.25
    assert shown["tokens"] == {"prompt": 100, "cached": 15, "spliced": 45, "prefilled": 40}
    text = report_of(repair="first:4", repaired_share=0.25).finish({"tier": "text"}, prompt_tokens=9, cached_tokens=0)
    assert (text["mode"], text["tier"], text["repaired_share"]) == ("text", "text", 0.0)


async def test_the_schedulers_reason_comes_before_ours() -> None:
    shown = report_of(reason="not_encoded:1").finish(
        {"tier": "text", "reason": "facts_lost"}, prompt_tokens=10, cached_tokens=4
    )
    assert (shown["mode"], shown["tier"], shown["reason"]) == ("text", "text", "facts_lost")
    assert shown["tokens"] == {"prompt": 10, "cached": 4, "spliced": 0, "prefilled": 6}
    assert report_of(reason="not_encoded:1").finish(None, prompt_tokens=1, cached_tokens=0)["reason"] == "not_encoded:1"


async def test_a_failed_self_test_refuses_to_start(make_service: Make, engine: MemoryEngine) -> None:
    service = make_service(self_test=True)
    with pytest.raises(UnverifiedSplice, match="did not splice"):  # this engine does not splice at all
        await service.start()
    assert service.codec is None
    with pytest.raises(BadMemoryRequest, match="still starting"):
        prepare(service)


async def test_a_failed_self_test_is_served_where_the_settings_say_so(make_service: Make) -> None:
    service = make_service(self_test=True, allow_unverified_splice=True)
    await service.start()
    assert service.codec is not None
    assert service.verdict is None or not service.verdict.passed


async def test_facts_that_are_too_long_are_refused_by_position(make_service: Make) -> None:
    service = make_service(max_fact_tokens=20)
    with pytest.raises(InvalidInput, match="fact 1 has 21 tokens; the limit of this server is 20"):
        await service.facts.add("ana", [NewFact(text="x" * 19), NewFact(text="x" * 20)])
    assert service.store.count("ana") == 0


async def test_characters_of_many_tokens_count_as_many(make_service: Make) -> None:
    service = make_service(max_fact_tokens=20)
    with pytest.raises(InvalidInput, match="fact 0 has 41 tokens"):
        service.facts.check_lengths([NewFact(text="\N{GRINNING FACE}" * 10)])


@pytest.mark.parametrize("field", ["speaker", "time"])
async def test_what_is_rendered_beside_the_text_counts_as_well(make_service: Make, field: str) -> None:
    service = make_service(max_fact_tokens=20)
    with pytest.raises(InvalidInput, match="the limit of this server is 20"):
        service.facts.check_lengths([NewFact(text="short", **{field: "x" * 10_000})])


async def test_a_fact_deleted_while_it_is_encoded_leaves_the_arena_too(
    make_service: Make, engine: MemoryEngine
) -> None:
    service = make_service()
    await service.start()
    engine.gate = asyncio.Event()  # before the encoder, which has just begun to look, finds the fact by itself
    ((fact, *_),) = await service.facts.add("ana", [NewFact(text="red kayak")])
    await engine.at_gate.wait()
    await service.facts.delete("ana", fact.id)
    engine.gate.set()
    assert await service.wait_for_kv("ana", [fact.id]) == []
    await stopped(service)
    (captured,) = [
        item.span.encoding_id for s in engine.captures if isinstance(s.directive, Capture) for item in s.directive.items
    ]
    assert captured in [e for op, payload in engine.controls if op == "drop" for e in payload["encoding_ids"]]


async def test_deleting_drops_kv_everywhere_and_encodes_those_that_saw_it(
    make_service: Make, engine: MemoryEngine, blobs: KVBlobs
) -> None:
    service = make_service()
    facts = await started(service)
    span_of = {s["id"]: s for s in prepare(service, k=4).report.facts}
    assert span_of.keys() == {f.id for f in facts}
    await service.facts.delete("ana", facts[0].id)
    (dropped,) = [payload["encoding_ids"] for op, payload in engine.controls if op == "drop"]
    assert len(dropped) == 1
    assert await service.wait_for_kv("ana", [f.id for f in facts[1:]]) == []
    assert not blobs.has(dropped[0])
    assert prepare(service, k=4).report.not_encoded == 0
    await stopped(service)


async def test_deleting_tells_the_encoder_even_where_the_engine_fails(make_service: Make, engine: MemoryEngine) -> None:
    service = make_service()
    facts = await started(service)
    engine.failing_controls = 1
    try:
        await service.facts.delete("ana", facts[0].id)
    finally:
        await stopped(service)


async def test_changed_weights_leave_no_encoding_in_use(make_service: Make, engine: MemoryEngine) -> None:
    service = make_service()
    facts = await started(service)
    engine.gate = gate = asyncio.Event()  # or the encoder may have made them again before anyone looks
    await service.weights_changed()
    assert prepare(service).report.not_encoded == 3
    engine.gate = None
    gate.set()
    service.notify("ana")
    assert await service.wait_for_kv("ana", [f.id for f in facts]) == []
    assert prepare(service).report.not_encoded == 0
    await stopped(service)


async def test_another_storage_encodes_everything_anew_and_keeps_both_apart(
    make_service: Make, engine: MemoryEngine, blobs: KVBlobs
) -> None:
    native = make_service()
    facts = await started(native)
    before = prepare(native).directive
    assert isinstance(before, Splice)
    engine.description |= {"fact_fingerprint": "memory-engine in int8", "kv_storage": "int8"}
    int8 = make_service()
    engine.gate = gate = asyncio.Event()
    await int8.start()
    assert prepare(int8).report.not_encoded == 3, "none of the other kind is served meanwhile"
    engine.gate = None
    gate.set()
    assert await int8.wait_for_kv("ana", [f.id for f in facts]) == []  # nobody has asked for them
    after = prepare(int8).directive
    assert isinstance(after, Splice)
    assert after.fingerprint != before.fingerprint
    assert not {span.encoding_id for span in before.spans} & {span.encoding_id for span in after.spans}
    for splice, is_int8 in ((before, False), (after, True)):
        for span in splice.spans:
            blob = blobs.load(span.encoding_id)
            assert blob is not None
            assert (blob.scales is not None) == is_int8
    assert prepare(native).directive == before, "switched back, nothing is to be encoded"
    for task in int8._tasks.values():
        task.cancel()
    await stopped(native)


@pytest.mark.parametrize("situation", ["first request of a server", "changed weights"])
async def test_waiting_begins_before_the_encoder_has_looked(make_service: Make, situation: str) -> None:
    service = make_service()
    if situation == "changed weights":
        facts = await started(service)
        await service.weights_changed()
    else:
        facts = [addition.fact for addition in await service.facts.add("ana", [NewFact(text=text) for text in TEXTS])]
        service.notify("ana")
    try:
        assert await service.wait_for_kv("ana", [f.id for f in facts]) == []
        assert prepare(service).report.not_encoded == 0
    finally:
        await stopped(service)


async def test_status_counts_what_was_encoded(make_service: Make) -> None:
    service = make_service()
    facts = await started(service)
    status = await service.status()
    cost = status["encoder"]["policies"]["anchor:2"]
    assert cost["facts"] == len(facts)
    assert cost["fact_tokens"] == sum(len(render_fact(f)) for f in facts)
    assert cost["tokens_prefilled_per_fact_token"] == round(cost["tokens_prefilled"] / cost["fact_tokens"], 4)
    assert (status["owners"], status["policies"], status["verified"]) == (1, ["anchor:2"], False)
    assert status["kv_store"]["encodings"] == len(facts)
    await stopped(service)


# ---- who waits for whom ----


class Stuck:
    """A call of the store that does not come back until it is let go."""

    def __init__(self, store: MemStore, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.asked = threading.Semaphore(0)
        working = getattr(store, name)

        def stuck(*args: Any, **kwargs: Any) -> Any:
            self.asked.release()
            assert self.let_go.wait(60)
            return working(*args, **kwargs)

        monkeypatch.setattr(store, name, stuck)


async def goes_on(service: MemoryService) -> None:
    """The encoder and the feed."""
    before = service._follower.position
    fact = await asyncio.to_thread(service.store.add, "bob", "by another process")
    async with asyncio.timeout(60):
        while service._follower.position == before:
            await asyncio.sleep(0.005)
        assert await service.wait_for_kv("bob", [fact.id]) == []


async def test_purges_that_take_long_hold_up_nothing_else(
    make_service: Make, store: MemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(feed_poll_s=0.01)
    await started(service)
    stuck = Stuck(store, "purge", monkeypatch)
    purges = [asyncio.create_task(service.purge(f"owner {i}")) for i in range(30)]
    assert await asyncio.to_thread(stuck.asked.acquire, timeout=60)
    await goes_on(service)
    assert (await service.status())["owners"] == 2
    assert len(await service.facts.add("cleo", [NewFact("one")])) == 1
    stuck.let_go.set()
    assert len(await asyncio.gather(*purges)) == 30
    await stopped(service)


async def test_many_facts_to_embed_hold_up_no_other_add(
    make_service: Make, store: MemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(feed_poll_s=0.01)
    await service.start()
    let_go, embed = threading.Event(), store.embedder.embed

    def slow(texts: Sequence[str]) -> Vectors:
        assert len(texts) == 1 or let_go.wait(60)
        return embed(texts)

    monkeypatch.setattr(store.embedder, "embed", slow)
    many = [NewFact(f"fact {i}") for i in range(50)]
    adds = [asyncio.create_task(service.facts.add(f"owner {i}", many)) for i in range(10)]
    async with asyncio.timeout(60):
        ((fact, *_),) = await service.facts.add("ana", [NewFact("one")])
        assert await service.wait_for_kv("ana", [fact.id]) == []
    let_go.set()
    await asyncio.gather(*adds)
    await stopped(service)


async def test_callers_who_wait_for_the_store_hold_up_neither_feed_nor_encoder(
    make_service: Make, store: MemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(feed_poll_s=0.01)
    await service.start()
    stuck = Stuck(store, "history", monkeypatch)
    fact = store.add("ana", "one")
    calls = [asyncio.create_task(service.in_thread(store.history, "ana", fact.id)) for _ in range(50)]
    await goes_on(service)
    stuck.let_go.set()
    await asyncio.gather(*calls)
    await stopped(service)


async def test_closing_waits_for_those_who_use_the_kv_store(
    make_service: Make, store: MemStore, blobs: KVBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    await service.start()
    fact = store.add("ana", "one")
    stuck = Stuck(store, "history", monkeypatch)
    call = asyncio.create_task(service.in_thread(store.history, "ana", fact.id))
    assert await asyncio.to_thread(stuck.asked.acquire, timeout=60)
    tasks = list(service._tasks.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    closing = asyncio.create_task(asyncio.to_thread(service.close))
    done, _ = await asyncio.wait([closing], timeout=0.05)
    assert not done
    assert blobs.stats().encodings >= 0, "still open"
    stuck.let_go.set()
    await closing
    assert [version.text for version in await call] == ["one"]


@pytest.mark.parametrize("what", ["kv_store", "scheduler"])
async def test_the_status_shows_what_fails_in_its_place(
    make_service: Make, blobs: KVBlobs, engine: MemoryEngine, what: str
) -> None:
    service = make_service()
    await started(service)
    with unwritable(blobs, readable=what != "kv_store"):
        engine.failing_controls = int(what == "scheduler")
        status = await service.status()
    assert status[what]["error"]
    assert status["owners"] == 1
    await stopped(service)


async def test_a_prompt_that_is_spliced_again_is_prefilled_exactly(make_service: Make, engine: MemoryEngine) -> None:
    service = make_service(promote_tokens=500)
    await started(service)
    assert service.promoter is not None
    before = len(engine.sent)
    for _ in range(2):
        prepared = prepare(service)
        assert prepared.report.block is not None
        prepared.report.block = replace(prepared.report.block, salt=prepared.salt)
        service.finish(prepared.report, {"tier": "spliced"}, prompt_tokens=70, cached_tokens=60)
    async with asyncio.timeout(5):
        while not service.promoter.table.promoted_blocks:
            await asyncio.sleep(0.01)
    [sent] = engine.sent[before:]
    block_end = len(HEAD) + len(HEADER) + 49
    assert (sent.salt, list(sent.token_ids)) == (service.salt("ana"), prepared.token_ids[:block_end])
    shown = (await service.status())["promotion"]
    assert 0 < shown.pop("tokens_prefilled") <= block_end  # encoding has left a part of them in the cache
    assert shown == {
        "budget_tokens": 500,
        "remembered_blocks": 1,
        "promoted_blocks": 1,
        "promoted_tokens": block_end,
        "promoted": 1,
        "hit": 0,
        "evicted": 0,
        "failed": 0,
    }
    await service.purge("ana")
    assert len(service.promoter.table) == 0
    await stopped(service)


async def test_the_budget_for_exact_prefill_is_an_eighth_of_the_pool_unless_it_is_set(make_service: Make) -> None:
    for promote_tokens, expected in ((None, (1 << 20) // 8), (0, 0)):
        service = make_service(promote_tokens=promote_tokens)
        await service.start()
        assert service.promoter is not None
        assert service.promoter.table.budget_tokens == expected
        await stopped(service)
