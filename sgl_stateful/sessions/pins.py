"""The pins that the scheduler holds for sessions, as the HTTP process sees and changes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memstore.session_log import SessionId
from sgl_stateful.engine_port import EnginePort

from .metrics import SessionMetrics
from .session import Change, Session

# So few tokens are prefilled whatever the pool has dropped.
_WORTH_TOKENS = 64


class EnginePins:
    """Pins by session, over the engine's control calls.

    Every request of a session and every unpin has a number that counts up, the fence: a request that was sent before
    its session was unpinned, and ends after it, pins nothing.
    """

    def __init__(self, engine: EnginePort, metrics: SessionMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._fences = itertools.count(1)

    def next_fence(self) -> int:
        """The number of what is about to be sent."""
        return next(self._fences)

    async def unpin(self, names: Iterable[SessionId]) -> None:
        """Let the KV of these sessions be evicted."""
        await self.unpin_before({name: self.next_fence() for name in names})

    async def unpin_before(self, fences: Mapping[SessionId, int]) -> None:
        """Let the KV of these sessions be evicted, as far as it was pinned by what was sent before their fences."""
        if fences:
            await self._engine.control("unpin", {"session_ids": dict(fences)})

    async def held(self, names: Iterable[str]) -> dict[str, int]:
        """Tokens pinned by name, of those among ``names`` that have a pin."""
        wanted = list(names)
        return dict((await self._engine.control("pins", {"session_ids": wanted}))["pins"]) if wanted else {}

    def saw(self, report: Mapping[str, Any] | None) -> None:
        """Count what the scheduler says with a request of a session: that its pin had been lost."""
        if report is not None and report.get("lost") is not None:
            self._metrics.lost(report["lost"])

    async def is_worth_prefilling(self, change: Change, token_ids: Sequence[int], *, salt: str) -> bool:
        """Whether a change is prefilled ahead of its question.

        Of what is not pinned the pool may have dropped most, and may drop it again before it is asked: then new data
        waits for the question, and all of it is prefilled once.
        """
        if change.pin or change.session.version == 0:
            return True
        found = await self._engine.control("cached", {"token_ids": list(token_ids), "salt": salt})
        return len(token_ids) - int(found["tokens"]) <= 2 * change.appended_tokens + _WORTH_TOKENS

    async def look(self, sessions: Sequence[Session]) -> None:
        """Learn which of these sessions' KV has left the pool."""
        named = {session.header.id: session for session in sessions if session.is_pinned and session.num_tokens}
        if not named:
            return
        found = await self._engine.control("pins", {"session_ids": list(named)})
        for name, session in named.items():
            if name in found["pins"]:
                session.lost = None
            else:
                session.lost = found["lost"].get(name) or session.lost or "not in the pool"

    async def cells(self) -> Mapping[str, Any]:
        """Cells of the pool, and how many pins there are."""
        return await self._engine.control("pins", {"session_ids": []})
