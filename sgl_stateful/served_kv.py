"""The copies of facts' KV that the scheduler serves from memory, seen from the HTTP process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from memstore import EncodingId, Fact, KVBlobs
from sgl_stateful.engine_port import EnginePort

logger = logging.getLogger(__name__)


class ServedKV:
    """Makes the scheduler forget the KV of facts that have changed or gone.

    That is for what is forgotten to be gone: no request asks for the KV of a version that the store no longer has, and
    it would leave the arena as the least recently used. So a scheduler that fails to do it is logged, and no more.

    Parameters
    ----------
    policies
        Names of the policies that facts are encoded under.

    Attributes
    ----------
    fingerprint
        Of the encodings in use; None while there are none.
    """

    def __init__(self, *, engine: EnginePort, blobs: KVBlobs, policies: Sequence[str]) -> None:
        self._engine = engine
        self._blobs = blobs
        self._policies = policies
        self.fingerprint: str | None = None

    def of(self, fact: Fact) -> list[EncodingId]:
        """What the KV of a fact, in this version, goes by; waits for the KV store."""
        if self.fingerprint is None:
            return []
        versions = [(fact.id, fact.version)]
        return [
            encoding.id
            for policy in self._policies
            for rungs in self._blobs.current(fact.owner, versions, fingerprint=self.fingerprint, policy=policy).values()
            for encoding in rungs.values()
        ]

    async def drop(self, encoding_ids: Sequence[EncodingId]) -> None:
        """Forget these."""
        if encoding_ids:
            await self._tell("drop", {"encoding_ids": list(encoding_ids)})

    async def sweep(self) -> None:
        """Forget whatever the KV store no longer has."""
        await self._tell("sweep", {})

    async def _tell(self, op: str, payload: Mapping[str, Any]) -> None:
        try:
            await self._engine.control(op, payload)
        except Exception:
            logger.exception("the scheduler did not drop the KV of facts that are gone")
