"""Registered questions on real sessions: evaluated in idle time, given way, kept true."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from flash_engine import said
from flash_setup import LONGEST, starting
from session_values import ANA, BO
from words import ByteTokenizer

from memstore import NewFact
from sgl_stateful.errors import (
    FlashNotFound,
    FlashNotReady,
    FlashReadersFull,
    FlashReaderTooSlow,
    SessionNotFound,
    SessionTooLong,
)
from sgl_stateful.flash.choices import choices_of
from sgl_stateful.flash.events import Event
from sgl_stateful.flash.prompts import LOW_PRIORITY, fact_versions
from sgl_stateful.flash.question import Ask, Prompt
from sgl_stateful.params import MemoryParams
from sgl_stateful.service import MemoryService

pytestmark = pytest.mark.anyio


# ---- in idle time ----


async def test_a_question_is_evaluated_behind_what_the_session_holds() -> None:
    async with starting() as setup:
        session = await setup.open("data")
        asked = await setup.register(session)
        await setup.settled()
        [sent] = setup.engine.asked
        assert sent.token_ids == (ByteTokenizer.BOS, *b"data", *b"what")
        assert sent.prompt.salt == setup.pinning.sent[0].salt == "salt of ana"
        hold = sent.prompt.hold
        assert hold is not None
        assert (hold.session_id, hold.pin, hold.priority, hold.group) == (
            session.header.id,
            False,
            LOW_PRIORITY,
            session.group,
        )
        hit = setup.found(session, asked)
        assert hit is not None
        assert hit.stored.answer.text == said(sent.token_ids)


async def test_each_append_and_rewind_is_followed_by_an_answer_on_it() -> None:
    async with starting() as setup:
        session = await setup.open("a")
        asked = await setup.register(session)
        await setup.settled()
        await setup.append(session, "b")
        assert setup.found(session, asked) is None
        await setup.settled()
        hit = setup.found(session, asked)
        assert hit is not None
        assert hit.stored.answer.text == said((ByteTokenizer.BOS, *b"ab", *b"what"))
        await setup.sessions.rewind(session.header.id, ANA, 1)
        assert setup.found(session, asked) is None
        await setup.settled()
        hit = setup.found(session, asked)
        assert hit is not None
        assert hit.stored.answer.text == said((ByteTokenizer.BOS, *b"a", *b"what"))
        assert hit.stored.key.present.data_version == 3


async def test_an_empty_session_is_asked_as_one() -> None:
    async with starting() as setup:
        session = await setup.open("")
        asked = await setup.register(session)
        await setup.settled()
        assert setup.engine.asked[0].token_ids == (ByteTokenizer.BOS, *b"what")
        assert setup.found(session, asked) is not None


async def test_evaluating_is_no_use_of_the_session() -> None:
    async with starting() as setup:
        session = await setup.open()
        used_at = session.header.used_at
        asked = await setup.register(session)
        await setup.settled()
        assert (session.header.used_at, session.is_busy) == (used_at, False)
        assert setup.found(session, asked) is not None
        assert session.header.used_at > used_at


async def test_all_questions_of_a_session_run_at_once() -> None:
    async with starting() as setup:
        session, other = await setup.open("a"), await setup.open("b")
        setup.engine.foreground.began()
        for n in range(5):
            await setup.register(session, f"word {n}", f"q{n}")
        await setup.register(other)
        setup.engine.gate = asyncio.Event()
        setup.engine.foreground.ended()
        await setup.until(lambda: setup.engine.at_gate == 5)
        setup.engine.gate.set()
        await setup.settled()
        assert setup.engine.most_at_gate == 5
        assert len(setup.engine.asked) == 6


async def test_callers_go_first() -> None:
    async with starting() as setup:
        session = await setup.open()
        setup.engine.foreground.began()
        asked = await setup.register(session)
        await asyncio.sleep(0.02)
        assert setup.engine.asked == []
        setup.engine.gate = asyncio.Event()
        setup.engine.foreground.ended()
        await setup.until(lambda: setup.engine.at_gate == 1)
        setup.engine.foreground.began()
        # By the next turn of the loop: the caller's request has not been sent by then.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (setup.engine.aborted, setup.engine.at_gate) == (1, 0)
        setup.engine.gate.set()
        setup.engine.foreground.began()
        setup.engine.foreground.ended()
        await asyncio.sleep(0.02)
        assert len(setup.engine.asked) == 1
        assert setup.found(session, asked) is None
        setup.engine.foreground.ended()
        await setup.settled()
        assert setup.found(session, asked) is not None
        assert setup.outcomes() == {"stored": 1, "preempted": 1}


async def test_a_share_of_busy_time_may_be_spent() -> None:
    async with starting(busy_share=0.5) as setup:
        session = await setup.open()
        setup.engine.foreground.began()
        asked = await setup.register(session)
        await setup.settled()
        assert setup.found(session, asked) is not None
        # What runs when its time is up is broken off, and tried again.
        setup.engine.gate = asyncio.Event()
        await setup.append(session, "more")
        await setup.until(lambda: setup.engine.aborted >= 1)
        setup.engine.gate.set()
        await setup.settled()
        assert setup.found(session, asked) is not None


async def test_nothing_begins_when_the_server_closes() -> None:
    async with starting() as setup:
        session = await setup.open()
        await setup.register(session)
        await setup.settled()
        setup.engine.closing = True
        await setup.append(session, "more")
        await asyncio.sleep(0.02)
        assert len(setup.engine.asked) == 1


# ---- what changes meanwhile ----


async def test_the_end_of_a_session_ends_its_questions() -> None:
    async with starting() as setup:
        session = await setup.open()
        setup.engine.gate = asyncio.Event()
        await setup.register(session)
        await setup.until(lambda: setup.engine.at_gate == 1)
        await setup.sessions.close(session.header.id, ANA)
        setup.engine.gate.set()
        await setup.settled()
        assert setup.outcomes() == {"void": 1}
        assert setup.flash.table.registrations.everyone() == []
        with pytest.raises(SessionNotFound):
            await setup.flash.show(session.header.id, ANA, "q")


async def test_an_append_during_an_evaluation_is_evaluated_after_it() -> None:
    async with starting() as setup:
        session = await setup.open("a")
        setup.engine.gate = asyncio.Event()
        asked = await setup.register(session)
        await setup.until(lambda: setup.engine.at_gate == 1)
        for more in ("b", "c"):
            await setup.append(session, more)
        setup.engine.gate.set()
        await setup.settled()
        assert [asked.token_ids[-5:-4] for asked in setup.engine.asked] == [(*b"a",), (*b"c",)]
        hit = setup.found(session, asked)
        assert hit is not None
        assert hit.stored.key.present.data_version == 3


async def test_weights_are_waited_for() -> None:
    async with starting() as setup:
        session = await setup.open()
        asked = await setup.register(session)
        await setup.settled()
        await setup.sessions.weights_changing()
        assert setup.found(session, asked) is None
        await setup.append(session, "more")
        await asyncio.sleep(0.02)
        assert len(setup.engine.asked) == 1
        await setup.sessions.weights_changed()
        await setup.settled()
        hit = setup.found(session, asked)
        assert hit is not None
        assert hit.stored.key.present.weight_version == setup.pinning.weights
        assert setup.engine.asked[-1].prompt.salt == f"salt of ana{setup.pinning.weights}"


async def test_a_flush_breaks_off_and_forgets() -> None:
    async with starting() as setup:
        session = await setup.open()
        asked = await setup.register(session)
        await setup.settled()
        setup.engine.gate = asyncio.Event()
        await setup.register(session, "else", "other")
        await setup.until(lambda: setup.engine.at_gate == 1)
        async with setup.flash.flushing() as broken_off:
            assert (broken_off, setup.engine.aborted) == (True, 1)
            setup.engine.gate.set()
            await asyncio.sleep(0.02)
            assert len(setup.engine.asked) == 2
        assert setup.found(session, asked) is None
        await setup.settled()
        assert setup.found(session, asked) is not None
        async with setup.flash.flushing() as broken_off:
            assert not broken_off


async def test_a_purge_leaves_nothing() -> None:
    async with starting() as setup:
        mine, theirs = await setup.open(), await setup.open(owner=BO)
        asked = await setup.register(mine)
        await setup.register(theirs)
        await setup.settled()
        await asyncio.to_thread(setup.sessions._keeper.log.delete, mine.header.owner, mine.header.id)
        await setup.sessions.purged(ANA)
        assert setup.found(mine, asked) is None
        assert setup.found(theirs, asked) is not None


async def test_what_fails_is_said_and_tried_again_on_new_data() -> None:
    async with starting() as setup:
        session = await setup.open()
        setup.engine.failing = "out of order"
        asked = await setup.register(session)
        await setup.settled()
        shown = await setup.flash.show(session.header.id, ANA, "q")
        assert (shown["state"], shown["error"]) == ("failed", "out of order")
        with pytest.raises(FlashNotReady, match="its evaluation failed: out of order"):
            await setup.flash.answer(session.header.id, ANA, "q")
        setup.engine.failing = None
        await setup.append(session, "more")
        await setup.settled()
        assert setup.found(session, asked) is not None


async def test_a_question_that_no_longer_fits_says_so() -> None:
    async with starting() as setup:
        session = await setup.open("a" * (LONGEST - 50))
        with pytest.raises(SessionTooLong, match="and 60 are asked for"):
            await setup.register(session, max_tokens=60)
        await setup.register(session, max_tokens=40)
        await setup.settled()
        await setup.append(session, "b" * 20)
        await setup.settled()
        shown = await setup.flash.show(session.header.id, ANA, "q")
        assert shown["error"].startswith("471 tokens of session and 5 of question leave room for 24 of an answer")
        assert session.state == "open"


# ---- answers, audits, gates ----


async def test_an_answer_by_its_name() -> None:
    async with starting() as setup:
        session = await setup.open()
        setup.engine.foreground.began()
        await setup.register(session)
        with pytest.raises(FlashNotReady, match="not been evaluated yet"):
            await setup.flash.answer(session.header.id, ANA, "q")
        setup.engine.foreground.ended()
        await setup.settled()
        answer = await setup.flash.answer(session.header.id, ANA, "q")
        text = said((ByteTokenizer.BOS, *b"data", *b"what"))
        assert (answer["name"], answer["text"], answer["data_version"]) == ("q", text, 1)
        assert (answer["served_from"], answer["staleness_s"], answer["by"]) == ("flash", 0.0, "decoding")
        for owner, name in ((ANA, "r"), (BO, "q")):
            with pytest.raises((FlashNotFound, SessionNotFound)):
                await setup.flash.answer(session.header.id, owner, name)
        setup.engine.foreground.began()
        await setup.append(session, "more")
        with pytest.raises(FlashNotReady, match="of an earlier version"):
            await setup.flash.answer(session.header.id, ANA, "q")
        stale = await setup.flash.answer(session.header.id, ANA, "q", max_staleness_s=60.0)
        assert (stale["text"], stale["data_version"]) == (text, 1)
        assert 0 < stale["staleness_s"] < 60


async def test_a_hit_is_decoded_again_and_what_differs_is_counted() -> None:
    async with starting(audit_every=1) as setup:
        session = await setup.open()
        asked = await setup.register(session, audit_target=0.9)
        await setup.settled()
        assert setup.found(session, asked) is not None
        await setup.until(lambda: setup.flash.metrics.totals()["audits"] == 1)
        assert setup.engine.asked[1].token_ids == setup.engine.asked[0].token_ids
        # The next one of an earlier version, as the session has gone on by then.
        setup.engine.foreground.began()
        assert setup.found(session, asked) is not None
        await setup.append(session, "more")
        setup.engine.answers = ["something else"]
        [entry] = setup.flash.table.registrations.everyone()
        setup.flash.table.queue.drop(entry)
        setup.engine.foreground.ended()
        await setup.until(lambda: setup.flash.metrics.totals()["false_accepts"] == 1)
        assert setup.engine.asked[2].token_ids == setup.engine.asked[0].token_ids
        assert (entry.audit.agreed, entry.audit.audited) == (1, 2)


async def test_a_gate_answers_in_one_scan_once_it_is_calibrated() -> None:
    choices = choices_of(["up", "down"], lambda text: [*text.encode()])
    up, down = (choice.token_ids[0] for choice in choices)
    async with starting() as setup:
        session = await setup.open()
        setup.engine.logprobs = {up: -0.1, down: -3.1}
        asked = await setup.register(session, choices=choices, target=0.8)
        # (n + 1) / (n + 2) reaches 0.8 at n = 3: until then all is decoded.
        for n in range(3):
            setup.engine.answers = ["Up, as it seems"]
            await setup.append(session, f"{n}")
            await setup.settled()
        [entry] = setup.flash.table.registrations.everyone()
        assert entry.gate is not None
        assert [sent.sampling["max_new_tokens"] for sent in setup.engine.asked] == [32] * len(setup.engine.asked)
        while not entry.gate.is_calibrated:
            setup.engine.answers = ["up"]
            await setup.append(session, ".")
            await setup.settled()
        count = len(setup.engine.asked)
        await setup.append(session, ".")
        await setup.settled()
        [scan] = setup.engine.asked[count:]
        assert (scan.sampling["max_new_tokens"], scan.label_ids) == (1, (up, down))
        hit = setup.found(session, asked)
        assert hit is not None
        answer = hit.stored.answer
        assert (answer.text, answer.by, answer.choice) == ("up", "gate", "up")
        assert answer.gap == pytest.approx(3.0)
        # Nearer together than anything that was seen: decoded on.
        setup.engine.logprobs = {up: -0.7, down: -0.8}
        setup.engine.answers = ["u", "down"]
        count = len(setup.engine.asked)
        await setup.append(session, ".")
        await setup.settled()
        assert [sent.sampling["max_new_tokens"] for sent in setup.engine.asked[count:]] == [1, 32]
        hit = setup.found(session, asked)
        assert hit is not None
        assert (hit.stored.answer.text, hit.stored.answer.by) == ("down", "decoding")


# ---- facts ----


async def test_what_a_question_with_facts_has_in_front_of_it_is_prefilled_exactly(service: MemoryService) -> None:
    added = await service.facts.add(ANA, [NewFact("the office is in Porto"), NewFact("the boat is in Faro")])
    assert await service.wait_for_kv(ANA, [one.fact.id for one in added]) == []
    async with starting(service) as setup:
        session = await setup.open()
        await setup.register(session, "office?", memory=MemoryParams(owner=ANA), query="office?")
        await setup.settled()
        assert service.promoter is not None
        promoted = service.promoter.table
        await setup.until(lambda: promoted.promoted_blocks)
        [asked] = [sent.token_ids for sent in setup.engine.asked]
        [block] = [known.block for known in promoted._known.values()]
        assert list(block.token_ids) == list(asked[: len(block.token_ids)])
        shown = bytes(i for i in block.token_ids if i < 256).decode()
        assert shown.startswith("data")
        assert shown.endswith(("the office is in Porto\n", "the boat is in Faro\n"))
        assert (block.owner, block.salt) == (ANA, f"salt of {ANA}")
        await setup.append(session, "!")
        await setup.settled()
        await setup.until(lambda: promoted.promoted_blocks == 2)


async def test_facts_are_part_of_the_prompt_and_of_the_key(service: MemoryService) -> None:
    [added] = await service.facts.add(ANA, [NewFact("the office is in Porto")])
    memory = MemoryParams(owner=ANA, mode="text")
    async with starting(service) as setup:
        session = await setup.open()
        asked = await setup.register(session, "office?", memory=memory, query="office?")
        await setup.settled()
        prompt = bytes(i for i in setup.engine.asked[0].token_ids if i < 256).decode()
        assert prompt.startswith("data")
        assert "the office is in Porto" in prompt
        assert prompt.endswith("office?")
        facts = fact_versions(await service.retrieve(memory, "office?"))
        assert facts == ((added.fact.id, 1),)
        assert setup.found(session, asked, facts=facts) is not None
        assert setup.found(session, asked) is None  # as if the memory had nothing
        answer = await setup.flash.answer(session.header.id, ANA, "q")
        await service.facts.update(ANA, added.fact.id, {"text": "the office is in Faro"})
        assert setup.found(session, asked, facts=facts) is None
        await setup.settled()
        assert "Faro" in bytes(i for i in setup.engine.asked[-1].token_ids if i < 256).decode()
        later = await setup.flash.answer(session.header.id, ANA, "q")
        assert later["text"] != answer["text"]
        await service.facts.delete(ANA, added.fact.id)
        await setup.settled()
        assert "office is" not in bytes(i for i in setup.engine.asked[-1].token_ids if i < 256).decode()


async def test_a_new_fact_that_the_search_does_not_find_costs_no_decoding(service: MemoryService) -> None:
    await service.facts.add(ANA, [NewFact("the office is in Porto")])
    memory = MemoryParams(owner=ANA, mode="text", k=1, search="vector")
    async with starting(service) as setup:
        session = await setup.open()
        await setup.register(session, "the office is in", memory=memory, query="the office is in")
        await setup.settled()
        await service.facts.add(ANA, [NewFact("something else altogether")])
        await setup.until(lambda: setup.outcomes().get("unchanged") == 1)
        assert len(setup.engine.asked) == 1
        assert (await setup.flash.answer(session.header.id, ANA, "q"))["data_version"] == 1


# ---- followers ----


async def read(follower: Any, count: int) -> list[Event]:
    found: list[Event] = []
    async for event in follower.events(patience_s=5.0):
        assert event is not None
        found.append(event)
        if len(found) == count:
            break
    return found


async def test_followers_hear_of_answers_as_they_come() -> None:
    async with starting() as setup:
        session = await setup.open()
        follower = await setup.flash.follow(session.header.id, ANA, last_event_id=None)
        reading = asyncio.create_task(read(follower, 3))
        await setup.register(session)
        await setup.settled()
        await setup.append(session, "more")
        await setup.settled()
        await setup.flash.delete(session.header.id, ANA, "q")
        events = await reading
        assert [(e.kind, e.data.get("data_version")) for e in events] == [
            ("answer", 1),
            ("answer", 2),
            ("removed", None),
        ]
        setup.flash.followers.remove(follower)
        again = await setup.flash.follow(session.header.id, ANA, last_event_id=events[0].id)
        assert await read(again, 2) == events[1:]
        await setup.sessions.close(session.header.id, ANA)
        assert [event.kind for event in await read(again, 9)] == ["ended"]


async def test_no_more_may_follow_than_there_is_room_for() -> None:
    async with starting() as setup:
        session = await setup.open()
        first = await setup.flash.follow(session.header.id, ANA, last_event_id=None)
        await setup.flash.follow(session.header.id, ANA, last_event_id=None)
        with pytest.raises(FlashReadersFull, match="2 follow this session"):
            await setup.flash.follow(session.header.id, ANA, last_event_id=None)
        setup.flash.followers.remove(first)
        setup.flash.followers.remove(first)
        await setup.flash.follow(session.header.id, ANA, last_event_id=None)
        with pytest.raises(SessionNotFound):
            await setup.flash.follow(session.header.id, BO, last_event_id=None)


async def test_a_follower_that_does_not_read_is_let_go() -> None:
    async with starting() as setup:
        session = await setup.open()
        await setup.register(session)
        await setup.settled()
        follower = await setup.flash.follow(session.header.id, ANA, last_event_id=None)
        for n in range(9):
            await setup.append(session, f"{n}")
            await setup.settled()
        with pytest.raises(FlashReaderTooSlow, match="1 changes were not read in time; 8 are kept"):
            await read(follower, 1)


async def test_stats_count_what_happened() -> None:
    async with starting() as setup:
        session = await setup.open()
        asked = await setup.register(session)
        await setup.settled()
        setup.found(session, asked)
        setup.found(session, asked, miss="fresh")
        setup.flash.find(session, Ask(Prompt((), (1,)), "{}"), miss="fresh")  # not registered: nobody's miss
        setup.engine.foreground.began()
        await setup.append(session, "more")
        setup.found(session, asked)
        stats = setup.flash.stats(rows=5)
        assert (stats["registered"], stats["retired"], stats["queue"]) == (1, 0, 1)
        totals = stats["totals"]
        assert {name: count for name, count in totals["misses"].items() if count} == {"fresh": 1, "version": 1}
        assert totals["stale_prevented"] == 1
        assert totals["tokens"] == {"prefilled": 6, "cached": 3, "decoded": 8}
        assert totals["fresh_s"]["p50"] is not None
        [row] = stats["rows"]
        assert (row["name"], row["state"], row["waiting"], row["hits"]) == ("q", "stale", True, 1)
