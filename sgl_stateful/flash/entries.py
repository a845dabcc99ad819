"""Entries of sessions: what the next request will begin with, prefilled and decoded ahead of it.

Source: Speculative Pre-Positioning (arXiv 2606.29565). Knows nothing of SGLang. To be used on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from memstore.session_log import SessionId
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.session import Session

from .entry import Entry
from .entry_pins import EntryPins
from .entry_point import EntryPoint
from .metrics import EntryMetrics
from .outcomes import Hit, Miss
from .port import FlashEngine
from .positioning import Positioner
from .prompts import FlashPrompts
from .question import Question
from .registered import Registered
from .shown import shown_entry_point
from .table import FlashTable


class EntryService(Registered):
    """Entries, what is known behind each, and their pins.

    Parameters
    ----------
    table
        Shares its queue with that of the questions.
    cells
        Cells of the KV pool that entries may have; 0: none is pinned.
    """

    metrics: EntryMetrics

    def __init__(
        self,
        sessions: SessionService,
        table: FlashTable,
        prompts: FlashPrompts,
        engine: FlashEngine,
        metrics: EntryMetrics,
        *,
        cells: int,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(sessions, table, prompts, metrics, wake=wake)
        self.pins = EntryPins(sessions.pins, metrics, limit=cells)
        self.positioner = Positioner(table, prompts, engine, metrics, sessions=sessions, pins=self.pins)

    # ---- registering ----

    async def update(self, session_id: str, owner: str, question: Question) -> dict[str, Any]:
        """See ``Registered.update``; what the former one has pinned is let go."""
        _, entry = await self._entry(session_id, owner, question.name)
        shown = await super().update(session_id, owner, question)
        self.pins.release(entry)
        return {**shown, "cells": 0}

    async def delete(self, session_id: str, owner: str, name: str) -> dict[str, Any]:
        """See ``Registered.delete``; what it has pinned is let go."""
        _, entry = await self._entry(session_id, owner, name)
        shown = await super().delete(session_id, owner, name)
        self.pins.release(entry)
        return shown

    async def stats(self, *, rows: int) -> dict[str, Any]:
        """``counts`` with the cells that are held, as the scheduler knows them now."""
        await self.pins.look()
        budget = self.pins.budget
        return {**self.counts(rows=rows), "cells": {"held": budget.cells, "budget": budget.limit}}

    def _row(self, entry: Entry, data_version: int) -> dict[str, Any]:
        return shown_entry_point(super()._row(entry, data_version), entry, cells=self.pins.budget.of(entry))

    # ---- serving ----

    def asked(self, session: Session, token_ids: Sequence[int]) -> Entry | None:
        """The entry that a question begins with, the longest of several; None: it begins with none."""
        is_first, best = session.num_tokens == 0, None
        asked = tuple(token_ids)
        for entry in self.table.registrations.of_session(session.header.id):
            ids = _ids(entry, is_first=is_first)
            is_longer = best is None or len(ids) > len(_ids(best, is_first=is_first))
            if is_longer and asked[: len(ids)] == ids:
                best = entry
        return best

    def look(self, session: Session, entry: Entry) -> Hit | Miss:
        """What is known behind an entry, if it holds now; not counted."""
        self._look_again(session)
        return self.table.look(entry, present=self.prompts.present(session))

    def is_exact(self, session: Session, entry: Entry, token_ids: Sequence[int]) -> bool:
        """Whether the question is the entry and nothing more."""
        return len(token_ids) == len(_ids(entry, is_first=session.num_tokens == 0))

    # ---- what happens ----

    def changed(self, session: Session) -> None:
        """See ``Watcher``; what stands behind tokens that the session no longer begins with is let go at once."""
        super().changed(session)
        self.pins.moved(session, self.table.registrations.of_session(session.header.id))

    def ended(self, session_id: SessionId) -> None:
        """See ``Watcher``."""
        entries = self.table.registrations.of_session(session_id)
        super().ended(session_id)
        for entry in entries:
            self.pins.release(entry)

    def purged(self, owner: str) -> None:
        """See ``Watcher``."""
        super().purged(owner)
        for entry in self.table.registrations.of_owner(owner):
            self.pins.release(entry)

    def weights_changed(self) -> None:
        """See ``Watcher``."""
        super().weights_changed()
        for entry in self.table.registrations.everyone():
            self.pins.release(entry)

    def flushed(self) -> None:
        """The cache was flushed, and with it what entries had pinned."""
        self.table.flushed()
        self.pins.flushed()


def _ids(entry: Entry, *, is_first: bool) -> tuple[int, ...]:
    point = entry.question
    assert isinstance(point, EntryPoint), point
    prompt = point.first if is_first else point.behind
    return (*prompt.head, *prompt.tail)
