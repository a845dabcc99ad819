"""Data that was accepted: what of it is added, in which order, and what is counted."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pinning_engine import PinningEngine
from prometheus_client import CollectorRegistry
from session_values import Clock, header, segment
from words import ByteTokenizer

from memstore.session_log import VolatileSessionLog
from sgl_stateful.errors import SessionClosed
from sgl_stateful.sessions.content import Content, Renderer
from sgl_stateful.sessions.keeper import SessionKeeper
from sgl_stateful.sessions.ledger import Ledger
from sgl_stateful.sessions.metrics import SessionMetrics
from sgl_stateful.sessions.queue import AppendQueues
from sgl_stateful.sessions.segments import segments_of
from sgl_stateful.sessions.session import Session
from sgl_stateful.sessions.table import SessionTable

pytestmark = pytest.mark.anyio


class Overloaded(Exception):
    """Neither a RuntimeError nor a ValueError."""


class OverloadedEngine(PinningEngine):
    overloaded = 0

    async def prefill(self, *args: Any, **more: Any) -> Any:
        if self.overloaded:
            self.overloaded -= 1
            raise Overloaded
        return await super().prefill(*args, **more)


class Server:
    """Queues on a keeper, as the service has them."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.engine = OverloadedEngine()
        self.metrics = SessionMetrics(CollectorRegistry())
        self.clock = Clock()
        self.table = SessionTable(
            ledger=Ledger(budget=1000, quota=1000), max_tokens=1000, versions=100, clock=self.clock
        )
        self.keeper = SessionKeeper(
            table=self.table,
            log=VolatileSessionLog(),
            engine=self.engine,
            salt=lambda owner: owner,
            threads=threads,
            metrics=self.metrics,
            model="model",
            clock=self.clock,
        )
        self.renderer = Renderer(ByteTokenizer(), vocab_size=300)
        self.rendering: dict[str, asyncio.Event] = {}
        self.queues = AppendQueues(self.keeper, limit=8, render=self.render)

    async def render(self, content: Content, *, is_first: bool) -> list[list[int]]:
        if (gate := self.rendering.get(content.text or "")) is not None:
            await gate.wait()
        return self.renderer.data(content, is_first=is_first)

    async def open(self, *, prefix: str = "", **more: Any) -> Session:
        head = header("a", clock=self.clock, **more)
        change = self.table.open(head, [segment(*prefix.encode(), kind="prefix")] if prefix else [])
        return (await self.keeper.make(change, lambda: self.keeper.log.create(head, change.entry))).session

    async def put_behind_one(self, session: Session, values: Sequence[str], *, first: str = "-") -> asyncio.Event:
        """Have one piece in the engine and these behind it; the event lets them go."""
        gate = self.engine.gate = asyncio.Event()
        self.put(session, first)
        await self.engine.at_gate.wait()
        for value in values:
            self.put(session, value)
        return gate

    def put(self, session: Session, value: str) -> int:
        return self.queues.put(session, Content(text=value))

    async def append(self, session: Session, value: str) -> None:
        async with self.queues.in_order(session):
            parts = await self.render(Content(text=value), is_first=session.num_tokens == 0)
            change = self.table.append(session, segments_of(parts, "data"))
            await self.keeper.make(change, self.keeper.logging(change))

    def dropped(self) -> int:
        return int(self.metrics.totals()["dropped"])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    with ThreadPoolExecutor(1) as threads:
        yield Server(threads)


def shown(session: Session) -> str:
    return ByteTokenizer().decode(session.token_ids())


# ---- what fits ----


async def test_with_a_window_the_newest_that_fit_are_kept(server: Server) -> None:
    session = await server.open(prefix="p", window_tokens=90)
    gate = await server.put_behind_one(session, [letter * 30 for letter in "abcde"])
    gate.set()
    await server.queues.settled(session)
    assert shown(session) == "p" + "c" * 30 + "d" * 30 + "e" * 30
    assert (session.queue_dropped, session.waiting) == (2, 0)
    assert (session.dropped_messages, server.dropped()) == (1, 3)  # the one in front left with the window


async def test_a_piece_longer_than_the_window_takes_no_other_with_it(server: Server) -> None:
    session = await server.open(prefix="p", window_tokens=100)
    gate = await server.put_behind_one(session, ["a" * 30, "b" * 101, "c" * 30])
    gate.set()
    await server.queues.settled(session)
    assert shown(session) == "p-" + "a" * 30 + "c" * 30
    assert (session.queue_dropped, session.waiting) == (1, 0)


async def test_without_a_window_the_first_that_fit_are_kept(server: Server) -> None:
    server.table.max_tokens = 100
    session = await server.open(prefix="p")
    gate = await server.put_behind_one(session, [letter * 30 for letter in "abcde"])
    gate.set()
    await server.queues.settled(session)
    assert shown(session) == "p-" + "a" * 30 + "b" * 30 + "c" * 30
    assert (session.queue_dropped, session.waiting, server.dropped()) == (2, 0, 2)
    assert len(server.engine.sent) < 5  # some of them together


async def test_of_pins_that_are_refused_the_first_that_fit_are_kept(server: Server) -> None:
    server.table.ledger.budget = 70
    session = await server.open(prefix="p")
    gate = await server.put_behind_one(session, [letter * 30 for letter in "abcde"])
    gate.set()
    await server.queues.settled(session)
    assert shown(session) == "p-" + "a" * 30 + "b" * 30
    assert (session.queue_dropped, session.waiting, server.table.ledger.pinned) == (3, 0, 62)
    assert server.metrics.totals()["refusals"]["budget"] == 3  # pieces, not tries


# ---- what fails ----


async def test_an_engine_that_is_overloaded_costs_one_group(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    session = await server.open(prefix="p")
    gate = await server.put_behind_one(session, ["a", "b"])
    server.engine.overloaded = 1
    gate.set()
    await server.queues.settled(session)
    assert (shown(session), session.queue_dropped, session.waiting, server.dropped()) == ("p-", 2, 0, 2)
    assert [record.exc_info is not None for record in caplog.records if "dropped" in record.message] == [True]
    server.put(session, "c")
    await server.queues.settled(session)
    assert shown(session) == "p-c"


async def test_what_comes_after_a_failure_is_added(server: Server) -> None:
    session = await server.open(prefix="p")
    server.engine.overloaded = 1
    server.rendering["a"] = asyncio.Event()
    server.put(session, "a")
    await asyncio.sleep(0)
    server.put(session, "b")
    server.rendering["a"].set()
    await server.queues.settled(session)
    assert (shown(session), session.queue_dropped, session.waiting) == ("pb", 1, 0)


async def test_data_of_a_session_that_ends_is_counted(server: Server) -> None:
    session = await server.open(prefix="p")
    gate = await server.put_behind_one(session, ["a", "b"])
    appending = asyncio.create_task(server.append(session, "c"))
    await asyncio.sleep(0)
    await server.keeper.end(session, "closed")
    gate.set()
    await server.queues.settled(session)
    assert (session.queue_dropped, session.waiting, server.dropped()) == (3, 0, 3)
    with pytest.raises(SessionClosed):
        await appending


@pytest.mark.parametrize("has_begun", [True, False])
async def test_data_that_waits_at_the_end_is_counted(server: Server, has_begun: bool) -> None:
    session = await server.open(prefix="p")
    if has_begun:
        await server.put_behind_one(session, ["a", "b"])
    else:
        for value in "-ab":
            server.put(session, value)
    server.queues.close()
    await server.queues.settled(session)
    await asyncio.sleep(0)
    assert (shown(session), session.queue_dropped, session.waiting) == ("p", 3, 0)


async def test_content_that_cannot_be_rendered_takes_no_other_with_it(server: Server) -> None:
    session = await server.open(prefix="p")
    server.put(session, "a")
    messages = tuple({"role": "user", "content": "x"} for _ in range(3))
    server.queues.put(session, Content(messages=messages))  # this tokenizer has no template
    server.put(session, "b")
    await server.queues.settled(session)
    assert (shown(session), session.queue_dropped, session.waiting) == ("pab", 3, 0)


# ---- order ----


async def test_a_piece_that_is_long_to_render_is_not_overtaken(server: Server) -> None:
    session = await server.open()
    long = server.rendering["long"] = asyncio.Event()
    server.put(session, "long")
    server.put(session, "short")
    appending = asyncio.create_task(server.append(session, "last"))
    for _ in range(10):
        await asyncio.sleep(0)
    long.set()
    await appending
    assert shown(session) == "longshortlast"
    assert session.token_ids().count(ByteTokenizer.BOS) == 1


async def test_the_next_begins_a_session_where_the_first_was_dropped(server: Server) -> None:
    session = await server.open()
    server.engine.overloaded = 1
    server.put(session, "a")
    server.put(session, "b")
    await server.queues.settled(session)
    assert (session.token_ids(), session.queue_dropped) == ([ByteTokenizer.BOS, ord("b")], 1)


async def test_appends_and_pieces_keep_the_order_in_which_they_came(server: Server) -> None:
    session = await server.open(prefix="p")
    gate = await server.put_behind_one(session, ["a"])
    appends = []
    for append, piece in (("B", "c"), ("D", "e"), ("F", "g")):
        appends.append(asyncio.create_task(server.append(session, append)))
        await asyncio.sleep(0)
        server.put(session, piece)
    gate.set()
    await asyncio.gather(*appends)
    await server.queues.settled(session)
    assert (shown(session), session.waiting) == ("p-aBcDeFg", 0)


async def test_an_append_right_after_a_piece_is_behind_it(server: Server) -> None:
    session = await server.open(prefix="p")
    server.put(session, "a")
    await server.append(session, "b")
    assert shown(session) == "pab"


async def test_a_caller_who_goes_away_keeps_nobody_waiting(server: Server) -> None:
    session = await server.open(prefix="p")
    gate = await server.put_behind_one(session, ["a"])
    appending = asyncio.create_task(server.append(session, "b"))
    await asyncio.sleep(0)
    server.put(session, "c")
    appending.cancel()
    gate.set()
    await server.queues.settled(session)
    assert (shown(session), session.waiting) == ("p-ac", 0)
