"""How facts come, change, expire and go, with everything that is derived from them."""

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple, TypeVar

from memstore.drafts import Progress, embed_facts
from memstore.embedding import Embedder, Vectors
from memstore.errors import (
    BlobStoreError,
    DuplicateFact,
    EmbedderMismatch,
    EmbeddingError,
    FactNotFound,
    FactSuperseded,
    VersionConflict,
)
from memstore.event_time import parse_event_time
from memstore.kv.blobs import KVBlobs
from memstore.kv.session_files import drop_session_files
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
from memstore.searchable import line_of, vectors_name
from memstore.types import Fact, FactId, FactState, NewFact, OwnerId
from memstore.validation import possible_ids, validate_expiry, validate_fact, validate_key

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_ATTEMPTS = 20
_EXPIRED_AT_ONCE = 500


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

    kv_remains: str | None = None
    """Why the KV cache was not cleared, where that failed."""

    sessions: int = 0


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
        self._vectors_name = vectors_name(embedder)
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
        digests = [content_digest(fact) for fact in facts]
        wanted: dict[str, NewFact] = {}
        for digest, fact in zip(digests, facts, strict=True):
            held = wanted.get(digest)
            wanted[digest] = fact if held is None or _stay(fact) > _stay(held) else held
        idempotency = None if key is None else IdempotencyKey(validate_key(key), _request_digest(facts))
        vectors: dict[str, Vectors] = {}

        def change() -> dict[str, Insertion]:
            found = self._records.find_identical(owner, list(wanted.values())) if wanted else []
            twins = {d: twin for d, twin in zip(wanted, found, strict=True) if twin and not self.has_expired(twin)}
            # With a key the store has to see the whole request.
            fresh = [digest for digest in wanted if idempotency is not None or digest not in twins]
            self._embed_into(vectors, digests, facts, [d for d in fresh if d not in vectors], on_progress)
            longer = {d: t for d, t in twins.items() if _stay(wanted[d]) > _stay(t)}
            kept = {
                d: dataclasses.replace(t, expires_at=wanted[d].expires_at, updated_at=self._clock())
                for d, t in longer.items()
            }
            insertions = {d: Insertion(kept.get(d, twin), created=False) for d, twin in twins.items()}
            if not fresh and not longer:
                # Nothing is written, and so nothing refuses a store that has changed over to another embedder.
                self.check_embedder(self._records.head(owner).embedder)
                return insertions
            batch = Batch(
                present=[twin for d, twin in twins.items() if d not in longer and d not in fresh],
                replacements=[Replacement(kept[d], twin) for d, twin in longer.items()],
                drafts=[self._draft(wanted[d], vectors[d]) for d in fresh],
                idempotency=idempotency,
            )
            applied = self._apply(owner, batch)
            insertions |= dict(zip(fresh, applied.insertions, strict=True))
            gone = [i.fact.id for i in insertions.values() if applied.replayed and self.has_expired(i.fact)]
            if gone:
                raise FactNotFound(gone[0])
            return insertions

        insertions = _repeated(change)
        first = {digest: position for position, digest in reversed(list(enumerate(digests)))}
        return [
            Inserted(
                insertions[digest]._replace(created=insertions[digest].created and first[digest] == position),
                vectors.get(digest),
            )
            for position, digest in enumerate(digests)
        ]

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
            vectors = self._embedded(new) if line_of(new) != line_of(fact) else None
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
                draft = self._draft(new, self._embedded(new))._replace(supersedes=old.id)
                successor = self._apply(owner, Batch(replacements=replacements, drafts=[draft])).insertions[0].fact
            else:
                expires_at = new.expires_at if _stay(new) > _stay(twin) else twin.expires_at
                successor = dataclasses.replace(
                    twin, supersedes=twin.supersedes or old.id, expires_at=expires_at, updated_at=now
                )
                self._apply(owner, Batch(replacements=[*replacements, Replacement(successor, twin)]))
            self._drop_blobs(owner, old.id)
            return successor

        return _repeated(change)

    def remove(self, owner: OwnerId, fact_ids: Sequence[FactId], *, expired_by: float | None = None) -> list[Fact]:
        """Remove facts, of those with an expiry until `expired_by` where given; return those that were removed."""
        removed = self._apply(owner, Batch(removals=fact_ids, expired_by=expired_by)).removed
        for fact in removed:
            self._drop_blobs(owner, fact.id)
        return removed

    def expire(self, owner: OwnerId) -> int:
        """Remove the facts whose time has come, a few at a time."""
        now, count = self._clock(), 0
        while due := self._records.expired(owner, now=now)[:_EXPIRED_AT_ONCE]:
            # One whose time was extended meanwhile stays.
            removed = self.remove(owner, due, expired_by=now)
            count += len(removed)
            if not removed:
                break
        return count

    def purge(self, owner: OwnerId) -> PurgeReceipt:
        """Remove everything of an owner."""
        counts = self._records.purge(owner)
        encodings, kv_remains = 0, None
        if self._blobs is not None:
            try:
                drop_session_files(self._blobs.path, owner)
                encodings = self._blobs.drop_owner(owner)
            except (BlobStoreError, OSError) as error:
                logger.warning("the KV of a purged owner was not dropped", exc_info=True)
                kv_remains = f"{error}; then run `memstore verify --repair`"
        return PurgeReceipt(owner, self._clock(), counts, encodings, kv_remains)

    def reembed(self, owner: OwnerId, facts: Sequence[Fact]) -> None:
        """Make the vectors of `facts` anew, which are missing or damaged."""
        vectors = embed_facts(self._embedder, facts, batch=self._embed_batch)
        updates = [VectorUpdate(f.seq, f.version, rows) for f, rows in zip(facts, vectors, strict=True)]
        self._records.put_vectors(owner, updates, embedder=self._vectors_name)
        logger.warning("made the vectors of %d facts anew, which were missing or damaged", len(updates))

    def head(self, owner: OwnerId) -> OwnerHead:
        """Return the owner's head; raise `EmbedderMismatch` where the store has another embedder by now."""
        head = self._records.head(owner)
        self.check_embedder(head.embedder)
        return head

    def expired(self, owner: OwnerId, head: OwnerHead) -> list[Fact]:
        """Return the facts whose time has come and that nobody has removed yet."""
        now = self._clock()
        if head.next_expiry is None or head.next_expiry > now:
            return []
        return self._records.get_many(owner, self._records.expired(owner, now=now))

    def check_embedder(self, stored: str | None) -> None:
        """Raise `EmbedderMismatch` where the store's vectors are another embedder's, or of another form."""
        if stored is not None and stored != self._vectors_name:
            raise EmbedderMismatch(stored=stored, offered=self._vectors_name)

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

    def _draft(self, fact: NewFact, vectors: Vectors) -> Draft:
        return Draft(fact, vectors, _event_at(fact))

    def _embed_into(
        self,
        vectors: dict[str, Vectors],
        digests: Sequence[str],
        facts: Sequence[NewFact],
        wanted: Sequence[str],
        on_progress: Progress | None,
    ) -> None:
        """Add the vectors of the facts with the digests `wanted` to `vectors`."""
        positions = [digests.index(digest) for digest in wanted] if len(wanted) < len(digests) else range(len(facts))
        chosen = [facts[position] for position in positions]
        try:
            rows = embed_facts(self._embedder, chosen, batch=self._embed_batch, on_progress=on_progress)
        except EmbeddingError as error:
            if error.position is None:
                raise
            position = positions[error.position]
            raise EmbeddingError(f"text {position} of {len(facts)} has no usable vector", position=position) from error
        vectors.update(zip(wanted, rows, strict=True))

    def _embedded(self, fact: NewFact) -> Vectors:
        return embed_facts(self._embedder, [fact], batch=self._embed_batch)[0]

    def _apply(self, owner: OwnerId, batch: Batch) -> Applied:
        return self._records.apply(owner, batch, embedder=self._vectors_name)

    def _drop_blobs(self, owner: OwnerId, fact_id: FactId) -> None:
        if self._blobs is None:
            return
        try:
            self._blobs.drop_fact(owner, fact_id)
        except BlobStoreError:
            # A cache: nothing of it is served for a fact that is gone or has another version.
            logger.warning("the KV of a changed fact was not dropped", exc_info=True)


def _stay(fact: Fact | NewFact) -> float:
    return math.inf if fact.expires_at is None else fact.expires_at


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
        digest.update(f"{content_digest(fact)}:{_stay(fact):f}\n".encode())
    return digest.hexdigest()
