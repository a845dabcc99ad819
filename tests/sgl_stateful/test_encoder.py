import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import combinations

import pytest
import torch
from kv_faults import unwritable
from memory_engine import MemoryEngine, kv_of
from words import ByteTokenizer

from memstore import Encoding, Fact, FactId, KVBlobs, MemStore, NewFact, OwnerId
from sgl_stateful.directive import Capture, CaptureItem
from sgl_stateful.encoding import AnchorList, EncodeJob, EncodingPolicy, StreamWindow
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.encoding.encoder import Encoder
from sgl_stateful.forgetting import Forgetting
from sgl_stateful.prompt import render_fact

CONTEXT = b"<user>\nNotes:\n"
CODEC = FactCodec(ByteTokenizer(), context=tuple(CONTEXT), model_fingerprint="memory-engine")
TIMEOUT_S = 60.0

pytestmark = pytest.mark.anyio

Make = Callable[..., Encoder]


@pytest.fixture
def make(store: MemStore, blobs: KVBlobs, engine: MemoryEngine) -> Make:
    def encoder(
        *policies: EncodingPolicy,
        concurrency: int = 4,
        max_job_tokens: int = 100_000,
        strict: bool = False,
        salt: Callable[[str], str] = "salt of {}".format,
    ) -> Encoder:
        return Encoder(
            store=store,
            blobs=blobs,
            codec=CODEC,
            policies=policies,
            engine=engine,
            forgetting=Forgetting(blobs, strict=strict),
            salt=salt,
            concurrency=concurrency,
            max_job_tokens=max_job_tokens,
        )

    return encoder


@asynccontextmanager
async def running(encoder: Encoder) -> AsyncIterator[None]:
    task = asyncio.create_task(encoder.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def add(
    store: MemStore, count: int, *, owner: str = "ana", stream: str = "", first: int = 0, session: int = 10
) -> list[Fact]:
    """Facts of one session each `session`."""
    return store.add_many(
        owner,
        [
            NewFact(
                text=f"Thing {i} of {owner} happened in {stream or 'a talk'}.",
                stream=stream,
                time=f"day {i // session}",
            )
            for i in range(first, first + count)
        ],
    )


def encodings(blobs: KVBlobs, facts: Sequence[Fact], policy: str) -> dict[FactId, Encoding]:
    current = blobs.current(
        OwnerId(facts[0].owner), [(f.id, f.version) for f in facts], fingerprint=CODEC.fingerprint, policy=policy
    )
    return {fact_id: rungs[0] for fact_id, rungs in current.items()}


async def encode_all(encoder: Encoder, facts: Sequence[Fact]) -> None:
    encoder.notify(facts[0].owner)
    assert await encoder.wait_for(facts[0].owner, [f.id for f in facts], timeout_s=TIMEOUT_S) == []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("policy", [AnchorList(4), StreamWindow(3), StreamWindow(0)], ids=lambda p: p.name)
async def test_every_fact_is_encoded_behind_what_its_encoding_says_it_saw(
    policy: EncodingPolicy, make: Make, store: MemStore, blobs: KVBlobs
) -> None:
    facts = add(store, 30)
    async with running(encoder := make(policy)):
        await encode_all(encoder, facts)
        await until(lambda: encoder.pending() == 0)
    found = encodings(blobs, facts, policy.name)
    texts = {f.id: render_fact(f).encode() for f in facts}
    assert found.keys() == texts.keys()
    for fact_id, encoding in found.items():
        before = CONTEXT + b"".join(texts[seen] for seen, _ in encoding.saw)
        blob = blobs.load(encoding.id)
        assert blob is not None
        assert encoding.token_ids == blob.token_ids == tuple(texts[fact_id])
        k, v = kv_of(before + texts[fact_id], len(before), len(before) + len(texts[fact_id]))
        assert torch.equal(blob.k, k)
        assert torch.equal(blob.v, v)
    assert encoder.counts[policy.name].facts == 30
    assert encoder.counts[policy.name].failures == 0


@pytest.mark.parametrize(("policy", "count", "most"), [(AnchorList(4), 200, 1.2), (StreamWindow(16), 600, 2.2)])
async def test_tokens_prefilled_for_a_token_of_fact(
    policy: EncodingPolicy, count: int, most: float, make: Make, store: MemStore, engine: MemoryEngine
) -> None:
    facts = add(store, count)
    async with running(encoder := make(policy)):
        await encode_all(encoder, facts)
    counts = encoder.counts[policy.name]
    assert counts.facts == count
    assert counts.fact_tokens == sum(len(render_fact(f)) for f in facts)
    assert 1.0 <= counts.tokens_prefilled / counts.fact_tokens <= most


async def test_turns_that_arrive_one_by_one_cost_two_tokens_a_token(make: Make, store: MemStore) -> None:
    async with running(encoder := make(policy := StreamWindow(4))):
        for i in range(40):
            await encode_all(encoder, add(store, 1, first=i))
    counts = encoder.counts[policy.name]
    assert counts.facts == 40
    assert counts.tokens_prefilled / counts.fact_tokens <= 2.2


async def test_deleting_an_anchor_encodes_the_facts_that_saw_it_again(
    make: Make, store: MemStore, blobs: KVBlobs
) -> None:
    facts = add(store, 30)
    async with running(encoder := make(policy := AnchorList(2))):
        await encode_all(encoder, facts)
        gone = blobs.anchors(OwnerId("ana"), policy.name)[0]
        store.delete("ana", gone)
        left = [f for f in facts if f.id != gone]
        await encode_all(encoder, left)
    assert gone not in blobs.anchors(OwnerId("ana"), policy.name)
    found = encodings(blobs, left, policy.name)
    assert found.keys() == {f.id for f in left}
    assert all(gone not in dict(encoding.saw) for encoding in found.values())
    assert blobs.dependents(OwnerId("ana"), gone) == []


async def test_deleting_a_turn_encodes_those_whose_window_held_it_and_no_others(
    make: Make, store: MemStore, blobs: KVBlobs
) -> None:
    facts = add(store, 20)
    async with running(encoder := make(policy := StreamWindow(2))):
        await encode_all(encoder, facts)
        before = encodings(blobs, facts, policy.name)
        store.delete("ana", facts[18].id)
        left = facts[:18] + facts[19:]
        await encode_all(encoder, left)
    after = encodings(blobs, left, policy.name)
    assert after.keys() == {f.id for f in left}
    assert [f.id for f in left if after[f.id].id != before[f.id].id] == [facts[19].id]
    assert facts[18].id not in dict(after[facts[19].id].saw)


async def test_a_fact_that_is_deleted_while_it_is_encoded_leaves_no_blob(
    make: Make, store: MemStore, blobs: KVBlobs, engine: MemoryEngine
) -> None:
    facts = add(store, 1)
    engine.gate = asyncio.Event()
    async with running(encoder := make(AnchorList(2))):
        encoder.notify("ana")
        await engine.at_gate.wait()
        store.delete("ana", facts[0].id)
        encoder.notify("ana")
        engine.gate.set()
        await until(lambda: encoder.pending() == 0)
    assert len(engine.captures) == 1
    assert blobs.stats().encodings == 0
    assert blobs.stats().blob_bytes == 0


async def test_an_engine_that_fails_twice_is_asked_again(make: Make, store: MemStore, engine: MemoryEngine) -> None:
    facts = add(store, 1)
    engine.failing = 2
    async with running(encoder := make(StreamWindow(2))):
        await encode_all(encoder, facts)
    assert len(engine.captures) == 3
    assert encoder.counts["window:2"].failures == 2


async def test_an_engine_that_keeps_failing_is_given_up_until_the_next_change(
    make: Make, store: MemStore, blobs: KVBlobs, engine: MemoryEngine
) -> None:
    facts = add(store, 3)
    ids = [f.id for f in facts]
    engine.failing = 10**9
    async with running(encoder := make(StreamWindow(0))):
        encoder.notify("ana")
        assert await encoder.wait_for("ana", ids, timeout_s=TIMEOUT_S) == ids
        assert encoder.pending() == 3
        asked = len(engine.captures)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(engine.captures) == asked == 3 * 3
        engine.failing = 0
        await encode_all(encoder, facts)
    assert encodings(blobs, facts, "window:0").keys() == set(ids)


async def test_one_fact_that_fails_does_not_stop_the_others(
    make: Make, store: MemStore, blobs: KVBlobs, engine: MemoryEngine
) -> None:
    facts = add(store, 5)
    engine.failing = 2  # the prefix that all share, and the first fact
    async with running(encoder := make(StreamWindow(0), concurrency=1)):
        await encode_all(encoder, facts)
    assert len(engine.captures) == 6


# ---- facts that int8 does not hold ----


async def test_a_fact_that_is_refused_is_not_encoded_again_until_it_changes(
    make: Make, store: MemStore, blobs: KVBlobs, engine: MemoryEngine
) -> None:
    engine.description["kv_storage"] = "int8"
    facts = add(store, 5)
    ids = [f.id for f in facts]
    engine.infinite = {ids[0], ids[3]}
    async with running(encoder := make(policy := StreamWindow(2))):
        for _ in range(5):  # more often than an owner whose facts fail is tried
            encoder.notify("ana")
            assert await encoder.wait_for("ana", ids, timeout_s=TIMEOUT_S) == [ids[0], ids[3]]
            assert encoder.pending() == 0
        asked = [item.encoding["fact_id"] for s in engine.captures for item in items_of(s.directive)]
        assert sorted(asked) == sorted(ids), "each fact once"
        assert encodings(blobs, facts, policy.name).keys() == {ids[1], ids[2], ids[4]}
        counts = encoder.counts[policy.name]
        assert (counts.facts, counts.refused, counts.failures) == (3, 2, 0)
        more = add(store, 1, first=5)
        await encode_all(encoder, more)  # the owner has not been given up
        engine.infinite = set()
        changed = store.update("ana", ids[0], text="Something that int8 holds.")
        encoder.notify("ana")
        assert await encoder.wait_for("ana", ids, timeout_s=TIMEOUT_S) == [ids[3]]
    assert encodings(blobs, [changed], policy.name).keys() == {ids[0]}


async def test_every_fact_of_an_owner_may_be_refused(
    make: Make, store: MemStore, engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.description["kv_storage"] = "int8"
    ids = [f.id for f in add(store, 2)]
    engine.infinite = set(ids)
    async with running(encoder := make(StreamWindow(0))):
        assert await encoder.wait_for("ana", ids, timeout_s=TIMEOUT_S) == ids
        looked = len(engine.sent)
        encoder.report_missing("ana")  # by a request that met them
        assert encoder.pending() == 0, "it was looked at just now"
        with monkeypatch.context() as patch:
            patch.setattr("sgl_stateful.encoding.encoder._RETRY_AFTER_S", -1.0)
            encoder.report_missing("ana")
        assert encoder.pending() == 1, "that is long ago"
        store.delete("ana", ids[0])
        encoder.notify("ana")
        assert await encoder.wait_for("ana", ids, timeout_s=TIMEOUT_S) == [ids[1]]
    assert len(engine.sent) == looked
    assert encoder.counts["window:0"].refused == 2


def items_of(directive: object) -> Sequence[CaptureItem]:
    assert isinstance(directive, Capture)
    return directive.items


async def test_time_that_is_up_leaves_what_is_missing(make: Make, store: MemStore, engine: MemoryEngine) -> None:
    facts = add(store, 2)
    engine.gate = asyncio.Event()
    async with running(encoder := make(StreamWindow(2))):
        encoder.notify("ana")
        await engine.at_gate.wait()
        assert await encoder.wait_for("ana", [facts[1].id], timeout_s=0.001) == [facts[1].id]
        assert await encoder.wait_for("not yet looked at", [facts[0].id], timeout_s=0.001) == [facts[0].id]


async def test_a_server_that_shuts_down_is_asked_for_nothing_more(
    make: Make, store: MemStore, engine: MemoryEngine
) -> None:
    facts = add(store, 10)
    engine.gate = asyncio.Event()
    encoder = make(StreamWindow(0), concurrency=2)
    task = asyncio.create_task(encoder.run())
    await until(lambda: len(engine.captures) == 2)
    engine.closing = True
    engine.gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        await task
    assert len(engine.captures) == 2
    assert encoder.pending() == len(facts) - 2


@pytest.mark.parametrize(("foreground", "most"), [(0, 3), (1, 1), (7, 1)])
async def test_callers_requests_leave_room_for_one(
    foreground: int, most: int, make: Make, store: MemStore, engine: MemoryEngine
) -> None:
    facts = add(store, 20)
    engine.foreground = foreground
    async with running(encoder := make(StreamWindow(0), concurrency=3)):
        await encode_all(encoder, facts)
    assert max(sent.others_in_flight for sent in engine.sent) + 1 == most


async def test_two_owners_share_neither_salt_nor_text(make: Make, store: MemStore, engine: MemoryEngine) -> None:
    owners = ("ana", "bob")
    facts = {owner: add(store, 12, owner=owner) for owner in owners}
    async with running(encoder := make(AnchorList(2), StreamWindow(2))):
        for owner in owners:
            await encode_all(encoder, facts[owner])
    prompts = {owner: {s.token_ids for s in engine.sent if s.salt == f"salt of {owner}"} for owner in owners}
    assert sum(map(len, prompts.values())) == len({s.token_ids for s in engine.sent})
    for owner, other in (owners, owners[::-1]):
        assert prompts[owner]
        assert not any(f"of {other} ".encode() in bytes(prompt) for prompt in prompts[owner])


async def test_each_policy_has_its_own_encodings(make: Make, store: MemStore, blobs: KVBlobs) -> None:
    facts = add(store, 12)
    policies = (AnchorList(2), StreamWindow(2))
    async with running(encoder := make(*policies)):
        await encode_all(encoder, facts)
    by_policy = [{e.id for e in encodings(blobs, facts, policy.name).values()} for policy in policies]
    assert [len(found) for found in by_policy] == [12, 12]
    assert not any(a & b for a, b in combinations(by_policy, 2))


async def test_a_prefix_that_is_too_long_is_cut_from_the_front(
    make: Make, store: MemStore, engine: MemoryEngine
) -> None:
    facts = add(store, 6)
    longest = max(len(render_fact(f)) for f in facts)
    budget = len(CONTEXT) + 2 * longest
    async with running(encoder := make(AnchorList(5), max_job_tokens=budget)):
        await encode_all(encoder, facts)
    assert all(len(sent.token_ids) <= budget for sent in engine.captures)
    assert sum(len(sent.directive.items) for sent in engine.captures if isinstance(sent.directive, Capture)) == 6


async def test_a_window_of_long_turns_keeps_to_the_longest_prompt(
    make: Make, store: MemStore, engine: MemoryEngine
) -> None:
    facts = add(store, 8)
    budget = len(CONTEXT) + 4 * max(len(render_fact(f)) for f in facts)
    async with running(encoder := make(StreamWindow(4), max_job_tokens=budget)):
        await encode_all(encoder, facts)
    assert all(len(sent.token_ids) <= budget for sent in engine.captures)


class AddsAtPlan(StreamWindow):
    """A store that gets a fact, whose owner is looked at again, while each plan is made."""

    def __init__(self, store: MemStore) -> None:
        super().__init__(0)
        object.__setattr__(self, "_store", store)
        object.__setattr__(self, "notify", None)

    def plan(self, facts: Sequence[Fact], missing: Sequence[Fact], anchors: Sequence[FactId]) -> list[EncodeJob]:
        self._store.add("ana", f"fact {len(facts)} while a plan is made")  # type: ignore[attr-defined]
        self.notify()  # type: ignore[attr-defined]
        return super().plan(facts, missing, anchors)


async def test_an_owner_whose_facts_keep_arriving_gets_kv(make: Make, store: MemStore, blobs: KVBlobs) -> None:
    facts = add(store, 5)
    policy = AddsAtPlan(store)
    encoder = make(policy)
    loop = asyncio.get_running_loop()
    object.__setattr__(policy, "notify", lambda: loop.call_soon_threadsafe(encoder.notify, "ana"))
    async with running(encoder):
        for _ in range(3):
            await encode_all(encoder, facts)
            facts += add(store, 1, first=len(facts))
        assert encodings(blobs, facts[:-1], policy.name).keys() == {f.id for f in facts[:-1]}


async def test_facts_that_go_before_their_turn_are_not_prefilled(
    make: Make, store: MemStore, engine: MemoryEngine, blobs: KVBlobs
) -> None:
    facts = add(store, 20)
    engine.gate = asyncio.Event()
    async with running(encoder := make(StreamWindow(0), concurrency=2)):
        await engine.at_gate.wait()
        for fact in facts[2:]:
            store.delete("ana", fact.id)
        encoder.notify("ana")
        engine.gate.set()
        await until(lambda: encoder.pending() == 0)
    assert len(engine.captures) == 2
    assert blobs.stats().encodings == 2


async def test_what_was_captured_of_an_epoch_that_is_over_is_dropped(
    make: Make, store: MemStore, engine: MemoryEngine, blobs: KVBlobs
) -> None:
    """An import after a purge may have brought back the ids and versions, with other texts."""
    epoch = 0
    add(store, 1)
    engine.gate = asyncio.Event()
    async with running(encoder := make(StreamWindow(0), salt=lambda owner: f"{epoch}:{owner}")):
        await engine.at_gate.wait()
        epoch += 1
        engine.gate.set()
        await until(lambda: encoder.pending() == 0)
        assert blobs.stats().encodings == 0
    assert [op for op, _ in engine.controls] == ["drop"]


@pytest.mark.parametrize("strict", [True, False])
async def test_what_saw_a_fact_that_went_meanwhile(
    strict: bool, make: Make, store: MemStore, engine: MemoryEngine, blobs: KVBlobs
) -> None:
    facts = add(store, 2)
    engine.gate = asyncio.Event()
    async with running(encoder := make(StreamWindow(2), strict=strict)):
        await engine.at_gate.wait()
        store.delete("ana", facts[0].id)
        engine.gate.set()
        await until(lambda: encoder.pending() == 0)
        assert blobs.stats().encodings == (0 if strict else 1), "of the second fact, which saw the first"


async def test_strictly_stale_kv_goes_before_it_is_made_anew(
    make: Make, store: MemStore, engine: MemoryEngine, blobs: KVBlobs
) -> None:
    facts = add(store, 2)
    async with running(encoder := make(StreamWindow(2), strict=True)):
        await encode_all(encoder, facts)
    store.delete("ana", facts[0].id)
    engine.failing = 10**9
    async with running(encoder := make(StreamWindow(2), strict=True)):
        assert await encoder.wait_for("ana", [facts[1].id], timeout_s=TIMEOUT_S) == [facts[1].id]
    assert blobs.stats().encodings == 0


# ---- a KV store that takes nothing ----


async def test_a_full_kv_store_is_left_alone_and_tried_with_one_job(
    make: Make,
    store: MemStore,
    blobs: KVBlobs,
    engine: MemoryEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rests: list[float] = []
    rested = asyncio.Event()

    async def rest(self: Encoder) -> None:
        rests.append(self._kv_rest_s)
        rested.set()
        await working(self)

    working = Encoder._rest
    monkeypatch.setattr(Encoder, "_rest", rest)
    monkeypatch.setattr("sgl_stateful.encoding.encoder._KV_REST_S", 0.01)
    monkeypatch.setattr("sgl_stateful.encoding.encoder._LONGEST_KV_REST_S", 0.03)
    facts = add(store, 10) + add(store, 10, owner="bob")
    with unwritable(blobs):
        async with running(encoder := make(StreamWindow(0), concurrency=2)):
            await until(lambda: len(rests) >= 4)
            assert encoder.error is not None
            assert "no space left" in encoder.error
            assert await encoder.wait_for("ana", [facts[0].id], timeout_s=TIMEOUT_S) == [facts[0].id]
    assert rests[:4] == [0.01, 0.02, 0.03, 0.03]
    assert len(engine.captures) <= 2 + len(rests) - 1, "those that were under way, and then one at a time"
    said = [record for record in caplog.records if record.name == "sgl_stateful.encoding.encoder"]
    assert len(said) == 1, "once, however often it failed"
    assert said[0].exc_info is None


async def test_a_kv_store_that_has_room_again_is_used(
    make: Make, store: MemStore, blobs: KVBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_stateful.encoding.encoder._KV_REST_S", 0.01)
    facts = add(store, 10)
    async with running(encoder := make(AnchorList(2))):
        with unwritable(blobs, readable=False):
            await until(lambda: encoder.error is not None)
        await until(lambda: encoder.pending() == 0)
        assert encoder.error is None
    assert encodings(blobs, facts, "anchor:2").keys() == {f.id for f in facts}


class FailsOnce:
    """A policy whose first plan meets a store that is busy."""

    name = "window:2"
    extends_prompts = True

    def __init__(self) -> None:
        self._policy = StreamWindow(2)
        self._failures = 1

    def choose_anchors(self, facts: Sequence[Fact], current: Sequence[FactId]) -> tuple[FactId, ...]:
        return self._policy.choose_anchors(facts, current)

    def plan(self, facts: Sequence[Fact], missing: Sequence[Fact], anchors: Sequence[FactId]) -> list[EncodeJob]:
        if self._failures:
            self._failures -= 1
            raise RuntimeError("the store is busy")
        return self._policy.plan(facts, missing, anchors)


async def test_a_plan_that_fails_is_made_again(make: Make, store: MemStore, blobs: KVBlobs) -> None:
    facts = add(store, 2)
    async with running(encoder := make(policy := FailsOnce())):
        await encode_all(encoder, facts)
        assert encodings(blobs, facts, policy.name).keys() == {f.id for f in facts}


async def test_priming_a_prefix_leaves_room_for_callers_as_well(
    make: Make, store: MemStore, engine: MemoryEngine
) -> None:
    facts = add(store, 20, session=1)  # the first fact is an anchor: its job goes first
    engine.foreground = 1
    async with running(encoder := make(AnchorList(2), concurrency=3)):
        await encode_all(encoder, facts)
    assert max(sent.others_in_flight for sent in engine.sent) == 0


async def test_a_server_that_shuts_down_while_facts_are_planned_is_asked_for_nothing(
    make: Make, store: MemStore, engine: MemoryEngine
) -> None:
    add(store, 20)

    class ClosesAtPlan(AnchorList):
        def plan(self, facts: Sequence[Fact], missing: Sequence[Fact], anchors: Sequence[FactId]) -> list[EncodeJob]:
            engine.closing = True
            return AnchorList.plan(self, facts, missing, anchors)

    async with asyncio.timeout(TIMEOUT_S):
        await make(ClosesAtPlan(2)).run()
    assert engine.sent == []
