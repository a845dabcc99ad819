"""What has happened to the answers of a session, for those who follow it: numbered, and bounded."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from sgl_stateful.errors import FlashReaderTooSlow

Kind = Literal["answer", "invalid", "retired", "removed", "gap", "ended", "error", "semantic_retired"]


class Event(NamedTuple):
    """One change; ``id`` names it for ``Last-Event-ID``."""

    id: str
    kind: Kind
    data: Mapping[str, Any]


class EventLog:
    """The latest changes of one session.

    Parameters
    ----------
    kept
        How many. Followers share them: whoever is further behind has missed some.
    """

    def __init__(self, kept: int) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._name = secrets.token_hex(4)  # another log, of a server before, counted from 1 too
        self.position = 0
        self.is_ended = False

    def add(self, kind: Kind, data: Mapping[str, Any]) -> Event:
        """A change has happened."""
        self.position += 1
        event = Event(f"{self._name}-{self.position}", kind, data)
        self._events.append(event)
        return event

    @property
    def oldest(self) -> int:
        """The position before the oldest event that is kept."""
        return self.position - len(self._events)

    def resume(self, last_event_id: str | None) -> tuple[int, bool]:
        """Where a follower goes on, and whether it has missed something.

        Parameters
        ----------
        last_event_id
            The last that it has seen; None: it begins with what happens next.
        """
        if last_event_id is None:
            return self.position, False
        name, _, number = last_event_id.partition("-")
        if name != self._name or not (number.isascii() and number.isdigit()) or int(number) > self.position:
            return self.oldest, True
        return max(int(number), self.oldest), int(number) < self.oldest

    def after(self, position: int) -> list[Event]:
        """What has happened since.

        Raises
        ------
        FlashReaderTooSlow
            Some of it is kept no more.
        """
        if position < self.oldest:
            raise FlashReaderTooSlow(
                f"{self.oldest - position} changes were not read in time; {len(self._events)} are kept"
            )
        return list(self._events)[position - self.oldest :]


class EventLogs:
    """The logs of sessions; ``kept``: events of each."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._logs: dict[str, EventLog] = {}
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[str], None]) -> None:
        """Have a listener called with the id of each session to which something happens."""
        self._listeners.append(listener)

    def of(self, session_id: str) -> EventLog:
        """The log of a session."""
        return self._logs.setdefault(session_id, EventLog(self._kept))

    def tell(self, session_id: str, kind: Kind, **data: Any) -> None:
        """Leave word of a change."""
        self.of(session_id).add(kind, data)
        for listener in self._listeners:
            listener(session_id)

    def end(self, session_id: str) -> None:
        """The session has ended: whoever follows it is told, and nothing comes any more."""
        if (log := self._logs.pop(session_id, None)) is not None:
            log.add("ended", {})
            log.is_ended = True
            for listener in self._listeners:
                listener(session_id)
