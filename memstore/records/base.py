"""The contract of a record store: the one truth that every cache is derived from."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from memstore.embedding import Vectors
from memstore.types import Change, Fact, FactId, NewFact, OwnerId


class Draft(NamedTuple):
    """A validated fact on its way in."""

    fact: NewFact
    vectors: Vectors
    """`[num_chunks, dimension]`, unit rows."""

    event_at: float | None = None
    supersedes: FactId | None = None


class Replacement(NamedTuple):
    """The next state of a stored fact."""

    fact: Fact
    """With the id and the seq that it has. Where its version is a new one, the stored record becomes history."""

    expected: Fact
    """What it was when it was read. Where it differs in any field, somebody else has written meanwhile."""

    vectors: Vectors | None = None
    """`[num_chunks, dimension]`; None keeps the ones it has, or drops them where the fact is superseded."""


class IdempotencyKey(NamedTuple):
    """A caller's name for one add, under which it happens once."""

    key: str
    digest: str
    """Of everything that the add was asked to store."""


class Batch(NamedTuple):
    """A change of one owner's facts that happens as a whole or not at all; applied in this order."""

    present: Sequence[Fact] = ()
    """Facts that must still be as they were read, in every field; nothing is written to them."""

    removals: Sequence[FactId] = ()
    expired_by: float | None = None
    """Unix seconds: `removals` that do not expire until then stay. None removes all."""

    replacements: Sequence[Replacement] = ()
    drafts: Sequence[Draft] = ()
    idempotency: IdempotencyKey | None = None
    """Belongs to `drafts`."""


class Insertion(NamedTuple):
    """What became of a draft."""

    fact: Fact
    created: bool
    """False where the owner had this very fact already; then `fact` is that one."""


class RestoredFact(NamedTuple):
    """A fact that comes back under the id that it had, from another store or from an earlier time of this one."""

    fact: Fact
    """Stored as it is; only the seq is assigned anew."""

    history: Sequence[Fact] = ()
    """Former versions, oldest first."""

    vectors: Vectors | None = None
    """`[num_chunks, dimension]`; None where the fact is superseded."""


class Applied(NamedTuple):
    """What a batch did."""

    insertions: list[Insertion]
    """One per draft."""

    removed: list[Fact]
    """Those of `removals` that were there."""

    replayed: bool = False
    """The idempotency key was used before, and nothing was applied."""


class OwnerHead(NamedTuple):
    """What a cache of one owner has to be fenced by."""

    epoch: int
    """Grows with every purge: 0 for an owner that was never purged."""

    position: int
    """Of the owner's last change in the feed; 0 without any."""

    next_expiry: float | None
    """Unix seconds of the earliest `expires_at` among the owner's facts."""

    embedder: str | None
    """Fingerprint of the vectors, `memstore.searchable.vectors_name`; None in a new store."""


class StoredVectors(NamedTuple):
    """Vectors of one owner's current facts."""

    seqs: npt.NDArray[np.int64]
    """`[n]`, non-decreasing: as many rows in a row as the fact has chunks."""

    versions: npt.NDArray[np.int64]
    """`[n]`, of the fact that the vector was made of."""

    rows: Vectors
    """`[n, dimension]`."""

    damaged: list[int]
    """Seqs whose vectors are not what was stored, and have to be made anew."""


class VectorUpdate(NamedTuple):
    """New vectors of one fact, good only while the fact has this version."""

    seq: int
    version: int
    vectors: Vectors


class OwnerStats(NamedTuple):
    """What a store holds of one owner."""

    current: int
    superseded: int
    history: int
    """Former versions."""

    text_bytes: int
    """UTF-8, of current facts."""

    epoch: int


class PurgeCounts(NamedTuple):
    """What a purge removed from the records."""

    facts: int
    history: int
    vectors: int
    """Of all embedders."""

    changes: int
    """Entries of the feed."""

    idempotency_keys: int
    epoch: int
    """The owner's new one."""

    remains: str | None
    """Where the server may still have the text on disk, and what ends that; None where it is nowhere."""


class Problem(NamedTuple):
    """One thing that is not as it should be."""

    kind: str
    """Of a fixed set, such as `damaged-record` or `missing-vector`."""

    owner: OwnerId | None
    fact_id: FactId | None
    detail: str
    repaired: bool


class Finding(NamedTuple):
    """One thing that an operator should know about where the records live."""

    level: str
    """`ok`, `warning` or `error`."""

    subject: str
    message: str


class RecordStore(Protocol):
    """Facts and their vectors, durable once a call returns; safe for several threads and several processes.

    Arguments are validated by the caller. Every method that takes an owner sees nothing of another one. Failures of
    the backend raise `StoreError`; a record that fails its checksum raises `StoreDamaged`.
    """

    @property
    def location(self) -> str:
        """Where the records are, as a URL without credentials."""
        ...

    # ---- writing ----

    def apply(self, owner: OwnerId, batch: Batch, *, embedder: str) -> Applied:
        """Apply `batch` as one transaction, and append what it did to the feed.

        A draft whose content (`content_digest`) a current fact of the owner has already is not stored again. A twin
        that has expired is removed first and does not count. An idempotency key that was used before applies
        nothing, and returns the facts of that time with `created` False and `replayed`.

        Raises
        ------
        EmbedderMismatch
            The store's vectors are made with another embedder than `embedder`.
        VersionConflict
            A fact that must be present or is to be replaced is gone or no longer what was expected; or a draft
            has a twin, and supersedes, or is to stay longer than the twin. Read again and repeat.
        DuplicateFact
            A replacement would have the content of another current fact.
        IdempotencyConflict
            The key was used for other content.
        FactNotFound
            The key was used, and what it stored has been removed since.
        """
        ...

    def restore(self, owner: OwnerId, facts: Sequence[RestoredFact], *, embedder: str) -> list[Insertion]:
        """Store facts of `owner` as they are, with ids, versions, times and history, in one transaction.

        Not stored, and returned as they are in the store with `created` False: a fact whose id the owner has
        already, whatever it says, and a current one whose content a current fact has already. As in `apply`, a twin
        that has expired is removed first and does not count. Seqs follow the order of `facts`. For the feed each
        fact that is stored is an addition, in the version that it has. History that damage has left under an id
        gives way.

        Raises
        ------
        EmbedderMismatch
            The store's vectors are made with another embedder than `embedder`.
        InvalidFact
            The id of one is another owner's (see `held_by_others`).
        """
        ...

    def purge(self, owner: OwnerId) -> PurgeCounts:
        """Remove everything of `owner` in one transaction, start the owner's next epoch, and append it to the feed."""
        ...

    # ---- reading ----

    def head(self, owner: OwnerId) -> OwnerHead:
        """Return the owner's epoch, last change and earliest expiry, and the store's embedder, in one round trip."""
        ...

    def get_many(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[Fact]:
        """Return the facts that exist, superseded ones included, in the order of `fact_ids`."""
        ...

    def held_by_others(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[FactId]:
        """Return those of `fact_ids`, in their order, that are ids of facts of other owners; ids are unique over all.

        The one method that sees them; it is not for what answers to an owner, who could probe for ids.
        """
        ...

    def get_by_seqs(self, owner: OwnerId, seqs: Sequence[int]) -> dict[int, Fact]:
        """Return the facts that exist, superseded ones included, by seq."""
        ...

    def find_identical(self, owner: OwnerId, facts: Sequence[NewFact]) -> list[Fact | None]:
        """Return, for each of `facts`, the current fact with the same content, expired or not."""
        ...

    def page(
        self, owner: OwnerId, *, stream: str | None, limit: int, after_seq: int, superseded: bool = False
    ) -> list[Fact]:
        """Return up to `limit` facts with seq > `after_seq`, by seq; of one stream, or of all for None.

        Only current ones, unless `superseded` asks for both.
        """
        ...

    def history(self, owner: OwnerId, fact_id: FactId) -> list[Fact]:
        """Return the former versions of one fact, oldest first, without the one that it has now."""
        ...

    def expired(self, owner: OwnerId, *, now: float) -> list[FactId]:
        """Return the facts, superseded ones included, whose `expires_at` is at or before `now`."""
        ...

    def owners_with_expired(self, *, now: float) -> list[OwnerId]:
        """Return the owners that have a fact whose `expires_at` is at or before `now`."""
        ...

    def count(self, owner: OwnerId) -> int:
        """Return the number of current facts."""
        ...

    def owners(self) -> list[OwnerId]:
        """Return every owner that has a fact, sorted."""
        ...

    def stats(self, owner: OwnerId) -> OwnerStats:
        """Return what the store holds of `owner`."""
        ...

    def changes(self, since: int, *, owner: OwnerId | None = None, limit: int = 1000) -> list[Change]:
        """Return up to `limit` changes with position > `since`, in order; of one owner, or of all for None.

        Raises
        ------
        FeedGap
            Changes after `since` have been trimmed: what follows the feed must be rebuilt.
        """
        ...

    def last_position(self) -> int:
        """Return the position of the last change of all; 0 in a new store."""
        ...

    # ---- vectors ----

    def claim_embedder(self, fingerprint: str) -> str:
        """Return the fingerprint that the vectors are made with; in a new store it becomes `fingerprint`."""
        ...

    def vectors(self, owner: OwnerId, *, embedder: str, dimension: int) -> StoredVectors:
        """Return all vectors of `owner` that `embedder` made."""
        ...

    def vectors_of(self, owner: OwnerId, seqs: Sequence[int], *, embedder: str, dimension: int) -> StoredVectors:
        """Return the vectors of these facts that `embedder` made, of those that have any."""
        ...

    def unindexed(self, owner: OwnerId, *, embedder: str, limit: int, after_seq: int = 0) -> list[Fact]:
        """Return up to `limit` current facts that have no vectors of `embedder` in their present version.

        By seq, and with a seq > `after_seq`.
        """
        ...

    def put_vectors(
        self, owner: OwnerId, updates: Sequence[VectorUpdate], *, embedder: str, is_reindex: bool = False
    ) -> int:
        """Store vectors of facts that still have the version they were made of; return how many.

        Raises `EmbedderMismatch` where `embedder` is not the store's, unless it is going to be (`is_reindex`).
        """
        ...

    def adopt_embedder(self, fingerprint: str) -> bool:
        """Make `fingerprint` the store's embedder if every current fact has its vectors, else return False.

        Vectors of other embedders are removed.
        """
        ...

    # ---- upkeep ----

    def check(self, *, embedder: str | None, dimension: int | None, repair: bool) -> list[Problem]:
        """Return everything whose parts do not fit together; mend what can be mended if `repair`.

        A damaged record is set aside under its id, counted, and no longer served; nothing else is ever lost.
        Vectors are looked at where `embedder` and `dimension` are given.
        """
        ...

    def compact(self) -> tuple[int, int]:
        """Give back what removed facts have left; return the bytes before and after."""
        ...

    def doctor(self) -> list[Finding]:
        """Return what an operator should know: durability, eviction, versions, reach."""
        ...

    def close(self) -> None:
        """Release files and connections; may be called twice."""
        ...
