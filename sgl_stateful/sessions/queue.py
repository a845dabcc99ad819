"""Data that was accepted and is added soon: one queue a session, bounded, several pieces to a prefill."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from memstore import MemStoreError
from memstore.session_log import SessionId
from sgl_stateful.errors import AppendQueueFull, SessionNotFound, StatefulError

from .keeper import SessionKeeper
from .segments import segments_of
from .session import Session

logger = logging.getLogger(__name__)


class AppendQueues:
    """Queues of a server's sessions. Of the event loop.

    Parameters
    ----------
    limit
        How many pieces may wait in one of them. With a window the oldest gives way, which would leave first anyhow.
    """

    def __init__(self, keeper: SessionKeeper, *, limit: int) -> None:
        self._keeper = keeper
        self._limit = limit
        self._waiting: dict[SessionId, list[Sequence[int]]] = {}
        self._draining: dict[SessionId, asyncio.Task[None]] = {}

    def check(self, session: Session) -> None:
        """Raise ``AppendQueueFull`` where no more may wait."""
        if session.waiting >= self._limit:
            self._keeper.metrics.refused("queue")
            raise AppendQueueFull(
                f"{session.waiting} appends of this session are waiting: slow down, or send more in each"
            )

    def put(self, session: Session, token_ids: Sequence[int]) -> int:
        """Accept data; returns how many pieces wait now.

        Raises
        ------
        AppendQueueFull
            Too many wait, and the session has no window.
        """
        if session.header.window_tokens is None:
            self.check(session)
        name = session.header.id
        waiting = self._waiting.setdefault(name, [])
        waiting.append(token_ids)
        session.waiting += 1
        if len(waiting) > self._limit:
            del waiting[0]
            session.waiting -= 1
            self._dropped(session, 1)
        if name not in self._draining:
            self._draining[name] = asyncio.get_running_loop().create_task(self._drain(session))
        return len(waiting)

    async def settled(self, session: Session) -> None:
        """Wait until what has been accepted so far is part of the session, or dropped."""
        if (task := self._draining.get(session.header.id)) is not None:
            await asyncio.wait([task])

    def close(self) -> None:
        """Drop what waits."""
        for task in self._draining.values():
            task.cancel()

    async def _drain(self, session: Session) -> None:
        name = session.header.id
        try:
            while self._waiting.get(name):
                async with self._keeper.alone(session):
                    parts, self._waiting[name] = self._waiting[name], []
                    try:
                        await self._add(session, parts)
                    finally:
                        session.waiting -= len(parts)
        except SessionNotFound:
            logger.info("session %s ended with data waiting", name)
        finally:
            session.waiting -= len(self._waiting.pop(name, ()))
            del self._draining[name]

    async def _add(self, session: Session, parts: Sequence[Sequence[int]]) -> None:
        try:
            with self._keeper.counting_refusals():
                change = self._keeper.table.append(session, segments_of(parts, "data"))
            await self._keeper.make(change, self._keeper.logging(change))
            self._keeper.metrics.dropped(change.dropped_messages)
        except SessionNotFound:
            raise
        except (StatefulError, MemStoreError, RuntimeError, ValueError) as error:
            # Nobody waits for an answer: the count tells.
            self._dropped(session, len(parts))
            logger.warning("session %s: %d pieces of data were dropped: %s", session.header.id, len(parts), error)

    def _dropped(self, session: Session, pieces: int) -> None:
        session.queue_dropped += pieces
        self._keeper.metrics.dropped(pieces)
