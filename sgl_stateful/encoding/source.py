"""Where facts that are to be encoded come from: a store, or a list of the server's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memstore import Fact, FactId


class FactSource(Protocol):
    """The part of a ``MemStore`` that encoding needs."""

    def list(self, owner: str, *, limit: int, after_seq: int) -> Sequence[Fact]:
        """Up to ``limit`` current facts of the owner with a ``seq`` above ``after_seq``, in order."""
        ...

    def get_many(self, owner: str, fact_ids: Sequence[FactId]) -> Sequence[Fact]:
        """Those of the facts that the owner has now."""
        ...
