"""Vector search within one owner: exact, over rows in memory.

A search is one fp32 product of all rows with the query. That takes milliseconds for 100,000 rows, nothing is built when
an owner is opened, and a removal copies one row. An HNSW graph of as many rows takes as long to build as thousands of
such searches, and a flat index of FAISS searches no faster and moves all later rows for each removal.

The fp32 scores only screen. Whatever order a kernel sums in, and so whichever BLAS is installed, they are within a
known distance of the true ones, so all rows that may belong to the best k are known too. Those are scored again, each
in the same way: the result does not depend on the kernel, the position of a row, or the rows beside it.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from memstore.embedding import Vectors, unit_rows
from memstore.errors import EmbeddingError

Int64s = npt.NDArray[np.int64]

# Rounding a unit row to float32 changes its squared length by about 1e-7; one that was damaged, or never normalised,
# is further off than this.
_SQUARED_NORM_TOLERANCE = 1e-3
# Up to this part of the rows, copying them together is faster than scoring all rows.
_GATHERED_PART = 1 / 8
# At once, to bound the memory that a search takes.
_RESCORED_ROWS = 4096
_SCREENED_SCORES = 2**24


class Neighbour(NamedTuple):
    """One fact near the query."""

    seq: int
    score: float
    """Cosine similarity of its nearest chunk, in [-1, 1]: the exact one, rounded to float32."""


class VectorIndex:
    """Exact cosine search over the facts of one owner, each with one vector or several; not thread-safe.

    A search uses one thread: see `_product`.
    """

    def __init__(self, dimension: int) -> None:
        # Rows [0, num_rows) are in use, in no particular order.
        self._rows = np.empty((0, dimension), dtype=np.float32)
        self._seqs = np.empty(0, dtype=np.int64)
        self._num_rows = 0
        self._num_facts = 0
        self._margin = _screening_margin(dimension)

    def __len__(self) -> int:
        """Return the number of facts."""
        return self._num_facts

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._rows.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes reserved for vectors and seqs."""
        return self._rows.nbytes + self._seqs.nbytes

    def add(self, seqs: Sequence[int] | Int64s, vectors: Sequence[Vectors]) -> None:
        """Add one fact per seq with its vectors `[num_chunks, dimension]`, num_chunks >= 1.

        A fact that is present is replaced, all its chunks; of a seq that is given twice the last one counts.

        Raises
        ------
        EmbeddingError
            On another shape, or a vector that is NaN, infinite or zero, naming the position in `vectors`; nothing
            is changed then.
        """
        assert len(seqs) == len(vectors), f"{len(seqs)} seqs for the vectors of {len(vectors)} facts"
        if not vectors:
            return
        ids = np.asarray(seqs, dtype=np.int64)
        rows, facts = _flatten(vectors, dimension=self.dimension)
        latest = {int(seq): fact for fact, seq in enumerate(ids)}
        kept = np.isin(facts, list(latest.values()))
        replaced = self._positions(np.unique(ids))
        self._append(ids[facts[kept]], rows[kept])
        self._drop(replaced)

    def load(self, seqs: Int64s, rows: Vectors) -> None:
        """Fill an empty index with unit rows `[n, dimension]`; a seq in `seqs` `[n]` repeats once per chunk.

        Both arrays belong to the index from then on, which writes into them.

        Raises
        ------
        EmbeddingError
            On a row whose length is not 1, naming its position: the search would not be exact.
        """
        assert not self._num_rows, f"load() into an index of {self._num_rows} rows"
        assert rows.shape == (len(seqs), self.dimension), f"{len(seqs)} seqs, rows of shape {rows.shape}"
        with np.errstate(over="ignore", invalid="ignore"):
            squared_norms = np.einsum("nd,nd->n", rows, rows)
            unit = np.abs(squared_norms - 1) < _SQUARED_NORM_TOLERANCE
        if not unit.all():
            position = int(np.argmin(unit))
            raise EmbeddingError(f"row {position}, of fact {seqs[position]}, is no unit vector", position=position)
        self._rows, self._seqs = np.ascontiguousarray(rows, dtype=np.float32), np.asarray(seqs, dtype=np.int64)
        self._num_rows, self._num_facts = len(rows), len(np.unique(seqs))

    def remove(self, seqs: Sequence[int] | Int64s) -> None:
        """Remove the facts `seqs`, where present."""
        self._drop(self._positions(np.unique(np.asarray(seqs, dtype=np.int64))))

    def search(self, vector: npt.ArrayLike, k: int, *, allowed: Int64s | None = None) -> list[Neighbour]:
        """Return the min(k, matching) facts nearest to `vector` `[dimension]`, best first, ties by seq.

        Parameters
        ----------
        allowed
            The seqs that match, increasing; None for all.

        Raises
        ------
        EmbeddingError
            On a vector that has another shape or no direction.
        """
        query = unit_rows(np.asarray(vector)[None], rows=1, dimension=self.dimension)[0]
        rows = self._rows[: self._num_rows]
        if allowed is None:
            return self._nearest(query, _product(rows, query), k)
        positions = self._positions(allowed)
        few = len(positions) <= len(rows) * _GATHERED_PART
        scores = _product(rows[positions], query) if few else _product(rows, query)[positions]
        return self._nearest(query, scores, k, positions=positions)

    def search_many(self, vectors: npt.ArrayLike, k: int) -> list[list[Neighbour]]:
        """Return what `search` returns for each of `vectors` `[m, dimension]`, reading the rows fewer times."""
        matrix = np.asarray(vectors)
        queries = unit_rows(matrix, rows=len(matrix), dimension=self.dimension)
        rows = self._rows[: self._num_rows]
        step = max(1, _SCREENED_SCORES // max(1, len(rows)))
        found: list[list[Neighbour]] = []
        for start in range(0, len(queries), step):
            batch = queries[start : start + step]
            scores = _product(batch, rows.T)  # [batch, num_rows]
            found.extend(self._nearest(*pair, k) for pair in zip(batch, scores, strict=True))
        return found

    def _nearest(self, query: Vectors, scores: Vectors, k: int, *, positions: Int64s | None = None) -> list[Neighbour]:
        """Return the best k facts of the rows at `positions`, or of all, given the screening score of each."""
        if k < 1 or not len(scores):
            return []
        candidates = self._candidates(scores, k, positions)
        seqs, exact = self._seqs[candidates], self._rescore(query, candidates)
        order = np.lexsort((seqs, -exact))
        if self._num_rows > self._num_facts:
            # The best chunk of a fact comes first; the others go.
            order = order[np.sort(np.unique(seqs[order], return_index=True)[1])]
        order = order[:k]
        return [Neighbour(*pair) for pair in zip(seqs[order].tolist(), exact[order].tolist(), strict=True)]

    def _candidates(self, scores: Vectors, k: int, positions: Int64s | None) -> Int64s:
        """Return positions of rows that hold the best row of each of the k best facts.

        With e the error of a score, k facts have a row that truly scores `edge - e` or more, so a fact that scores
        less is none of the best k, and the best row of one that is among them has a screening score of at least
        `edge - 2e`. Equal is what is equal after rounding and clamping, which the margin allows for.
        """
        wanted = k
        floor = -np.inf
        while wanted < len(scores):
            edge = float(np.partition(scores, len(scores) - wanted)[len(scores) - wanted])
            if self._num_rows == self._num_facts or self._count_facts(scores >= edge, positions) >= k:
                floor = min(edge, 1.0) - self._margin
                break
            wanted *= 2
        # From -1 down all scores are equal.
        chosen = np.flatnonzero(scores >= floor) if floor > -1 else np.arange(len(scores))
        return chosen if positions is None else positions[chosen]

    def _count_facts(self, chosen: npt.NDArray[np.bool_], positions: Int64s | None) -> int:
        seqs = self._seqs[: self._num_rows] if positions is None else self._seqs[positions]
        return len(np.unique(seqs[chosen]))

    def _rescore(self, query: Vectors, positions: Int64s) -> Vectors:
        """Return the cosines of the rows at `positions`, `[len(positions)]`; equal rows have equal ones.

        The products of float32 values are exact in float64, and each row is summed by itself, in one order.
        """
        exact = np.empty(len(positions), dtype=np.float32)
        query64 = query.astype(np.float64)
        for start in range(0, len(positions), _RESCORED_ROWS):
            block = positions[start : start + _RESCORED_ROWS]
            exact[start : start + _RESCORED_ROWS] = (self._rows[block] * query64).sum(axis=1)
        return exact.clip(-1, 1)

    def _positions(self, seqs: Int64s) -> Int64s:
        """Return the positions of all rows of the facts `seqs`, which are increasing."""
        if not len(seqs):
            return np.empty(0, dtype=np.int64)
        mine = self._seqs[: self._num_rows]
        # Much faster than np.isin where seqs are far apart: rows are mostly in the order of their seqs.
        return np.flatnonzero(seqs.take(np.searchsorted(seqs, mine), mode="clip") == mine)

    def _append(self, seqs: Int64s, rows: Vectors) -> None:
        start, stop = self._num_rows, self._num_rows + len(rows)
        if stop > len(self._rows):
            # Exactly what the first batch needs, since that is all of the owner; later a quarter more.
            self._resize(stop if not start else max(stop, len(self._rows) * 5 // 4))
        self._rows[start:stop] = rows
        self._seqs[start:stop] = seqs
        self._num_rows = stop
        self._num_facts += len(np.unique(seqs))

    def _drop(self, positions: Int64s) -> None:
        """Remove rows, all of each fact; the last rows take the places that become free."""
        self._num_facts -= len(np.unique(self._seqs[positions]))
        stop = self._num_rows - len(positions)
        holes = positions[positions < stop]
        tail = np.setdiff1d(np.arange(stop, self._num_rows), positions, assume_unique=True)
        self._rows[holes] = self._rows[tail]
        self._seqs[holes] = self._seqs[tail]
        self._num_rows = stop
        if stop < len(self._rows) // 2:
            self._resize(stop)

    def _resize(self, capacity: int) -> None:
        rows = np.empty((capacity, self.dimension), dtype=np.float32)
        seqs = np.empty(capacity, dtype=np.int64)
        rows[: self._num_rows] = self._rows[: self._num_rows]
        seqs[: self._num_rows] = self._seqs[: self._num_rows]
        self._rows, self._seqs = rows, seqs


def _product(rows: Vectors, other: Vectors) -> Vectors:
    """Return `rows @ other`, on one thread.

    Two pools of threads, this one's and the one of the model that embeds the query, get into each other's way: on as
    many cores as threads, a search right after an embedding took ten times as long as either.
    """
    with _thread_pools().limit(limits=1, user_api="blas"):
        return rows @ other


@cache
def _thread_pools() -> ThreadpoolController:
    # Finding the libraries takes milliseconds.
    return ThreadpoolController()


def _screening_margin(dimension: int) -> float:
    """Return by how much the fp32 scores of two unit rows may be in the wrong order.

    N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1, equation (3.5): summed in any
    order, a product of n terms errs by at most n u / (1 - n u) |x| |y|. One percent more is for the lengths of the
    rows; 2**-22 is for rounding the exact score and the edge to float32, and for products that underflow.
    """
    terms = dimension * 2.0**-24
    return 2 * 1.01 * terms / (1 - terms) + 2.0**-22


def _flatten(vectors: Sequence[Vectors], *, dimension: int) -> tuple[Vectors, Int64s]:
    """Return the unit rows of all facts, and of each row the position of its fact in `vectors`."""
    chunks = [np.asarray(of_fact) for of_fact in vectors]
    for position, of_fact in enumerate(chunks):
        if of_fact.ndim != 2 or of_fact.shape[1] != dimension or not len(of_fact):
            shape = list(of_fact.shape)
            raise EmbeddingError(
                f"the vectors of text {position} have shape {shape}, not [1 or more, {dimension}]", position=position
            )
    facts = np.repeat(np.arange(len(chunks)), [len(of_fact) for of_fact in chunks])
    try:
        rows = unit_rows(np.concatenate(chunks), rows=len(facts), dimension=dimension)
    except EmbeddingError as error:
        position = int(facts[error.position])
        raise EmbeddingError(
            f"a vector of text {position} is NaN, infinite or zero: the text has no direction", position=position
        ) from error
    return rows, facts
