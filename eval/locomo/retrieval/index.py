"""The units of every conversation in a store of ours, one owner each, and what its search finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from locomo.retrieval.units import Unit, UnitText
from memstore import MemStore, MemStoreSettings, NewFact
from memstore.embedding import Embedder
from memstore.search.views import SearchMode

_BATCH = 256
_UNIT = "unit"
SPEAKER = "speaker"
"""The field of a fact's metadata that filters read."""

PLAIN_HYBRID = "plain hybrid"
"""A mode of `UnitIndex.search`: the store's hybrid search with its boosts at 0."""


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
    text
        What the texts of the units are, and so which parts of a unit are fields of its fact: of a dated one the time,
        which stands in no text then; of a plain one speaker and time, as a server of ours gets them. The store's search
        reads fields before the text, so that what it reads of a dated unit is the unit's text.
    one_stream
        Whether all units of a conversation are of one stream, as a server of ours gets them, or each of its thread's.
    """

    def __init__(self, directory: Path, embedder: Embedder, *, text: UnitText, one_stream: bool = False) -> None:
        self._directory = directory
        self._embedder = embedder
        self._text = text
        self._one_stream = one_stream
        self._store = MemStore(directory, embedder=embedder)
        self._plain: MemStore | None = None

    def fill(self, owner: str, units: Sequence[Unit], *, on_progress: Callable[[int], None] = lambda _: None) -> None:
        """Add the units of one conversation; `on_progress` is told how many more are done."""
        for start in range(0, len(units), _BATCH):
            batch = units[start : start + _BATCH]
            streams = [owner if self._one_stream else unit.thread for unit in batch]
            facts = [_fact(unit, self._text, stream) for unit, stream in zip(batch, streams, strict=True)]
            self._store.add_many(owner, facts)
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
        """Return what the store's search returns, best first; parameters are its own, and see `PLAIN_HYBRID`."""
        if mode == PLAIN_HYBRID:
            hits = self._plain_store().search(owner, query, k=k, mode=SearchMode.HYBRID, where=where)
        else:
            hits = self._store.search(owner, query, k=k, mode=mode, where=where)
        return [Hit(str(hit.fact.metadata[_UNIT]), hit.score) for hit in hits]

    def close(self) -> None:
        """Release the store's files."""
        self._store.close()
        if self._plain is not None:
            self._plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plain_store(self) -> MemStore:
        if self._plain is None:
            settings = MemStoreSettings(month_boost=0, neighbour_boost=0)
            self._plain = MemStore(self._directory, embedder=self._embedder, settings=settings)
        return self._plain


def _fact(unit: Unit, text: UnitText, stream: str) -> NewFact:
    undated = unit.text.removeprefix(f"({unit.date_time}) ") if text is UnitText.DATED else ""
    has_time = bool(undated.strip()) or text is UnitText.PLAIN
    return NewFact(
        undated if undated.strip() else unit.text,
        stream=stream,
        speaker=(unit.speaker or None) if text is UnitText.PLAIN else None,
        time=(unit.date_time or None) if has_time else None,
        # The id keeps two turns with the same words apart, which the store would otherwise take for one fact.
        metadata={_UNIT: unit.id, SPEAKER: unit.speaker},
    )
