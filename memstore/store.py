"""`MemStore`: facts of many owners, added, changed, searched and deleted."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy.typing as npt

from memstore.drafts import Progress
from memstore.embedding import Embedder, SentenceTransformerEmbedder
from memstore.errors import FactNotFound
from memstore.kv.blobs import KVBlobs
from memstore.lifecycle import KEEP, FactPatch, Keep, Lifecycle, PurgeReceipt
from memstore.location import open_records
from memstore.records.base import OwnerStats, RecordStore
from memstore.search.searcher import Searcher
from memstore.search.views import SearchMode
from memstore.searchable import vectors_name
from memstore.session_log import SessionLog
from memstore.session_log.lazy import LazySessionLog
from memstore.settings import MemStoreSettings
from memstore.types import Addition, Change, Fact, FactId, FactState, NewFact, OwnerId, SearchHit
from memstore.validation import possible_ids, validate_count, validate_owner, validate_query, validate_stream

# `MemStore.list` would shadow the builtin in the annotations beside it.
_Facts: TypeAlias = list[Fact]
_Hits: TypeAlias = list[SearchHit]
_Owners: TypeAlias = list[OwnerId]
_Changes: TypeAlias = list[Change]
_Additions: TypeAlias = list[Addition]

_PAGE = 1000


class MemStore:
    """Facts of many owners, safe to share between threads; any number of processes may have one store open.

    The record is the truth: it is durable before `add` returns. Vectors in memory and KV blobs follow from it.

    Parameters
    ----------
    location
        A directory, made if absent, `sqlite:///DIR`, or a Redis URL (see `docs/store.md`).
    embedder
        None is the sentence-transformers model that the settings name.
    settings
        None reads them from the environment.
    blobs
        KV cache to keep in step with the records; closed by whoever opened it.
    clock
        Unix seconds, to stamp facts with and to expire them by.

    Raises
    ------
    InvalidLocation, StoreError
        See `memstore.errors`; `EmbedderMismatch` where the vectors were made by another embedder, or by a
        release that made them of other text.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        embedder: Embedder | None = None,
        settings: MemStoreSettings | None = None,
        blobs: KVBlobs | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings or MemStoreSettings()
        self.blobs = blobs
        self._clock = clock
        self.records: RecordStore = open_records(location, self.settings, clock=clock)
        self._sessions = LazySessionLog(location, self.settings)
        try:
            self.embedder: Embedder = embedder or embedder_of(self.settings)
            self._lifecycle = Lifecycle(
                self.records,
                embedder=self.embedder,
                embed_batch=self.settings.embed_batch,
                blobs=blobs,
                clock=clock,
            )
            self._lifecycle.check_embedder(self.records.claim_embedder(vectors_name(self.embedder)))
        except BaseException:
            self.records.close()
            raise
        self._searcher = Searcher(self.records, self._lifecycle, embedder=self.embedder, settings=self.settings)

    # ---- adding and changing ----

    def add(
        self,
        owner: str,
        text: str,
        *,
        stream: str = "",
        speaker: str | None = None,
        time: str | None = None,
        metadata: Mapping[str, object] | None = None,
        expires_at: float | None = None,
        idempotency_key: str | None = None,
    ) -> Fact:
        """Store one fact and return it; a fact that is there already, in every field, is returned instead.

        Raises
        ------
        InvalidOwner, InvalidFact, IdempotencyConflict, EmbeddingError, StoreError
        """
        fact = NewFact(text, stream, speaker, time, {} if metadata is None else metadata, expires_at)
        return self.add_many(owner, [fact], idempotency_key=idempotency_key)[0]

    def add_many(
        self,
        owner: str,
        facts: Sequence[NewFact],
        *,
        idempotency_key: str | None = None,
        on_progress: Progress | None = None,
    ) -> _Facts:
        """Store all of `facts`, or none, and return them in order.

        Parameters
        ----------
        idempotency_key
            A call with a key that was used before stores nothing and returns what the first one stored, as it is now;
            `FactNotFound` where that has been deleted since.

        Raises
        ------
        InvalidOwner, InvalidFact, IdempotencyConflict, EmbeddingError, StoreError
        """
        inserted = self._lifecycle.insert(validate_owner(owner), facts, key=idempotency_key, on_progress=on_progress)
        return [one.insertion.fact for one in inserted]

    def ingest(
        self,
        owner: str,
        facts: Sequence[NewFact],
        *,
        idempotency_key: str | None = None,
        on_progress: Progress | None = None,
    ) -> _Additions:
        """Store all of `facts`, or none, as `add_many` does, and say of each what a caller may want to look at.

        Raises
        ------
        InvalidOwner, InvalidFact, IdempotencyConflict, EmbeddingError, StoreError
        """
        owner_id = validate_owner(owner)
        inserted = self._lifecycle.insert(owner_id, facts, key=idempotency_key, on_progress=on_progress)
        near = self._searcher.near_duplicates(owner_id, inserted)
        return [
            Addition(*one.insertion, tuple(similar), 1 if one.vectors is None else len(one.vectors))
            for one, similar in zip(inserted, near, strict=True)
        ]

    def update(
        self,
        owner: str,
        fact_id: str,
        *,
        text: str | Keep = KEEP,
        stream: str | Keep = KEEP,
        speaker: str | Keep | None = KEEP,
        time: str | Keep | None = KEEP,
        metadata: Mapping[str, object] | Keep = KEEP,
        expires_at: float | Keep | None = KEEP,
    ) -> Fact:
        """Change some fields of a fact and return it; what it was becomes history, and its KV is dropped.

        Raises
        ------
        FactNotFound, FactSuperseded, DuplicateFact, InvalidFact, EmbeddingError, StoreError
        """
        patch = FactPatch(text, stream, speaker, time, metadata, expires_at)
        return self._lifecycle.update(validate_owner(owner), fact_id, patch)

    def supersede(
        self,
        owner: str,
        fact_id: str,
        text: str,
        *,
        stream: str | Keep = KEEP,
        speaker: str | Keep | None = KEEP,
        time: str | None = None,
        metadata: Mapping[str, object] | Keep = KEEP,
        expires_at: float | None = None,
    ) -> Fact:
        """Put a new fact in the place of another, which becomes history, and return the new one.

        Stream, speaker and metadata are taken over from the old fact unless given; time and expiry are not, since
        they were the old one's. Where the owner has the new fact already, that one takes the place; it goes on to
        name the first fact that it superseded.

        Raises
        ------
        FactNotFound, FactSuperseded, InvalidFact, EmbeddingError, StoreError
        """
        patch = FactPatch(text, stream, speaker, time, metadata, expires_at)
        return self._lifecycle.supersede(validate_owner(owner), fact_id, patch)

    def delete(self, owner: str, fact_id: str) -> Fact:
        """Remove a fact with its history, vectors and KV, and return it; raise `FactNotFound` where there is none."""
        removed = self._lifecycle.alive(self._lifecycle.remove(validate_owner(owner), possible_ids([fact_id])))
        if not removed:
            raise FactNotFound(fact_id)
        return removed[0]

    def expire(self, owner: str | None = None) -> int:
        """Remove the facts whose time has come, of one owner or of all; return how many.

        To be called now and then; a fact that has expired is not returned any more in any case.
        """
        due = self.records.owners_with_expired(now=self._clock()) if owner is None else [validate_owner(owner)]
        return sum(map(self._lifecycle.expire, due))

    def purge(self, owner: str) -> PurgeReceipt:
        """Remove everything of an owner: sessions, records, history, vectors, KV, the entries of the feed.

        The owner's next epoch begins, so that nothing that was derived before is reachable.
        """
        owner_id = validate_owner(owner)
        # First: who is told of the purge by the feed finds none of them.
        sessions = self._sessions.purge(owner_id)
        receipt = self._lifecycle.purge(owner_id)
        self._searcher.drop(owner_id)
        return receipt._replace(sessions=sessions)

    # ---- reading ----

    def get(self, owner: str, fact_id: str) -> Fact:
        """Return one fact, superseded or not; raise `FactNotFound` where this owner has no such fact."""
        facts = self.get_many(owner, [fact_id])
        if not facts:
            raise FactNotFound(fact_id)
        return facts[0]

    def get_many(self, owner: str, fact_ids: Sequence[str]) -> _Facts:
        """Return those of `fact_ids` that this owner has, in their order."""
        return self._lifecycle.alive(self.records.get_many(validate_owner(owner), possible_ids(fact_ids)))

    def list(
        self,
        owner: str,
        *,
        stream: str | None = None,
        limit: int = 100,
        after_seq: int = 0,
        superseded: bool = False,
    ) -> _Facts:
        """Return up to `limit` facts with seq > `after_seq`, in order; of one stream, or of all for None.

        Superseded facts are left out unless asked for.
        """
        owner_id, stream = validate_owner(owner), validate_stream(stream)
        limit, after_seq = validate_count("limit", limit), validate_count("after_seq", after_seq)
        facts: _Facts = []
        while len(facts) < limit:
            wanted = min(limit - len(facts), _PAGE)
            page = self.records.page(owner_id, stream=stream, limit=wanted, after_seq=after_seq, superseded=superseded)
            facts += self._lifecycle.alive(page)
            if len(page) < wanted:
                break
            after_seq = page[-1].seq
        return facts

    def history(self, owner: str, fact_id: str) -> _Facts:
        """Return a fact in every version, oldest first, those of the facts that it took the place of before its own."""
        owner_id = validate_owner(owner)
        chain: _Facts = []
        seen: set[FactId] = set()
        fact: Fact | None = self.get(owner, fact_id)
        while fact is not None and fact.id not in seen:
            seen.add(fact.id)
            chain = [*self.records.history(owner_id, fact.id), fact, *chain]
            ancestors = self.get_many(owner, [fact.supersedes]) if fact.supersedes else []
            fact = ancestors[0] if ancestors else None
        return chain

    def count(self, owner: str) -> int:
        """Return the number of this owner's current facts."""
        owner_id = validate_owner(owner)
        expired = self._lifecycle.expired(owner_id, self.records.head(owner_id))
        return self.records.count(owner_id) - sum(fact.state is FactState.CURRENT for fact in expired)

    def owners(self) -> _Owners:
        """Return every owner that has a fact, sorted."""
        return self.records.owners()

    def stats(self, owner: str) -> OwnerStats:
        """Return what the store holds of an owner, what has expired and is not removed yet included."""
        return self.records.stats(validate_owner(owner))

    def epoch(self, owner: str) -> int:
        """Return the owner's epoch, which grows with every purge. What is derived in an older one is stale."""
        return self.records.head(validate_owner(owner)).epoch

    def changes(self, since: int, *, owner: str | None = None, limit: int = 1000) -> _Changes:
        """Return up to `limit` changes with position > `since`, in order; of one owner, or of all for None.

        Raises
        ------
        FeedGap
            Where they have been trimmed.
        """
        since, limit = validate_count("since", since), validate_count("limit", limit)
        return self.records.changes(since, owner=None if owner is None else validate_owner(owner), limit=limit)

    # ---- searching ----

    def search(
        self,
        owner: str,
        query: str,
        *,
        k: int,
        min_score: float | None = None,
        where: Mapping[str, object] | None = None,
        mode: str = SearchMode.VECTOR,
    ) -> _Hits:
        """Return the current facts of `owner` that suit `query` best, best first, ties by seq.

        Exactly min(k, matching) hits, less those whose `unboosted` score is below `min_score`. By vector and hybrid,
        every fact that `where` lets pass matches; by keyword, those that share a word with the query. An unknown owner
        has none.

        Parameters
        ----------
        where
            A filter (see `memstore.search.filters`) that applies before the best are chosen.
        mode
            `vector`, `keyword` or `hybrid`.

        Raises
        ------
        InvalidOwner, InvalidQuery, EmbeddingError, StoreError
        """
        k = validate_query(query, k=k, min_score=min_score)
        hits = self._searcher.by_text(validate_owner(owner), query, k=k, where=where, mode=mode)
        return hits if min_score is None else [hit for hit in hits if hit.unboosted >= min_score]

    def search_vector(
        self, owner: str, vector: npt.ArrayLike, k: int, *, where: Mapping[str, object] | None = None
    ) -> _Hits:
        """Return the min(k, matching) facts nearest to `vector` `[dimension]`, best first, ties by seq."""
        k = validate_count("k", k)
        return self._searcher.by_vector(validate_owner(owner), vector, k=k, where=where)

    def reembed(self, owner: str, facts: Sequence[Fact]) -> None:
        """Make the vectors of facts anew that are missing or damaged."""
        self._lifecycle.reembed(validate_owner(owner), facts)

    @property
    def session_log(self) -> SessionLog:
        """The sessions kept beside the facts; opened by whoever needs it first, and closed with the store."""
        return self._sessions.get()

    def index_bytes(self) -> int:
        """Return the memory that what is searched of the owners in use takes."""
        return self._searcher.nbytes

    def close(self) -> None:
        """Release files and connections; may be called twice."""
        self._searcher.close()
        self._sessions.close()
        self.records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def embedder_of(settings: MemStoreSettings) -> Embedder:
    """Return the embedder that the settings name."""
    return SentenceTransformerEmbedder(
        settings.embedder_model, device=settings.embedder_device, threads=settings.embedder_threads
    )
