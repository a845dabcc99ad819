import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pinning_engine import POOL_TOKENS, PinningEngine
from prometheus_client import CollectorRegistry
from session_values import ANA, BO, Clock
from words import ByteTokenizer

from memstore import OwnerId, StoreBusy, StoreDamaged, StoreUnreachable
from memstore.session_log import LogEntry, SessionHeader, SessionId, VolatileSessionLog
from sgl_stateful.errors import (
    AppendQueueFull,
    BadSessionRequest,
    PinRefused,
    SessionClosed,
    SessionExpired,
    SessionNotFound,
    SessionNotSaved,
    SessionOfAnotherModel,
    SessionTooLong,
    SessionVersionConflict,
    TurnInProgress,
)
from sgl_stateful.sessions.content import Content, Renderer
from sgl_stateful.sessions.metrics import SessionMetrics
from sgl_stateful.sessions.service import Options, SessionService
from sgl_stateful.sessions.session import Session
from sgl_stateful.sessions.upkeep import SessionUpkeep
from sgl_stateful.sessions.use import Answer, Use

pytestmark = pytest.mark.anyio

PLAIN = Options(ttl_s=None)


class FailingLog(VolatileSessionLog):
    """Cannot be written as long as it is told so."""

    is_down = False
    damaged: SessionId | None = None  # this one alone cannot be compacted or deleted

    def __init__(self) -> None:
        super().__init__()
        self.writing, self._open = threading.Event(), threading.Event()
        self._open.set()

    def pause(self) -> None:
        """Let the next write wait."""
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def create(self, header: SessionHeader, entry: LogEntry) -> None:
        self._check()
        super().create(header, entry)

    def append(self, owner: OwnerId, session_id: SessionId, entry: LogEntry, *, used_at: float) -> None:
        self._check()
        super().append(owner, session_id, entry, used_at=used_at)

    def delete(self, owner: OwnerId, session_id: SessionId) -> bool:
        self._check()
        self._check_one(session_id)
        return super().delete(owner, session_id)

    def compact(self, owner: OwnerId, session_id: SessionId, entry: LogEntry) -> None:
        self._check_one(session_id)
        super().compact(owner, session_id, entry)

    def update(self, header: SessionHeader) -> None:
        self._check()
        super().update(header)

    def _check_one(self, session_id: SessionId) -> None:
        if session_id == self.damaged:
            raise StoreDamaged("sessions.sqlite3", "of no use")

    def _check(self) -> None:
        self.writing.set()
        assert self._open.wait(10)
        if self.is_down:
            raise StoreUnreachable("the store does not answer")


@pytest.fixture
def engine() -> PinningEngine:
    return PinningEngine()


@pytest.fixture
def log() -> FailingLog:
    return FailingLog()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(engine: PinningEngine, log: FailingLog, clock: Clock) -> Iterator[Callable[..., SessionService]]:
    with ThreadPoolExecutor(2) as threads:

        def make_service(**more: Any) -> SessionService:
            values: dict[str, Any] = {
                "log": log,
                "engine": engine,
                "renderer": Renderer(ByteTokenizer(), vocab_size=300),
                "salt": lambda owner: f"salt of {owner}",
                "threads": threads,
                "metrics": SessionMetrics(CollectorRegistry()),
                "model": "model",
                "budget": 1000,
                "quota": 1000,
                "pool_tokens": POOL_TOKENS,
                "max_tokens": 2000,
                "versions": 100,
                "queue": 4,
                "clock": clock,
            }
            return SessionService(**(values | more))

        yield make_service


@pytest.fixture
def sessions(make: Callable[..., SessionService]) -> SessionService:
    return make()


def text(value: str) -> Content:
    return Content(text=value)


def shown(session: Session) -> str:
    return ByteTokenizer().decode(session.token_ids())


async def asked(sessions: SessionService, use: Use, question: str, engine: PinningEngine, answer: str) -> Any:
    """Answer a use as the engine would: the prompt's KV is cached, and pinned as the hold says."""
    ids = ByteTokenizer().encode(question, add_special_tokens=False)
    sessions.answering.admit(use, ids, len(answer))
    prompt = (*use.token_ids, *ids)
    out = ByteTokenizer().encode(answer, add_special_tokens=False)
    cached = engine.answer((*prompt, *out), use.salt)
    report = {"session": engine.held((*prompt, *out), use.hold)}
    return await sessions.answering.end(
        use, Answer(out, answer, None, False, len(prompt), min(cached, len(prompt)), report)
    )


# ---- appends ----


async def test_an_append_prefills_what_is_new_and_pins_all(sessions: SessionService, engine: PinningEngine) -> None:
    session = await sessions.create(ANA, text("0123456789"), PLAIN)
    assert (session.version, shown(session)) == (1, "0123456789")
    made = await sessions.append(session.header.id, ANA, text("abc"))
    assert (made.change.entry.version, made.prefilled_tokens, made.cached_tokens) == (
        2,
        3,
        11,
    )  # with what begins a text
    assert engine.pins == {session.header.id: tuple(session.token_ids())}
    assert shown(session) == "0123456789abc"


async def test_appends_at_once_are_ordered_as_they_came(sessions: SessionService) -> None:
    session = await sessions.create(ANA, None, PLAIN)
    made = await asyncio.gather(*(sessions.append(session.header.id, ANA, text(letter)) for letter in "abcd"))
    assert [one.change.entry.version for one in made] == [2, 3, 4, 5]
    assert shown(session) == "abcd"


async def test_an_engine_that_fails_leaves_the_session_as_it_was(
    sessions: SessionService, engine: PinningEngine
) -> None:
    session = await sessions.create(ANA, text("one"), PLAIN)
    before = (session.version, shown(session), sessions.table.ledger.pinned)
    engine.failing = 1
    with pytest.raises(RuntimeError):
        await sessions.append(session.header.id, ANA, text("two"))
    assert (session.version, shown(session), sessions.table.ledger.pinned) == before
    await sessions.append(session.header.id, ANA, text("two"))
    assert shown(session) == "onetwo"


async def test_a_log_that_fails_leaves_the_session_as_it_was(
    sessions: SessionService, engine: PinningEngine, log: FailingLog
) -> None:
    session = await sessions.create(ANA, text("one"), PLAIN)
    before = (session.version, shown(session), sessions.table.ledger.pinned)
    log.is_down = True
    with pytest.raises(StoreUnreachable):
        await sessions.append(session.header.id, ANA, text("two"))
    with pytest.raises(StoreUnreachable):
        await sessions.create(ANA, text("another"), PLAIN)
    assert (session.version, shown(session), sessions.table.ledger.pinned) == before
    assert len(sessions.table) == 1
    log.is_down = False
    await sessions.append(session.header.id, ANA, text("three"))
    assert engine.pins[session.header.id] == tuple(session.token_ids())
    assert shown(session) == "onethree"


async def test_a_caller_who_goes_away_leaves_the_session_as_it_was(
    sessions: SessionService, engine: PinningEngine
) -> None:
    session = await sessions.create(ANA, text("one"), PLAIN)
    engine.gate = asyncio.Event()
    task = asyncio.create_task(sessions.append(session.header.id, ANA, text("two")))
    await engine.at_gate.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.gate = None
    assert (session.version, session.waiting, sessions.table.ledger.pinned) == (1, 0, 4)
    await sessions.append(session.header.id, ANA, text("three"))
    assert shown(session) == "onethree"


async def test_a_guard_is_checked_when_its_turn_comes(sessions: SessionService) -> None:
    session = await sessions.create(ANA, text("a"), PLAIN)
    results = await asyncio.gather(
        sessions.append(session.header.id, ANA, text("b"), if_version=1),
        sessions.append(session.header.id, ANA, text("c"), if_version=1),
        return_exceptions=True,
    )
    assert isinstance(results[1], SessionVersionConflict)
    assert (session.version, shown(session)) == (2, "ab")


async def test_too_many_appends_at_once_are_refused(sessions: SessionService, engine: PinningEngine) -> None:
    session = await sessions.create(ANA, text("a"), PLAIN)
    engine.gate = asyncio.Event()
    tasks = [asyncio.create_task(sessions.append(session.header.id, ANA, text("x"))) for _ in range(4)]
    await engine.at_gate.wait()
    with pytest.raises(AppendQueueFull):
        await sessions.append(session.header.id, ANA, text("y"))
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert (shown(session), session.waiting) == ("axxxx", 0)


async def test_a_refused_append_says_so_and_a_demoted_one_goes_on(
    make: Callable[..., SessionService], engine: PinningEngine
) -> None:
    sessions = make(budget=20, quota=20)
    session = await sessions.create(ANA, text("0123456789"), PLAIN)
    with pytest.raises(PinRefused) as refused:
        await sessions.append(session.header.id, ANA, text("x" * 10))
    assert (refused.value.numbers.needed, refused.value.numbers.pinned) == (10, 11)
    assert (session.version, engine.pins[session.header.id]) == (1, tuple(session.token_ids()))
    other = await sessions.create(BO, text("01234567"), replace(PLAIN, on_full="demote"))
    await sessions.append(other.header.id, BO, text("x" * 5))
    assert (other.pin_state, other.version, other.header.id in engine.pins) == ("unpinned", 2, False)
    assert sessions.metrics.totals()["demotions"] == 1
    assert sessions.metrics.totals()["refusals"]["budget"] == 1


@pytest.mark.parametrize("content", [{}, {"text": "a", "input_ids": (1,)}])
def test_content_is_exactly_one_thing(content: dict[str, Any]) -> None:
    with pytest.raises(BadSessionRequest, match="one of text, messages and input_ids"):
        Content(**content)


@pytest.mark.parametrize(
    "fields",
    [{"text": ""}, {"input_ids": ()}, {"messages": ()}, {"input_ids": (300,)}, {"input_ids": (-1,)}],
)
async def test_what_has_no_tokens_or_wrong_ones_is_refused(sessions: SessionService, fields: dict[str, Any]) -> None:
    session = await sessions.create(ANA, text("a"), PLAIN)
    with pytest.raises(BadSessionRequest):
        await sessions.append(session.header.id, ANA, Content(**fields))
    assert session.version == 1


# ---- data that is only accepted ----


async def test_accepted_data_is_added_several_pieces_at_once(sessions: SessionService, engine: PinningEngine) -> None:
    session = await sessions.create(ANA, text("a"), PLAIN)
    engine.gate = asyncio.Event()
    await sessions.queue(session.header.id, ANA, text("b"))
    await engine.at_gate.wait()
    for letter in "cde":
        await sessions.queue(session.header.id, ANA, text(letter))
    assert session.waiting == 4
    with pytest.raises(AppendQueueFull):
        await sessions.queue(session.header.id, ANA, text("f"))
    engine.gate.set()
    await sessions.settled(session)
    assert (shown(session), session.version, session.waiting) == ("abcde", 3, 0)


async def test_with_a_window_the_oldest_piece_that_waits_gives_way(
    sessions: SessionService, engine: PinningEngine
) -> None:
    session = await sessions.create(ANA, text("a"), replace(PLAIN, window_tokens=100))
    engine.gate = asyncio.Event()
    await sessions.queue(session.header.id, ANA, text("b"))
    await engine.at_gate.wait()
    for letter in "cdefgh":
        await sessions.queue(session.header.id, ANA, text(letter))
    engine.gate.set()
    await sessions.settled(session)
    assert (shown(session), session.queue_dropped, session.waiting) == ("abefgh", 2, 0)


async def test_accepted_data_that_cannot_be_added_is_counted(sessions: SessionService, engine: PinningEngine) -> None:
    session = await sessions.create(ANA, text("a"), PLAIN)
    engine.failing = 1
    await sessions.queue(session.header.id, ANA, text("b"))
    await sessions.settled(session)
    assert (shown(session), session.queue_dropped, session.waiting) == ("a", 1, 0)


# ---- queries and turns ----


async def test_a_query_is_answered_on_the_version_at_which_it_began(
    sessions: SessionService, engine: PinningEngine
) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    use = await sessions.answering.begin(session.header.id, ANA, "query")
    await sessions.append(session.header.id, ANA, text("def"))
    said = await asked(sessions, use, "?", engine, "!")
    assert (said["data_version"], said["version"], use.hold.tokens) == (1, None, 4)
    assert (session.version, shown(session), session.uses) == (2, "abcdef", 0)


async def test_a_query_that_ends_late_does_not_move_the_pin_back(
    sessions: SessionService, engine: PinningEngine
) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    engine.gate = asyncio.Event()
    appending = asyncio.create_task(sessions.append(session.header.id, ANA, text("def")))
    await engine.at_gate.wait()
    use = await sessions.answering.begin(session.header.id, ANA, "query")  # on the old version, after the append began
    engine.gate.set()
    await appending
    engine.gate = None
    await asked(sessions, use, "?", engine, "!")
    assert engine.pins[session.header.id] == tuple(session.token_ids())
    await sessions.rewind(session.header.id, ANA, 1)
    await asked(sessions, await sessions.answering.begin(session.header.id, ANA, "query"), "?", engine, "!")
    assert engine.pins[session.header.id] == tuple(session.token_ids())


async def test_a_pin_that_ran_ahead_is_put_right_by_the_next_query(
    sessions: SessionService, engine: PinningEngine, log: FailingLog
) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    log.is_down = True
    with pytest.raises(StoreUnreachable):
        await sessions.append(session.header.id, ANA, text("def"))
    assert len(engine.pins[session.header.id]) == 7
    await asked(sessions, await sessions.answering.begin(session.header.id, ANA, "query"), "?", engine, "!")
    assert engine.pins[session.header.id] == tuple(session.token_ids())


async def test_a_turn_becomes_part_of_the_session(
    sessions: SessionService, engine: PinningEngine, log: FailingLog
) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    said = await asked(sessions, use, "?", engine, "yes")
    assert (said["data_version"], said["version"], shown(session)) == (1, 2, "abc?yes")
    assert len(log.entries(OwnerId(ANA), session.header.id)) == 2
    assert sessions.table.ledger.pinned == session.num_tokens
    assert not session.turning


async def test_two_turns_at_once(sessions: SessionService, engine: PinningEngine) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    with pytest.raises(TurnInProgress):
        await sessions.answering.begin(session.header.id, ANA, "turn")
    appending = asyncio.create_task(sessions.append(session.header.id, ANA, text("later")))
    await asked(sessions, use, "?", engine, "yes")
    await appending
    assert shown(session) == "abc?yeslater"


async def test_an_answer_that_was_cut_off_does_not_count(sessions: SessionService) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    sessions.answering.admit(use, [1], 10)
    said = await sessions.answering.end(use, Answer([5], "x", None, True, 5, 4, None))
    assert (said["version"], session.version, sessions.table.ledger.pinned) == (None, 1, 4)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    await sessions.answering.drop(use)
    await sessions.answering.drop(use)
    assert (session.uses, session.turning, sessions.table.ledger.pinned) == (0, False, 4)


async def test_closing_ends_what_runs_once(sessions: SessionService, engine: PinningEngine, log: FailingLog) -> None:
    """Case S3."""
    session = await sessions.create(ANA, text("abc"), PLAIN)
    turn = await sessions.answering.begin(session.header.id, ANA, "turn")
    query = await sessions.answering.begin(session.header.id, ANA, "query")
    cancelled: list[str] = []
    turn.cancel, query.cancel = (lambda: cancelled.append("turn")), (lambda: cancelled.append("query"))
    await sessions.close(session.header.id, ANA)
    assert sorted(cancelled) == ["query", "turn"]
    assert (engine.pins, sessions.table.ledger.pinned, log.header(session.header.id)) == ({}, 0, None)
    with pytest.raises(SessionClosed):
        await asked(sessions, turn, "?", engine, "yes")
    # It ended after it was closed: what it leaves in the engine is not pinned.
    assert engine.pins == {}
    await sessions.answering.drop(query)
    with pytest.raises(SessionClosed):
        await sessions.close(session.header.id, ANA)
    with pytest.raises(SessionNotFound):
        await sessions.get(session.header.id, BO)


async def test_closing_beside_the_upkeep(
    sessions: SessionService, engine: PinningEngine, log: FailingLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upkeep deletes what has ended between the two steps of a close."""
    session = await sessions.create(ANA, text("abc"), PLAIN)
    control = engine.control

    async def unpin_late(op: str, payload: Any = None) -> Any:
        answer = await control(op, payload)
        if op == "unpin":
            await sessions.sweep()
        return answer

    monkeypatch.setattr(engine, "control", unpin_late)
    await sessions.close(session.header.id, ANA)
    assert log.header(session.header.id) is None


async def test_a_turn_has_to_have_room_for_its_answer(make: Callable[..., SessionService]) -> None:
    sessions = make(max_tokens=20)
    session = await sessions.create(ANA, text("0123456789"), PLAIN)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    with pytest.raises(SessionTooLong, match="room for 5"):
        sessions.answering.admit(use, [1, 2, 3, 4], 6)
    await sessions.answering.drop(use)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    assert sessions.answering.admit(use, [1, 2, 3, 4], 5) == 5
    await sessions.answering.drop(use)


async def test_a_turn_that_cannot_be_logged_says_so(
    sessions: SessionService, engine: PinningEngine, log: FailingLog
) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    log.is_down = True
    with pytest.raises(SessionNotSaved):
        await asked(sessions, use, "?", engine, "yes")
    log.is_down = False
    assert (session.version, shown(session), session.turning) == (1, "abc", False)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    await asked(sessions, use, "?", engine, "no")
    assert shown(session) == "abc?no"


# ---- pins that are lost ----


async def test_a_flush_shows_and_the_next_use_makes_the_pin_anew(
    sessions: SessionService, engine: PinningEngine
) -> None:
    """Case S13, without a model."""
    session = await sessions.create(ANA, text("abc"), PLAIN)
    engine.flush()
    [seen] = await sessions.show([session])
    assert (seen["pin"]["state"], seen["pin"]["reason"], seen["pin"]["cells"]) == ("lost", "flushed", 4)
    use = await sessions.answering.begin(session.header.id, ANA, "query")
    await asked(sessions, use, "?", engine, "!")
    [seen] = await sessions.show([session])
    assert (seen["pin"]["state"], engine.pins[session.header.id]) == ("pinned", tuple(session.token_ids()))
    assert sessions.metrics.totals()["lost"] == {"flushed": 1}


async def test_refreshing_prefills_what_was_lost(sessions: SessionService, engine: PinningEngine) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    engine.flush()
    await sessions.refresh(session.header.id, ANA)
    assert engine.pins[session.header.id] == tuple(session.token_ids())
    assert sessions.metrics.totals()["operations"]["rebuild"]["count"] == 1


async def test_unpinning_and_pinning(sessions: SessionService, engine: PinningEngine, log: FailingLog) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    await sessions.unpin(session.header.id, ANA)
    assert (session.pin_state, engine.pins, sessions.table.ledger.pinned) == ("unpinned", {}, 0)
    header = log.header(session.header.id)
    assert header is not None
    assert not header.is_pinned
    await sessions.append(session.header.id, ANA, text("d"))
    assert engine.pins == {}
    await sessions.pin(session.header.id, ANA, on_full=None)
    assert (session.pin_state, engine.pins) == ("pinned", {session.header.id: tuple(session.token_ids())})


async def test_new_weights_reach_nothing_old(sessions: SessionService, engine: PinningEngine) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    before = engine.sent[-1].salt
    await sessions.weights_changing()
    await sessions.weights_changed()
    assert (engine.pins, session.pin_state) == ({}, "lost")
    await sessions.append(session.header.id, ANA, text("d"))
    assert engine.sent[-1].salt != before
    assert engine.sent[-1].token_ids == tuple(session.token_ids())
    assert engine.pins[session.header.id] == tuple(session.token_ids())


# ---- life ----


async def test_what_has_expired_is_gone_everywhere(
    sessions: SessionService, engine: PinningEngine, log: FailingLog, clock: Clock
) -> None:
    session = await sessions.create(ANA, text("abc"), replace(PLAIN, ttl_s=10.0))
    kept = await sessions.create(ANA, text("def"), PLAIN)
    clock.now += 10
    with pytest.raises(SessionExpired):
        await sessions.append(session.header.id, ANA, text("d"))
    log.is_down = True
    with pytest.raises(StoreUnreachable):
        await sessions.sweep()
    assert set(engine.pins) == {kept.header.id}
    log.is_down = False
    await sessions.sweep()
    assert (log.header(session.header.id), log.header(kept.header.id) is None) == (None, False)
    with pytest.raises(SessionExpired):
        await sessions.get(session.header.id, ANA)
    assert sessions.metrics.totals()["expiries"] == {"idle": 1, "age": 0}


async def test_use_begins_the_idle_time_anew_and_the_log_learns_of_it(
    sessions: SessionService, engine: PinningEngine, log: FailingLog, clock: Clock
) -> None:
    session = await sessions.create(ANA, text("abc"), replace(PLAIN, ttl_s=10.0))
    clock.now += 9
    await asked(sessions, await sessions.answering.begin(session.header.id, ANA, "query"), "?", engine, "!")
    await sessions.sweep()
    header = log.header(session.header.id)
    assert header is not None
    assert header.used_at == clock.now
    clock.now += 9
    assert await sessions.sweep() == 0
    assert (await sessions.get(session.header.id, ANA)) is session


async def test_a_session_goes_on_after_a_restart(
    make: Callable[..., SessionService], engine: PinningEngine, log: FailingLog
) -> None:
    session = await make().create(ANA, text("abc"), PLAIN)
    before = make()
    await before.append(session.header.id, ANA, text("def"))
    engine.flush()
    engine.lost.clear()
    after = make()
    [found] = await after.sessions_of(ANA)
    assert (shown(found), found.version, found.pin_state) == ("abcdef", 2, "lost")
    await after.append(session.header.id, ANA, text("g"))
    assert (shown(found), found.version, found.pin_state) == ("abcdefg", 3, "pinned")
    with pytest.raises(SessionNotFound):
        await after.get(session.header.id, BO)


async def test_another_servers_change_is_a_conflict_and_then_known(make: Callable[..., SessionService]) -> None:
    one, two = make(), make()
    session = await one.create(ANA, text("abc"), PLAIN)
    await two.append(session.header.id, ANA, text("two"))
    with pytest.raises(SessionVersionConflict, match="another server"):
        await one.append(session.header.id, ANA, text("one"))
    made = await one.append(session.header.id, ANA, text("one"))
    assert (shown(made.session), made.session.version) == ("abctwoone", 3)


async def test_a_session_of_another_model(make: Callable[..., SessionService], log: FailingLog) -> None:
    session = await make().create(ANA, text("abc"), PLAIN)
    other = make(model="another")
    with pytest.raises(SessionOfAnotherModel):
        await other.get(session.header.id, ANA)
    with pytest.raises(SessionNotFound):
        await other.get(session.header.id, BO)
    assert await other.sessions_of(ANA) == []
    with pytest.raises(SessionNotFound):
        await other.close(session.header.id, BO)
    assert log.header(session.header.id) is not None
    with pytest.raises(SessionOfAnotherModel):
        await other.close(session.header.id, ANA)
    assert log.header(session.header.id) is None


async def test_a_purged_owner_has_no_sessions(sessions: SessionService, engine: PinningEngine, log: FailingLog) -> None:
    """Case M17's session."""
    used, idle = await sessions.create(ANA, text("abc"), PLAIN), await sessions.create(ANA, text("abd"), PLAIN)
    other = await sessions.create(BO, text("abc"), PLAIN)
    query = await sessions.answering.begin(idle.header.id, ANA, "query")
    assert log.purge(OwnerId(ANA)) == 2
    with pytest.raises(SessionClosed):
        await sessions.append(used.header.id, ANA, text("d"))
    assert await sessions.purged(ANA) == 1
    with pytest.raises(SessionClosed):
        sessions.answering.check(query)
    assert set(engine.pins) == {other.header.id}
    for session in (used, idle):
        with pytest.raises(SessionClosed):
            await sessions.answering.begin(session.header.id, ANA, "query")
    assert sessions.table.ledger.pinned == 4


@pytest.mark.parametrize("how", ["create", "fork", "append"])
async def test_a_purge_is_not_undone_by_what_was_under_way(
    sessions: SessionService, engine: PinningEngine, log: FailingLog, how: str
) -> None:
    session = await sessions.create(ANA, text("secret"), PLAIN)
    engine.gate = asyncio.Event()
    work = {
        "create": lambda: sessions.create(ANA, text("another"), PLAIN),
        "fork": lambda: sessions.fork(session.header.id, ANA, version=None, options=lambda header: PLAIN),
        "append": lambda: sessions.append(session.header.id, ANA, text("more")),
    }[how]
    task = asyncio.create_task(work())
    await engine.at_gate.wait()
    log.purge(OwnerId(ANA))
    await sessions.purged(ANA)
    engine.gate.set()
    with pytest.raises(SessionClosed):
        await task
    assert list(log.headers()) == []
    assert (engine.pins, sessions.table.ledger.pinned, len(sessions.table)) == ({}, 0, 0)


async def test_what_was_opened_after_another_processs_purge_stays(sessions: SessionService, log: FailingLog) -> None:
    before = await sessions.create(ANA, text("abc"), PLAIN)
    log.purge(OwnerId(ANA))
    after = await sessions.create(ANA, text("abc"), PLAIN)
    assert await sessions.purged(ANA) == 1  # told a moment later
    assert [session.header.id for session in sessions.table.sessions()] == [after.header.id]
    with pytest.raises(SessionClosed):
        await sessions.get(before.header.id, ANA)


async def test_a_session_in_use_on_another_server_does_not_expire_here(
    make: Callable[..., SessionService], log: FailingLog, clock: Clock, engine: PinningEngine
) -> None:
    one, two = make(), make()
    session = await one.create(ANA, text("abc"), replace(PLAIN, ttl_s=100.0))
    await two.get(session.header.id, ANA)
    clock.now += 90
    await asked(one, await one.answering.begin(session.header.id, ANA, "query"), "?", engine, "!")
    await one.sweep()
    clock.now += 20
    assert await two.sweep() == 0
    assert len(two.table) == 0
    await one.append(session.header.id, ANA, text("d"))
    clock.now += 100
    assert await one.sweep() == 1
    assert log.header(session.header.id) is None


async def test_what_no_server_has_in_memory_is_deleted_when_its_time_is_long_over(
    make: Callable[..., SessionService], log: FailingLog, clock: Clock
) -> None:
    before = make()
    await before.create(ANA, text("abc"), replace(PLAIN, ttl_s=100.0))
    kept = await before.create(ANA, text("abc"), PLAIN)
    after = SessionUpkeep(make()._keeper)  # as after a restart: nothing is in memory
    clock.now += 150
    assert await after.look_through_log(grace_s=60.0) == 0
    clock.now += 10
    assert await after.look_through_log(grace_s=60.0) == 1
    assert [header.id for header in log.headers()] == [kept.header.id]


async def test_looking_at_sessions_of_the_log_counts_no_cells(make: Callable[..., SessionService]) -> None:
    session = await make().create(ANA, text("abc"), PLAIN)
    other = make()
    [seen] = await other.show(await other.sessions_of(ANA))
    assert (seen["pin"]["state"], seen["pin"]["cells"], other.table.ledger.pinned) == ("lost", 0, 0)
    await other.get(session.header.id, ANA)
    assert other.table.ledger.pinned == 4


async def test_a_session_that_was_deleted_elsewhere_ends_here(
    make: Callable[..., SessionService], engine: PinningEngine
) -> None:
    one, two = make(), make()
    session = await one.create(ANA, text("abc"), PLAIN)
    await two.close(session.header.id, ANA)
    with pytest.raises(SessionClosed):
        await one.append(session.header.id, ANA, text("d"))
    assert (one.table.ledger.pinned, engine.pins) == (0, {})
    with pytest.raises(SessionClosed):
        await one.answering.begin(session.header.id, ANA, "query")


@pytest.mark.parametrize("what", ["pin", "unpin"])
async def test_pinning_what_was_deleted_elsewhere(make: Callable[..., SessionService], what: str) -> None:
    one, two = make(), make()
    session = await one.create(ANA, text("abc"), PLAIN)
    await two.close(session.header.id, ANA)
    work = one.unpin(session.header.id, ANA) if what == "unpin" else one.pin(session.header.id, ANA, on_full=None)
    with pytest.raises(SessionClosed):
        await work
    assert (one.table.ledger.pinned, len(one.table)) == (0, 0)


async def test_a_caller_who_goes_away_during_the_write_changes_nothing_about_it(
    sessions: SessionService, log: FailingLog
) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    log.pause()
    log.writing.clear()
    task = asyncio.create_task(sessions.append(session.header.id, ANA, text("d")))
    await asyncio.to_thread(log.writing.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    log.go_on()
    with pytest.raises(asyncio.CancelledError):
        await task
    # It was logged, and so it is here too.
    assert (session.version, shown(session)) == (2, "abcd")
    await sessions.append(session.header.id, ANA, text("e"))
    assert shown(session) == "abcde"


async def test_a_turn_after_which_facts_move_says_that_its_kv_is_missing(
    sessions: SessionService, engine: PinningEngine
) -> None:
    session = await sessions.create(ANA, text("abc"), PLAIN)
    use = await sessions.answering.begin(session.header.id, ANA, "turn")
    use.hold = replace(use.hold, tokens=session.num_tokens)  # as with facts behind the session
    await asked(sessions, use, "?", engine, "yes")
    assert (session.pin_state, session.lost) == ("lost", "not prefilled yet")
    await sessions.refresh(session.header.id, ANA)
    assert (session.pin_state, engine.pins[session.header.id]) == ("pinned", tuple(session.token_ids()))


async def test_a_demotion_is_counted_once(make: Callable[..., SessionService]) -> None:
    sessions = make(budget=10, quota=10)
    session = await sessions.create(ANA, text("0123456789"), replace(PLAIN, on_full="demote"))
    for _ in range(3):
        await sessions.append(session.header.id, ANA, text("x"))
    assert sessions.metrics.totals()["demotions"] == 1


async def test_two_turns_that_come_at_the_same_moment(sessions: SessionService) -> None:
    session = await sessions.create(ANA, None, PLAIN)
    begun = await asyncio.gather(
        *(sessions.answering.begin(session.header.id, ANA, "turn") for _ in range(2)), return_exceptions=True
    )
    assert [type(one) for one in begun] == [Use, TurnInProgress]


async def test_a_long_history_is_compacted(make: Callable[..., SessionService], log: FailingLog) -> None:
    sessions = make(versions=5)
    session = await sessions.create(ANA, text("a"), replace(PLAIN, window_tokens=10))
    for letter in "bcdefghijklmnop":
        await sessions.append(session.header.id, ANA, text(letter * 3))
    await sessions.sweep()
    assert len(log.entries(OwnerId(ANA), session.header.id)) <= 10
    restored = await make().get(session.header.id, ANA)
    assert (shown(restored), restored.version) == (shown(session), 16)
    # What the log has let go cannot be gone back to, before a restart either.
    with pytest.raises(BadSessionRequest, match="is not kept"):
        await sessions.rewind(session.header.id, ANA, 15)


async def test_forks_go_their_own_ways(sessions: SessionService, engine: PinningEngine) -> None:
    parent = await sessions.create(ANA, text("abc"), replace(PLAIN, priority=3))
    await sessions.append(parent.header.id, ANA, text("d"))

    def same(header: SessionHeader) -> Options:
        return Options(ttl_s=header.ttl_s, priority=header.priority)

    fork = await sessions.fork(parent.header.id, ANA, version=1, options=same)
    await sessions.append(fork.header.id, ANA, text("x"))
    assert (shown(parent), shown(fork), fork.header.priority) == ("abcd", "abcx", 3)
    assert (fork.header.parent, fork.header.parent_version) == (parent.header.id, 1)
    assert engine.sent[-1].hold is not None
    assert engine.sent[-1].hold.group == parent.group
    assert sessions.table.ledger.pinned == 6
    await sessions.close(parent.header.id, ANA)
    assert shown(fork) == "abcx"


# ---- failures ----


@pytest.mark.parametrize("lost", ["the look at the parent", "the answer"])
async def test_a_fork_that_was_refused_leaves_none(
    sessions: SessionService, log: FailingLog, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    parent = await sessions.create(ANA, text("abc"), PLAIN)
    fork = partial(sessions.fork, parent.header.id, ANA, version=None, options=lambda header: PLAIN)
    create, written = log.create, list[SessionId]()

    def busy(session_id: SessionId) -> None:
        raise StoreBusy("the store is failing over")

    def create_and_fail(header: SessionHeader, entry: LogEntry) -> None:
        create(header, entry)
        written.append(header.id)
        if lost == "the answer":
            raise StoreUnreachable("no answer")
        monkeypatch.setattr(log, "header", busy)

    monkeypatch.setattr(log, "create", create_and_fail)
    with pytest.raises((StoreBusy, StoreUnreachable)):
        await fork()
    monkeypatch.undo()
    assert log.header(written[0]) is not None
    with pytest.raises(SessionNotFound):
        await sessions.get(written[0], ANA)
    again = await fork()
    await sessions.sweep()
    assert {header.id for header in log.headers()} == {parent.header.id, again.header.id}


async def test_what_a_purge_could_not_take_back_is_taken_back_later(
    sessions: SessionService, engine: PinningEngine, log: FailingLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = log.create

    def create_and_go_down(header: SessionHeader, entry: LogEntry) -> None:
        create(header, entry)
        log.is_down = True

    monkeypatch.setattr(log, "create", create_and_go_down)
    engine.gate = asyncio.Event()
    task = asyncio.create_task(sessions.create(ANA, text("secret"), PLAIN))
    await engine.at_gate.wait()
    await sessions.purged(ANA)
    engine.gate.set()
    with pytest.raises(SessionClosed):
        await task
    log.is_down = False
    assert len(log.headers()) == 1
    await sessions.sweep()
    assert list(log.headers()) == []


async def test_a_pin_that_is_refused_is_not_logged(make: Callable[..., SessionService], log: FailingLog) -> None:
    sessions = make(budget=20, quota=20)
    session = await sessions.create(ANA, text("x" * 12), replace(PLAIN, pin=False))
    await sessions.create(BO, text("x" * 12), PLAIN)
    with pytest.raises(PinRefused):
        await sessions.pin(session.header.id, ANA, on_full=None)
    stored = log.header(session.header.id)
    assert stored is not None
    assert (stored.is_pinned, session.pin_state) == (False, "unpinned")


async def test_a_pin_that_cannot_be_logged_is_given_back(sessions: SessionService, log: FailingLog) -> None:
    session = await sessions.create(ANA, text("abc"), replace(PLAIN, pin=False))
    log.is_down = True
    with pytest.raises(StoreUnreachable):
        await sessions.pin(session.header.id, ANA, on_full=None)
    assert (session.pin_state, session.header.is_pinned, sessions.table.ledger.pinned) == ("unpinned", False, 0)
    log.is_down = False
    await sessions.pin(session.header.id, ANA, on_full=None)
    assert (session.pin_state, sessions.table.ledger.pinned) == ("pinned", 4)


async def test_a_caller_who_goes_away_leaves_pin_and_log_as_one(sessions: SessionService, log: FailingLog) -> None:
    session = await sessions.create(ANA, text("abc"), replace(PLAIN, pin=False))
    log.pause()
    log.writing.clear()
    task = asyncio.create_task(sessions.pin(session.header.id, ANA, on_full=None))
    await asyncio.to_thread(log.writing.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    log.go_on()
    with pytest.raises(asyncio.CancelledError):
        await task
    stored = log.header(session.header.id)
    assert stored is not None
    assert (stored.is_pinned, session.header.is_pinned, sessions.table.ledger.pinned) == (True, True, 4)


async def test_a_session_that_is_busy_on_another_server_lives(
    make: Callable[..., SessionService], log: FailingLog, clock: Clock
) -> None:
    one, two = make(), make()
    session = await one.create(ANA, text("abc"), replace(PLAIN, ttl_s=100.0))
    use = await one.answering.begin(session.header.id, ANA, "query")
    clock.now += 1000
    await one.sweep()
    assert await SessionUpkeep(two._keeper).look_through_log(grace_s=60.0) == 0
    assert log.header(session.header.id) is not None
    await one.answering.drop(use)


async def grown(sessions: SessionService, letters: str) -> Session:
    """A session with more versions than are kept of it."""
    session = await sessions.create(ANA, text("a"), replace(PLAIN, window_tokens=10))
    for letter in letters:
        await sessions.append(session.header.id, ANA, text(letter))
    return session


async def test_what_is_not_compacted_keeps_its_versions_and_stops_no_other(
    make: Callable[..., SessionService], log: FailingLog
) -> None:
    sessions = make(versions=3)
    first, second = [await grown(sessions, "bcdefgh") for _ in range(2)]
    bad, good = sorted((first, second), key=lambda session: session.header.id)
    log.damaged = bad.header.id
    await sessions.sweep()
    assert (list(bad.versions), list(good.versions)) == ([6, 7, 8], [8])
    assert len(log.entries(OwnerId(ANA), good.header.id)) == 1
    await sessions.rewind(bad.header.id, ANA, 7)


async def test_what_goes_on_elsewhere_is_not_compacted_here(
    make: Callable[..., SessionService], log: FailingLog
) -> None:
    one, two = make(versions=3), make(versions=100)
    session = await grown(one, "bcdefgh")
    await two.append(session.header.id, ANA, text("i"))
    await one.sweep()
    again = await one.get(session.header.id, ANA)
    assert (again.version, shown(again)[-1], list(again.versions)) == (9, "i", [7, 8, 9])


async def test_one_that_cannot_be_deleted_stops_no_other_from_expiring(
    sessions: SessionService, log: FailingLog, clock: Clock
) -> None:
    made = [await sessions.create(ANA, text("abc"), replace(PLAIN, ttl_s=10.0)) for _ in range(3)]
    log.damaged = made[0].header.id
    clock.now += 10
    assert await sessions.sweep() == 3
    assert [header.id for header in log.headers()] == [made[0].header.id]
    log.damaged = None
    await sessions.sweep()
    assert list(log.headers()) == []


async def test_an_engine_that_fails_stops_no_other_from_expiring(
    sessions: SessionService, engine: PinningEngine, log: FailingLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await sessions.create(ANA, text("abc"), replace(PLAIN, ttl_s=10.0))
    clock.now += 10

    async def failing(op: str, payload: Any = None) -> Any:
        raise RuntimeError(f"control call {op!r} failed")

    monkeypatch.setattr(engine, "control", failing)
    assert await sessions.sweep() == 3
    assert list(log.headers()) == []
    monkeypatch.undo()
    assert len(engine.pins) == 3
    await sessions.sweep()
    assert engine.pins == {}


async def test_what_another_release_called_the_same_model_is_served(make: Callable[..., SessionService]) -> None:
    session = await make(model="of an earlier release").create(ANA, text("abc"), PLAIN)
    now = make(model="model", former_models=["of an earlier release"])
    await now.append(session.header.id, ANA, text("d"))
    assert shown(await now.get(session.header.id, ANA)) == "abcd"


async def test_new_data_of_what_is_not_pinned_waits_for_its_question_where_the_pool_has_dropped_the_rest(
    make: Callable[..., SessionService], engine: PinningEngine
) -> None:
    sessions = make()
    session = await sessions.create(ANA, text("x" * 499), replace(PLAIN, pin=False))
    kept = await sessions.append(session.header.id, ANA, text("y" * 10))
    assert (kept.prefilled_tokens, kept.cached_tokens) == (10, 500)
    engine.flush()
    sent = len(engine.sent)
    lost = await sessions.append(session.header.id, ANA, text("z" * 10))
    assert (lost.prefilled_tokens, lost.cached_tokens, lost.session.version) == (0, 0, 3)
    assert len(engine.sent) == sent
    # Of 720 tokens 200 are new: more than twice that, and 64, are missing. Of 1420 with 700 new ones not.
    more = await sessions.append(session.header.id, ANA, text("z" * 200))
    assert more.prefilled_tokens == 0
    much = await sessions.append(session.header.id, ANA, text("z" * 700))
    assert much.prefilled_tokens == 1420


async def test_new_data_of_a_pinned_session_is_prefilled_whatever_the_pool_has_dropped(
    make: Callable[..., SessionService], engine: PinningEngine
) -> None:
    sessions = make()
    session = await sessions.create(ANA, text("x" * 499), PLAIN)  # and the tokenizer's first token
    engine.flush()
    made = await sessions.append(session.header.id, ANA, text("y" * 10))
    assert (made.prefilled_tokens, made.cached_tokens) == (510, 0)
