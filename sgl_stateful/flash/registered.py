"""What questions and entries of sessions have in common: registering, looking, and hearing of what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memstore.session_log import SessionId
from sgl_stateful.errors import SessionNotFound
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.session import Session

from .entry import Entry
from .metrics import FlashMetrics
from .prompts import FlashPrompts
from .question import Question
from .shown import shown_entry
from .table import FlashTable


class Registered:
    """Registrations on sessions. Of the event loop.

    Parameters
    ----------
    wake
        Has the worker look for something to do.
    """

    def __init__(
        self,
        sessions: SessionService,
        table: FlashTable,
        prompts: FlashPrompts,
        metrics: FlashMetrics,
        *,
        wake: Callable[[], None],
    ) -> None:
        self.sessions = sessions
        self.table = table
        self.prompts = prompts
        self.metrics = metrics
        self._wake = wake
        sessions.watchers.add(self)

    # ---- registering ----

    async def register(self, session_id: str, owner: str, question: Question) -> dict[str, Any]:
        """Register one; it is evaluated when there is time.

        Raises
        ------
        FlashExists, FlashLimitReached, SessionTooLong, SessionError, StoreError
        """
        session = await self.sessions.get(session_id, owner)
        self.prompts.check_room(session.num_tokens, question)
        entry = self.table.register(session.header.id, owner, question, data_version=session.version)
        return self._registered(entry, session)

    async def update(self, session_id: str, owner: str, question: Question) -> dict[str, Any]:
        """Put one in the place of the one of its name.

        Raises
        ------
        FlashNotFound, FlashExists, SessionTooLong, SessionError, StoreError
        """
        session, entry = await self._entry(session_id, owner, question.name)
        self.prompts.check_room(session.num_tokens, question)
        self.table.update(entry, question)
        return self._registered(entry, session)

    async def delete(self, session_id: str, owner: str, name: str) -> dict[str, Any]:
        """End a registration; returns it as it was. Raises ``FlashNotFound``."""
        session, entry = await self._entry(session_id, owner, name)
        shown = self._shown(entry, session)
        self.table.remove(entry)
        self.metrics.registered(len(self.table.registrations))
        return shown

    async def show(self, session_id: str, owner: str, name: str) -> dict[str, Any]:
        """One registration; raises ``FlashNotFound``."""
        session, entry = await self._entry(session_id, owner, name)
        return self._shown(entry, session)

    async def show_all(self, session_id: str, owner: str) -> list[dict[str, Any]]:
        """A session's registrations, by name."""
        session = await self.sessions.find(session_id, owner)
        return [self._shown(entry, session) for entry in self.table.registrations.of_session(session.header.id)]

    def counts(self, *, rows: int) -> dict[str, Any]:
        """Counts of the server, and up to that many registrations of all owners, those with most hits first."""
        entries = self.table.registrations.everyone()
        most = sorted(entries, key=lambda entry: (-entry.hits, entry.session_id, entry.name))[:rows]
        return {
            "registered": len(entries),
            "retired": sum(entry.retired is not None for entry in entries),
            "totals": self.metrics.totals(),
            "rows": [self._row(entry, self._version(entry)) for entry in most],
        }

    def has(self, session_id: str) -> bool:
        """Whether the session has some."""
        return self.table.registrations.has_session(session_id)

    def _registered(self, entry: Entry, session: Session) -> dict[str, Any]:
        self.metrics.registered(len(self.table.registrations))
        self._wake()
        return self._shown(entry, session)

    async def _entry(self, session_id: str, owner: str, name: str) -> tuple[Session, Entry]:
        session = await self.sessions.find(session_id, owner)
        return session, self.table.registrations.get(session.header.id, name)

    def _shown(self, entry: Entry, session: Session) -> dict[str, Any]:
        return self._row(entry, session.version)

    def _row(self, entry: Entry, data_version: int) -> dict[str, Any]:
        waiting = self.table.queue.wanted(entry) is not None
        return shown_entry(entry, data_version=data_version, now=self.table.clock(), waiting=waiting)

    def _version(self, entry: Entry) -> int:
        try:
            return self.sessions.table.get(entry.session_id, owner=None).version
        except SessionNotFound:  # it is on its way out, or goes on elsewhere
            return 0

    def _look_again(self, session: Session) -> None:
        """Learn of a change by another server, where the session has just been read anew."""
        if self.table.version(session.header.id) not in (None, session.version):
            self.changed(session)

    # ---- what happens ----

    def changed(self, session: Session) -> None:
        """See ``Watcher``."""
        if self.has(session.header.id):
            self.table.changed(session.header.id, session.version)
            self._wake()

    def ended(self, session_id: SessionId) -> None:
        """See ``Watcher``."""
        self.table.ended(session_id)
        self.metrics.registered(len(self.table.registrations))

    def purged(self, owner: str) -> None:
        """See ``Watcher``."""
        self.table.purged(owner)
        self._wake()

    def weights_changed(self) -> None:
        """See ``Watcher``."""
        self.table.weights_changed()
        self._wake()
