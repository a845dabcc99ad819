"""Moving a store to another embedder, while it is in use."""

from collections.abc import Iterator
from typing import NamedTuple

from memstore.drafts import Progress, embed_facts
from memstore.embedding import Embedder
from memstore.errors import FeedGap, StoreBusy, StoreDamaged
from memstore.records.base import RecordStore, VectorUpdate
from memstore.searchable import vectors_name
from memstore.types import OwnerId

_ROUNDS = 100


class ReindexReport(NamedTuple):
    """What a reindex did."""

    previous: str
    """Fingerprint of the embedder before."""

    embedder: str
    """And from now on."""

    embedded: int
    """Facts whose vectors this run made; the others had theirs from an earlier one."""

    facts: int


def reindex(
    records: RecordStore, embedder: Embedder, *, batch: int = 64, on_progress: Progress | None = None
) -> ReindexReport:
    """Make the vectors of every current fact with `embedder`, then let the store change over to it.

    Until then whoever has the store open goes on with the former embedder; from then on those are refused with
    `EmbedderMismatch`, and have to be started with the new one. A run that is interrupted is continued by the next
    one. Where the store has this embedder already, only what lacks vectors is done.

    Raises
    ------
    EmbeddingError, StoreError
    """
    target = vectors_name(embedder)
    previous = records.claim_embedder(target)
    embedded, counts = 0, dict[OwnerId, int]()
    position, pending = records.last_position(), records.owners()
    is_all = True
    for _ in range(_ROUNDS):
        counts |= {owner: records.count(owner) for owner in pending}
        total = sum(counts.values())
        done, stored_in_round = total - sum(counts[owner] for owner in pending), 0
        for owner in pending:
            of_owner = 0
            for stored in _embed_missing(records, embedder, owner, batch=batch):
                of_owner += stored
                if on_progress is not None:
                    on_progress(min(done + of_owner, total), total)
            stored_in_round += of_owner
            done += counts[owner]
        embedded += stored_in_round
        if on_progress is not None:
            on_progress(total, total)
        # False where facts were added or changed meanwhile: those next.
        if records.adopt_embedder(target):
            return ReindexReport(previous, target, embedded, total)
        since, position = position, records.last_position()
        changed = _changed_since(records, since)
        if not changed and is_all and not stored_in_round:
            raise StoreDamaged("vectors of some facts cannot be stored: run `memstore verify --repair`, then repeat")
        # A check that removed vectors is in no feed.
        is_all = not changed
        pending = sorted(changed) if changed else records.owners()
    raise StoreBusy("facts are added faster than they can be embedded: pause the writers, then reindex again")


def _embed_missing(records: RecordStore, embedder: Embedder, owner: OwnerId, *, batch: int) -> Iterator[int]:
    """Go once through the facts of `owner` that lack vectors; yield how many got them, batch by batch."""
    after_seq = 0
    while facts := records.unindexed(owner, embedder=vectors_name(embedder), limit=batch, after_seq=after_seq):
        after_seq = facts[-1].seq
        vectors = embed_facts(embedder, facts, batch=batch)
        updates = [VectorUpdate(f.seq, f.version, rows) for f, rows in zip(facts, vectors, strict=True)]
        yield records.put_vectors(owner, updates, embedder=vectors_name(embedder), is_reindex=True)


def _changed_since(records: RecordStore, position: int) -> set[OwnerId]:
    """Return the owners that the feed names after `position`, or all where it begins later."""
    owners: set[OwnerId] = set()
    try:
        while changes := records.changes(position):
            owners |= {change.owner for change in changes}
            position = changes[-1].position
    except FeedGap:
        return {*records.owners(), *owners}
    return owners
