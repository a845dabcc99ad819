"""Who follows the changes of sessions: each reads at its own pace, and whoever is too slow is let go by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from sgl_stateful.errors import FlashReadersFull

from .events import Event, EventLog, EventLogs


class Follower:
    """One reader of a session's changes: a place in its log, however much it has not read."""

    def __init__(self, session_id: str, log: EventLog, position: int, *, has_gap: bool) -> None:
        self.session_id = session_id
        self._log = log
        self._position = position
        self._has_gap = has_gap
        self._news = asyncio.Event()

    def wake(self) -> None:
        """Something has happened."""
        self._news.set()

    async def events(self, *, patience_s: float) -> AsyncGenerator[Event | None]:
        """What happens, until the session has ended; None where nothing did for ``patience_s``.

        Raises
        ------
        FlashReaderTooSlow
            More has happened since the last reading than is kept.
        """
        if self._has_gap:
            yield Event("", "gap", {})
        while True:
            self._news.clear()
            events = self._log.after(self._position)
            self._position += len(events)
            for event in events:
                yield event
            if events:
                continue
            if self._log.is_ended:
                return
            try:
                await asyncio.wait_for(self._news.wait(), patience_s)
            except TimeoutError:
                yield None


class Followers:
    """The readers of all sessions.

    Parameters
    ----------
    most
        How many may follow one session.
    """

    def __init__(self, logs: EventLogs, *, most: int) -> None:
        self._most = most
        self._logs = logs
        self._followers: dict[str, set[Follower]] = {}

    def add(self, session_id: str, last_event_id: str | None) -> Follower:
        """One more; to be followed by ``remove``.

        Raises
        ------
        FlashReadersFull
        """
        followers = self._followers.get(session_id, set())
        if len(followers) >= self._most:
            raise FlashReadersFull(f"{len(followers)} follow this session, and no more may")
        log = self._logs.of(session_id)
        position, has_gap = log.resume(last_event_id)
        follower = Follower(session_id, log, position, has_gap=has_gap)
        self._followers.setdefault(session_id, set()).add(follower)
        return follower

    def count(self, session_id: str) -> int:
        """How many follow a session."""
        return len(self._followers.get(session_id, ()))

    def remove(self, follower: Follower) -> None:
        """It reads no more; harmless when repeated."""
        followers = self._followers.get(follower.session_id, set())
        followers.discard(follower)
        if not followers:
            self._followers.pop(follower.session_id, None)

    def wake(self, session_id: str) -> None:
        """Something has happened to a session."""
        for follower in self._followers.get(session_id, ()):
            follower.wake()
