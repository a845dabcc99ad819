"""What happens to sessions without anybody asking: they expire, and their log is kept up to date and short."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from memstore import MemStoreError, SessionGone, SessionMoved
from memstore.session_log import LogEntry, SessionId
from sgl_stateful.errors import SessionNotFound, SessionVersionConflict
from sgl_stateful.outage import OUTAGES

from .chain import segments
from .keeper import SessionKeeper
from .session import Session

logger = logging.getLogger(__name__)


class SessionUpkeep:
    """Looks after the sessions of a keeper. Of the event loop."""

    def __init__(self, keeper: SessionKeeper) -> None:
        self._keeper = keeper

    async def sweep(self) -> int:
        """End the sessions whose time is over; returns how many."""
        try:
            return await self.expire()
        finally:
            await self._keeper.endings.settle()
            await self.write_touches()
            await self.compact()

    async def expire(self) -> int:
        """End the sessions whose time is over; returns how many. One that was used on another server lives on there."""
        count = 0
        for session, why in self._keeper.table.expired():
            with self._sparing_others(session):
                header = await self._keeper.in_thread(self._keeper.log.header, session.header.id)
                if header is not None and header.used_at > session.header.used_at:
                    if self._keeper.table.is_here(session):
                        await self._keeper.forget(session)
                    continue
                if self._keeper.table.is_here(session) and session.ended_by(self._keeper.clock()) is not None:
                    self._keeper.metrics.expired(why)
                    count += 1
                    await self._keeper.end(session, "expired")
        return count

    @contextmanager
    def _sparing_others(self, session: Session) -> Iterator[None]:
        """Log what is wrong with one session, unless it is wrong with all of them."""
        try:
            yield
        except OUTAGES:
            raise
        except (MemStoreError, RuntimeError, OSError) as error:
            logger.warning("looking after session %s failed, and is repeated: %s", session.header.id, error)

    async def look_through_log(self, *, grace_s: float) -> int:
        """Compare with the log, which other processes change too, and remove what should not be there, or here.

        There: sessions that nobody has in memory any more and whose time has long been over. Here: sessions and
        snapshots that the log has no more.

        Parameters
        ----------
        grace_s
            How much longer than its time one is left, for a server that is still answering on it.

        Returns
        -------
        int
            How many sessions were deleted from the log.
        """
        # First what is here: a session that begins meanwhile is in the log, and not in what was read of it.
        here, snapshots = self._keeper.table.sessions(), await self._keeper.snapshots.present()
        alive: set[SessionId] = set()
        after: SessionId | None = None
        count = 0
        while page := await self._keeper.in_thread(partial(self._keeper.log.headers, after=after)):
            after = page[-1].id
            alive.update(header.id for header in page)
            for header in page:
                ends = header.ends_at()
                if (
                    ends is not None
                    and ends + grace_s <= self._keeper.clock()
                    and not self._keeper.table.knows(header.id)
                ):
                    count += await self._keeper.in_thread(self._keeper.log.delete, header.owner, header.id)
                    await self._keeper.snapshots.forget([header])
        for session in here:
            if session.header.id not in alive and self._keeper.table.is_here(session):
                await self._keeper.gone(session)
        await self._keeper.snapshots.remove_orphans(snapshots, alive)
        return count

    async def write_touches(self) -> None:
        """Write to the log when sessions were last used: what is being answered is in use now."""
        for session in self._keeper.table.sessions():
            if session.is_busy:
                self._keeper.touch(session)
        touched, self._keeper.touched = self._keeper.touched, {}
        try:
            if touched:
                await self._keeper.in_thread(self._keeper.log.touch, touched)
        except BaseException:
            self._keeper.touched = touched | self._keeper.touched
            raise

    async def compact(self) -> None:
        """Write the content of sessions with a long log as one entry; earlier versions cannot be reached then."""
        for session in self._keeper.table.sessions():
            if session.logged <= 2 * self._keeper.table.versions or self._keeper.is_changing(session):
                continue
            with suppress(SessionNotFound, SessionVersionConflict), self._sparing_others(session):
                async with self._keeper.alone(session):
                    await self._compact(session)

    async def _compact(self, session: Session) -> None:
        header, entry = session.header, LogEntry(session.version, 0, 0, tuple(segments(session.head)))
        try:
            await self._keeper.in_thread(self._keeper.log.compact, header.owner, header.id, entry)
        except SessionMoved:
            await self._keeper.forget(session)
        except SessionGone:
            await self._keeper.gone(session)
        else:
            self._keeper.table.forget_versions(session)
