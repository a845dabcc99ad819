"""Whether everything in a store fits together, and mending what does not."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from memstore.errors import BlobStoreDamaged
from memstore.kv.verify import Alive, BlobReport
from memstore.records.base import Problem
from memstore.searchable import vectors_name
from memstore.store import MemStore
from memstore.types import FactId, OwnerId
from memstore.validation import is_reserved

_BATCH = 256
_DAMAGED_CACHE = "damaged-kv-cache"


class VerifyReport(NamedTuple):
    """What was looked at, and what was wrong with it."""

    facts: int
    """Current ones, after repair."""

    problems: list[Problem]
    blobs: BlobReport | None
    """None where no KV cache was given, or it could not be opened."""

    kv_replaced: bool
    """The KV cache was damaged as a whole, or of another release, and an empty one was put in its place."""

    @property
    def is_sound(self) -> bool:
        """Nothing is wrong, or all of it was mended."""
        if not all(problem.repaired for problem in self.problems):
            return False
        blobs = self.blobs
        return blobs is None or blobs.repaired >= blobs.corrupt + blobs.orphans + blobs.dangling


def alive_in(store: MemStore) -> Alive:
    """Return what tells which facts `store` has at a version, for `KVBlobs.verify`.

    KV under a reserved owner is left to the server that made it.
    """

    def alive(owner: OwnerId, facts: Sequence[tuple[FactId, int]]) -> Collection[FactId]:
        if is_reserved(owner):
            return {fact_id for fact_id, _ in facts}
        stored = {fact.id: fact.version for fact in store.get_many(owner, [fact_id for fact_id, _ in facts])}
        return {fact_id for fact_id, version in facts if stored.get(fact_id) == version}

    return alive


def verify(store: MemStore, *, repair: bool, kv_damage: BlobStoreDamaged | None = None) -> VerifyReport:
    """Check every record, vector and KV blob against each other; with `repair`, mend what can be mended.

    Damaged records are set aside, since nothing can bring them back; whatever follows from records is made anew. A KV
    cache that is damaged as a whole is replaced by whoever opens it, or not at all: see `KVBlobs`.

    Parameters
    ----------
    kv_damage
        Why the cache of this store, which has none then, could not be opened.
    """
    embedder = store.embedder
    found = store.records.check(embedder=vectors_name(embedder), dimension=embedder.dimension, repair=repair)
    owners = store.owners()
    if repair:
        lacking = {fact_id for owner in owners for fact_id in _index(store, owner)}
        found = [p._replace(repaired=p.fact_id not in lacking) if p.kind == "missing-vector" else p for p in found]
    blobs = None if store.blobs is None else store.blobs.verify(alive=alive_in(store), repair=repair)
    replaced = None if store.blobs is None else store.blobs.replaced
    if replaced is not None:
        found = [*found, Problem(_DAMAGED_CACHE, None, None, replaced, repaired=True)]
    if kv_damage is not None:
        found = [*found, Problem(_DAMAGED_CACHE, None, None, str(kv_damage), repaired=False)]
    return VerifyReport(
        sum(store.records.count(owner) for owner in owners), found, blobs, kv_replaced=replaced is not None
    )


def _index(store: MemStore, owner: OwnerId) -> list[FactId]:
    """Make the vectors that facts of `owner` lack, and return the facts that still lack them."""
    embedder, after_seq = vectors_name(store.embedder), 0
    while facts := store.records.unindexed(owner, embedder=embedder, limit=_BATCH, after_seq=after_seq):
        store.reembed(owner, facts)
        after_seq = facts[-1].seq
    return [fact.id for fact in store.records.unindexed(owner, embedder=embedder, limit=_BATCH)]
