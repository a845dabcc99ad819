"""Evaluates registered questions while nobody else wants the engine.

Runs on the HTTP process's event loop as ordinary requests of low priority. What callers ask for goes first: the moment
one of their requests comes, everything here is aborted in the engine, and begun again when there are none. The KV that
it has prefilled stays in the cache, so what is lost is what was decoded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf

from .evaluating import Evaluator, Work
from .metrics import FlashMetrics
from .pacing import Pacer
from .port import FlashEngine
from .question import Question

logger = logging.getLogger(__name__)


class FlashWorker:
    """Works off tables that share one queue. Of the event loop.

    Parameters
    ----------
    evaluators
        By what they evaluate.
    is_paused
        Whether nothing may begin.
    busy_share
        Of the time in which callers' requests are in flight, how much may be spent; 0: none of it.
    rest_s
        How long there have to be none before something begins.
    """

    def __init__(
        self,
        evaluators: Mapping[type[Question], Evaluator],
        engine: FlashEngine,
        metrics: FlashMetrics,
        *,
        is_paused: Callable[[], bool],
        busy_share: float = 0.0,
        rest_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._evaluators = evaluators
        self._tables = [evaluator.table for evaluator in evaluators.values()]
        self._queue = self._tables[0].queue
        assert all(table.queue is self._queue for table in self._tables), "tables with queues of their own"
        self._is_paused = is_paused
        self._engine = engine
        self._metrics = metrics
        self.pacer = Pacer(busy_share, clock, rest_s=rest_s)
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0
        self.pacer.busy(engine.foreground_requests() > 0)
        engine.listen(self._foreground)

    @property
    def is_running(self) -> bool:
        """Whether something is being evaluated."""
        return bool(self._tasks)

    def wake(self) -> None:
        """There may be something to do."""
        self._changed.set()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[bool]:
        """Break off what is being evaluated, and begin nothing until the end of the block; whether something was."""
        self._pauses += 1
        was_running = bool(self._tasks)
        for task in self._tasks:
            task.cancel()
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
            yield was_running
        finally:
            self._pauses -= 1
            self._changed.set()

    async def run(self) -> None:
        """Evaluate what is wanted, until the server shuts down; cancel to stop."""
        while not self._engine.is_closing():
            self._changed.clear()
            self._metrics.depth(len(self._queue))
            wait_s = self.pacer.wait_s()
            if self._pauses or self._is_paused():
                wait_s = None
            if wait_s == 0 and (works := self._next()):
                try:
                    await self._do(works)
                except Exception:
                    # The serving boundary: without this task nothing would be evaluated any more.
                    logger.exception("evaluating registered questions failed, and goes on with the next")
                continue
            next_at = min((at for table in self._tables if (at := table.next_at()) is not None), default=None)
            is_due = wait_s is not None and next_at is not None and next_at < inf
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(),
                    max(wait_s or 0.0, (next_at or 0.0) - self._tables[0].clock()) if is_due else None,
                )

    def _next(self) -> list[Work]:
        for table in self._tables:
            if (audit := table.take_audit()) is not None:
                return [Work(audit.entry, audit)]
        return [Work(entry) for entry in self._tables[0].take()]

    def _evaluator(self, work: Work) -> Evaluator:
        return self._evaluators[type(work.entry.question)]

    async def _do(self, works: Sequence[Work]) -> None:
        """Do them at once, behind the prefix that they share, until they are done or have to give way."""
        loop = asyncio.get_running_loop()
        self.pacer.running(True)
        before = self.pacer.used_s
        self._tasks = [loop.create_task(self._evaluator(work).do(work)) for work in works]
        try:
            self._give_way()
            await asyncio.wait(self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.pacer.running(False)
            if self._timer is not None:
                self._timer.cancel()
            for task, work in zip(self._tasks, works, strict=True):
                if task.cancelled():
                    self._evaluator(work).give_back(work)
            self._tasks = []
            self._metrics.spent(self.pacer.used_s - before)

    def _foreground(self, is_busy: bool) -> None:
        self.pacer.busy(is_busy)
        if self._tasks:
            self._give_way()
        self._changed.set()

    def _give_way(self) -> None:
        """Break off what runs where its time is up, or else when it will be."""
        if (left_s := self.pacer.left_s()) is None:
            return
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._give_way)
            return
        for task in self._tasks:
            task.cancel()
