"""Pins on the real engine, in fp32, with a pool of 6,000 tokens: what they keep, cost and give up."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from engines import RunningEngine
from test_engine_splice import Prompt

from sgl_stateful.directive import Splice
from sgl_stateful.sessions.hold import HOLD_KEY, Hold, dump_hold
from sgl_stateful.sglang_adapter.engine import INTERNAL, scheduler_report

pytestmark = pytest.mark.engine

_POOL = 6000
_DEADLINE_S = 60.0
_FACTS = [f"{name} keeps {count} bees in hive {count + 3}." for count, name in enumerate(("Ada", "Bo", "Cleo", "Dan"))]
_fences = itertools.count(1)
_seeds = itertools.count(1)


def words(count: int) -> list[int]:
    """Token ids that no other call returns."""
    return [int(i) for i in np.random.default_rng(next(_seeds)).integers(100, 40_000, count)]


class Sessions:
    """Sends requests of sessions to the engine, under one salt."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        self.page_size = engine.page_size

    def whole(self, tokens: int) -> int:
        """Tokens in whole pages."""
        return tokens // self.page_size * self.page_size

    def hold(self, session: str, tokens: int | None, **more: Any) -> Hold:
        return Hold(session, tokens, **{"pin": True, "fence": next(_fences), **more})

    def prefill(self, ids: list[int], hold: Hold | None = None) -> Any:
        return self.engine.run(self.engine.port.prefill(ids, salt="pins", directive=None, hold=hold))

    def pin(self, session: str, ids: list[int], **more: Any) -> Mapping[str, Any]:
        """Prefill a session's tokens and pin them; what the scheduler reports."""
        report: Mapping[str, Any] = self.prefill(ids, self.hold(session, len(ids), **more)).scheduler["session"]
        return report

    async def replies(
        self, ids: list[int], tokens: int, hold: Hold | None = None, *, stream: bool = False, rid: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0}
        if hold is not None:
            sampling["custom_params"] = {HOLD_KEY: dump_hold(hold)}
        request = GenerateReqInput(
            rid=rid or uuid.uuid4().hex, input_ids=ids, sampling_params=sampling, stream=stream, cache_salt="pins"
        )
        setattr(request, INTERNAL, True)
        async with aclosing(self.engine.engine.tokenizer_manager.generate_request(request, None)) as replies:
            async for reply in replies:
                yield reply

    def generate(self, ids: list[int], tokens: int, hold: Hold | None = None) -> dict[str, Any]:
        async def last() -> dict[str, Any]:
            return [reply async for reply in self.replies(ids, tokens, hold)][-1]

        return self.engine.run(last())

    def table(self, *sessions: str) -> Mapping[str, Any]:
        payload = {"session_ids": list(sessions) or None}
        return self.engine.run(self.engine.port.control("pins", payload))

    def unpin(self, *sessions: str) -> int:
        payload = {"session_ids": {session: next(_fences) for session in sessions}}
        unpinned: int = self.engine.run(self.engine.port.control("unpin", payload))["unpinned"]
        return unpinned

    def until(self, holds: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """The table, once it is as it should be."""
        deadline = time.monotonic() + _DEADLINE_S
        while not holds(table := self.table()):
            assert time.monotonic() < deadline, table
        return table

    def flood(self, pools: int) -> None:
        """That many times the pool, in prompts that nobody asks for again."""
        for _ in range(pools * _POOL // 1500):
            self.prefill(words(1500))


@pytest.fixture
def sessions(engine: RunningEngine) -> Iterator[Sessions]:
    """The engine with an empty pool and no pins; afterwards every cell has one owner, and the pins' are the locked."""
    engine.run(engine.service.start())
    driver = Sessions(engine)
    _flush(driver)
    yield driver
    table = driver.until(lambda t: t["available"] + t["evictable"] + t["protected"] == _POOL)
    assert table["protected"] == table["pinned_cells"]
    driver.unpin(*table["pins"], *table["lost"])
    table = driver.table()
    assert (table["pins"], table["lost"], table["pinned_cells"], table["protected"]) == ({}, {}, 0, 0)
    assert table["available"] + table["evictable"] == _POOL
    assert table["failures"] == 0


def _flush(driver: Sessions) -> None:
    """Flush the cache; SGLang refuses while the last request is being put away."""
    deadline = time.monotonic() + _DEADLINE_S
    while not driver.engine.engine.flush_cache().success:
        assert time.monotonic() < deadline, "the cache is never idle"


@pytest.mark.timeout(900)
def test_a_pinned_prefix_survives_a_flood(sessions: Sessions) -> None:
    pinned, twin = words(600), words(600)
    sessions.pin("flood", pinned)
    sessions.prefill(twin)
    sessions.flood(3)
    assert sessions.prefill([*pinned, 7, 8, 9]).cached_tokens == sessions.whole(600)
    assert sessions.prefill([*twin, 7, 8, 9]).cached_tokens == 0
    sessions.unpin("flood")
    sessions.flood(1)
    assert sessions.prefill([*pinned, 7, 8, 9]).cached_tokens == 0


def test_only_the_session_s_own_tokens_are_pinned(sessions: Sessions) -> None:
    prefix, question = words(101), words(50)
    report = sessions.prefill([*prefix, *question], sessions.hold("own", len(prefix))).scheduler
    cells = sessions.whole(101)
    assert report == {"session": {"pinned_tokens": cells, "pinned_cells": cells, "lost": None}}
    table = sessions.table("own", "another")
    assert (table["pins"], table["lost"], table["pinned_cells"]) == ({"own": cells}, {}, cells)
    assert table["protected"] == cells
    assert table["evictable"] == sessions.whole(151) - cells


def test_a_longer_pin_takes_the_place_of_the_shorter(sessions: Sessions) -> None:
    ids = words(320)
    for tokens in (160, 320, 240):  # there, on, and back
        assert sessions.pin("longer", ids[:tokens])["pinned_cells"] == tokens
        table = sessions.table()
        assert (table["pins"], table["protected"]) == ({"longer": tokens}, tokens)


def test_the_same_pin_again_is_kept_through_splits(sessions: Sessions) -> None:
    ids = words(320)
    sessions.pin("same", ids)
    sessions.pin("half", ids[:160])  # splits the node that the first one locks
    assert sessions.pin("same", ids) == {"pinned_tokens": 320, "pinned_cells": 320, "lost": None}
    assert sessions.unpin("half") == 1
    assert sessions.table()["protected"] == 320
    assert sessions.unpin("same") == 1
    assert sessions.table()["protected"] == 0


def test_what_sessions_share_is_counted_once(sessions: Sessions) -> None:
    shared, left, right = words(160), words(80), words(48)
    sessions.pin("left", [*shared, *left])
    assert sessions.pin("right", [*shared, *right])["pinned_cells"] == 160 + 80 + 48
    assert sessions.table()["pins"] == {"left": 240, "right": 208}
    assert sessions.unpin("left") == 1
    table = sessions.table()
    assert (table["pinned_cells"], table["protected"]) == (208, 208)
    assert sessions.unpin("right", "left") == 1
    assert sessions.table()["protected"] == 0


def test_a_turn_pins_question_and_answer(sessions: Sessions) -> None:
    ids = words(160)
    reply = sessions.generate(ids, 17, sessions.hold("turn", None))
    assert reply["meta_info"]["completion_tokens"] == 17
    # The last token that was sampled has no KV yet.
    assert sessions.table()["pins"] == {"turn": sessions.whole(160 + 16)}
    again = sessions.prefill([*ids, *reply["output_ids"], 5])
    assert again.cached_tokens == sessions.whole(160 + 16)


def test_a_request_that_does_not_pin_changes_no_pin(sessions: Sessions) -> None:
    ids = words(160)
    sessions.pin("asked", ids)
    report = sessions.prefill([*ids, *words(40)], sessions.hold("asked", None, pin=False)).scheduler
    assert report == {"session": {"pinned_tokens": 160, "pinned_cells": 160, "lost": None}}


def test_a_request_older_than_the_unpin_does_not_pin(sessions: Sessions) -> None:
    ids = words(160)
    older = sessions.hold("late", len(ids))
    sessions.pin("late", ids[:80])
    assert sessions.unpin("late") == 1
    report = sessions.prefill(ids, older).scheduler["session"]
    assert report == {"pinned_tokens": 0, "pinned_cells": 0, "lost": None}
    assert sessions.table()["stale"] > 0
    assert sessions.pin("late", ids)["pinned_tokens"] == 160  # one that came after the unpin


def test_a_late_request_does_not_shorten_a_newer_pin(sessions: Sessions) -> None:
    ids = words(160)
    older = sessions.hold("overtaken", 80)
    sessions.pin("overtaken", ids)
    assert sessions.prefill(ids[:80], older).scheduler["session"]["pinned_tokens"] == 160


def test_an_unpin_older_than_the_pin_leaves_it(sessions: Sessions) -> None:
    older = next(_fences)
    sessions.pin("unpinned before", words(80))
    payload = {"session_ids": {"unpinned before": older}}
    assert sessions.engine.run(sessions.engine.port.control("unpin", payload)) == {"unpinned": 0}
    assert sessions.table()["pins"] == {"unpinned before": 80}


def test_a_flush_loses_pins_and_the_next_use_makes_them_anew(sessions: Sessions) -> None:
    ids = words(160)
    first = sessions.generate(ids, 8, sessions.hold("flushed", 160))
    sessions.pin("another", words(80))
    _flush(sessions)
    table = sessions.table()
    assert (table["pins"], table["pinned_cells"], table["available"]) == ({}, 0, _POOL)
    assert table["lost"] == {"flushed": "flushed", "another": "flushed"}
    second = sessions.generate(ids, 8, sessions.hold("flushed", 160))
    assert second["meta_info"]["cached_tokens"] == 0
    assert second["output_ids"] == first["output_ids"]
    report = scheduler_report(second["meta_info"])
    assert report == {"session": {"pinned_tokens": 160, "pinned_cells": 160, "lost": "flushed"}}
    assert sessions.pin("flushed", ids)["lost"] is None
    assert sessions.table()["lost"] == {"another": "flushed"}


def test_a_request_that_needs_the_memory_gets_it(sessions: Sessions) -> None:
    """1,600 tokens each for three sessions leave 1,200; 2,400 are needed."""
    kept, used, idle = words(1600), words(1600), words(1600)
    sessions.pin("kept", kept, priority=1)
    sessions.pin("used", used)
    sessions.pin("idle", idle)
    sessions.pin("used", used)  # the less recently used of the two goes first
    before = sessions.table()["released"]
    reply = sessions.generate(words(2400), 4)
    assert reply["meta_info"]["completion_tokens"] == 4
    table = sessions.table()
    assert table["pins"] == {"kept": 1600, "used": 1600}
    assert table["lost"] == {"idle": "reclaimed"}
    assert table["released"] - before == 1
    assert sessions.prefill([*kept, 1]).cached_tokens == 1600
    sessions.unpin("used")
    assert sessions.pin("idle", idle)["lost"] == "reclaimed"


def test_priority_outlives_use(sessions: Sessions) -> None:
    sessions.pin("first", words(2400), priority=1)
    sessions.pin("second", words(2400), priority=-1)
    sessions.generate(words(2400), 4)
    assert sessions.table()["pins"] == {"first": 2400}


def test_a_session_that_needs_its_own_pin_s_memory_gets_it(sessions: Sessions) -> None:
    """Its own prefix cannot make room for it: the other session's must, though it was used last."""
    own, other = words(2400), words(2400)
    sessions.pin("own", own)
    sessions.pin("other", other)
    report = sessions.pin("own", [*own, *words(2000)])
    assert report == {"pinned_tokens": 4400, "pinned_cells": 4400, "lost": None}
    assert sessions.table()["lost"] == {"other": "reclaimed"}


@pytest.mark.timeout(900)
def test_an_answer_outgrows_what_pins_leave(sessions: Sessions) -> None:
    """SGLang counts on early ends: beside an answer of 300 tokens it lets sessions in that leave 256 for it."""
    prompt = words(96)
    lengths = [1120] * 5 + [48]
    assert _POOL - len(prompt) - sum(lengths) == 256

    async def run() -> list[dict[str, Any]]:
        begun, replies = asyncio.Event(), []

        async def answer() -> None:
            async for reply in sessions.replies(prompt, 300, stream=True):
                replies.append(reply)
                begun.set()

        running = asyncio.create_task(answer())
        await begun.wait()
        for i, length in enumerate(lengths):
            hold = sessions.hold(f"beside {i}", length)
            await sessions.engine.port.prefill(words(length), salt="pins", directive=None, hold=hold)
        assert not running.done(), "the sessions were let in too late to be in the way"
        await running
        return replies

    last = sessions.engine.run(run())[-1]["meta_info"]
    assert (last["finish_reason"]["type"], last["completion_tokens"]) == ("length", 300)
    table = sessions.table()
    assert table["lost"] == {"beside 0": "reclaimed"}
    assert len(table["pins"]) == len(lengths) - 1


def test_an_aborted_request_pins_nothing_and_changes_no_pin(sessions: Sessions) -> None:
    ids, rid = words(160), uuid.uuid4().hex
    sessions.pin("aborted", ids)

    async def run() -> dict[str, Any]:
        last: dict[str, Any] = {}
        hold = sessions.hold("aborted", None)
        async for reply in sessions.replies([*ids, *words(80)], 2000, hold, stream=True, rid=rid):
            last = reply
            sessions.engine.engine.tokenizer_manager.abort_request(rid)
        return last

    assert sessions.engine.run(run())["meta_info"]["finish_reason"]["type"] == "abort"
    table = sessions.until(lambda t: t["protected"] == t["pinned_cells"])
    assert table["pins"] == {"aborted": 160}


def test_a_stream_tells_of_its_session_at_the_end(sessions: Sessions) -> None:
    ids = words(160)

    async def run() -> list[dict[str, Any]]:
        replies = sessions.replies([*ids, 3], 6, sessions.hold("stream", 160), stream=True)
        # Read at once: SGLang uses one `meta_info` for several replies.
        return [scheduler_report(reply["meta_info"]) async for reply in replies]

    *before, last = sessions.engine.run(run())
    assert len(before) > 0
    assert all(report is None for report in before)
    assert last == {"session": {"pinned_tokens": 160, "pinned_cells": 160, "lost": None}}


def test_a_splice_is_pinned_up_to_where_it_begins(sessions: Sessions, engine: RunningEngine) -> None:
    prompt = Prompt(engine, "pinned", _FACTS)
    prompt.capture()
    session = words(96)
    shift = len(session) - prompt.spans[0].start
    ids = [*session, *prompt.ids[prompt.spans[0].start :]]
    spans = tuple(type(s)(s.encoding_id, s.start + shift, s.end + shift) for s in prompt.spans)
    hold = sessions.hold("spliced", None)
    salt = "pinned:spliced"
    engine.run(engine.port.prefill(ids[: spans[1].end], salt=salt, directive=None))  # two facts are there as text, too
    found = engine.run(engine.port.prefill(ids, salt=salt, directive=Splice(spans), top_logprobs=2, hold=hold))
    assert found.scheduler["tier"] == "spliced"
    assert found.scheduler["session"] == {"pinned_tokens": 96, "pinned_cells": 96, "lost": None}
    assert sessions.table()["protected"] == 96
    plain = engine.run(engine.port.prefill([*session, 4, 5], salt=salt, directive=None))
    assert plain.cached_tokens == 96


@pytest.mark.parametrize("group", ["greenhouse", ""])
def test_what_a_group_shares_is_prefilled_once(sessions: Sessions, group: str) -> None:
    shared, tails = words(512), [words(30), words(40), words(50)]

    async def run() -> list[Any]:
        # One session, or three of a group.
        names = ["one"] * 3 if group == "" else ["one", "two", "three"]
        return await asyncio.gather(
            *(
                sessions.engine.port.prefill(
                    [*shared, *tail], salt="pins", directive=None, hold=sessions.hold(name, 512, group=group)
                )
                for name, tail in zip(names, tails, strict=True)
            )
        )

    results = sessions.engine.run(run())
    uncached = sum(result.prompt_tokens - result.cached_tokens for result in results)
    assert uncached == 512 + 30 + 40 + 50
    assert sessions.table()["pinned_cells"] == 512


def test_a_long_prompt_in_chunks_is_prefilled_once_for_two(sessions: Sessions) -> None:
    shared = words(2600)

    async def run() -> list[Any]:
        holds = [sessions.hold(name, 2600, group="long") for name in ("one", "two")]
        return await asyncio.gather(
            *(
                sessions.engine.port.prefill([*shared, i, i], salt="pins", directive=None, hold=hold)
                for i, hold in enumerate(holds)
            )
        )

    results = sessions.engine.run(run())
    uncached = sum(result.prompt_tokens - result.cached_tokens for result in results)
    assert uncached == 2600 + 2 + 2 + 2600 - sessions.whole(2600)
