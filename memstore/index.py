"""Vector search, one index per owner, so that the filter by owner comes before the top k."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import faiss
import numpy as np
import numpy.typing as npt

from memstore.embedding import Vectors, unit_rows
from memstore.records.base import StoredVectors
from memstore.types import OwnerId


class Neighbour(NamedTuple):
    """One vector near the query."""

    seq: int
    score: float
    """Cosine similarity in [-1, 1]."""


class OwnerIndex:
    """Exact cosine search over the vectors of one owner; not thread-safe."""

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._faiss = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._seqs: set[int] = set()

    def __len__(self) -> int:
        return len(self._seqs)

    def add(self, seqs: Sequence[int] | npt.NDArray[np.int64], vectors: npt.ArrayLike) -> None:
        """Add `vectors`, `[len(seqs), dimension]`; one whose seq is present takes its place.

        Raises
        ------
        EmbeddingError
            On a vector that has no direction; nothing is added then.
        """
        rows = unit_rows(vectors, rows=len(seqs), dimension=self._dimension)
        ids = np.asarray(seqs, dtype=np.int64)
        # The last one of a seq that is given twice counts.
        latest = {int(seq): row for row, seq in enumerate(ids)}
        self.remove(list(latest))
        if latest:
            self._faiss.add_with_ids(rows[list(latest.values())], np.fromiter(latest, dtype=np.int64))
            self._seqs.update(latest)

    def remove(self, seqs: Sequence[int]) -> None:
        """Remove the vectors of `seqs`, where present."""
        present = self._seqs.intersection(seqs)
        if present:
            self._faiss.remove_ids(faiss.IDSelectorBatch(np.fromiter(present, dtype=np.int64)))
            self._seqs -= present

    def search(self, vector: npt.ArrayLike, k: int) -> list[Neighbour]:
        """Return the min(k, len) nearest to `vector` `[dimension]`, best first, ties by seq."""
        query = unit_rows(np.asarray(vector)[None], rows=1, dimension=self._dimension)
        k = min(k, len(self))
        if k == 0:
            return []
        wanted = k
        while True:
            # FAISS breaks a tie at the edge as it likes: widen until the edge lies between two scores.
            wanted = min(wanted + 1, len(self))
            scores, ids = self._faiss.search(query, wanted)
            if wanted == len(self) or scores[0, -1] < scores[0, k - 1]:
                break
            wanted *= 2
        ranked = sorted((-float(score), int(seq)) for score, seq in zip(scores[0], ids[0], strict=True) if seq >= 0)
        return [Neighbour(seq, max(-1.0, min(1.0, -negated))) for negated, seq in ranked[:k]]


class _Entry:
    __slots__ = ("index", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index: OwnerIndex | None = None


class FactIndex:
    """The indexes of all owners, each filled from the records when first searched.

    Thread-safe. A caller that changes the records tells the index after the commit: a load that runs meanwhile
    has either seen the commit or is told.

    Parameters
    ----------
    load
        Returns all vectors of an owner.
    max_open
        Owners whose vectors stay in memory; the least recently searched is dropped first.
    """

    def __init__(self, load: Callable[[OwnerId], StoredVectors], *, dimension: int, max_open: int) -> None:
        self._load = load
        self._dimension = dimension
        self._max_open = max_open
        self._table = threading.Lock()
        self._entries: OrderedDict[OwnerId, _Entry] = OrderedDict()

    def add(self, owner: OwnerId, seqs: Sequence[int], vectors: Vectors) -> None:
        """Add vectors that the records have by now, `[len(seqs), dimension]`."""
        with self._table:
            entry = self._entries.get(owner)
        if entry is not None:
            with entry.lock:
                if entry.index is not None:
                    entry.index.add(seqs, vectors)

    def remove(self, owner: OwnerId, seqs: Sequence[int]) -> None:
        """Remove vectors that the records no longer have."""
        with self._table:
            entry = self._entries.get(owner)
        if entry is not None:
            with entry.lock:
                if entry.index is not None:
                    entry.index.remove(seqs)

    def drop(self, owner: OwnerId) -> None:
        """Forget what is in memory of `owner`; the next search loads it again."""
        with self._table:
            self._entries.pop(owner, None)

    def search(self, owner: OwnerId, vector: npt.ArrayLike, k: int) -> list[Neighbour]:
        """Return the min(k, count) vectors of `owner` nearest to `vector` `[dimension]`, best first."""
        with self._table:
            entry = self._entries.setdefault(owner, _Entry())
            self._entries.move_to_end(owner)
        with entry.lock:
            if entry.index is None:
                stored = self._load(owner)
                index = OwnerIndex(self._dimension)
                index.add(stored.seqs, stored.vectors)
                entry.index = index
            neighbours = entry.index.search(vector, k)
            empty = not len(entry.index)
        with self._table:
            # Owners that have nothing must not push out those that have.
            if empty and self._entries.get(owner) is entry:
                del self._entries[owner]
            while len(self._entries) > self._max_open:
                self._entries.popitem(last=False)
        return neighbours
