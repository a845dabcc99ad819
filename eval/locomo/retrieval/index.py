"""The units of every conversation in a store of ours, one owner each, and what its search finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from locomo.retrieval.units import Unit
from memstore import MemStore, NewFact
from memstore.embedding import Embedder
from memstore.search.views import SearchMode

_BATCH = 256
_UNIT = "unit"
SPEAKER = "speaker"
"""The field of a fact's metadata that filters read."""


class Hit(NamedTuple):
    """A unit that was found, and the store's score of it."""

    unit: str
    score: float


class UnitIndex:
    """A `MemStore` with one owner per conversation, whose facts are its units.

    Parameters
    ----------
    directory
        Where the store lies; empty or absent.
    embedder
        Embeds units and questions.
    with_fields
        Whether speaker and time are fields of the facts, as a server of ours gets them: the store's search then reads
        them before the text. Else it reads the unit's text alone.
    """

    def __init__(self, directory: Path, embedder: Embedder, *, with_fields: bool = False) -> None:
        self._store = MemStore(directory, embedder=embedder)
        self._with_fields = with_fields

    def fill(self, owner: str, units: Sequence[Unit], *, on_progress: Callable[[int], None] = lambda _: None) -> None:
        """Add the units of one conversation; `on_progress` is told how many more are done."""
        for start in range(0, len(units), _BATCH):
            batch = [_fact(unit, with_fields=self._with_fields) for unit in units[start : start + _BATCH]]
            self._store.add_many(owner, batch)
            on_progress(len(batch))

    def search(
        self,
        owner: str,
        query: str,
        *,
        k: int,
        mode: str = SearchMode.VECTOR,
        where: Mapping[str, object] | None = None,
    ) -> list[Hit]:
        """Return what the store's search returns, best first; parameters are its own."""
        hits = self._store.search(owner, query, k=k, mode=mode, where=where)
        return [Hit(str(hit.fact.metadata[_UNIT]), hit.score) for hit in hits]

    def close(self) -> None:
        """Release the store's files."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fact(unit: Unit, *, with_fields: bool) -> NewFact:
    return NewFact(
        unit.text,
        stream=unit.thread,
        speaker=(unit.speaker or None) if with_fields else None,
        time=(unit.date_time or None) if with_fields else None,
        # The id keeps two turns with the same words apart, which the store would otherwise take for one fact.
        metadata={_UNIT: unit.id, SPEAKER: unit.speaker},
    )
