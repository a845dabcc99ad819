"""Registered questions of one server, in the HTTP process: what routes and requests do with them.

Knows nothing of SGLang: a ``FlashEngine`` decodes. To be used on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from memstore.session_log import SessionId
from sgl_stateful.errors import FlashNotReady, SessionNotFound
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.session import Session

from .answers import FactVersions
from .entry import Entry
from .followers import Follower, Followers
from .metrics import FlashMetrics
from .outcomes import Hit, Miss, MissCause
from .port import FlashEngine
from .prompts import FlashPrompts, Memory
from .question import Ask, Question
from .semantic import Embed, SemanticMatcher
from .shown import shown_answer, shown_entry
from .table import FlashTable
from .wording import Wording
from .worker import FlashWorker

_WHY = {
    "not_ready": "it has not been evaluated yet",
    "version": "its answer is of an earlier version",
    "facts": "its answer had other facts",
    "weights": "the model's weights are being updated",
}


class FlashService:
    """Registered questions, and the worker that evaluates them.

    Parameters
    ----------
    memory
        None: this server has none.
    limit, owner_limit
        Questions in all, and of one owner.
    batch
        How many are evaluated at once.
    busy_share
        Of the time in which callers' requests are in flight, how much may be spent on evaluating.
    rest_s
        How long there have to be none before something begins.
    audit_every
        One in so many hits is decoded again.
    embed, semantic_audit_every
        See ``SemanticMatcher``.
    kept_events, readers
        Changes that are kept of a session, and how many may follow them.
    """

    def __init__(
        self,
        *,
        sessions: SessionService,
        memory: Memory | None,
        engine: FlashEngine,
        metrics: FlashMetrics,
        limit: int,
        owner_limit: int,
        batch: int,
        aging_s: float,
        busy_share: float = 0.0,
        rest_s: float = 0.0,
        audit_every: int = 50,
        embed: Embed | None = None,
        semantic_audit_every: int = 5,
        kept_events: int = 256,
        readers: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sessions = sessions
        self.metrics = metrics
        self.table = FlashTable(
            limit=limit,
            owner_limit=owner_limit,
            batch=batch,
            aging_s=aging_s,
            audit_every=audit_every,
            kept_events=kept_events,
            clock=clock,
        )
        self.prompts = FlashPrompts(sessions, memory)
        self.worker = FlashWorker(
            self.table, self.prompts, engine, metrics, busy_share=busy_share, rest_s=rest_s, clock=clock
        )
        self.semantic = SemanticMatcher(
            self.table, self.prompts, metrics, embed=embed, audit_every=semantic_audit_every
        )
        self.followers = Followers(self.table.events, most=readers)
        self.table.events.listen(self.followers.wake)
        sessions.watchers.add(self)

    # ---- registering ----

    async def register(self, session_id: str, owner: str, question: Question) -> dict[str, Any]:
        """Register a question; it is evaluated when there is time.

        Raises
        ------
        FlashExists, FlashLimitReached, SessionTooLong, SessionError, StoreError
        """
        session = await self.sessions.get(session_id, owner)
        self.prompts.check_room(session.num_tokens, question)
        entry = self.table.register(session.header.id, owner, question, data_version=session.version)
        return self._registered(entry, session)

    async def update(self, session_id: str, owner: str, question: Question) -> dict[str, Any]:
        """Put a question in the place of the one of its name.

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

    def stats(self, *, rows: int) -> dict[str, Any]:
        """Counts of the server, and up to that many registrations of all owners, those with most hits first."""
        now, entries = self.table.clock(), self.table.registrations.everyone()
        most = sorted(entries, key=lambda entry: (-entry.hits, entry.session_id, entry.name))[:rows]
        return {
            "registered": len(entries),
            "retired": sum(entry.retired is not None for entry in entries),
            "queue": len(self.table.queue),
            "totals": self.metrics.totals(),
            "rows": [
                shown_entry(
                    entry,
                    data_version=self._version(entry),
                    now=now,
                    waiting=self.table.queue.wanted(entry) is not None,
                )
                for entry in most
            ],
        }

    def _registered(self, entry: Entry, session: Session) -> dict[str, Any]:
        self.metrics.registered(len(self.table.registrations))
        self.worker.wake()
        return self._shown(entry, session)

    async def _entry(self, session_id: str, owner: str, name: str) -> tuple[Session, Entry]:
        session = await self.sessions.find(session_id, owner)
        return session, self.table.registrations.get(session.header.id, name)

    def _shown(self, entry: Entry, session: Session) -> dict[str, Any]:
        waiting = self.table.queue.wanted(entry) is not None
        return shown_entry(entry, data_version=session.version, now=self.table.clock(), waiting=waiting)

    def _version(self, entry: Entry) -> int:
        try:
            return self.sessions.table.get(entry.session_id, owner=None).version
        except SessionNotFound:  # it is on its way out, or goes on elsewhere
            return 0

    # ---- answers ----

    def has(self, session_id: str) -> bool:
        """Whether the session has questions."""
        return self.table.registrations.has_session(session_id)

    def find(
        self,
        session: Session,
        ask: Ask,
        *,
        facts: FactVersions = (),
        max_staleness_s: float = 0.0,
        miss: MissCause | None = None,
    ) -> Hit | None:
        """The answer of a question that is asked now; None where it has to be decoded. Counts either.

        Parameters
        ----------
        miss
            Why it is decoded in any case; None: it need not be.
        """
        if self.table.version(session.header.id) not in (None, session.version):
            self.changed(session)  # by another server: it has just been read anew
        present = self.prompts.present(session)
        if miss is not None:
            if self.table.registrations.asked(session.header.id, ask.prompt):
                self.metrics.missed(miss)
            return None
        found = self.table.find(session.header.id, ask, present=present, facts=facts, max_staleness_s=max_staleness_s)
        if isinstance(found, Miss):
            self.metrics.missed(found.cause)
            return None
        if found is not None:
            self.metrics.hit()
            self.sessions.touch(session)
            if self.table.has_audits:
                self.worker.wake()
        return found

    def find_alike(self, session: Session, ask: Ask, wording: Wording, *, max_staleness_s: float = 0.0) -> Hit | None:
        """The answer of a registered question that means what is asked; None where it has to be decoded."""
        hit = self.semantic.find(session, ask, wording, max_staleness_s=max_staleness_s)
        if hit is not None:
            self.sessions.touch(session)
            if self.table.has_audits:
                self.worker.wake()
        return hit

    async def answer(self, session_id: str, owner: str, name: str, *, max_staleness_s: float = 0.0) -> dict[str, Any]:
        """A question's answer, if it holds now.

        Raises
        ------
        FlashNotReady
            It has none that may be served; the message says why.
        FlashNotFound, SessionError, StoreError
        """
        _, entry = await self._entry(session_id, owner, name)
        try:
            facts = await self.prompts.facts(entry.question)
        except RuntimeError as error:
            raise FlashNotReady(str(error)) from error
        session = await self.sessions.find(session_id, owner)
        found = self.table.look(
            entry, present=self.prompts.present(session), facts=facts, max_staleness_s=max_staleness_s
        )
        if isinstance(found, Miss):
            self.metrics.missed(found.cause)
            raise FlashNotReady(f"question {name!r} has no answer now: {self._why(found)}")
        self.table.served(found)
        self.sessions.touch(session)
        self.metrics.hit()
        return {"name": name, **shown_hit(found, self.table.clock())}

    @staticmethod
    def _why(miss: Miss) -> str:
        if miss.entry.retired is not None:
            return f"it is out of service: {miss.entry.retired}"
        if miss.entry.error is not None:
            return f"its evaluation failed: {miss.entry.error}"
        return _WHY.get(miss.cause, miss.cause)

    # ---- following ----

    async def follow(self, session_id: str, owner: str, *, last_event_id: str | None) -> Follower:
        """Follow what happens to a session's answers, from behind an event, or from now on.

        To be followed by ``followers.remove``.

        Raises
        ------
        FlashReadersFull, SessionError, StoreError
        """
        session = await self.sessions.find(session_id, owner)
        return self.followers.add(session.header.id, last_event_id)

    # ---- what happens ----

    def changed(self, session: Session) -> None:
        """See ``Watcher``."""
        if self.has(session.header.id):
            self.table.changed(session.header.id, session.version)
            self.worker.wake()

    def ended(self, session_id: SessionId) -> None:
        """See ``Watcher``."""
        self.table.ended(session_id)
        self.metrics.registered(len(self.table.registrations))

    def purged(self, owner: str) -> None:
        """See ``Watcher``."""
        self.table.purged(owner)
        self.worker.wake()

    def weights_changed(self) -> None:
        """See ``Watcher``."""
        self.table.weights_changed()
        self.worker.wake()

    @asynccontextmanager
    async def flushing(self) -> AsyncIterator[bool]:
        """While the cache is being flushed nothing is evaluated, and what is known is forgotten in the end.

        Yields whether something was broken off for it.
        """
        async with self.worker.paused() as broken_off:
            try:
                yield broken_off
            finally:
                self.table.flushed()

    def facts_changed(self, owner: str, fact_id: str | None) -> None:
        """A fact was changed or is gone; None: facts were added."""
        self.table.facts_changed(owner, fact_id)
        self.worker.wake()


def shown_hit(hit: Hit, now: float) -> dict[str, Any]:
    """An answer that is served, as callers see it."""
    return {
        "served_from": "flash",
        "staleness_s": round(hit.staleness_s, 6),
        **shown_answer(hit.entry, hit.stored, now),
        **({} if hit.similarity is None else {"by": "semantic", "similarity": hit.similarity}),
    }
