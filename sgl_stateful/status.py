"""What an operator asks first of the stores and the scheduler. What fails is shown in its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from concurrent.futures import Executor
from typing import Any

from memstore import KVBlobs, MemStore
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.feed import FeedFollower
from sgl_stateful.forgetting import Forgetting

logger = logging.getLogger(__name__)


class StoreStatus:
    """The part of the status that has to be asked for; ``threads`` are where the stores are waited for."""

    def __init__(
        self,
        *,
        store: MemStore,
        blobs: KVBlobs,
        engine: EnginePort,
        follower: FeedFollower,
        forgetting: Forgetting,
        threads: Executor,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._engine = engine
        self._follower = follower
        self._forgetting = forgetting
        self._threads = threads

    async def parts(self) -> dict[str, Any]:
        """``store``, ``owners``, ``kv_store`` and ``scheduler``; never raises, since it is asked when things fail."""
        counted = await _shown(self._count_owners())
        return {
            "store": {
                "location": self._store.records.location,
                "error": counted.get("error"),
                "feed": {"position": self._follower.position, "error": self._follower.outage.error},
            },
            "owners": counted.get("owners"),
            "kv_store": await _shown(self._count_encodings()),
            "scheduler": await _shown(self._engine.control("stats")),
        }

    async def _count_owners(self) -> dict[str, Any]:
        owners = await asyncio.get_running_loop().run_in_executor(self._threads, self._store.owners)
        return {"owners": len(owners)}

    async def _count_encodings(self) -> dict[str, Any]:
        stats = await asyncio.get_running_loop().run_in_executor(self._threads, self._blobs.stats)
        return {**stats._asdict(), "corrupt": self._blobs.corrupt_count, "error": self._forgetting.error}


async def _shown(part: Awaitable[Mapping[str, Any]]) -> dict[str, Any]:
    """A part, or what is wrong with it under ``error``."""
    try:
        return dict(await part)
    except Exception as error:
        # Each part asks something else, and none may cost the others.
        logger.debug("a part of the status failed", exc_info=True)
        return {"error": str(error) or type(error).__name__}
