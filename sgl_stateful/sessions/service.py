"""The sessions of one server, in the HTTP process: what callers can do to them.

Knows nothing of SGLang: an ``EnginePort`` prefills and pins. To be used on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memstore import InvalidInput, MemStoreError
from memstore.session_log import OnFull, Segment, SessionHeader, SessionId, SessionLog
from memstore.validation import validate_owner
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.errors import BadSessionRequest

from .answering import Answering
from .chain import Head
from .content import Content, Renderer
from .keeper import SessionKeeper
from .ledger import Ledger
from .metrics import SessionMetrics
from .pinning import Pinning
from .queue import AppendQueues
from .segments import segments_of
from .session import Made, Session
from .snapshotting import SessionSnapshots
from .table import SessionTable
from .upkeep import SessionUpkeep

logger = logging.getLogger(__name__)

_SHORT_CHARACTERS = 8000  # rendered and tokenised in a few milliseconds
_GAUGES_EVERY_S = 5.0
_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """How a session is to be kept; see ``SessionHeader``."""

    ttl_s: float | None
    max_age_s: float | None = None
    reserve_tokens: int = 0
    priority: int = 0
    window_tokens: int | None = None
    on_full: OnFull = "refuse"
    pin: bool = True


class SessionService:
    """Sessions of one server.

    Parameters
    ----------
    salt
        The cache salt of an owner; may ask a store, and is called on ``threads``.
    model
        Fingerprint of the model and tokenizer.
    former_models
        What earlier releases called the same ones.
    budget, quota
        Cells that pinned sessions may have, all and those of one owner.
    pool_tokens
        Cells of the KV pool.
    max_tokens
        The longest session, tokens.
    versions
        How many of a session can be gone back to.
    queue
        Appends of one session that may wait.
    snapshots
        None: KV is not kept on disk.
    """

    def __init__(
        self,
        *,
        log: SessionLog,
        engine: EnginePort,
        renderer: Renderer,
        salt: Callable[[str], str],
        threads: Executor,
        metrics: SessionMetrics,
        model: str,
        former_models: Collection[str] = (),
        budget: int,
        quota: int,
        pool_tokens: int,
        max_tokens: int,
        versions: int,
        queue: int,
        snapshots: SessionSnapshots | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.renderer = renderer
        self.metrics = metrics
        self.table = SessionTable(
            ledger=Ledger(budget=budget, quota=quota), max_tokens=max_tokens, versions=versions, clock=clock
        )
        self._keeper = SessionKeeper(
            table=self.table,
            log=log,
            engine=engine,
            salt=salt,
            threads=threads,
            metrics=metrics,
            model=model,
            former_models=former_models,
            snapshots=snapshots,
            clock=clock,
        )
        self._queues = AppendQueues(self._keeper, limit=queue, render=self.render)
        self.answering = Answering(self._keeper, renderer, alone=self._queues.in_order)
        self._upkeep = SessionUpkeep(self._keeper)
        self._pinning = Pinning(self._keeper)
        self.pool_tokens = pool_tokens
        self.get = self._keeper.get
        self.find = self._keeper.find
        self.sessions_of = self._keeper.sessions_of
        self.purged = self._keeper.purged
        self.pin = self._pinning.pin
        self.unpin = self._pinning.unpin
        self.refresh = self._pinning.refresh
        self.weights_changing = self._keeper.weights_changing
        self.weights_changed = self._keeper.weights_changed
        self.touch = self._keeper.touch
        self.pins = self._keeper.pins
        self.epoch = self._keeper.epoch
        self.weights = self._keeper.weights
        self.watchers = self._keeper.watchers

    # ---- beginning and end ----

    async def create(self, owner: str, content: Content | None, options: Options) -> Session:
        """Open a session; ``content`` is its fixed prefix, and is prefilled before this returns.

        Raises
        ------
        BadSessionRequest, SessionTooLong, PinRefused, StoreError
        """
        parts = [] if content is None else await self.render(content, is_first=True)
        return await self._open(self._header(owner, options), segments_of(parts, "prefix"))

    async def fork(
        self, session_id: str, owner: str, *, version: int | None, options: Callable[[SessionHeader], Options]
    ) -> Session:
        """Open a session with the content of another; ``options`` makes its options of the parent's.

        Raises
        ------
        SessionError, StoreError
        """
        parent = await self.get(session_id, owner)
        at = parent.version if version is None else version
        head = self.table.at(parent, at)
        header = self._header(parent.header.owner, options(parent.header))
        return await self._open(replace(header, parent=parent.header.id, parent_version=at), (), base=head)

    def _header(self, owner: str, options: Options) -> SessionHeader:
        now = self._keeper.clock()
        try:
            checked = validate_owner(owner)
        except InvalidInput as error:
            raise BadSessionRequest(f"owner: {error}") from error
        return SessionHeader(
            id=SessionId(uuid.uuid4().hex),
            owner=checked,
            model=self._keeper.model,
            created_at=now,
            used_at=now,
            ttl_s=options.ttl_s,
            max_age_s=options.max_age_s,
            reserve_tokens=options.reserve_tokens,
            priority=options.priority,
            window_tokens=options.window_tokens,
            on_full=options.on_full,
            is_pinned=options.pin,
        )

    async def _open(self, header: SessionHeader, added: Sequence[Segment], *, base: Head = None) -> Session:
        with self._keeper.counting_refusals():
            change = self.table.open(header, added, base=base)
        made = await self._keeper.make(change, partial(self._keeper.log.create, header, change.entry))
        if made.change.pin:
            self.metrics.admitted()
        self._observe("append", made)
        return made.session

    async def close(self, session_id: str, owner: str) -> Session:
        """See ``SessionKeeper.close``."""
        return await self._keeper.close(session_id, owner)

    # ---- changes ----

    async def append(self, session_id: str, owner: str, content: Content, *, if_version: int | None = None) -> Made:
        """Add data, one append after the other, in the order in which they came.

        Raises
        ------
        SessionError, StoreError
        """
        session = await self.get(session_id, owner)
        self._queues.check(session)
        session.waiting += 1
        try:
            async with self._queues.in_order(session):
                parts = await self.render(content, is_first=session.num_tokens == 0)
                with self._keeper.counting_refusals():
                    change = self.table.append(session, segments_of(parts, "data"), if_version=if_version)
                made = await self._keeper.make(change, self._keeper.logging(change))
        finally:
            session.waiting -= 1
        self.metrics.dropped(change.dropped_messages)
        self._observe("append", made)
        return made

    async def queue(self, session_id: str, owner: str, content: Content) -> tuple[Session, int]:
        """Accept data to be added soon; returns how many pieces wait.

        Raises
        ------
        SessionError
        """
        self.renderer.check(content)
        session = await self.get(session_id, owner)
        return session, self._queues.put(session, content)

    async def settled(self, session: Session) -> None:
        """See ``AppendQueues.settled``."""
        await self._queues.settled(session)

    async def rewind(self, session_id: str, owner: str, version: int, *, if_version: int | None = None) -> Session:
        """Go back to what the session held at an earlier version; that makes a new version.

        Raises
        ------
        SessionError, StoreError
        """
        session = await self.get(session_id, owner)
        async with self._queues.in_order(session):
            with self._keeper.counting_refusals():
                change = self.table.rewind(session, version, if_version=if_version)
            return (await self._keeper.make(change, self._keeper.logging(change))).session

    # ---- looking ----

    async def show(self, sessions: Sequence[Session]) -> list[dict[str, Any]]:
        """The sessions as the API shows them, with what has become of their pins."""
        await self._keeper.pins.look(sessions)
        return [self.shown(session) for session in sessions]

    def shown(self, session: Session) -> dict[str, Any]:
        """One session as the API shows it."""
        return session.as_dict(cells=self.table.ledger.cells(session.header.id))

    async def stats(self, *, sessions: int) -> dict[str, Any]:
        """Cells, counts and latencies, and up to that many sessions, those with most cells first."""
        everyone = self.table.sessions()
        await self._keeper.pins.look(everyone)
        ledger, pool = self.table.ledger, await self._gauge()
        states = [session.pin_state for session in everyone]
        largest = sorted(everyone, key=lambda s: (-ledger.cells(s.header.id), s.header.id))[:sessions]
        return {
            "cells": {
                "pool": self.pool_tokens,
                "budget": ledger.budget,
                "quota": ledger.quota,
                "pinned": pool["pinned_cells"],
                "admitted": ledger.pinned,
                "reserved": ledger.reserved,
                "evictable": pool["evictable"],
                "free": pool["available"],
                "by_owner_class": self.metrics.by_class(ledger.by_owner),
            },
            "sessions": {
                "open": len(everyone),
                **{name: states.count(name) for name in ("pinned", "lost", "unpinned")},
            },
            "totals": self.metrics.totals(),
            "queue": {
                "waiting": sum(session.waiting for session in everyone),
                "dropped": sum(session.queue_dropped for session in everyone),
            },
            "rows": [self.shown(session) for session in largest],
        }

    async def _gauge(self) -> Any:
        pool = await self._keeper.pins.cells()
        self.metrics.set_cells(
            pinned=pool["pinned_cells"],
            evictable=pool["evictable"],
            free=pool["available"],
            by_owner=self.table.ledger.by_owner,
        )
        self.metrics.set_open(len(self.table))
        return pool

    # ---- upkeep ----

    async def run(self, *, every_s: float) -> None:
        """End sessions whose time is over, and keep log and metrics up to date; until cancelled."""
        gauged = looked = 0.0
        while True:
            try:
                await self.sweep()
                now = time.monotonic()
                if now - gauged >= _GAUGES_EVERY_S:
                    gauged = now
                    await self._gauge()
                if now - looked >= _LOG_EVERY_S:
                    looked = now
                    await self._upkeep.look_through_log(grace_s=_LOG_EVERY_S)
            except (MemStoreError, RuntimeError, OSError) as error:
                logger.warning("looking after sessions failed, and is repeated: %s", error)
            except Exception:
                # The serving boundary: without upkeep nothing would expire any more.
                logger.exception("looking after sessions failed, and is repeated")
            await asyncio.sleep(every_s)

    async def write_snapshots(self) -> None:
        """Keep KV on disk for a restart; until cancelled."""
        await self._keeper.snapshots.run(self._keeper)

    async def sweep(self) -> int:
        """End the sessions whose time is over; returns how many."""
        return await self._upkeep.sweep()

    def close_all(self) -> None:
        """Begin nothing more; sessions stay in the log."""
        self._queues.close()

    async def render(self, content: Content, *, is_first: bool) -> list[list[int]]:
        """See ``Renderer.data``; on a thread where it takes long."""
        if self.renderer.size(content) <= _SHORT_CHARACTERS:
            return self.renderer.data(content, is_first=is_first)
        return await asyncio.to_thread(self.renderer.data, content, is_first=is_first)

    def _observe(self, operation: Any, made: Made) -> None:
        self.metrics.observe(
            operation, ms=made.ms, cached_tokens=made.cached_tokens, prefilled_tokens=made.prefilled_tokens
        )
