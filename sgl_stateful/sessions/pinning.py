"""Asking for sessions' KV to be kept, or not, by themselves rather than with a change."""

from __future__ import annotations

import time
from dataclasses import replace

from memstore.session_log import OnFull

from .cancellation import to_its_end
from .keeper import SessionKeeper
from .session import Session


class Pinning:
    """Pins and unpins the sessions of a keeper. Of the event loop."""

    def __init__(self, keeper: SessionKeeper) -> None:
        self._keeper = keeper

    async def pin(self, session_id: str, owner: str, *, on_full: OnFull | None) -> Session:
        """Ask for the session's KV to be kept, and prefill what of it is not in the pool.

        Raises
        ------
        PinRefused
            It does not fit, and is not to be demoted; the session is as before, here and in the log.
        SessionError, StoreError
        """
        session = await self._keeper.get(session_id, owner)
        async with self._keeper.alone(session):
            was_pinned = session.header.is_pinned
            with self._keeper.counting_refusals():
                self._keeper.table.pin(session, demote=(on_full or session.header.on_full) == "demote")
            await to_its_end(self._log_pin(session, was_pinned=was_pinned))
            if session.demoted is not None:
                self._keeper.metrics.demoted()
            else:
                self._keeper.metrics.admitted()
            await self._refresh(session)
        return session

    async def unpin(self, session_id: str, owner: str) -> Session:
        """Let the session's KV be evicted when room is needed; it is prefilled again on use."""
        session = await self._keeper.get(session_id, owner)
        async with self._keeper.alone(session):
            await to_its_end(self._log_unpin(session))
            await self._keeper.unpin([session])
        return session

    async def refresh(self, session_id: str, owner: str) -> Session:
        """Begin the session's idle time anew, and prefill what of it the pool has lost."""
        session = await self._keeper.get(session_id, owner)
        async with self._keeper.alone(session):
            if session.demoted is not None:
                self._keeper.table.pin(session, demote=True)
            await self._refresh(session)
        return session

    async def _log_pin(self, session: Session, *, was_pinned: bool) -> None:
        """Log a pin that was claimed, or give a new one back; not to be cancelled in between."""
        try:
            await self._keeper.update(session, session.header)
        except BaseException:
            if session.state == "open" and not was_pinned:
                self._keeper.table.unpin(session)
            raise

    async def _log_unpin(self, session: Session) -> None:
        await self._keeper.update(session, replace(session.header, is_pinned=False))
        self._keeper.table.unpin(session)

    async def _refresh(self, session: Session) -> None:
        self._keeper.touch(session)
        if not (ids := session.token_ids()) or not session.is_pinned:
            return
        began = time.perf_counter()
        try:
            prefilled, cached = await self._keeper.prefill(session, ids, pin=True)
        finally:
            self._keeper.renew(session)
        ms = 1e3 * (time.perf_counter() - began)
        session.lost = None
        self._keeper.metrics.observe("rebuild", ms=ms, cached_tokens=cached, prefilled_tokens=prefilled)
