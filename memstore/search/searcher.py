"""Finding an owner's facts: by vectors, by words, or by both."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memstore.embedding import Embedder, Vectors, unit_rows
from memstore.errors import EmbeddingError, InvalidQuery, StoreBusy
from memstore.lifecycle import Inserted, Lifecycle
from memstore.records.base import RecordStore
from memstore.search.boosts import Boosts, Ranked
from memstore.search.filters import FactFilter, parse_filter
from memstore.search.views import OwnerView, SearchMode, Views
from memstore.settings import MemStoreSettings
from memstore.types import OwnerId, SearchHit

_ATTEMPTS = 20
_NEAR_DUPLICATES = 5
# Among these are some of other speakers, and the fact itself.
_NEAR_DUPLICATE_DEPTH = 32


class _Query(NamedTuple):
    mode: SearchMode
    vector: Vectors | None
    text: str
    k: int
    where: FactFilter | None


class Searcher:
    """Searches the facts of every owner; see `MemStore` for what each method promises."""

    def __init__(
        self, records: RecordStore, lifecycle: Lifecycle, *, embedder: Embedder, settings: MemStoreSettings
    ) -> None:
        self._records = records
        self._lifecycle = lifecycle
        self._embedder = embedder
        self._near_duplicate_score = settings.near_duplicate_score
        boosts = Boosts(month=settings.month_boost, neighbour=settings.neighbour_boost)
        self._views = Views(
            lambda owner: OwnerView(records, owner, embedder=embedder, reembed=lifecycle.reembed, boosts=boosts),
            max_open=settings.max_open_indexes,
            max_bytes=settings.max_index_bytes,
        )

    @property
    def nbytes(self) -> int:
        """Memory of what is searched of the owners in use."""
        return self._views.nbytes

    def by_text(
        self, owner: OwnerId, query: str, *, k: int, where: Mapping[str, object] | None, mode: str
    ) -> list[SearchHit]:
        """Return the min(k, matching) facts that suit a text best."""
        by, passing = _search_mode(mode), parse_filter(where)
        vector = None
        if by is not SearchMode.KEYWORD and k:
            vector = unit_rows(self._embedder.embed([query]), rows=1, dimension=self._embedder.dimension)[0]
        return self._best(owner, _Query(by, vector, query, k, passing))

    def by_vector(
        self, owner: OwnerId, vector: npt.ArrayLike, *, k: int, where: Mapping[str, object] | None
    ) -> list[SearchHit]:
        """Return the min(k, matching) facts nearest to a vector `[dimension]`."""
        dimension = self._embedder.dimension
        if np.shape(vector) != (dimension,):
            raise InvalidQuery(f"vector has shape {list(np.shape(vector))}, not [{dimension}]")
        try:
            unit = unit_rows(np.asarray(vector)[None], rows=1, dimension=dimension)[0]
        except EmbeddingError as error:
            raise InvalidQuery(f"vector has no direction: {error}") from error
        return self._best(owner, _Query(SearchMode.VECTOR, unit, "", k, parse_filter(where)))

    def near_duplicates(self, owner: OwnerId, added: Sequence[Inserted]) -> list[list[SearchHit]]:
        """Return, for each of the facts just added, others of its speaker that are as near as the settings say.

        Nearest first, a few at most. What two people say are two facts, however near their vectors are.
        """
        near: list[list[SearchHit]] = [[] for _ in added]
        rows = [
            (position, row)
            for position, one in enumerate(added)
            if one.insertion.created and one.vectors is not None
            for row in one.vectors
        ]
        if not rows:
            return near
        with self._views.opened(owner, self._lifecycle.head(owner)) as view:
            found = view.nearest(np.stack([row for _, row in rows]), _NEAR_DUPLICATE_DEPTH)
            versions = {seq: view.version(seq) for neighbours in found for seq, _ in neighbours}
        scores: list[dict[int, float]] = [{} for _ in added]
        for (position, _), neighbours in zip(rows, found, strict=True):
            for seq, score in neighbours:
                if score >= self._near_duplicate_score and seq != added[position].insertion.fact.seq:
                    scores[position][seq] = max(score, scores[position].get(seq, -1.0))
        for position, by_seq in enumerate(scores):
            ordered = sorted(by_seq.items(), key=lambda item: (-item[1], item[0]))
            ranked = [Ranked(seq, score, score) for seq, score in ordered]
            speaker = added[position].insertion.fact.speaker
            hits = [hit for hit in self._hits(owner, ranked, versions) if hit.fact.speaker == speaker]
            near[position] = hits[:_NEAR_DUPLICATES]
        return near

    def drop(self, owner: OwnerId) -> None:
        """Forget what is in memory of an owner."""
        self._views.drop(owner)

    def close(self) -> None:
        """Forget what is in memory."""
        self._views.close()

    def _best(self, owner: OwnerId, query: _Query) -> list[SearchHit]:
        for _ in range(_ATTEMPTS if query.k else 0):
            head = self._lifecycle.head(owner)
            expired = [fact.seq for fact in self._lifecycle.expired(owner, head)]
            with self._views.opened(owner, head) as view:
                view.forget(expired)
                found = view.search(query.mode, vector=query.vector, text=query.text, k=query.k, where=query.where)
                versions = {hit.seq: view.version(hit.seq) for hit in found}
            hits = self._hits(owner, found, versions)
            # Fewer where a fact changed between the two look-ups: look again.
            if len(hits) == len(found):
                return hits
        if query.k:
            raise StoreBusy(f"the facts of owner {owner!r} change faster than they can be read: repeat")
        return []

    def _hits(self, owner: OwnerId, found: Sequence[Ranked], versions: Mapping[int, int | None]) -> list[SearchHit]:
        """Return the facts found that are still as the view has seen them, current and not expired."""
        facts = self._records.get_by_seqs(owner, [hit.seq for hit in found]) if found else {}
        return [
            SearchHit(fact, score, unboosted)
            for seq, score, unboosted in found
            if (fact := facts.get(seq)) is not None
            and fact.version == versions[seq]
            and not self._lifecycle.has_expired(fact)
        ]


def _search_mode(mode: str) -> SearchMode:
    try:
        return SearchMode(mode)
    except ValueError:
        raise InvalidQuery(f"mode is {mode!r}: choose from {', '.join(SearchMode)}") from None
