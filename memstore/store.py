"""`MemStore`: facts of many owners, added, listed, searched and deleted."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memstore.blobs import KVBlobs
from memstore.embedding import Embedder, SentenceTransformerEmbedder, Vectors, unit_rows
from memstore.errors import EmbedderMismatch, EmbeddingError, FactNotFound, InvalidQuery
from memstore.index import FactIndex
from memstore.records.base import Draft, RecordStore
from memstore.records.sqlite import SQLiteRecords
from memstore.settings import MemStoreSettings
from memstore.types import Fact, FactId, NewFact, OwnerId, SearchHit
from memstore.validation import validate_count, validate_fact, validate_owner, validate_query

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (texts embedded so far, texts to embed)."""

# `MemStore.list` would shadow the builtin in the annotations beside it.
_Facts: TypeAlias = list[Fact]
_Hits: TypeAlias = list[SearchHit]
_Owners: TypeAlias = list[OwnerId]


class MemStore:
    """Facts with their vectors in one directory, safe to share between threads.

    The record is the truth: it is on disk before `add` returns. Vectors in memory and KV blobs follow from it.

    Parameters
    ----------
    path
        Directory of the store, made if absent; one MemStore at a time may have it open.
    embedder
        None is the sentence-transformers model that the settings name.
    settings
        None reads them from the environment.
    blobs
        KV cache to keep in step with the records; closed by whoever opened it.

    Raises
    ------
    StoreError
        See `memstore.errors`; `EmbedderMismatch` where the vectors were made by another embedder.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        embedder: Embedder | None = None,
        settings: MemStoreSettings | None = None,
        blobs: KVBlobs | None = None,
    ) -> None:
        self.settings = settings or MemStoreSettings()
        self.blobs = blobs
        self._records: RecordStore = SQLiteRecords(Path(path), busy_timeout_s=self.settings.busy_timeout_s)
        try:
            self.embedder: Embedder = embedder or _embedder(self.settings)
            self._claim_fingerprint()
        except BaseException:
            self._records.close()
            raise
        dimension = self.embedder.dimension
        self._index = FactIndex(
            lambda owner: self._records.vectors(owner, dimension=dimension),
            dimension=dimension,
            max_open=self.settings.max_open_indexes,
        )
        # Held over a commit and its step in the index: a delete must not overtake the add that it undoes.
        self._writing = threading.Lock()

    def add(
        self,
        owner: str,
        text: str,
        *,
        stream: str = "",
        speaker: str | None = None,
        time: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> Fact:
        """Store one fact and return it; a fact that is there already, in every field, is returned instead.

        Raises
        ------
        InvalidOwner, InvalidFact, EmbeddingError, StoreError
        """
        fact = NewFact(
            text=text, stream=stream, speaker=speaker, time=time, metadata={} if metadata is None else metadata
        )
        return self.add_many(owner, [fact])[0]

    def add_many(self, owner: str, facts: Sequence[NewFact], *, on_progress: Progress | None = None) -> _Facts:
        """Store all of `facts`, or none, and return them in order.

        Raises
        ------
        InvalidOwner, InvalidFact, EmbeddingError, StoreError
        """
        owner_id = validate_owner(owner)
        for fact in facts:
            validate_fact(fact)
        known = self._records.find_identical(owner_id, facts)
        fresh = [position for position, twin in enumerate(known) if twin is None]
        if not fresh:
            return [twin for twin in known if twin is not None]
        vectors = self._embed_facts(facts, fresh, on_progress)
        drafts = [Draft(facts[position], vector) for position, vector in zip(fresh, vectors, strict=True)]
        with self._writing:
            inserted = self._records.insert(owner_id, drafts)
            created = [row for row, insertion in enumerate(inserted) if insertion.created]
            self._index.add(owner_id, [inserted[row].fact.seq for row in created], vectors[created])
        stored = iter(inserted)
        return [next(stored).fact if twin is None else twin for twin in known]

    def get(self, owner: str, fact_id: str) -> Fact:
        """Return one fact; raise `FactNotFound` where this owner has no such fact."""
        fact = self._records.get(validate_owner(owner), FactId(fact_id))
        if fact is None:
            raise FactNotFound(fact_id)
        return fact

    def get_many(self, owner: str, fact_ids: Sequence[str]) -> _Facts:
        """Return those of `fact_ids` that this owner has, in their order."""
        return self._records.get_many(validate_owner(owner), [FactId(fact_id) for fact_id in fact_ids])

    def list(self, owner: str, *, stream: str | None = None, limit: int = 100, after_seq: int = 0) -> _Facts:
        """Return up to `limit` facts with seq > `after_seq`, in order; of one stream, or of all for None."""
        validate_count("limit", limit)
        validate_count("after_seq", after_seq)
        return self._records.page(validate_owner(owner), stream=stream, limit=limit, after_seq=after_seq)

    def neighbours(self, owner: str, stream: str, seq: int, *, before: int) -> _Facts:
        """Return the `before` facts that precede `seq` in `stream`, in order; fewer at the start of the stream."""
        validate_count("before", before)
        return self._records.preceding(validate_owner(owner), stream, seq=seq, limit=before)

    def count(self, owner: str) -> int:
        """Return the number of this owner's facts."""
        return self._records.count(validate_owner(owner))

    def owners(self) -> _Owners:
        """Return every owner that has a fact, sorted."""
        return self._records.owners()

    def search(self, owner: str, query: str, *, k: int, min_score: float | None = None) -> _Hits:
        """Return the facts of `owner` nearest to `query`, best first, ties by seq.

        Exactly min(k, count) hits, less those whose score is below `min_score`. An unknown owner has none.

        Raises
        ------
        InvalidOwner, InvalidQuery, EmbeddingError, StoreError
        """
        validate_query(query, k=k, min_score=min_score)
        owner_id = validate_owner(owner)
        if k == 0:
            return []
        vector = unit_rows(self.embedder.embed([query]), rows=1, dimension=self.embedder.dimension)[0]
        hits = self._nearest(owner_id, vector, k)
        return hits if min_score is None else [hit for hit in hits if hit.score >= min_score]

    def search_vector(self, owner: str, vector: npt.ArrayLike, k: int) -> _Hits:
        """Return the min(k, count) facts nearest to `vector` `[dimension]`, best first, ties by seq."""
        validate_count("k", k)
        if np.shape(vector) != (self.embedder.dimension,):
            raise InvalidQuery(f"vector has shape {list(np.shape(vector))}, not [{self.embedder.dimension}]")
        owner_id = validate_owner(owner)
        try:
            return self._nearest(owner_id, vector, k) if k else []
        except EmbeddingError as error:
            raise InvalidQuery(f"vector has no direction: {error}") from error

    def truncated(self, text: str) -> bool:
        """Return whether the end of `text` does not reach its vector, because it is too long for the embedder."""
        return self.embedder.count_tokens(text) > self.embedder.max_tokens

    def delete(self, owner: str, fact_id: str) -> Fact:
        """Remove a fact, its vector and its KV, and return the fact; raise `FactNotFound` where there is none."""
        owner_id = validate_owner(owner)
        with self._writing:
            fact = self._records.get(owner_id, FactId(fact_id))
            if fact is None:
                raise FactNotFound(fact_id)
            # The cache first: where that fails nothing is lost, and the call can be repeated.
            if self.blobs is not None:
                self.blobs.drop_fact(owner_id, fact.id)
            self._records.delete(owner_id, fact.id)
            self._index.remove(owner_id, [fact.seq])
            # And once more: one that was being made when the record was still there.
            if self.blobs is not None:
                self.blobs.drop_fact(owner_id, fact.id)
        return fact

    def epoch(self, owner: str) -> int:
        """Return the owner's epoch: 0 until it is bumped. What is derived from an older one is stale."""
        return self._records.epoch(validate_owner(owner))

    def bump_epoch(self, owner: str) -> int:
        """Start the owner's next epoch and return it."""
        return self._records.bump_epoch(validate_owner(owner))

    def close(self) -> None:
        """Release the directory; may be called twice."""
        self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _claim_fingerprint(self) -> None:
        stored, offered = self._records.embedder_fingerprint(), self.embedder.fingerprint
        if stored is None:
            self._records.set_embedder_fingerprint(offered)
        elif stored != offered:
            raise EmbedderMismatch(stored=stored, offered=offered)

    def _embed_facts(self, facts: Sequence[NewFact], positions: Sequence[int], on_progress: Progress | None) -> Vectors:
        batches, size = [], self.settings.embed_batch
        for start in range(0, len(positions), size):
            batch = positions[start : start + size]
            texts = [facts[position].text for position in batch]
            for position, text in zip(batch, texts, strict=True):
                if self.truncated(text):
                    logger.warning(
                        "text %d is searchable by its first %d tokens alone: split it to have all of it found",
                        position,
                        self.embedder.max_tokens,
                    )
            try:
                batches.append(
                    unit_rows(self.embedder.embed(texts), rows=len(batch), dimension=self.embedder.dimension)
                )
            except EmbeddingError as error:
                if error.position is None:
                    raise
                position = batch[error.position]
                raise EmbeddingError(
                    f"text {position} of {len(facts)} has no usable vector", position=position
                ) from error
            if on_progress is not None:
                on_progress(start + len(batch), len(positions))
        return np.concatenate(batches)

    def _nearest(self, owner: OwnerId, vector: npt.ArrayLike, k: int) -> _Hits:
        wanted = k
        while True:
            near = self._index.search(owner, vector, wanted)
            facts = self._records.get_by_seqs(owner, [neighbour.seq for neighbour in near])
            hits = [SearchHit(facts[seq], score) for seq, score in near if seq in facts]
            if len(hits) >= k or len(near) < wanted:
                return hits[:k]
            # A fact was deleted between the two look-ups: take as many more.
            wanted += len(near) - len(hits)


def _embedder(settings: MemStoreSettings) -> Embedder:
    return SentenceTransformerEmbedder(
        settings.embedder_model, device=settings.embedder_device, threads=settings.embedder_threads
    )
