"""Registered questions of one server, in the HTTP process: what routes and requests do with them.

Knows nothing of SGLang: a ``FlashEngine`` decodes. To be used on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from sgl_stateful.errors import FlashNotReady
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.session import Session

from .answers import FactVersions
from .entries import EntryService
from .entry_point import EntryPoint
from .evaluating import Evaluator
from .followers import Follower, Followers
from .metrics import EntryMetrics, FlashMetrics
from .outcomes import Hit, Miss, MissCause
from .port import FlashEngine
from .prompts import FlashPrompts, Memory
from .question import Ask, Question
from .registered import Registered
from .semantic import Embed, SemanticMatcher
from .shown import shown_answer
from .table import FlashTable
from .wording import Wording
from .worker import FlashWorker

_WHY = {
    "not_ready": "it has not been evaluated yet",
    "version": "its answer is of an earlier version",
    "facts": "its answer had other facts",
    "weights": "the model's weights are being updated",
}


class FlashService(Registered):
    """Registered questions and entries, and the worker that evaluates both.

    Parameters
    ----------
    memory
        None: this server has none.
    limit, owner_limit, entry_limit, entry_owner_limit
        Questions and entries in all, and of one owner.
    entry_cells
        Cells of the KV pool that entries may have pinned.
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
        entry_metrics: EntryMetrics,
        limit: int,
        owner_limit: int,
        entry_limit: int,
        entry_owner_limit: int,
        entry_cells: int,
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
        table = FlashTable(
            limit=limit,
            owner_limit=owner_limit,
            batch=batch,
            aging_s=aging_s,
            audit_every=audit_every,
            kept_events=kept_events,
            clock=clock,
        )
        entry_table = FlashTable(
            limit=entry_limit,
            owner_limit=entry_owner_limit,
            aging_s=aging_s,
            audit_every=audit_every,
            kept_events=1,  # nobody follows them
            queue=table.queue,
            noun="entry",
            clock=clock,
        )
        prompts = FlashPrompts(sessions, memory)
        super().__init__(sessions, table, prompts, metrics, wake=self.wake)
        self.entries = EntryService(
            sessions, entry_table, prompts, engine, entry_metrics, cells=entry_cells, wake=self.wake
        )
        self.worker = FlashWorker(
            {Question: Evaluator(table, prompts, engine, metrics), EntryPoint: self.entries.positioner},
            engine,
            metrics,
            is_paused=lambda: prompts.is_paused,
            busy_share=busy_share,
            rest_s=rest_s,
            clock=clock,
        )
        self.semantic = SemanticMatcher(table, prompts, metrics, embed=embed, audit_every=semantic_audit_every)
        self.followers = Followers(self.table.events, most=readers)
        self.table.events.listen(self.followers.wake)

    def wake(self) -> None:
        """There may be something to evaluate."""
        self.worker.wake()

    def stats(self, *, rows: int) -> dict[str, Any]:
        """``counts``, with what waits to be evaluated, entries too."""
        return {**self.counts(rows=rows), "queue": len(self.table.queue)}

    # ---- answers ----

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
        self._look_again(session)
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
                self.entries.flushed()

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
