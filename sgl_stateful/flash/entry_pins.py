"""The KV of entries in the pool: who may pin how much, and letting go of it at once where it is no more wanted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memstore.session_log import SessionId
from sgl_stateful.sessions.hold import Hold, entry_pin
from sgl_stateful.sessions.pins import EnginePins
from sgl_stateful.sessions.session import Session

from .cells import CellBudget
from .entry import Entry
from .metrics import EntryMetrics

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Base:
    """The tokens of a session behind which an entry stands."""

    num_tokens: int
    digest: bytes

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Base:
        """From all of them."""
        return cls(len(token_ids), hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest())

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether these begin with them."""
        return len(token_ids) >= self.num_tokens and Base.of(token_ids[: self.num_tokens]) == self


class EntryPins:
    """Pins of entries. Of the event loop.

    An entry's pin holds its session's tokens, the entry's own and those decoded ahead. What the session's pin holds in
    any case is not counted.

    Parameters
    ----------
    limit
        Cells that entries may have; 0: none is pinned.
    """

    def __init__(self, pins: EnginePins, metrics: EntryMetrics, *, limit: int) -> None:
        self.budget: CellBudget[Entry] = CellBudget(limit, _worth)
        self._pins = pins
        self._metrics = metrics
        self._bases: dict[Entry, Base] = {}
        self._claiming: set[Entry] = set()
        self._may_be_pinned: set[str] = set()
        self._owed: dict[str, int] = {}  # fences by name
        self._task: asyncio.Task[None] | None = None

    # ---- pinning ----

    def claim(self, entry: Entry, session: Session, hold: Hold, tokens: int) -> Hold | None:
        """What a request of ``tokens`` tokens at most tells the scheduler so that all of them are pinned.

        None where the budget has no room for them. To be followed by ``stands`` or ``fails``.
        """
        gone = self.budget.claim(entry, self._beyond(session, tokens)) if self.budget.limit else None
        if gone is None:
            return None
        for other in gone:
            self.release(other)
        priority = hold.priority + entry.question.priority
        hold = replace(hold, entry=entry.name, tokens=None, pin=True, fence=self._pins.next_fence(), priority=priority)
        self._may_be_pinned.add(hold.pin_name)
        self._claiming.add(entry)
        self._gauge()
        return hold

    def stands(self, entry: Entry, session: Session, token_ids: Sequence[int], tokens: int) -> None:
        """A request has pinned so many tokens, of which the session's are ``token_ids``."""
        self._claiming.discard(entry)
        self.budget.settle(entry, min(self._beyond(session, tokens), self.budget.of(entry)))
        if tokens:
            self._bases[entry] = Base.of(token_ids)
        self._gauge()

    def fails(self, entry: Entry, before: int) -> None:
        """A request has come to no end: what stands is as before, when the entry held so many cells."""
        self._claiming.discard(entry)
        self.budget.settle(entry, min(before, self.budget.of(entry)))
        self._gauge()

    # ---- letting go ----

    def release(self, entry: Entry) -> None:
        """Let go of what an entry has pinned, and of what a request that is under way will pin."""
        self._forget(entry)
        name = _name(entry)
        if name in self._may_be_pinned:
            self._may_be_pinned.remove(name)
            self._owed[name] = self._pins.next_fence()
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._settle(), name="sgl-stateful entry pins")
        self._gauge()

    def moved(self, session: Session, entries: Sequence[Entry]) -> None:
        """A session has other tokens: entries that stand behind what is not its beginning let go."""
        if not any(entry in self._bases for entry in entries):
            return
        token_ids = session.token_ids()
        holds: dict[Base, bool] = {}
        for entry in entries:
            if (base := self._bases.get(entry)) is not None:
                if base not in holds:
                    holds[base] = base.begins(token_ids)
                if not holds[base]:
                    self.release(entry)

    def flushed(self) -> None:
        """The pool was emptied."""
        for entry in list(self.budget):
            self._forget(entry)
        self._gauge()

    async def look(self) -> None:
        """Count no more what has lost its pin, as the scheduler has it: to a request, or with its session's."""
        standing = {_name(entry): (entry, base) for entry, base in self._bases.items()}
        found = await self._pins.held(standing)
        for name, (entry, base) in standing.items():
            is_as_before = self._bases.get(entry) is base and entry not in self._claiming
            if name not in found and is_as_before:
                self._forget(entry)
        self._gauge()

    def _forget(self, entry: Entry) -> None:
        self.budget.release(entry)
        self._bases.pop(entry, None)
        self._claiming.discard(entry)

    async def _settle(self) -> None:
        while self._owed:
            owed = dict(self._owed)
            try:
                await self._pins.unpin_before({SessionId(name): fence for name, fence in owed.items()})
            except Exception as error:
                # Nobody waits for this task: what is still pinned is let go of later.
                logger.warning("entries cannot be unpinned, and are once more in a moment: %s", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            for name, fence in owed.items():
                if self._owed.get(name) == fence:
                    del self._owed[name]

    @staticmethod
    def _beyond(session: Session, tokens: int) -> int:
        return max(tokens - (session.num_tokens if session.is_pinned else 0), 0)

    def _gauge(self) -> None:
        self._metrics.held(self.budget.cells)


def _name(entry: Entry) -> str:
    return entry_pin(entry.session_id, entry.name)


def _worth(entry: Entry, cells: int) -> tuple[int, float]:
    """What keeping an entry is worth: its priority, then what it saves for each cell."""
    return entry.question.priority, entry.worth.value() / max(cells, 1)
