"""What happens to sessions without anybody asking: they expire, and their log is kept up to date and short."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial

from memstore import MemStoreError, SessionGone, SessionMoved
from memstore.session_log import LogEntry, SessionId
from sgl_stateful.errors import SessionNotFound

from .chain import segments
from .keeper import SessionKeeper

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
            await self.delete_ended()
            await self.write_touches()
            await self.compact()

    async def delete_ended(self) -> None:
        """Delete from the log what has ended and could not be deleted then."""
        for name in list(self._keeper.undeleted):
            try:
                await self._keeper.delete(name)
            except MemStoreError as error:
                logger.warning("session %s cannot be deleted from the log yet: %s", name, error)

    async def expire(self) -> int:
        """End the sessions whose time is over; returns how many. One that was used on another server lives on there."""
        count = 0
        for session, why in self._keeper.table.expired():
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

    async def expire_elsewhere(self, *, grace_s: float) -> int:
        """Delete sessions of the log that nobody has in memory any more and whose time has long been over.

        Parameters
        ----------
        grace_s
            How much longer than its time one is left, for a server that is still answering on it.
        """
        after: SessionId | None = None
        count = 0
        while page := await self._keeper.in_thread(partial(self._keeper.log.headers, after=after)):
            after = page[-1].id
            for header in page:
                ends = header.ends_at()
                if (
                    ends is not None
                    and ends + grace_s <= self._keeper.clock()
                    and not self._keeper.table.knows(header.id)
                ):
                    count += await self._keeper.in_thread(self._keeper.log.delete, header.owner, header.id)
                    await self._keeper.snapshots.forget([header])
        return count

    async def write_touches(self) -> None:
        """Write to the log when sessions were last used."""
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
            with suppress(SessionNotFound):
                async with self._keeper.alone(session):
                    entry = LogEntry(session.version, 0, 0, tuple(segments(session.head)))
                    header = session.header
                    with suppress(SessionGone, SessionMoved):
                        await self._keeper.in_thread(self._keeper.log.compact, header.owner, header.id, entry)
                    self._keeper.table.forget_versions(session)
