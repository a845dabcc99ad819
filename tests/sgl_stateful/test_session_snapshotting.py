"""Which sessions get a snapshot, and when it goes; the scheduler's part is played by one that writes real files."""

from __future__ import annotations

import asyncio
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
from session_values import ANA, BO, Clock
from words import ByteTokenizer

from memstore.kv.session_files import session_file
from memstore.session_log import SessionLog, VolatileSessionLog
from sgl_stateful.sessions.content import Content, Renderer
from sgl_stateful.sessions.hold import Readback
from sgl_stateful.sessions.metrics import SessionMetrics
from sgl_stateful.sessions.service import Options, SessionService
from sgl_stateful.sessions.session import Session
from sgl_stateful.sessions.snapshot_file import SnapshotHeader, tokens_digest, write_snapshot
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
        self.weights: str | None = ""
        self.asked: list[str] = []
        self._pending: dict[str, list[int]] = {}

    async def control(self, op: str, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        body = dict(payload or {})
        match op:
            case "snapshot_write":
                self.asked.append(body["name"])
                self._pending[body["name"]] = body["token_ids"]
                return {"state": "writing"}
            case "snapshot_state":
                return self._finish(body["name"])
            case "snapshot_drop":
                return {"dropped": sum(self._pending.pop(name, None) is not None for name in body["names"])}
            case "snapshot_fence":
                self.weights = body["weights"]
                return {}
        return await super().control(op, payload)

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
        await setup.sessions.weights_changed("+1")
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
    async with make(log) as setup:
        again = await setup.sessions.get(session.header.id, ANA)
        assert setup.snapshots.readback(again) == Readback(kept, session.num_tokens, 256)
        await setup.until(lambda: setup.files() == {kept})


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
