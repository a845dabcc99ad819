"""How many requests of the server's own are in flight at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sgl_stateful.engine_port import EnginePort


class Slots:
    """One while callers' requests are in flight, otherwise up to ``most``."""

    def __init__(self, engine: EnginePort, most: int) -> None:
        self._engine = engine
        self._most = most
        self._taken = 0
        self._freed = asyncio.Condition()

    async def take(self) -> None:
        """Wait for a slot; whoever has it gives it back."""
        async with self._freed:
            await self._freed.wait_for(self._has_one)
            self._taken += 1

    async def give_back(self) -> None:
        """Leave a slot to the next one."""
        async with self._freed:
            self._taken -= 1
            self._freed.notify_all()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """A slot for as long as the ``with`` lasts."""
        await self.take()
        try:
            yield
        finally:
            await self.give_back()

    def _has_one(self) -> bool:
        return self._taken < (1 if self._engine.foreground_requests() else self._most)
