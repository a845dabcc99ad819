"""Data that was accepted and is added soon: one queue a session, bounded, several pieces to a prefill."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from memstore import MemStoreError
from memstore.session_log import SessionId
from sgl_stateful.errors import AppendQueueFull, PinRefused, SessionNotFound, SessionTooLong, StatefulError

from .content import Content
from .keeper import SessionKeeper
from .segments import segments_of
from .session import Session

logger = logging.getLogger(__name__)


class Render(Protocol):
    """Makes token ids of a content, one list a message; see ``Renderer.data``."""

    async def __call__(self, content: Content, *, is_first: bool) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    content: Content

    @property
    def messages(self) -> int:
        return len(self.content.messages or (0,))


@dataclass(frozen=True, slots=True, eq=False)
class _Rendered:
    piece: _Piece
    parts: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.parts))


@dataclass(slots=True)
class _Barrier:
    """Somebody who came when pieces waited, and is behind these and before those that come later."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    passed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Queue:
    session: Session
    entries: deque[_Piece | _Barrier] = field(default_factory=deque)
    taken: list[_Piece] = field(default_factory=list)  # being added
    task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> list[_Piece]:
        return [entry for entry in self.entries if isinstance(entry, _Piece)]

    def take(self, most: int) -> None:
        """Take the oldest pieces up to the first barrier."""
        while len(self.taken) < most and self.entries and isinstance(entry := self.entries[0], _Piece):
            self.taken.append(entry)
            self.entries.popleft()


class AppendQueues:
    """Queues of a server's sessions. Of the event loop.

    A piece is the content of one append: all of it is added, or nothing. ``Session.waiting`` counts pieces,
    ``Session.queue_dropped`` messages.

    Parameters
    ----------
    limit
        How many pieces may wait in one of them. With a window the oldest gives way, which would leave first anyhow.
    render
        Makes token ids of a piece when its turn comes; may do so on a thread.
    """

    def __init__(self, keeper: SessionKeeper, *, limit: int, render: Render) -> None:
        self._keeper = keeper
        self._limit = limit
        self._render = render
        self._queues: dict[SessionId, _Queue] = {}

    def check(self, session: Session) -> None:
        """Raise ``AppendQueueFull`` where no more may wait."""
        if session.waiting >= self._limit:
            self._keeper.metrics.refused("queue")
            raise AppendQueueFull(
                f"{session.waiting} appends of this session are waiting: slow down, or send more in each"
            )

    def put(self, session: Session, content: Content) -> int:
        """Accept data; returns how many pieces wait now.

        Raises
        ------
        AppendQueueFull
            Too many wait, and the session has no window.
        """
        if session.header.window_tokens is None:
            self.check(session)
        queue = self._active(session)
        if queue is None:
            queue = self._queues[session.header.id] = _Queue(session)
            queue.task = asyncio.get_running_loop().create_task(self._drain(queue))
            # Not in the task itself, which may be cancelled before it has begun.
            queue.task.add_done_callback(lambda _: self._end(queue))
        queue.entries.append(_Piece(content))
        session.waiting += 1
        if len(waiting := queue.waiting) > self._limit:
            queue.entries.remove(waiting[0])
            session.waiting -= 1
            self._dropped(session, waiting[:1])
        return len(queue.waiting)

    @asynccontextmanager
    async def in_order(self, session: Session) -> AsyncIterator[None]:
        """As ``SessionKeeper.alone``, and behind the pieces that wait when this is called; later ones are behind it.

        Raises
        ------
        SessionNotFound
            It has ended while this waited.
        """
        queue = self._active(session)
        if queue is None or not queue.entries:
            async with self._keeper.alone(session):  # where pieces are being added, they have that to themselves
                yield
            return
        barrier = _Barrier()
        queue.entries.append(barrier)
        try:
            await barrier.opened.wait()
            async with self._keeper.alone(session):
                yield
        finally:
            barrier.passed.set()

    async def settled(self, session: Session) -> None:
        """Wait until what has been accepted so far is part of the session, or dropped."""
        if (queue := self._active(session)) is not None and queue.task is not None:
            await asyncio.wait([queue.task])

    def close(self) -> None:
        """Drop what waits."""
        for queue in self._queues.values():
            if queue.task is not None:
                queue.task.cancel()

    def _active(self, session: Session) -> _Queue | None:
        """The queue that is being worked off; another copy of the session, from the log, has another one."""
        queue = self._queues.get(session.header.id)
        if queue is None or queue.session is not session or queue.task is None or queue.task.done():
            return None
        return queue

    async def _drain(self, queue: _Queue) -> None:
        session = queue.session
        try:
            while queue.entries:
                if isinstance(barrier := queue.entries[0], _Barrier):
                    barrier.opened.set()
                    await barrier.passed.wait()
                    queue.entries.popleft()
                    continue
                async with self._keeper.alone(session):
                    # What begins a session is rendered apart: until it is there, nobody knows what that will be.
                    queue.take(1 if session.num_tokens == 0 else len(queue.entries))
                    await self._add(queue, await self._rendered(queue))
        except SessionNotFound:
            logger.info("session %s ended with data waiting", session.header.id)

    def _end(self, queue: _Queue) -> None:
        """Drop what is left, and keep nobody waiting."""
        left = [*queue.taken, *queue.waiting]
        queue.session.waiting -= len(left)
        self._dropped(queue.session, left)
        for entry in queue.entries:
            if isinstance(entry, _Barrier):
                entry.opened.set()
        queue.taken.clear()
        queue.entries.clear()
        if self._queues.get(queue.session.header.id) is queue:
            del self._queues[queue.session.header.id]

    async def _rendered(self, queue: _Queue) -> list[_Rendered]:
        """What was taken, as far as it can be rendered and, with a window, the newest that fit it."""
        session, rendered = queue.session, []
        for piece in list(queue.taken):
            try:
                rendered.append(_Rendered(piece, await self._render(piece.content, is_first=session.num_tokens == 0)))
            except Exception as error:
                self._refuse(queue, [piece], error)
        if (window := session.header.window_tokens) is None:
            return rendered
        kept = _newest(rendered, window)
        if old := [one.piece for one in rendered if one not in kept]:
            self._refuse(queue, old, SessionTooLong(f"with what is newer, longer than the window of {window} tokens"))
        return kept

    async def _add(self, queue: _Queue, group: Sequence[_Rendered]) -> None:
        """Add the pieces in one change; where that does not fit, those that do, one after the other."""
        if not group:
            return
        session, pieces = queue.session, [one.piece for one in group]
        if session.state != "open":
            raise SessionNotFound("the session has ended")
        segments = segments_of((part for one in group for part in one.parts), "data")
        try:
            if len(group) > 1:
                change = self._keeper.table.append(session, segments)
            else:
                with self._keeper.counting_refusals():
                    change = self._keeper.table.append(session, segments)
        except (SessionTooLong, PinRefused) as error:
            if len(group) == 1:
                self._refuse(queue, pieces, error)
                return
            await self._add(queue, group[: len(group) // 2])
            await self._add(queue, group[len(group) // 2 :])
            return
        try:
            await self._keeper.make(change, self._keeper.logging(change))
        except SessionNotFound:
            raise
        except Exception as error:
            self._refuse(queue, pieces, error)
            return
        self._settle(queue, pieces)
        self._keeper.metrics.dropped(change.dropped_messages)

    def _refuse(self, queue: _Queue, pieces: Sequence[_Piece], error: Exception) -> None:
        """Drop what was taken, and say why: nobody waits for an answer."""
        self._settle(queue, pieces)
        self._dropped(queue.session, pieces)
        # The serving boundary: whatever one piece raises, those behind it are added.
        known = isinstance(error, StatefulError | MemStoreError | RuntimeError | ValueError)
        logger.warning(
            "session %s: %d pieces of data were dropped: %s",
            queue.session.header.id,
            len(pieces),
            error if known else repr(error),
            exc_info=None if known else error,
        )

    @staticmethod
    def _settle(queue: _Queue, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            queue.taken.remove(piece)
        queue.session.waiting -= len(pieces)

    def _dropped(self, session: Session, pieces: Sequence[_Piece]) -> None:
        messages = sum(piece.messages for piece in pieces)
        session.queue_dropped += messages
        self._keeper.metrics.dropped(messages)


def _newest(rendered: Sequence[_Rendered], window_tokens: int) -> list[_Rendered]:
    """Those at the end that fit together. One that is too long by itself takes no other with it."""
    kept: list[_Rendered] = []
    room = window_tokens
    for one in reversed(rendered):
        if one.tokens > window_tokens:
            continue
        if one.tokens > room:
            break
        room -= one.tokens
        kept.append(one)
    return kept[::-1]
