"""Entries on real sessions: decoded ahead in idle time, pinned within the budget, and let go of at every ending."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from random import Random

import pytest
from flash_engine import said
from flash_setup import LONGEST, Setup, entry, starting
from session_values import ANA, BO
from words import ByteTokenizer

from sgl_stateful.errors import (
    BadFlashRequest,
    FlashExists,
    FlashLimitReached,
    FlashNotFound,
    SessionTooLong,
)
from sgl_stateful.flash.choices import choices_of
from sgl_stateful.flash.entry_pins import Base
from sgl_stateful.flash.prompts import LOW_PRIORITY
from sgl_stateful.sessions.session import Session

pytestmark = pytest.mark.anyio

INTERLEAVINGS = int(os.environ.get("ENTRY_INTERLEAVINGS", "30"))
CHOICES = choices_of(["yes", "no"], lambda text: list(text.encode()))


async def settled(setup: Setup) -> None:
    """Until nothing waits or runs, and nothing is to be unpinned."""
    await setup.settled()
    pins = setup.flash.entries.pins
    await setup.until(lambda: not pins._owed)


async def known(setup: Setup, content: str, word: str = "next") -> str:
    """What the engine says behind an entry of four tokens."""
    return said((ByteTokenizer.BOS, *content.encode(), *word.encode()))[:4]


# ---- ahead ----


async def test_an_entry_is_decoded_ahead_behind_its_session_and_pinned() -> None:
    async with starting() as setup:
        session = await setup.open("data")
        await setup.enter(session)
        await settled(setup)
        [sent] = setup.engine.asked
        assert sent.token_ids == (ByteTokenizer.BOS, *b"data", *b"next")
        assert sent.sampling["max_new_tokens"] == 4
        hold = sent.prompt.hold
        assert hold is not None
        assert (hold.entry, hold.pin, hold.tokens, hold.priority) == ("e", True, None, LOW_PRIORITY)
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.text, ahead.ends) == (await known(setup, "data"), "length")
        assert setup.entry_pins() == {f"{session.header.id}/e": 5 + 4 + 4}
        assert setup.flash.entries.pins.budget.cells == 4 + 4  # the rest is its session's


async def test_each_append_moves_the_pin_and_only_the_newest_version_is_decoded() -> None:
    async with starting() as setup:
        session = await setup.open("a")
        await setup.enter(session)
        await settled(setup)
        setup.engine.gate = asyncio.Event()
        await setup.append(session, "b")
        await setup.until(lambda: setup.engine.at_gate)
        assert setup.entry_pins() == {f"{session.header.id}/e": 2 + 8}  # until the newer one stands
        await setup.append(session, "c")
        await setup.append(session, "d")
        setup.engine.gate.set()
        await settled(setup)
        prompts = [asked.token_ids[1:-4] for asked in setup.engine.asked]
        assert prompts == [(*b"a",), (*b"ab",), (*b"abcd",)]
        assert setup.ahead(session, "next") is not None
        assert setup.entry_pins() == {f"{session.header.id}/e": 5 + 8}


async def test_callers_go_first_and_what_was_broken_off_holds_what_it_held() -> None:
    async with starting() as setup:
        session = await setup.open("a")
        await setup.enter(session)
        await settled(setup)
        setup.engine.gate = asyncio.Event()
        await setup.append(session, "b")
        await setup.until(lambda: setup.engine.at_gate)
        setup.engine.foreground.began()
        await setup.until(lambda: setup.engine.aborted == 1)
        assert setup.flash.entries.pins.budget.cells == 8
        assert setup.ahead(session, "next") is None
        setup.engine.foreground.ended()
        setup.engine.gate.set()
        await settled(setup)
        assert setup.ahead(session, "next") is not None


async def test_questions_and_entries_of_a_session_are_one_batch() -> None:
    async with starting() as setup:
        setup.engine.gate = asyncio.Event()
        setup.engine.foreground.began()
        session = await setup.open("data")
        await setup.register(session, "what")
        await setup.enter(session)
        setup.engine.foreground.ended()
        await setup.until(lambda: setup.engine.at_gate == 2)
        setup.engine.gate.set()
        await settled(setup)
        assert setup.engine.most_at_gate == 2
        assert setup.ahead(session, "next") is not None


async def test_an_entry_that_is_prefilled_alone() -> None:
    async with starting() as setup:
        session = await setup.open("data")
        await setup.enter(session, max_tokens=0)
        await settled(setup)
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.token_ids, ahead.text) == ((), "")
        assert setup.entry_pins() == {f"{session.header.id}/e": 5 + 4}


async def test_decoding_ahead_ends_at_the_decision_point_and_shows_it() -> None:
    async with starting() as setup:
        session = await setup.open("data")
        setup.engine.answers = ["a<b>", "a<b>"]
        setup.engine.stopped_by = "<b>"
        await setup.enter(session, until=("<b>",), until_ids=(7,), sampling_params={"temperature": 0, "stop": "."})
        await settled(setup)
        [asked] = setup.engine.asked
        assert (asked.sampling["stop"], asked.sampling["stop_token_ids"]) == ([".", "<b>"], [7])
        assert asked.sampling["no_stop_trim"] is True
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.text, ahead.token_ids, ahead.ends) == ("a<b>", tuple(b"a<b>"), None)


async def test_a_token_that_ends_the_answer_is_not_ahead_of_it() -> None:
    async with starting() as setup:
        session = await setup.open("data")
        setup.engine.answers = ["yes\x00"]
        setup.engine.stopped_by = 0
        await setup.enter(session)
        await settled(setup)
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.token_ids, ahead.ends) == (tuple(b"yes"), "stop")


# ---- choices ----


async def test_choices_are_weighed_behind_the_decision_point_until_the_gate_fires() -> None:
    async with starting() as setup:
        setup.engine.logprobs = {ord("y"): -0.1, ord("n"): -2.1}
        session = await setup.open("a")
        setup.engine.answers = ["yes!"]
        await setup.enter(session, choices=CHOICES, target=0.6)
        await settled(setup)
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.by, ahead.choice, ahead.agreed) == ("decoding", "yes", True)
        assert ahead.gap == pytest.approx(2.0)
        assert ahead.token_ids == tuple(b"yes!")
        await setup.append(session, "b")
        await settled(setup)
        assert setup.engine.asked[-1].sampling["max_new_tokens"] == 1
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.by, ahead.choice, ahead.token_ids, ahead.before) == ("gate", "yes", (), "")
        setup.engine.logprobs[ord("n")] = -1.0  # nearer than what was seen: it is decoded on, and says no
        setup.engine.answers = ["y", "nope"]
        await setup.append(session, "c")
        await settled(setup)
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.by, ahead.agreed, ahead.token_ids) == ("decoding", False, tuple(b"nope"))


async def test_choices_behind_a_text_that_is_decoded_first() -> None:
    async with starting() as setup:
        setup.engine.logprobs = {ord("y"): -0.1, ord("n"): -2.1}
        session = await setup.open("a")
        setup.engine.answers = ["A:", "no"]
        setup.engine.stopped_by = ":"
        await setup.enter(session, until=(":",), choices=CHOICES, max_tokens=6)
        await settled(setup)
        first, second = setup.engine.asked
        assert second.token_ids == (*first.token_ids, *b"A:")
        assert (first.label_ids, second.label_ids) == ((), (ord("y"), ord("n")))
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.before, ahead.text, ahead.choice, ahead.agreed) == ("A:", "A:no", "yes", False)


async def test_without_its_decision_point_no_choice_is_weighed() -> None:
    async with starting() as setup:
        session = await setup.open("a")
        await setup.enter(session, until=(":",), choices=CHOICES)
        await settled(setup)
        ahead = setup.ahead(session, "next")
        assert ahead is not None
        assert (ahead.choice, ahead.before) == (None, None)
        assert len(ahead.token_ids) == 4


# ---- registering ----


async def test_the_longest_entry_that_a_question_begins_with() -> None:
    async with starting() as setup:
        session = await setup.open("a")
        for word in ("ne", "next", "nextly", "other"):
            await setup.enter(session, word, name=word)
        entries = setup.flash.entries
        for question, name in (("next", "next"), ("next one", "next"), ("nex", "ne"), ("n", None), ("x", None)):
            found = entries.asked(session, tuple(question.encode()))
            assert (None if found is None else found.name) == name


async def test_an_entry_of_an_empty_session_begins_as_a_session_does() -> None:
    async with starting() as setup:
        session = await setup.open("")
        await setup.enter(session)
        await settled(setup)
        assert setup.engine.asked[0].token_ids == (ByteTokenizer.BOS, *b"next")
        assert setup.ahead(session, "next") is not None


async def test_limits_are_refused_with_numbers() -> None:
    async with starting(entry_limit=3, entry_owner_limit=2) as setup:
        session, other = await setup.open("a"), await setup.open("b", BO)
        for name in ("one", "two"):
            await setup.enter(session, name, name=name)
        with pytest.raises(FlashLimitReached, match="2 of 2 entries are registered by this owner"):
            await setup.enter(session, "three", name="three")
        await setup.enter(other, "three", name="three")
        with pytest.raises(FlashLimitReached, match="3 of 3 entries") as refused:
            await setup.enter(other, "four", name="four")
        numbers = refused.value.numbers
        assert (numbers.registered, numbers.limit, numbers.owner_registered, numbers.owner_limit) == (3, 3, 1, 2)
        with pytest.raises(FlashExists):
            await setup.enter(session, "one again", name="one")
        with pytest.raises(FlashExists):
            await setup.enter(session, "one", name="another")
        await setup.register(session, "one", name="one")  # a question is another matter


async def test_what_does_not_fit_is_refused_and_fails_when_the_session_has_grown() -> None:
    async with starting() as setup:
        session = await setup.open("a" * (LONGEST - 40))
        with pytest.raises(SessionTooLong):
            await setup.enter(session, max_tokens=100)
        await setup.enter(session, max_tokens=16)
        await settled(setup)
        await setup.append(session, "b" * 30)
        await settled(setup)
        shown = await setup.flash.entries.show(session.header.id, ANA, "e")
        assert "leave room for" in shown["error"]
        assert shown["state"] == "stale"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 257},
        {"max_tokens": -1},
        {"sampling_params": {"temperature": 0.5}},
        {"choices": CHOICES, "max_tokens": 0},
        {"until": ("",)},
        {"until_ids": tuple(range(17))},
        {"target": 0.9},
        {"priority": 101},
    ],
)
def test_entries_that_cannot_be(fields: dict[str, object]) -> None:
    with pytest.raises(BadFlashRequest):
        entry(**fields)


# ---- letting go ----


@pytest.mark.parametrize("how", ["delete", "update", "rewind", "close", "purge", "flush", "weights", "unpin"])
async def test_every_ending_lets_go_of_the_pin(how: str) -> None:
    async with starting() as setup:
        session = await setup.open("a")
        await setup.append(session, "b")
        await setup.enter(session)
        await settled(setup)
        assert len(setup.entry_pins()) == 1
        setup.engine.foreground.began()  # nothing takes its place for now
        entries, sessions, name = setup.flash.entries, setup.sessions, session.header.id
        match how:
            case "delete":
                await entries.delete(name, ANA, "e")
            case "update":
                await entries.update(name, ANA, entry("other"))
            case "rewind":
                await sessions.rewind(name, ANA, 1)
            case "close":
                await sessions.close(name, ANA)
            case "purge":
                await asyncio.to_thread(sessions._keeper.log.purge, ANA)
                await sessions.purged(ANA)
            case "flush":
                async with setup.flash.flushing():
                    setup.pinning.flush()
            case "weights":
                await sessions.weights_changing()
                await sessions.weights_changed()
            case _:
                await sessions.unpin(name, ANA)
                await entries.stats(rows=0)
        await setup.until(lambda: not setup.entry_pins() and not entries.pins._owed)
        assert entries.pins.budget.cells == 0
        setup.engine.foreground.ended()
        await settled(setup)
        session_tokens = {"update": 3, "rewind": 2, "flush": 3, "weights": 3}.get(how)
        entry_tokens = 4 + len("other" if how == "update" else "next")
        pinned = 0 if session_tokens is None else session_tokens + entry_tokens
        assert sum(setup.entry_pins().values()) == pinned


async def test_what_ends_while_it_is_decoded_ahead_pins_nothing() -> None:
    async with starting() as setup:
        session = await setup.open("a")
        setup.engine.gate = asyncio.Event()
        await setup.enter(session)
        await setup.until(lambda: setup.engine.at_gate)
        await setup.flash.entries.delete(session.header.id, ANA, "e")
        setup.engine.gate.set()
        await settled(setup)
        assert (setup.entry_pins(), setup.flash.entries.pins.budget.cells) == ({}, 0)
        with pytest.raises(FlashNotFound):
            await setup.flash.entries.show(session.header.id, ANA, "e")


async def test_a_pin_that_cannot_be_let_go_of_now_is_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_stateful.flash.entry_pins._AGAIN_S", 0.001)
    async with starting() as setup:
        session = await setup.open("a")
        await setup.enter(session)
        await settled(setup)
        control, failures = setup.pinning.control, 3

        async def failing(op: str, payload: object = None) -> object:
            nonlocal failures
            if op == "unpin" and failures:
                failures -= 1
                raise RuntimeError("the scheduler does not answer")
            return await control(op, payload)  # type: ignore[arg-type]

        setup.pinning.control = failing  # type: ignore[method-assign, assignment]
        await setup.flash.entries.delete(session.header.id, ANA, "e")
        await settled(setup)
        assert (failures, setup.entry_pins()) == (0, {})


async def test_the_budget_holds_and_the_least_valuable_gives_way() -> None:
    async with starting(entry_cells=20) as setup:
        session = await setup.open("a")
        for word, priority in (("one.", 0), ("two.", 1), ("six.", 2), ("ten.", 0)):
            await setup.enter(session, word, name=word[:3], priority=priority)
            await settled(setup)
        assert {name.split("/")[1] for name in setup.entry_pins()} == {"two", "six"}
        assert setup.flash.entries.pins.budget.cells == 16
        assert setup.ahead(session, "one.") is not None  # it is known all the same


async def test_without_a_budget_nothing_is_pinned() -> None:
    async with starting(entry_cells=0) as setup:
        session = await setup.open("a")
        await setup.enter(session)
        await settled(setup)
        assert setup.entry_pins() == {}
        assert setup.ahead(session, "next") is not None


async def test_a_pin_that_a_request_took_the_place_of_is_no_more_counted_and_makes_room() -> None:
    async with starting(entry_cells=10) as setup:
        session, other = await setup.open("a"), await setup.open("b")
        await setup.enter(session, "one.", priority=1)
        await settled(setup)
        await setup.enter(other, "two.")
        await settled(setup)
        assert list(setup.entry_pins()) == [f"{session.header.id}/e"]
        setup.pinning.pins.pop(f"{session.header.id}/e")
        await setup.append(other, "c")
        await settled(setup)
        assert setup.entry_pins() == {f"{other.header.id}/e": 3 + 4 + 4}
        assert (await setup.flash.entries.stats(rows=0))["cells"] == {"held": 8, "budget": 10}


async def test_an_entry_that_fails_keeps_nothing_pinned() -> None:
    async with starting() as setup:
        session = await setup.open("a")
        await setup.enter(session)
        await settled(setup)
        setup.engine.failing = "out of order"
        await setup.append(session, "b")
        await settled(setup)
        assert (setup.entry_pins(), setup.flash.entries.pins.budget.cells) == ({}, 0)
        shown = await setup.flash.entries.show(session.header.id, ANA, "e")
        assert (shown["state"], shown["error"]) == ("stale", "out of order")
        setup.engine.failing = None
        await setup.append(session, "c")
        await settled(setup)
        assert setup.entry_pins() == {f"{session.header.id}/e": 4 + 8}


def test_what_a_session_begins_with() -> None:
    base = Base.of([1, 2, 3])
    assert [base.begins(ids) for ids in ([1, 2, 3], [1, 2, 3, 4], [1, 2], [1, 2, 4, 3], [])] == [
        True,
        True,
        False,
        False,
        False,
    ]


# ---- interleavings ----


async def test_in_no_interleaving_is_anything_stale_served_or_left_pinned() -> None:
    served = 0
    for seed in range(INTERLEAVINGS):
        rng = Random(seed)
        async with starting(entry_cells=40, entry_owner_limit=4) as setup:
            contents: dict[str, dict[int, str]] = {}
            sessions: list[Session] = []
            for _ in range(40):
                served += await step(setup, rng, sessions, contents)
                check_pins(setup)
            await settled(setup)
            check_pins(setup)
            for session in sessions:
                await setup.sessions.close(session.header.id, ANA)
            await settled(setup)
            assert (setup.entry_pins(), setup.flash.entries.pins.budget.cells) == ({}, 0)
    assert served > INTERLEAVINGS


async def step(setup: Setup, rng: Random, sessions: list[Session], contents: dict[str, dict[int, str]]) -> int:
    """One thing happens; returns whether something was known when it was asked."""
    dice, word = rng.random(), rng.choice(("next", "more", "next one"))
    if not sessions or dice < 0.08:
        session = await setup.open("s")
        sessions.append(session)
        contents[session.header.id] = {1: "s"}
        return 0
    session = rng.choice(sessions)
    name, versions = session.header.id, contents[session.header.id]
    entries = setup.flash.entries
    if dice < 0.24:
        with suppress(FlashExists, FlashLimitReached):
            await setup.enter(session, word, name=word[:1])
    elif dice < 0.40:
        letter = rng.choice("ab")
        await setup.append(session, letter)
        versions[session.version] = versions[session.version - 1] + letter
    elif dice < 0.47:
        back = rng.choice(sorted(versions))
        await setup.sessions.rewind(name, ANA, back)
        versions[session.version] = versions[back]
    elif dice < 0.51:
        async with setup.flash.flushing():
            setup.pinning.flush()
    elif dice < 0.54:
        with suppress(FlashNotFound):
            await entries.delete(name, ANA, word[:1])
    elif dice < 0.57:
        with suppress(FlashNotFound, FlashExists):
            await entries.update(name, ANA, entry(word, word[:1]))
    elif dice < 0.59:
        sessions.remove(session)
        await setup.sessions.close(name, ANA)
    elif dice < 0.61:
        await setup.sessions.weights_changing()
        await setup.sessions.weights_changed()
    elif dice < 0.66:
        setup.engine.foreground.began()
        await asyncio.sleep(0)
        setup.engine.foreground.ended()
    elif dice < 0.80:
        await (setup.settled() if rng.random() < 0.5 else asyncio.sleep(0.001))
    else:
        ahead = setup.ahead(session, word)
        if ahead is not None:
            found = entries.asked(session, tuple(word.encode()))
            assert found is not None
            text = found.question.content.text
            assert ahead.text == await known(setup, versions[session.version], str(text))
            return 1
    return 0


def check_pins(setup: Setup) -> None:
    """The budget holds, and knows of every pin that stands."""
    pins = setup.flash.entries.pins
    assert pins.budget.cells <= 40
    counted = {f"{entry.session_id}/{entry.name}" for entry in pins.budget}
    assert set(setup.entry_pins()) <= counted | set(pins._owed)
