"""Moving a store to another embedder, while it is in use."""

from typing import NamedTuple

from memstore.drafts import Progress, embed_texts
from memstore.embedding import Embedder
from memstore.errors import StoreBusy, StoreDamaged
from memstore.records.base import RecordStore, VectorUpdate
from memstore.types import Fact

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
    target = embedder.fingerprint
    previous = records.claim_embedder(target)
    embedded = 0
    for _ in range(_ROUNDS):
        counts = {owner: records.count(owner) for owner in records.owners()}
        total, done = sum(counts.values()), 0
        for owner, count in counts.items():
            of_owner = 0
            before: list[Fact] = []
            while facts := records.unindexed(owner, embedder=target, limit=batch):
                if facts == before:
                    raise StoreDamaged(
                        f"vectors of owner {owner!r} cannot be stored: run `memstore verify --repair`, then repeat"
                    )
                before = facts
                vectors = embed_texts(embedder, [fact.text for fact in facts], batch=batch)
                updates = [VectorUpdate(f.seq, f.version, rows) for f, rows in zip(facts, vectors, strict=True)]
                stored = records.put_vectors(owner, updates, embedder=target)
                embedded += stored
                of_owner += stored
                if on_progress is not None:
                    on_progress(min(done + of_owner, total), total)
            done += count
        if on_progress is not None:
            on_progress(total, total)
        # False where facts were added or changed meanwhile: those next.
        if records.adopt_embedder(target):
            return ReindexReport(previous, target, embedded, total)
    raise StoreBusy("facts are added faster than they can be embedded: pause the writers, then reindex again")
