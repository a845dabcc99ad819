"""Which weights KV is of, and the scheduler's fence: snapshots are written and read for one set of weights alone."""

from __future__ import annotations

import logging
import secrets

from sgl_stateful.engine_port import EnginePort

logger = logging.getLogger(__name__)


class Weights:
    """What the scheduler is told of the weights, from the start of a server on. Of the event loop.

    Attributes
    ----------
    name
        Empty for those that the server was started with; after an update random, so that no other process has it.
    epoch
        Counts beginnings and ends of updates: KV that was looked at across one is not to be used.
    """

    def __init__(self, engine: EnginePort) -> None:
        self.name = ""
        self.epoch = 0
        self._engine = engine
        self._updates = 0  # under way
        self._is_told = True

    @property
    def current(self) -> str | None:
        """The name of the weights; None while they are being updated."""
        return None if self._updates else self.name

    async def changing(self) -> None:
        """Weights are about to be updated: no KV is written or read from now on.

        Raises
        ------
        RuntimeError
            The scheduler could not be told: nothing may be updated.
        """
        self._updates += 1
        self.epoch += 1
        try:
            await self._tell()
        except BaseException:
            self._updates -= 1
            self.epoch += 1
            raise

    async def changed(self) -> None:
        """An update has ended, one way or another. Where the scheduler cannot be told, ``settle`` is to be called."""
        assert self._updates > 0, "the end of an update that has not begun"
        self._updates -= 1
        self.epoch += 1
        self.name = f"+{secrets.token_hex(8)}"
        try:
            await self._tell()
        except RuntimeError as error:
            logger.warning("no snapshot is written or read until the scheduler knows of the new weights: %s", error)

    async def settle(self) -> None:
        """Tell the scheduler what it could not be told before; raises ``RuntimeError`` where it still cannot."""
        if not self._is_told:
            await self._tell()

    async def _tell(self) -> None:
        self._is_told, epoch = False, self.epoch
        await self._engine.control("snapshot_fence", {"weights": self.current})
        self._is_told = epoch == self.epoch
