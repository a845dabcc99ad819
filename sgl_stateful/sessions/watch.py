"""Who is told what happens to sessions, at the moment when it does."""

from __future__ import annotations

from typing import Protocol

from memstore.session_log import SessionId

from .session import Session


class Watcher(Protocol):
    """Called on the event loop, and not to raise."""

    def changed(self, session: Session) -> None:
        """The session has another version."""
        ...

    def ended(self, session_id: SessionId) -> None:
        """The session was closed, has expired, or was removed by another process."""
        ...

    def purged(self, owner: str) -> None:
        """Everything of an owner was removed; called before their sessions end."""
        ...

    def weights_changed(self) -> None:
        """The model's weights were updated, or may have been."""
        ...


class Watchers:
    """Tells each of them, in the order in which they were added."""

    def __init__(self) -> None:
        self._each: list[Watcher] = []

    def add(self, watcher: Watcher) -> None:
        """Tell one more from now on."""
        self._each.append(watcher)

    def changed(self, session: Session) -> None:
        """See ``Watcher``."""
        for watcher in self._each:
            watcher.changed(session)

    def ended(self, session_id: SessionId) -> None:
        """See ``Watcher``."""
        for watcher in self._each:
            watcher.ended(session_id)

    def purged(self, owner: str) -> None:
        """See ``Watcher``."""
        for watcher in self._each:
            watcher.purged(owner)

    def weights_changed(self) -> None:
        """See ``Watcher``."""
        for watcher in self._each:
            watcher.weights_changed()
