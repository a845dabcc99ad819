"""What is derived from one owner's records and kept in memory: vectors, words and attributes to search by.

A view is a cache that follows the change feed. It is brought up to date whenever it is opened, so that what any
process has written before is found; where the feed no longer reaches back to what the view has seen, it is built anew.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from memstore.embedding import Embedder, Vectors
from memstore.errors import FeedGap, StoreBusy, StoreDamaged
from memstore.records.base import OwnerHead, RecordStore, StoredVectors
from memstore.search.boosts import Boosts, Ranked, boosted
from memstore.search.filters import AttributeIndex, FactFilter
from memstore.search.fusion import fuse
from memstore.search.keywords import KeywordIndex
from memstore.search.streams import StreamIndex
from memstore.search.vectors import Neighbour, VectorIndex
from memstore.searchable import line_of, vectors_name
from memstore.types import Change, ChangeKind, Fact, FactState, OwnerId

Reembed: TypeAlias = Callable[[OwnerId, Sequence[Fact]], None]
"""Makes and stores the vectors of facts that have none."""

_PAGE = 1000
_ATTEMPTS = 20
_FUSION_DEPTH = 100
_VERSION_BYTES = 100  # of a dict of small integers


class SearchMode(StrEnum):
    """What a search ranks by."""

    VECTOR = "vector"
    KEYWORD = "keyword"
    HYBRID = "hybrid"
    """Both, by a weighted sum of their scores, with what `memstore.search.boosts` adds."""


class OwnerView:
    """The searchable state of one owner at one position of the feed; not thread-safe."""

    def __init__(
        self, records: RecordStore, owner: OwnerId, *, embedder: Embedder, reembed: Reembed, boosts: Boosts
    ) -> None:
        self._records = records
        self._owner = owner
        self._embedder = embedder
        self._reembed = reembed
        self._boosts = boosts
        self._position = -1
        self._keywords: KeywordIndex | None = None
        self._clear()

    def __len__(self) -> int:
        return len(self._versions)

    @property
    def nbytes(self) -> int:
        """Memory that the view takes; of attributes and streams an estimate."""
        size = self._vectors.nbytes + _VERSION_BYTES * len(self._versions)
        if self._keywords is not None:
            size += self._keywords.nbytes
        if self._attributes is not None:
            size += self._attributes.nbytes
        if self._streams is not None:
            size += self._streams.nbytes
        return size

    def close(self) -> None:
        """Give the memory back; the view is empty then, and reads everything anew when it is used again."""
        self._position = -1
        self._clear()

    def version(self, seq: int) -> int | None:
        """Return the version of a fact that the view has seen, or None."""
        return self._versions.get(seq)

    def bring_to(self, head: OwnerHead) -> None:
        """Take in every change up to `head`, or more."""
        for attempt in range(_ATTEMPTS):
            if self._position >= head.position:
                return
            if self._position < 0:
                self._load(head)
                return
            if self._catch_up(makes_lacking=attempt > 1):
                return
            head = self._records.head(self._owner)
        raise StoreBusy(f"the facts of owner {self._owner!r} change faster than they can be read: repeat")

    def forget(self, seqs: Sequence[int]) -> None:
        """Leave out facts that are gone or have expired; what is changed after all comes back with that change."""
        for seq in seqs:
            self._versions.pop(seq, None)
        self._vectors.remove(seqs)
        if self._keywords is not None:
            self._keywords.remove(seqs)
        if self._attributes is not None:
            self._attributes.remove(seqs)
        if self._streams is not None:
            self._streams.remove(seqs)

    def search(
        self,
        mode: SearchMode,
        *,
        vector: Vectors | None,
        text: str,
        k: int,
        where: FactFilter | None,
    ) -> list[Ranked]:
        """Return the min(k, matching) best facts; for keywords, only facts that have a word of `text` match.

        Boosts are for the best `_FUSION_DEPTH` (or k) of the fusion, from the scores of these alone: a fact that
        `where` leaves out has none to give, and still stands between those that it stands between.
        """
        allowed = None if where is None else self._attribute_index().matching(where)
        if mode is SearchMode.KEYWORD:
            return _unboosted(self._keyword_index().search(text, k, allowed=allowed))
        assert vector is not None, f"a {mode} search without a vector"
        if mode is SearchMode.VECTOR:
            return _unboosted(self._vectors.search(vector, k, allowed=allowed))
        keywords, streams = self._hybrid_indexes()
        depth = max(k, _FUSION_DEPTH)
        nearest = self._vectors.search(vector, depth, allowed=allowed)
        worded = keywords.search(text, depth, allowed=allowed)
        lacking = {neighbour.seq for neighbour in worded}.difference(neighbour.seq for neighbour in nearest)
        if lacking:
            nearest += self._vectors.search(vector, len(lacking), allowed=np.array(sorted(lacking)))
        if streams is None:
            return _unboosted(fuse(nearest, worded, k))
        return boosted(fuse(nearest, worded, depth), k, query=text, streams=streams, boosts=self._boosts)

    def nearest(self, vectors: Vectors, k: int) -> list[list[Neighbour]]:
        """Return, for each of `vectors` `[n, dimension]`, the min(k, count) nearest facts."""
        return self._vectors.search_many(vectors, k)

    def _clear(self) -> None:
        if self._keywords is not None:
            self._keywords.close()
        self._vectors = VectorIndex(self._embedder.dimension)
        self._versions: dict[int, int] = {}
        self._keywords = None
        self._attributes: AttributeIndex | None = None
        self._streams: StreamIndex | None = None

    def _load(self, head: OwnerHead) -> None:
        # What changes after `head` was read is taken in once more with the next changes.
        self._clear()
        stored = self._read_vectors(None)
        if len(np.unique(stored.seqs)) != self._records.count(self._owner):
            before: list[Fact] = []
            while missing := self._records.unindexed(self._owner, embedder=vectors_name(self._embedder), limit=_PAGE):
                if missing == before:
                    raise self._beyond_mending()
                self._reembed(self._owner, missing)
                before = missing
            stored = self._read_vectors(None)
        self._vectors.load(stored.seqs, stored.rows)
        self._versions = dict(zip(stored.seqs.tolist(), stored.versions.tolist(), strict=True))
        self._position = head.position

    def _catch_up(self, *, makes_lacking: bool) -> bool:
        """Take in the changes after the view's position; return False where a fact changed meanwhile.

        With `makes_lacking`, a fact whose vectors are missing is taken for damaged and no longer for changed.
        """
        changes = self._changes()
        if changes is None:
            self._position = -1
            return False
        if not changes:
            return True
        seqs = sorted({change.seq for change in changes if change.seq is not None})
        facts = self._records.get_by_seqs(self._owner, seqs)
        current = {seq: fact for seq, fact in facts.items() if fact.state is FactState.CURRENT}
        stored = self._read_vectors(list(current))
        rows = {seq: stored.rows[stored.seqs == seq] for seq in np.unique(stored.seqs).tolist()}
        versions = dict(zip(stored.seqs.tolist(), stored.versions.tolist(), strict=True))
        lacking = [fact for seq, fact in current.items() if versions.get(seq) != fact.version]
        if lacking:
            if makes_lacking:
                self._reembed(self._owner, lacking)
            return False
        self.forget(seqs)
        self._vectors.add(list(current), [rows[seq] for seq in current])
        self._versions |= {seq: fact.version for seq, fact in current.items()}
        if self._keywords is not None:
            self._keywords.add(list(current), [str(line_of(fact)) for fact in current.values()])
        if self._attributes is not None:
            self._attributes.add(list(current.values()))
        if self._streams is not None:
            self._streams.add(list(current.values()))
        self._position = changes[-1].position
        return True

    def _changes(self) -> list[Change] | None:
        """Return every change after the view's position, or None where building anew is needed or cheaper."""
        changes: list[Change] = []
        since = self._position
        try:
            while page := self._records.changes(since, owner=self._owner, limit=_PAGE):
                changes += page
                since = page[-1].position
                if len(changes) > max(_PAGE, len(self)) or any(c.kind is ChangeKind.PURGED for c in page):
                    return None
                if len(page) < _PAGE:
                    break
        except FeedGap:
            return None
        return changes

    def _read_vectors(self, seqs: Sequence[int] | None) -> StoredVectors:
        """Return the vectors of `seqs`, or of all facts; those that are damaged are made anew first."""
        embedder, dimension = vectors_name(self._embedder), self._embedder.dimension
        for _ in range(_ATTEMPTS):
            if seqs is None:
                stored = self._records.vectors(self._owner, embedder=embedder, dimension=dimension)
            else:
                stored = self._records.vectors_of(self._owner, seqs, embedder=embedder, dimension=dimension)
            if not stored.damaged:
                return stored
            facts = self._records.get_by_seqs(self._owner, stored.damaged)
            current = [fact for fact in facts.values() if fact.state is FactState.CURRENT]
            if not current:
                # Of facts that are gone.
                return stored._replace(damaged=[])
            self._reembed(self._owner, current)
        raise self._beyond_mending()

    def _beyond_mending(self) -> StoreDamaged:
        return StoreDamaged(
            f"vectors of owner {self._owner!r} are missing or damaged and cannot be stored anew:"
            " run `memstore verify --repair`"
        )

    def _all_facts(self) -> list[Fact]:
        facts: list[Fact] = []
        while page := self._records.page(
            self._owner, stream=None, limit=_PAGE, after_seq=facts[-1].seq if facts else 0
        ):
            facts += page
        # Those that came after the view's position are taken in with the next changes.
        return [fact for fact in facts if fact.seq in self._versions]

    def _keyword_index(self) -> KeywordIndex:
        if self._keywords is None:
            self._keywords = _keywords_of(self._all_facts())
        return self._keywords

    def _hybrid_indexes(self) -> tuple[KeywordIndex, StreamIndex | None]:
        """Return the words, and the streams unless nothing is boosted; the facts are read once for both."""
        if not any(self._boosts):
            return self._keyword_index(), None
        if self._streams is None:
            facts = self._all_facts()
            streams = StreamIndex()
            streams.add(facts)
            if self._keywords is None:
                self._keywords = _keywords_of(facts)
            self._streams = streams
        return self._keyword_index(), self._streams

    def _attribute_index(self) -> AttributeIndex:
        if self._attributes is None:
            index = AttributeIndex()
            index.add(self._all_facts())
            self._attributes = index
        return self._attributes


def _unboosted(found: Sequence[Neighbour]) -> list[Ranked]:
    return [Ranked(seq, score, score) for seq, score in found]


def _keywords_of(facts: Sequence[Fact]) -> KeywordIndex:
    index = KeywordIndex()
    index.add([fact.seq for fact in facts], [str(line_of(fact)) for fact in facts])
    return index


class _Entry:
    __slots__ = ("lock", "nbytes", "view")

    def __init__(self, view: OwnerView) -> None:
        self.lock = threading.Lock()
        self.view = view
        self.nbytes = 0  # as of the last use, to be read without the lock


class Views:
    """The views of the owners that were searched last. Thread-safe.

    Parameters
    ----------
    make
        Returns an empty view of an owner.
    max_open
        Owners whose views stay in memory.
    max_bytes
        What their vectors may take together; the least recently used go first.
    """

    def __init__(self, make: Callable[[OwnerId], OwnerView], *, max_open: int, max_bytes: int) -> None:
        self._make = make
        self._max_open = max_open
        self._max_bytes = max_bytes
        self._table = threading.Lock()
        self._entries: OrderedDict[OwnerId, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Memory of all views."""
        with self._table:
            return sum(entry.nbytes for entry in self._entries.values())

    @contextmanager
    def opened(self, owner: OwnerId, head: OwnerHead) -> Iterator[OwnerView]:
        """Yield the owner's view, which has seen `head`, to this thread alone."""
        with self._table:
            entry = self._entries.get(owner)
            if entry is None:
                entry = self._entries[owner] = _Entry(self._make(owner))
            self._entries.move_to_end(owner)
        with entry.lock:
            try:
                entry.view.bring_to(head)
                yield entry.view
            except BaseException:
                # It may have taken in a part of a change.
                entry.view.close()
                raise
            is_empty, entry.nbytes = not len(entry.view), entry.view.nbytes
        with self._table:
            # Owners that have nothing must not push out those that have.
            if is_empty and self._entries.get(owner) is entry:
                del self._entries[owner]
            while len(self._entries) > self._max_open or (len(self._entries) > 1 and self._are_too_large()):
                _release(self._entries.popitem(last=False)[1])

    def drop(self, owner: OwnerId) -> None:
        """Forget what is in memory of `owner`; it is read again when it is next searched."""
        with self._table:
            entry = self._entries.pop(owner, None)
            if entry is not None:
                _release(entry)

    def close(self) -> None:
        """Forget everything."""
        for owner in list(self._entries):
            self.drop(owner)

    def _are_too_large(self) -> bool:
        return sum(entry.nbytes for entry in self._entries.values()) > self._max_bytes


def _release(entry: _Entry) -> None:
    # Where another thread is searching in it, the memory goes when that one is done.
    if entry.lock.acquire(blocking=False):
        try:
            entry.view.close()
        finally:
            entry.lock.release()
