"""What is left of sessions that have ended: a pin, a snapshot, tokens in the log. What cannot be removed is owed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memstore import MemStoreError
from memstore.session_log import SessionHeader, SessionId, SessionLog
from sgl_stateful.outage import OUTAGES

from .pins import EnginePins
from .snapshotting import SessionSnapshots

logger = logging.getLogger(__name__)

Part = Literal["pin", "snapshot", "log"]

_FAILURES = (MemStoreError, OSError, RuntimeError)


@dataclass(slots=True)
class _Left:
    header: SessionHeader
    fence: int
    parts: set[Part]
    is_busy: bool = False


class Endings:
    """Removes what is left, and keeps in mind what could not be removed. Of the event loop.

    Parameters
    ----------
    in_thread
        Waits for the log on a thread.
    """

    def __init__(
        self,
        *,
        log: SessionLog,
        pins: EnginePins,
        snapshots: SessionSnapshots,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self._log = log
        self._pins = pins
        self._snapshots = snapshots
        self._in_thread = in_thread
        self._left: dict[SessionId, _Left] = {}

    def owes(self, name: SessionId) -> bool:
        """Whether the log may still have tokens of the session, which has ended."""
        left = self._left.get(name)
        return left is not None and "log" in left.parts

    def begin(self, headers: Iterable[SessionHeader], parts: Collection[Part]) -> None:
        """These parts of sessions are to be removed; to be followed by ``finish`` or, where nobody waits, ``settle``.

        A pin that is made from now on is left alone.
        """
        for header in headers:
            former = self._left.get(header.id)
            owed = set(parts) if former is None else former.parts | set(parts)
            self._left[header.id] = _Left(header, self._pins.next_fence(), owed)

    async def finish(self, names: Iterable[SessionId]) -> None:
        """Remove what is left of these sessions; harmless where that has been done.

        Raises
        ------
        MemStoreError, OSError, RuntimeError
            The first that failed; all others have been tried, and ``settle`` tries again.
        """
        if errors := await self._remove(self._of(names)):
            raise errors[0]

    async def settle(self, names: Iterable[SessionId] | None = None) -> None:
        """As ``finish``, of all that is owed or of these sessions; what fails is only logged."""
        for error in await self._remove(self._of(list(self._left) if names is None else names)):
            logger.warning("something is left of a session that has ended, and is removed later: %s", error)

    def _of(self, names: Iterable[SessionId]) -> list[_Left]:
        return [left for name in names if (left := self._left.get(name)) is not None and not left.is_busy]

    async def _remove(self, several: Sequence[_Left]) -> list[Exception]:
        errors: list[Exception] = []
        for left in several:
            left.is_busy = True
        try:
            await self._each("pin", several, self._unpin, errors)
            await self._each("snapshot", several, self._drop, errors)
            for left in several:
                await self._each("log", [left], self._delete, errors)
                if errors and isinstance(errors[-1], OUTAGES):
                    break  # which no other would do better in
        finally:
            for left in several:
                left.is_busy = False
                if not left.parts and self._left.get(left.header.id) is left:
                    del self._left[left.header.id]
        return errors

    @staticmethod
    async def _each(
        part: Part,
        several: Sequence[_Left],
        work: Callable[[Sequence[_Left]], Awaitable[None]],
        errors: list[Exception],
    ) -> None:
        if not (due := [left for left in several if part in left.parts]):
            return
        try:
            await work(due)
        except _FAILURES as error:
            errors.append(error)
            return
        for left in due:
            left.parts.discard(part)

    async def _unpin(self, several: Sequence[_Left]) -> None:
        await self._pins.unpin_before({left.header.id: left.fence for left in several})

    async def _drop(self, several: Sequence[_Left]) -> None:
        await self._snapshots.forget([left.header for left in several])

    async def _delete(self, several: Sequence[_Left]) -> None:
        for left in several:
            await self._in_thread(self._log.delete, left.header.owner, left.header.id)
