"""How facts come, change, expire and go, with everything that is derived from them."""

import contextlib
import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from memstore.drafts import Progress, embed_texts
from memstore.embedding import Embedder, Vectors
from memstore.errors import (
    DuplicateFact,
    EmbedderMismatch,
    EmbeddingError,
    FactNotFound,
    FactSuperseded,
    StoreError,
    VersionConflict,
)
from memstore.event_time import parse_event_time
from memstore.kv.blobs import KVBlobs
from memstore.records.base import (
    Applied,
    Batch,
    Draft,
    IdempotencyKey,
    Insertion,
    OwnerHead,
    PurgeCounts,
    RecordStore,
    Replacement,
    VectorUpdate,
)
from memstore.records.codec import content_digest
from memstore.types import Fact, FactId, FactState, NewFact, OwnerId
from memstore.validation import possible_ids, validate_expiry, validate_fact, validate_key

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_ATTEMPTS = 20


class Keep(Enum):
    """For a field that an update leaves as it is, where None is a value."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP


class FactPatch(NamedTuple):
    """New values of some fields of a fact."""

    text: str | Keep = KEEP
    stream: str | Keep = KEEP
    speaker: str | Keep | None = KEEP
    time: str | Keep | None = KEEP
    metadata: Mapping[str, object] | Keep = KEEP
    expires_at: float | Keep | None = KEEP

    def of(self, fact: Fact | NewFact) -> NewFact:
        """Return the content that `fact` has with this patch."""
        given = {name: value for name, value in self._asdict().items() if value is not KEEP}
        kept = {spec.name: getattr(fact, spec.name) for spec in dataclasses.fields(NewFact)}
        return NewFact(**(kept | given))


class PurgeReceipt(NamedTuple):
    """What a purge removed."""

    owner: OwnerId
    at: float
    """Unix seconds."""

    records: PurgeCounts
    encodings: int
    """KV encodings."""


class Inserted(NamedTuple):
    """What became of one fact that was to be added."""

    insertion: Insertion
    vectors: Vectors | None
    """`[num_chunks, dimension]`; None where the fact was there and nothing had to be embedded."""


class Lifecycle:
    """Changes facts, and keeps their vectors and KV in step; see `MemStore` for what each method promises."""

    def __init__(
        self,
        records: RecordStore,
        *,
        embedder: Embedder,
        embed_batch: int,
        blobs: KVBlobs | None,
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        self._embedder = embedder
        self._embed_batch = embed_batch
        self._blobs = blobs
        self._clock = clock

    def insert(
        self, owner: OwnerId, facts: Sequence[NewFact], *, key: str | None, on_progress: Progress | None
    ) -> list[Inserted]:
        """Store all of `facts`, or none."""
        now = self._clock()
        for fact in facts:
            validate_fact(fact, now=now)
        twins: list[Fact | None] = [None] * len(facts)
        idempotency = None
        if key is not None:
            idempotency = IdempotencyKey(validate_key(key), _request_digest(facts))
        elif facts:
            found = self._records.find_identical(owner, facts)
            twins = [None if twin is None or self.has_expired(twin) else twin for twin in found]
        fresh = [position for position, twin in enumerate(twins) if twin is None]
        vectors = dict(zip(fresh, self._embed(facts, fresh, on_progress), strict=True))
        applied = Applied([], [])
        if not fresh:
            # Nothing is written, and so nothing refuses a store that has changed over to another embedder.
            self.check_embedder(self._records.head(owner).embedder)
        else:
            drafts = [self._draft(facts[position], rows) for position, rows in vectors.items()]
            applied = self._apply(owner, Batch(drafts=drafts, idempotency=idempotency))
        stored = iter(applied.insertions)
        insertions = [next(stored) if twin is None else Insertion(twin, created=False) for twin in twins]
        if not applied.replayed:
            insertions = self._kept_longest(owner, insertions, facts)
        elif gone := [insertion.fact.id for insertion in insertions if self.has_expired(insertion.fact)]:
            raise FactNotFound(gone[0])
        return [Inserted(insertion, vectors.get(position)) for position, insertion in enumerate(insertions)]

    def update(self, owner: OwnerId, fact_id: str, patch: FactPatch) -> Fact:
        """Change some fields of a current fact."""

        def change() -> Fact:
            fact = self._current(owner, fact_id)
            new = patch.of(fact)
            validate_fact(dataclasses.replace(new, expires_at=None), now=0.0)
            # By digest, since to Python 1 is True.
            is_changed = content_digest(new) != content_digest(fact)
            if not is_changed and new.expires_at == fact.expires_at:
                return fact
            if patch.expires_at is not KEEP:
                validate_expiry(new.expires_at, now=self._clock())
            replaced = dataclasses.replace(
                fact,
                text=new.text,
                stream=new.stream,
                speaker=new.speaker,
                time=new.time,
                metadata=dict(new.metadata),
                expires_at=new.expires_at,
                version=fact.version + is_changed,
                updated_at=self._clock(),
                event_at=_event_at(new),
            )
            vectors = self._embed([new])[0] if new.text != fact.text else None
            try:
                self._apply(owner, Batch(replacements=[Replacement(replaced, fact, vectors)]))
            except DuplicateFact as error:
                # A twin that has expired does not count.
                if not self.expire(owner):
                    raise
                raise VersionConflict(f"a twin of fact {fact_id!r} had expired") from error
            if is_changed:
                self._drop_blobs(owner, fact.id)
            return replaced

        return _repeated(change)

    def supersede(self, owner: OwnerId, fact_id: str, patch: FactPatch) -> Fact:
        """Put a new fact, the old one with `patch`, in the place of a current one."""

        def change() -> Fact:
            old, now = self._current(owner, fact_id), self._clock()
            new = patch.of(old)
            validate_fact(new, now=now)
            history = dataclasses.replace(old, state=FactState.SUPERSEDED, version=old.version + 1, updated_at=now)
            replacements = [Replacement(history, old)]
            twin = self._records.find_identical(owner, [new])[0]
            if twin is None or twin.id == old.id or self.has_expired(twin):
                draft = self._draft(new, self._embed([new])[0])._replace(supersedes=old.id)
                successor = self._apply(owner, Batch(replacements=replacements, drafts=[draft])).insertions[0].fact
            else:
                expires_at = max(twin.expires_at, new.expires_at, key=_stay)
                successor = dataclasses.replace(
                    twin, supersedes=twin.supersedes or old.id, expires_at=expires_at, updated_at=now
                )
                self._apply(owner, Batch(replacements=[*replacements, Replacement(successor, twin)]))
            self._drop_blobs(owner, old.id)
            return successor

        return _repeated(change)

    def remove(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[Fact]:
        """Remove facts, and return those that were there."""
        # The cache first: where that fails nothing is lost, and the call can be repeated.
        for fact_id in fact_ids:
            self._drop_blobs(owner, fact_id)
        removed = self._apply(owner, Batch(removals=fact_ids)).removed
        # And once more: one that was being made when the record was still there.
        for fact in removed:
            self._drop_blobs(owner, fact.id)
        return removed

    def expire(self, owner: OwnerId) -> int:
        """Remove the facts whose time has come."""
        due = self._records.expired(owner, now=self._clock())
        return len(self.remove(owner, due)) if due else 0

    def purge(self, owner: OwnerId) -> PurgeReceipt:
        """Remove everything of an owner."""
        encodings = self._drop_owner(owner)
        counts = self._records.purge(owner)
        # And once more: KV that was being made when the records were still there.
        encodings += self._drop_owner(owner)
        return PurgeReceipt(owner, self._clock(), counts, encodings)

    def reembed(self, owner: OwnerId, facts: Sequence[Fact]) -> None:
        """Make the vectors of `facts` anew, which are missing or damaged."""
        vectors = embed_texts(self._embedder, [fact.text for fact in facts], batch=self._embed_batch)
        updates = [VectorUpdate(f.seq, f.version, rows) for f, rows in zip(facts, vectors, strict=True)]
        self._records.put_vectors(owner, updates, embedder=self._embedder.fingerprint)
        logger.warning("made the vectors of %d facts anew, which were missing or damaged", len(updates))

    def head(self, owner: OwnerId) -> OwnerHead:
        """Return the owner's head, after everything has been removed that has expired."""
        head = self._records.head(owner)
        self.check_embedder(head.embedder)
        if head.next_expiry is None or head.next_expiry > self._clock():
            return head
        try:
            self.expire(owner)
        except StoreError:
            # What has expired is not returned in any case.
            logger.warning("expired facts of an owner could not be removed", exc_info=True)
            return head
        return self._records.head(owner)

    def check_embedder(self, stored: str | None) -> None:
        """Raise `EmbedderMismatch` where the store's vectors are made with another embedder."""
        if stored is not None and stored != self._embedder.fingerprint:
            raise EmbedderMismatch(stored=stored, offered=self._embedder.fingerprint)

    def alive(self, facts: Sequence[Fact]) -> list[Fact]:
        """Return the facts that have not expired."""
        return [fact for fact in facts if not self.has_expired(fact)]

    def has_expired(self, fact: Fact) -> bool:
        """Return whether the fact's time has come."""
        return fact.expires_at is not None and fact.expires_at <= self._clock()

    def _current(self, owner: OwnerId, fact_id: str) -> Fact:
        facts = self.alive(self._records.get_many(owner, possible_ids([fact_id])))
        if not facts:
            raise FactNotFound(fact_id)
        if facts[0].state is not FactState.CURRENT:
            raise FactSuperseded(fact_id)
        return facts[0]

    def _kept_longest(
        self, owner: OwnerId, insertions: Sequence[Insertion], facts: Sequence[NewFact]
    ) -> list[Insertion]:
        """Of identical facts, also among those that came together, the one that stays longest counts."""
        latest = {insertion.fact.id: insertion.fact for insertion in insertions}
        wanted = {fact_id: fact.expires_at for fact_id, fact in latest.items()}
        for (fact, _), new in zip(insertions, facts, strict=True):
            wanted[fact.id] = max(wanted[fact.id], new.expires_at, key=_stay)
        for fact_id, expires_at in wanted.items():
            if _stay(expires_at) > _stay(latest[fact_id].expires_at):
                # Somebody else may have changed it since: then that is what the caller has now.
                with contextlib.suppress(FactNotFound, FactSuperseded):
                    latest[fact_id] = self.update(owner, fact_id, FactPatch(expires_at=expires_at))
        return [insertion._replace(fact=latest[insertion.fact.id]) for insertion in insertions]

    def _draft(self, fact: NewFact, vectors: Vectors) -> Draft:
        return Draft(fact, vectors, _event_at(fact))

    def _embed(
        self, facts: Sequence[NewFact], positions: Sequence[int] | None = None, on_progress: Progress | None = None
    ) -> list[Vectors]:
        positions = range(len(facts)) if positions is None else positions
        texts = [facts[position].text for position in positions]
        try:
            return embed_texts(self._embedder, texts, batch=self._embed_batch, on_progress=on_progress)
        except EmbeddingError as error:
            if error.position is None:
                raise
            position = positions[error.position]
            raise EmbeddingError(f"text {position} of {len(facts)} has no usable vector", position=position) from error

    def _apply(self, owner: OwnerId, batch: Batch) -> Applied:
        return self._records.apply(owner, batch, embedder=self._embedder.fingerprint)

    def _drop_blobs(self, owner: OwnerId, fact_id: FactId) -> None:
        if self._blobs is not None:
            self._blobs.drop_fact(owner, fact_id)

    def _drop_owner(self, owner: OwnerId) -> int:
        return 0 if self._blobs is None else self._blobs.drop_owner(owner)


def _stay(expires_at: float | None) -> float:
    return math.inf if expires_at is None else expires_at


def _event_at(fact: NewFact) -> float | None:
    return None if fact.time is None else parse_event_time(fact.time)


def _repeated(change: Callable[[], _T]) -> _T:
    """Make a change that reads before it writes; read again where somebody else wrote in between."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return change()
        except VersionConflict:
            continue
    return change()


def _request_digest(facts: Sequence[NewFact]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for fact in facts:
        digest.update(f"{content_digest(fact)}:{fact.expires_at}\n".encode())
    return digest.hexdigest()
