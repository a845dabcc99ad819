"""The sessions that live in this process: found in the log, changed one change at a time, ended with all that runs.

A change is acknowledged once its tokens are in the log. When it fails before, the session is what it was, and a pin
that has run ahead is put right by the next use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Literal, TypeVar

from memstore import SessionGone, SessionMoved, StoreUnreachable
from memstore.session_log import SessionHeader, SessionId, SessionLog
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.errors import (
    PinRefused,
    SessionClosed,
    SessionNotFound,
    SessionOfAnotherModel,
    SessionVersionConflict,
)

from .cancellation import to_its_end
from .endings import Endings
from .hold import Hold
from .metrics import SessionMetrics
from .owner_salts import OwnerSalts
from .pins import EnginePins
from .session import Change, Made, Session
from .snapshotting import SessionSnapshots
from .table import SessionTable
from .use import Use
from .watch import Watchers

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SessionKeeper:
    """Sessions with their log and their KV. Of the event loop; the log is waited for on threads.

    Parameters
    ----------
    salt
        The cache salt of an owner; may ask a store, and is called on ``threads``.
    model
        Fingerprint of the model and tokenizer.
    former_models
        What earlier releases called the same ones.
    """

    def __init__(
        self,
        *,
        table: SessionTable,
        log: SessionLog,
        engine: EnginePort,
        salt: Callable[[str], str],
        threads: Executor,
        metrics: SessionMetrics,
        model: str,
        former_models: Collection[str] = (),
        snapshots: SessionSnapshots | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.table = table
        self.log = log
        self.metrics = metrics
        self.model = model
        self._models = {model, *former_models}
        self.snapshots = snapshots or SessionSnapshots(None, engine, metrics)
        self.clock = clock
        self.pins = EnginePins(engine, metrics)
        self.endings = Endings(log=log, pins=self.pins, snapshots=self.snapshots, in_thread=self.in_thread)
        self.uses: dict[SessionId, set[Use]] = {}
        self._engine = engine
        self._threads = threads
        self.weights = self.snapshots.weights
        self._salts = OwnerSalts(salt, self.weights, self.in_thread)
        self.salt, self.epoch = self._salts.of, self._salts.purges
        self._locks: dict[SessionId, asyncio.Lock] = {}
        self._loading = asyncio.Lock()
        self.touched: dict[SessionId, float] = {}
        self.watchers = Watchers()

    # ---- finding ----

    async def get(self, session_id: str, owner: str | None) -> Session:
        """The session, alive and about to be used, from the log if it is not here.

        Raises
        ------
        SessionNotFound, SessionClosed, SessionExpired, SessionOfAnotherModel, StoreError
        """
        session = await self.find(session_id, owner)
        self.table.wake(session)
        return session

    async def find(self, session_id: str, owner: str | None) -> Session:
        """The session as ``get`` has it, only to be looked at: it is not counted if it was not before."""
        if not self.table.knows(session_id):
            await self._load(SessionId(session_id), owner)
        return self.table.get(session_id, owner=owner)

    async def _load(self, session_id: SessionId, owner: str | None) -> None:
        async with self._loading:
            if self.table.knows(session_id):
                return
            header = await self.in_thread(self.log.header, session_id)
            if header is None or owner not in (None, header.owner) or self.endings.owes(session_id):
                raise SessionNotFound("there is no such session of this owner")
            if header.model not in self._models:
                raise SessionOfAnotherModel("the session was made with another model or tokenizer: open a new one")
            try:
                entries = await self.in_thread(self.log.entries, header.owner, session_id)
            except SessionGone:
                raise SessionNotFound("there is no such session of this owner") from None
            self.renew(self.table.restore(header, entries))

    async def sessions_of(self, owner: str) -> list[Session]:
        """An owner's sessions that this model can serve, by id; those whose time is over are left out."""
        after: SessionId | None = None
        while page := await self.in_thread(partial(self.log.headers, after=after)):
            after = page[-1].id
            for header in page:
                if header.owner == owner and not self.table.knows(header.id):
                    with suppress(SessionNotFound, SessionOfAnotherModel):
                        await self._load(header.id, owner)
        now = self.clock()
        return [session for session in self.table.sessions(owner) if session.ended_by(now) is None]

    @asynccontextmanager
    async def alone(self, session: Session) -> AsyncIterator[None]:
        """Until the end of the block nobody else changes the session; whoever came first goes first.

        Raises
        ------
        SessionNotFound, SessionVersionConflict
            It has ended while this waited, or goes on elsewhere.
        """
        lock = self._locks.setdefault(session.header.id, asyncio.Lock())
        async with lock:
            if self.table.get(session.header.id, owner=None) is not session:
                raise SessionVersionConflict("another server has changed the session: look at it and repeat")
            yield

    def is_changing(self, session: Session) -> bool:
        """Whether somebody is changing the session, or about to."""
        lock = self._locks.get(session.header.id)
        return lock is not None and lock.locked()

    # ---- changing ----

    async def make(self, change: Change, write: Callable[[], None], *, is_in_pool: bool = False) -> Made:
        """Prefill a planned change, log it with ``write`` and commit it; abandon it where any of that fails.

        Parameters
        ----------
        is_in_pool
            It need not be prefilled.

        Raises
        ------
        SessionVersionConflict
            Another server has changed the session.
        SessionNotFound
            It has ended meanwhile.
        StoreError
            The log cannot be written.
        """
        session, began = change.session, time.perf_counter()
        purges = self._salts.purges(session.header.owner)
        prefilled = cached = 0
        try:
            if change.gives_way:
                await self.unpin([session])
            if not is_in_pool and (ids := change.token_ids()):
                salt = await self.salt(session.header.owner)
                if await self.pins.is_worth_prefilling(change, ids, salt=salt):
                    prefilled, cached = await self.prefill(session, ids, pin=change.pin)
        except BaseException:
            self.table.abandon(change)
            raise
        finally:
            # Whatever the pin is now: who begins from here on puts it right, and who began before leaves it alone.
            self.renew(session)
        await to_its_end(self._write(change, write, purges))
        return Made(session, change, prefilled, cached, 1e3 * (time.perf_counter() - began))

    async def _write(self, change: Change, write: Callable[[], None], purges: int) -> None:
        """Log and commit, or abandon; not to be cancelled in between, when nobody knew which it was."""
        session, was_pinned = change.session, change.session.is_pinned or change.session.version == 0
        is_written = False
        try:
            await self.in_thread(write)
            is_written = True
            await self._check_purge(session, purges)
        except SessionMoved:
            self.table.abandon(change)
            await self.forget(session)
            raise SessionVersionConflict("another server has changed the session: look at it and repeat") from None
        except SessionGone:
            self.table.abandon(change)
            await self.gone(session, is_logged=is_written)
            raise SessionClosed("the session has been closed") from None
        except BaseException as error:
            self.table.abandon(change)
            if session.version == 0 and (is_written or isinstance(error, StoreUnreachable)):
                self.endings.begin([session.header], ["log"])  # nobody has its name, and who asks again gets another
            raise
        self.table.commit(change)
        self.watchers.changed(session)
        if change.pin:
            session.lost = None
        elif change.demoted is not None and was_pinned:
            self.metrics.demoted()
            await self.unpin([session])

    async def _check_purge(self, session: Session, purges: int) -> None:
        """Raise ``SessionGone`` where the owner was purged during the write, or the parent is gone."""
        header = session.header
        is_orphan = header.parent is not None and session.version == 0
        is_orphan = is_orphan and await self.in_thread(self.log.header, header.parent) is None
        if is_orphan or purges != self._salts.purges(header.owner):
            raise SessionGone("the owner was purged")

    async def gone(self, session: Session, *, is_logged: bool = False) -> None:
        """The log has the session no more, or is to have it no more: end it here too."""
        if session.state == "open" and session.version > 0:
            self.table.close(session)
        self._ended(session.header.id)
        self.endings.begin([session.header], ["pin", "snapshot", "log"] if is_logged else ["pin", "snapshot"])
        await self.endings.settle([session.header.id])

    async def forget(self, session: Session) -> None:
        """The session goes on elsewhere: drop the copy."""
        self.table.forget(session)
        self._stop(session.header.id)
        self.snapshots.left(session.header.id)
        self.endings.begin([session.header], ["pin"])
        await self.endings.settle([session.header.id])

    async def update(self, session: Session, header: SessionHeader) -> None:
        """Log what holds for a session from now on.

        Raises
        ------
        SessionClosed, StoreError
        """
        try:
            await self.in_thread(self.log.update, header)
        except SessionGone:
            await self.gone(session)
            raise SessionClosed("the session has been closed") from None

    def logging(self, change: Change) -> Callable[[], None]:
        """What writes a change of a session that is in the log."""
        header = change.session.header
        return partial(self.log.append, header.owner, header.id, change.entry, used_at=self.clock())

    async def prefill(self, session: Session, token_ids: list[int], *, pin: bool) -> tuple[int, int]:
        """Have the tokens in the pool, and pinned if so; returns how many were prefilled and how many were there."""
        began = time.perf_counter()
        result = await self._engine.prefill(
            token_ids,
            salt=await self.salt(session.header.owner),
            directive=None,
            hold=self.hold(session, len(token_ids), pin=pin, fence=self.pins.next_fence()),
        )
        prefilled = result.prompt_tokens - result.cached_tokens
        self.pins.saw(report := result.scheduler.get("session"))
        if self.snapshots.saw(session, report) != "snapshot":
            self.snapshots.prefilled(prefilled, seconds=time.perf_counter() - began)
        return prefilled, result.cached_tokens

    def hold(self, session: Session, tokens: int | None, *, pin: bool, fence: int) -> Hold:
        """What the scheduler is told with a request that begins with that many tokens of the session."""
        header, snapshot = session.header, self.snapshots.readback(session) if pin else None
        return Hold(header.id, tokens, pin, fence, header.priority, session.group, snapshot)

    def renew(self, session: Session) -> None:
        """Let no query that has begun so far say what is pinned."""
        session.fence = self.pins.next_fence()

    async def unpin(self, sessions: Sequence[Session]) -> None:
        """Let the KV of these sessions be evicted."""
        try:
            await self.pins.unpin([session.header.id for session in sessions])
        finally:
            for session in sessions:
                self.renew(session)

    def touch(self, session: Session) -> None:
        """Begin the session's idle time anew; the log learns of it later."""
        self.table.touch(session)
        self.touched[session.header.id] = session.header.used_at

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a pin that is refused inside."""
        try:
            yield
        except PinRefused as refused:
            self.metrics.refused("quota" if refused.is_of_owner else "budget")
            raise

    # ---- ending ----

    async def close(self, session_id: str, owner: str | None) -> Session:
        """End a session: what runs on it is cut off, its memory is free, and its tokens are deleted.

        Raises
        ------
        SessionNotFound, SessionClosed, SessionExpired
        SessionOfAnotherModel
            It has been deleted.
        StoreError, OSError, RuntimeError
            It has ended, and what is left of it is removed when that is possible again.
        """
        try:
            session = await self.get(session_id, owner)
        except SessionOfAnotherModel:
            header = await self.in_thread(self.log.header, SessionId(session_id))
            if header is not None:
                self.endings.begin([header], ["snapshot", "log"])
                await self.endings.finish([header.id])
            raise
        await self.end(session, "closed")
        return session

    async def end(self, session: Session, how: Literal["closed", "expired"]) -> None:
        """End a session in this process and in the log."""
        name = session.header.id
        self.table.close(session, how=how)
        self._ended(name)
        self.endings.begin([session.header], ["pin", "snapshot", "log"])
        await self.endings.finish([name])

    async def purged(self, owner: str) -> int:
        """End every session of an owner whose everything was removed; returns how many.

        What the log still has was opened after the purge, by the time that another process's purge is known here.
        """
        self._salts.purged(owner)
        self.watchers.purged(owner)
        ended: list[SessionHeader] = []
        for session in self.table.sessions(owner):
            if await self.in_thread(self.log.header, session.header.id) is None and self.table.is_here(session):
                self.table.close(session)
                self._ended(session.header.id)
                ended.append(session.header)
        self.endings.begin(ended, ["pin", "snapshot"])
        await self.endings.finish([header.id for header in ended])
        return len(ended)

    async def weights_changing(self) -> None:
        """See ``Weights.changing``; no snapshot is read any more."""
        self.snapshots.forget_all()
        await self.weights.changing()

    async def weights_changed(self) -> None:
        """No KV made so far is right any more: nothing of it is reached again, and no pin keeps it."""
        self._salts.weights_changed()
        self.snapshots.forget_all()
        sessions = self.table.sessions()
        self.endings.begin([session.header for session in sessions], ["pin", "snapshot"])
        for session in sessions:
            session.lost = "weights changed" if session.is_pinned else None
            self.renew(session)
        await self.weights.changed()
        self.watchers.weights_changed()
        await self.endings.settle([session.header.id for session in sessions])

    def _ended(self, name: SessionId) -> None:
        self._stop(name)
        self.watchers.ended(name)

    def _stop(self, name: SessionId) -> None:
        for use in list(self.uses.get(name, ())):
            if use.cancel is not None:
                use.cancel()
        self._locks.pop(name, None)
        self.touched.pop(name, None)

    # ---- what both need ----

    async def in_thread(self, call: Callable[..., T], *args: object) -> T:
        """Wait for the log on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args))
