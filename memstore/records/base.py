"""The contract of a record store: the one truth that every cache is derived from."""

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from memstore.embedding import Vectors
from memstore.types import Fact, FactId, NewFact, OwnerId


class Draft(NamedTuple):
    """A validated fact on its way in, with its unit vector `[dimension]`."""

    fact: NewFact
    vector: npt.NDArray[np.float32]


class Insertion(NamedTuple):
    """What became of a draft."""

    fact: Fact
    created: bool
    """False where the owner had this very fact already; then `fact` is that one."""


class StoredVectors(NamedTuple):
    """All vectors of one owner."""

    seqs: npt.NDArray[np.int64]
    """`[n]`, increasing."""

    vectors: Vectors
    """`[n, dimension]`."""


class RecordStore(Protocol):
    """Facts and their vectors, durable once a call returns; safe to call from several threads.

    Arguments are validated by the caller. Every method takes the owner and sees nothing of another one. Failures
    of the backend raise `StoreError`.
    """

    def embedder_fingerprint(self) -> str | None:
        """Return the fingerprint that the vectors were made with, or None in a new store."""
        ...

    def set_embedder_fingerprint(self, fingerprint: str) -> None:
        """Record the fingerprint that all vectors are made with from now on."""
        ...

    def insert(self, owner: OwnerId, drafts: Sequence[Draft]) -> list[Insertion]:
        """Store all drafts, or none, in order; one result per draft.

        A draft whose content (text, stream, speaker, time, metadata) the owner has already is not stored again.
        """
        ...

    def find_identical(self, owner: OwnerId, facts: Sequence[NewFact]) -> list[Fact | None]:
        """Return, for each of `facts`, the stored fact with the same content."""
        ...

    def get(self, owner: OwnerId, fact_id: FactId) -> Fact | None:
        """Return one fact, or None."""
        ...

    def get_many(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[Fact]:
        """Return the facts that exist, in the order of `fact_ids`."""
        ...

    def get_by_seqs(self, owner: OwnerId, seqs: Sequence[int]) -> dict[int, Fact]:
        """Return the facts that exist, by seq."""
        ...

    def page(self, owner: OwnerId, *, stream: str | None, limit: int, after_seq: int) -> list[Fact]:
        """Return up to `limit` facts with seq > `after_seq`, by seq; of one stream, or of all for None."""
        ...

    def preceding(self, owner: OwnerId, stream: str, *, seq: int, limit: int) -> list[Fact]:
        """Return the last `limit` facts of `stream` with a seq below `seq`, by seq."""
        ...

    def count(self, owner: OwnerId) -> int:
        """Return the number of facts."""
        ...

    def owners(self) -> list[OwnerId]:
        """Return every owner that has a fact, sorted."""
        ...

    def vectors(self, owner: OwnerId, *, dimension: int) -> StoredVectors:
        """Return all vectors of `owner`; raise `StoreDamaged` where one has another dimension."""
        ...

    def delete(self, owner: OwnerId, fact_id: FactId) -> Fact | None:
        """Remove one fact with its vector and return it, or None. Its seq is never given out again."""
        ...

    def epoch(self, owner: OwnerId) -> int:
        """Return how often `bump_epoch` was called for `owner`."""
        ...

    def bump_epoch(self, owner: OwnerId) -> int:
        """Add one to the owner's epoch and return it."""
        ...

    def close(self) -> None:
        """Release files and connections; may be called twice."""
        ...


def content_digest(fact: NewFact) -> bytes:
    """Return 32 bytes that two facts of one owner share exactly when their content is the same."""
    content = [fact.text, fact.stream, fact.speaker, fact.time, dict(fact.metadata)]
    canonical = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=32).digest()
