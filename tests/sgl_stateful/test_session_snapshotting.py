"""Which sessions get a snapshot, and when it goes; the scheduler's part is played by one that writes real files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pinning_engine import POOL_TOKENS, PinningEngine
from prometheus_client import CollectorRegistry
from session_values import ANA, BO, Clock, segment
from words import ByteTokenizer

from memstore import OwnerId
from memstore.kv.session_files import PART, session_file
from memstore.session_log import LogEntry, SessionId, SessionLog, VolatileSessionLog
from sgl_stateful.errors import SessionClosed, SessionVersionConflict
from sgl_stateful.sessions.content import Content, Renderer
from sgl_stateful.sessions.hold import Readback
from sgl_stateful.sessions.metrics import SessionMetrics
from sgl_stateful.sessions.service import Options, SessionService
from sgl_stateful.sessions.session import Session
from sgl_stateful.sessions.snapshot_file import SnapshotHeader, read_header, tokens_digest, write_snapshot
from sgl_stateful.sessions.snapshots import SnapshotFolder
from sgl_stateful.sessions.snapshotting import SessionSnapshots

pytestmark = pytest.mark.anyio

PLAIN = Options(ttl_s=None)
BYTES_PER_TOKEN = 16
DEADLINE_S = 30.0


class WritingEngine(PinningEngine):
    """Writes the file that it is asked for; while ``is_slow``, not before it is asked again ``finish``ed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.foreground = 0
        self.is_slow = False
        self.asked: list[str] = []
        self.looked: list[str] = []
        self.out_of_order: set[str] = set()
        self._pending: dict[str, list[int]] = {}

    async def control(self, op: str, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        body = dict(payload or {})
        if op in self.out_of_order:
            raise RuntimeError(f"control call {op!r} failed")
        match op:
            case "snapshot_write":
                self.looked.append(body["name"])
                ids = self._in_pool(body["token_ids"], body["salt"])
                if len(ids) < body["least_tokens"]:
                    return {"state": "not_in_pool"}
                if body.get("look"):
                    return {"state": "in_pool", "tokens": len(ids)}
                self.asked.append(body["name"])
                self._pending[body["name"]] = ids
                return {"state": "writing"}
            case "snapshot_state":
                return self._finish(body["name"])
            case "snapshot_drop":
                return {"dropped": sum(self._pending.pop(name, None) is not None for name in body["names"])}
        return await super().control(op, payload)

    def _in_pool(self, ids: list[int], salt: str) -> list[int]:
        tree = self._cached.get(salt, set())
        return ids[: max((n for n in range(len(ids) + 1) if tuple(ids[:n]) in tree), default=0)]

    def _finish(self, name: str) -> Mapping[str, Any]:
        if name not in self._pending:
            return {"state": "dropped"}
        if self.is_slow:
            return {"state": "writing"}
        ids = self._pending.pop(name)
        header = SnapshotHeader(f"f{self.weights}", tokens_digest(ids), (1, len(ids), 1, 2), "float32")
        write_snapshot(self.folder / name, name, header, torch.zeros(header.shape), torch.ones(header.shape))
        fields = ("fingerprint", "tokens_digest", "shape", "dtype")
        return {"state": "written", **{field: getattr(header, field) for field in fields}}

    def foreground_requests(self) -> int:
        return self.foreground


class Setup:
    """A service with snapshots in a folder, and with its upkeep running."""

    def __init__(self, folder: Path, log: SessionLog, threads: ThreadPoolExecutor, *, budget_bytes: int) -> None:
        self.folder = folder
        self.log = log
        self.clock = Clock()
        self.engine = WritingEngine(folder)
        self.metrics = SessionMetrics(CollectorRegistry())
        self.snapshots = SessionSnapshots(
            SnapshotFolder(folder, budget_bytes=budget_bytes),
            self.engine,
            self.metrics,
            fingerprint="f",
            bytes_per_token=BYTES_PER_TOKEN,
            quiet_s=0.02,
            look_every_s=0.01,
        )
        self.sessions = SessionService(
            log=log,
            engine=self.engine,
            renderer=Renderer(ByteTokenizer(), vocab_size=300),
            salt=lambda owner: f"salt of {owner}",
            threads=threads,
            metrics=self.metrics,
            model="model",
            budget=20_000,
            quota=20_000,
            pool_tokens=POOL_TOKENS,
            max_tokens=10_000,
            versions=100,
            queue=4,
            snapshots=self.snapshots,
            clock=self.clock,
        )

    def files(self) -> set[str]:
        return {file.name for file in self.folder.iterdir()}

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await asyncio.sleep(0.005)

    async def written(self, session: Session) -> str:
        """Wait for the snapshot of what the session holds now."""
        await self.until(lambda: self.snapshots.covered(session) == session.num_tokens)
        return session_file(session.header.owner, session.header.id)


Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    @asynccontextmanager
    async def running(log: SessionLog | None = None, *, budget_bytes: int = 1 << 20) -> AsyncIterator[Setup]:
        with ThreadPoolExecutor(2) as threads:
            setup = Setup(tmp_path, log or VolatileSessionLog(), threads, budget_bytes=budget_bytes)
            await setup.snapshots.start()
            upkeep = asyncio.create_task(setup.sessions.write_snapshots())
            yield setup
            upkeep.cancel()
            with suppress(asyncio.CancelledError):
                await upkeep

    return running


def content(count: int) -> Content:
    return Content(text="x" * count)


async def test_a_quiet_session_is_written_and_read_back(make: Make) -> None:
    async with make() as setup:
        small = await setup.sessions.create(ANA, content(200), PLAIN)
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        name = await setup.written(session)
        assert setup.files() == {name}
        assert setup.snapshots.readback(session) == Readback(name, session.num_tokens, 256)
        assert setup.snapshots.readback(small) is None
        use = await setup.sessions.answering.begin(session.header.id, ANA, "query")
        assert use.hold.snapshot == Readback(name, session.num_tokens, 256)
        await setup.sessions.answering.drop(use)
        assert setup.metrics.totals()["snapshots"] == {"written": 1, "read": 0, "missed": 0}


async def test_what_was_appended_is_written_once_it_is_much(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        await setup.written(session)
        tokens = session.num_tokens
        await setup.sessions.append(session.header.id, ANA, content(200))
        assert setup.snapshots.covered(session) == tokens
        assert setup.snapshots.readback(session).tokens == tokens
        await setup.sessions.append(session.header.id, ANA, content(100))
        await setup.written(session)
        assert len(setup.engine.asked) == 2


async def test_nothing_is_written_while_callers_wait(make: Make) -> None:
    async with make() as setup:
        setup.engine.foreground = 1
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        looked = 0

        def counting() -> int:
            nonlocal looked
            looked += 1
            return 1

        setup.engine.foreground_requests = counting
        await setup.until(lambda: looked >= 20)
        assert setup.engine.asked == []
        setup.engine.foreground_requests = lambda: 0
        await setup.written(session)


async def test_a_snapshot_of_other_content_is_not_read(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, Content(text="a" * 300), replace(PLAIN, window_tokens=1000))
        version = session.version
        await setup.written(session)
        await setup.sessions.append(session.header.id, ANA, Content(text="b" * 300))
        await setup.written(session)
        setup.engine.foreground = 1
        await setup.sessions.rewind(session.header.id, ANA, version)
        assert setup.snapshots.readback(session) is None


async def test_it_goes_with_its_session_and_its_owner(make: Make) -> None:
    async with make() as setup:
        closed = await setup.sessions.create(ANA, content(300), PLAIN)
        purged = await setup.sessions.create(BO, content(310), PLAIN)
        kept = await setup.sessions.create(ANA, content(320), PLAIN)
        names = [await setup.written(session) for session in (closed, purged, kept)]
        await setup.sessions.close(closed.header.id, ANA)
        assert setup.files() == set(names[1:])
        setup.log.purge(purged.header.owner)
        assert await setup.sessions.purged(BO) == 1
        assert setup.files() == {names[2]}


async def test_one_that_is_being_written_goes_too(make: Make) -> None:
    async with make() as setup:
        setup.engine.is_slow = True
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        await setup.until(lambda: setup.engine.asked != [])
        setup.log.purge(session.header.owner)
        assert await setup.sessions.purged(ANA) == 1
        setup.engine.is_slow = False
        other = await setup.sessions.create(BO, content(300), PLAIN)
        written = await setup.written(other)
        assert setup.files() == {written}


async def test_new_weights_make_all_of_them_wrong(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        await setup.written(session)
        await setup.sessions.weights_changing()
        assert setup.engine.weights is None
        assert setup.snapshots.readback(session) is None
        await setup.sessions.weights_changed()
        assert setup.files() == set()
        assert setup.engine.weights.startswith("+")
        await setup.sessions.refresh(session.header.id, ANA)
        name = await setup.written(session)
        assert setup.files() == {name}
    async with make() as setup:  # a server that has the first weights again
        assert setup.files() == set()


async def test_after_a_restart_those_of_the_log_are_found_and_others_go(make: Make) -> None:
    log = VolatileSessionLog()
    async with make(log) as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        gone = await setup.sessions.create(BO, content(300), PLAIN)
        kept = await setup.written(session)
        await setup.written(gone)
    log.delete(gone.header.owner, gone.header.id)
    abandoned, written_now = kept + PART, session_file(OwnerId(BO), SessionId("now")) + PART
    async with make(log) as setup:
        for name in (abandoned, written_now):
            (setup.folder / name).touch()
        os.utime(setup.folder / abandoned, (0, 0))
        await setup.sessions._upkeep.look_through_log(grace_s=60.0)
        again = await setup.sessions.get(session.header.id, ANA)
        assert setup.snapshots.readback(again) == Readback(kept, session.num_tokens, 256)
        assert setup.files() == {kept}


async def test_the_budget_holds_the_sessions_used_last(make: Make) -> None:
    async with make(budget_bytes=2 * 305 * BYTES_PER_TOKEN + 3000) as setup:
        clock = setup.clock
        written = []
        for _ in range(3):
            clock.now += 10
            session = await setup.sessions.create(ANA, content(300), PLAIN)
            written.append(await setup.written(session))
        assert setup.files() == set(written[1:])


async def test_one_that_could_not_be_read_is_made_anew(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        await setup.written(session)
        report = {"lost": "flushed", "snapshot": {"state": "missed", "reason": "damaged"}}
        assert setup.snapshots.saw(session, report) == "prefill"
        assert setup.snapshots.readback(session) is None
        await setup.written(session)
        assert setup.metrics.totals()["snapshots"] == {"written": 2, "read": 0, "missed": 1}


async def test_where_prefill_is_faster_nothing_is_read(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(600), PLAIN)
        name = await setup.written(session)
        size = session.num_tokens * BYTES_PER_TOKEN
        read = {"state": "read", "tokens": session.num_tokens, "bytes": size, "ms": 1000.0}
        assert setup.snapshots.saw(session, {"lost": None, "snapshot": read}) == "snapshot"
        setup.snapshots.rates.prefilled_tokens = type(setup.snapshots.rates.prefilled_tokens)()
        setup.snapshots.prefilled(300, seconds=1.0)  # of a session of 600 a half takes as long as reading it
        assert setup.snapshots.readback(session) == Readback(name, session.num_tokens, 300)
        setup.snapshots.prefilled(30_000, seconds=1.0)
        assert setup.snapshots.readback(session) is None


# ---- what the pool has lost ----


async def shrunk(setup: Setup) -> tuple[Session, str]:
    """A session of which more is to be written than its snapshot has, and of which the pool has less than that."""
    session = await setup.sessions.create(ANA, content(1000), PLAIN)
    name = await setup.written(session)
    setup.engine.foreground = 1
    await setup.sessions.append(session.header.id, ANA, content(600))
    [salt] = setup.engine._cached
    setup.engine._cached[salt] = {ids for ids in setup.engine._cached[salt] if len(ids) <= 300}
    return session, name


async def test_a_snapshot_gives_way_to_no_shorter_one(make: Make) -> None:
    async with make() as setup:
        session, name = await shrunk(setup)
        setup.engine.looked.clear()
        setup.engine.foreground = 0
        await setup.until(lambda: setup.engine.looked != [])
        other = await setup.sessions.create(BO, content(300), PLAIN)
        await setup.written(other)
        assert read_header(setup.folder / name).num_tokens == 1001
        assert setup.engine.asked.count(name) == 1
        readback = setup.snapshots.readback(session)
        assert readback is not None
        assert readback.tokens == 1001


async def test_a_pin_that_was_given_up_is_noticed_before_anything_is_written(make: Make) -> None:
    async with make() as setup:
        session, name = await shrunk(setup)
        setup.engine.lost[session.header.id] = "reclaimed"
        del setup.engine.pins[session.header.id]
        setup.engine.looked.clear()
        setup.engine.foreground = 0
        await setup.until(lambda: session.lost == "reclaimed")
        assert (setup.engine.looked, setup.engine.asked.count(name)) == ([], 1)
        await setup.sessions.refresh(session.header.id, ANA)
        await setup.written(session)


async def test_nothing_makes_room_for_what_is_not_in_the_pool(make: Make) -> None:
    async with make(budget_bytes=305 * BYTES_PER_TOKEN + 2000) as setup:
        kept = await setup.sessions.create(ANA, content(300), PLAIN)
        name = await setup.written(kept)
        setup.engine.foreground = 1
        setup.clock.now += 10
        other = await setup.sessions.create(BO, content(300), PLAIN)
        setup.engine._cached = {salt: set() for salt in setup.engine._cached}
        setup.engine.looked.clear()
        setup.engine.foreground = 0
        await setup.until(lambda: setup.engine.looked != [])
        third = await setup.sessions.create(
            BO, content(200), PLAIN
        )  # which gives the writer time, and is never written
        await setup.sessions.show([third, other])
        assert setup.files() == {name}
        assert setup.snapshots.covered(kept) == kept.num_tokens


# ---- the ways in which a session ends ----


async def test_what_another_server_has_closed_leaves_no_snapshot(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        await setup.written(session)
        setup.log.delete(session.header.owner, session.header.id)
        with pytest.raises(SessionClosed):
            await setup.sessions.append(session.header.id, ANA, content(1))
        assert setup.files() == set()
        assert remembered(setup, session) == 0


async def test_a_session_that_the_log_has_lost_ends_here(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        kept = await setup.sessions.create(BO, content(300), PLAIN)
        await setup.written(session)
        name = await setup.written(kept)
        setup.log.purge(session.header.owner)  # by another process, and the feed does not tell
        await setup.sessions._upkeep.look_through_log(grace_s=60.0)
        with pytest.raises(SessionClosed):
            await setup.sessions.get(session.header.id, ANA)
        assert (setup.files(), set(setup.engine.pins)) == ({name}, {kept.header.id})
        assert remembered(setup, session) == 0


async def test_a_session_that_goes_on_elsewhere_is_not_remembered(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        name = await setup.written(session)
        entry = LogEntry(2, 1, 1, (segment(1, 2, 3),))
        setup.log.append(session.header.owner, session.header.id, entry, used_at=setup.clock.now)
        with pytest.raises(SessionVersionConflict):
            await setup.sessions.append(session.header.id, ANA, content(1))
        assert remembered(setup, session) == 0
        again = await setup.sessions.get(session.header.id, ANA)
        assert (again.version, setup.snapshots.readback(again)) == (2, Readback(name, session.num_tokens, 256))


def remembered(setup: Setup, session: Session) -> int:
    """In how many tables there is something of the session, its snapshot apart."""
    snapshots = setup.snapshots
    return sum(
        session.header.id in table for table in (snapshots._covered, snapshots._unchanged, snapshots._not_before)
    )


@pytest.mark.parametrize("op", ["unpin", "snapshot_drop"])
async def test_a_scheduler_that_does_not_answer_keeps_nothing_of_a_closed_session(make: Make, op: str) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        await setup.written(session)
        setup.engine.out_of_order = {op}
        with pytest.raises(RuntimeError):
            await setup.sessions.close(session.header.id, ANA)
        assert setup.log.header(session.header.id) is None
        setup.engine.out_of_order = set()
        await setup.sessions.sweep()
        assert (setup.files(), setup.engine.pins) == (set(), {})


async def test_a_file_that_cannot_be_removed_is_removed_later(make: Make) -> None:
    async with make() as setup:
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        file = setup.folder / await setup.written(session)
        file.unlink()
        file.mkdir()  # which no unlink removes
        with pytest.raises(OSError, match="directory"):
            await setup.sessions.close(session.header.id, ANA)
        await setup.sessions.sweep()
        file.rmdir()
        file.write_bytes(b"kv")
        await setup.sessions.sweep()
        assert setup.files() == set()


# ---- failures ----


async def test_a_bug_does_not_end_the_writing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make() as setup:
        seen: list[str] = []
        make_room = SnapshotFolder.make_room

        def failing_once(folder: SnapshotFolder, name: str, *rest: Any, **more: Any) -> Any:
            seen.append(name)
            if len(seen) == 1:
                raise KeyError(name)
            return make_room(folder, name, *rest, **more)

        monkeypatch.setattr(SnapshotFolder, "make_room", failing_once)
        first = await setup.sessions.create(ANA, content(300), PLAIN)
        await setup.until(lambda: seen != [])
        second = await setup.sessions.create(BO, content(300), PLAIN)
        await setup.written(second)
        assert setup.snapshots.covered(first) == 0


async def test_a_scheduler_that_was_not_told_of_new_weights_is_told_later(make: Make) -> None:
    async with make() as setup:
        await setup.sessions.weights_changing()
        setup.engine.out_of_order = {"snapshot_fence"}
        await setup.sessions.weights_changed()
        assert setup.engine.weights is None
        setup.engine.out_of_order = set()
        await setup.until(lambda: setup.engine.weights is not None)
        assert setup.engine.weights == setup.snapshots.weights.name != ""


async def test_where_the_scheduler_cannot_be_told_no_weights_are_updated(make: Make) -> None:
    async with make() as setup:
        setup.engine.out_of_order = {"snapshot_fence"}
        with pytest.raises(RuntimeError):
            await setup.sessions.weights_changing()
        setup.engine.out_of_order = set()
        session = await setup.sessions.create(ANA, content(300), PLAIN)
        await setup.written(session)
        assert setup.engine.weights == ""


async def test_two_updates_at_once_open_the_fence_once_both_have_ended(make: Make) -> None:
    async with make() as setup:
        await setup.sessions.weights_changing()
        await setup.sessions.weights_changing()
        await setup.sessions.weights_changed()
        assert setup.engine.weights is None
        await setup.sessions.weights_changed()
        assert setup.engine.weights == setup.snapshots.weights.name != ""
