"""Everything that `memstore` raises.

::

    MemStoreError
    ├── InvalidInput (ValueError)     what the caller passed; nothing was changed
    │   ├── InvalidOwner
    │   ├── InvalidFact
    │   │   ├── DuplicateFact         an update would make two facts the same
    │   │   └── FactSuperseded        the fact is history, which is not rewritten
    │   ├── InvalidQuery
    │   ├── InvalidEncoding
    │   ├── InvalidExport             a file to import is not, or no longer, what an export wrote
    │   ├── InvalidLocation           a store URL that cannot be understood
    │   └── IdempotencyConflict       the key was used for other content
    ├── FactNotFound (LookupError)    unknown id, or an id of another owner
    ├── SessionExists                 a session's id is taken
    ├── SessionGone (LookupError)     no such session of that owner
    ├── SessionMoved                  another process has added to the session
    ├── EmbeddingError                the embedder returned something that is no direction
    └── StoreError                    the store itself; the message says what to do
        ├── StoreReadOnly             no permission to write, or a replica
        ├── StoreFull                 no space left
        ├── StoreDamaged              a record or a file is not, or no longer, what was written
        ├── StoreTooNew               written by a newer release
        ├── StoreBusy                 another writer was in the way for too long
        │   └── VersionConflict       one fact changed under a writer; repeated by `MemStore`
        ├── StoreClosed               used after close()
        ├── StoreUnreachable          the server does not answer
        ├── StoreRefused              wrong user, password or permissions
        ├── StoreTLSError             the certificate of either side is not accepted
        ├── FeedGap                   changes were trimmed before they were read
        ├── EmbedderMismatch          the vectors were made by another embedder, or of other text
        └── BlobStoreError            the KV cache; facts are never affected
            ├── BlobStoreFull
            ├── BlobStoreReadOnly
            ├── BlobStoreInUse        opened twice in one process, or compacted while open
            ├── BlobStoreDamaged      the whole file is damaged or of another release, and was left in its place
            └── CorruptBlob           one value fails its checksum or layout
"""

# Named after the condition, which an except clause reads better than a suffix.


class MemStoreError(Exception):
    """Base of every error that this package raises on purpose."""


class InvalidInput(MemStoreError, ValueError):
    """An argument was refused; nothing was changed."""


class InvalidOwner(InvalidInput):
    """The owner is empty, too long, or holds a character that cannot be stored."""


class InvalidFact(InvalidInput):
    """A fact's text, stream, speaker, time or metadata cannot be stored."""


class DuplicateFact(InvalidFact):
    """A change would give a fact the content that another current fact of the owner has.

    Attributes
    ----------
    fact_id
        The other fact.
    """

    def __init__(self, fact_id: str) -> None:
        super().__init__(f"fact {fact_id!r} says exactly this already: delete one of the two, or supersede it")
        self.fact_id = fact_id


class FactSuperseded(InvalidFact):
    """The fact has been superseded, and history is not rewritten."""

    def __init__(self, fact_id: str) -> None:
        super().__init__(f"fact {fact_id!r} has been superseded: change the fact that took its place")
        self.fact_id = fact_id


class InvalidQuery(InvalidInput):
    """A search or listing asks for something that has no meaning."""


class InvalidEncoding(InvalidInput):
    """K, V and the metadata of an encoding do not fit together."""


class InvalidExport(InvalidInput):
    """A file to import has another format, was cut off, or was changed since it was written."""


class InvalidLocation(InvalidInput):
    """The store's URL has an unknown scheme, or options that make no sense. Never shows a password."""


class IdempotencyConflict(InvalidInput):
    """An idempotency key came with other content than the first time."""

    def __init__(self, key: str) -> None:
        super().__init__(f"idempotency key {key!r} was used for other content: use a new key for a new request")
        self.key = key


class FactNotFound(MemStoreError, LookupError):
    """The owner has no such fact.

    A fact of another owner raises the same error with the same words, so that ids cannot be probed.
    """

    def __init__(self, fact_id: str) -> None:
        super().__init__(f"this owner has no fact {fact_id!r}")
        self.fact_id = fact_id


class SessionExists(MemStoreError):
    """There is a session of that id."""


class SessionGone(MemStoreError, LookupError):
    """There is no such session of that owner."""


class SessionMoved(MemStoreError):
    """The session's last version is another than the one that was to be built on."""


class EmbeddingError(MemStoreError):
    """The embedder returned NaN, infinity, a zero vector or a wrong shape.

    Attributes
    ----------
    position
        Index of the text in the batch, or None when the whole batch has the wrong shape.
    """

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class StoreError(MemStoreError):
    """The store cannot do what it was asked to; the message says what to do."""


class StoreReadOnly(StoreError):
    """The directory or a file in it cannot be written, or the server is a read-only replica."""


class StoreFull(StoreError):
    """The disk, the quota or the server's memory is full; the transaction was rolled back."""


class StoreDamaged(StoreError):
    """The file is not a record database, or a part of it is not what was written."""


class StoreTooNew(StoreError):
    """A newer release wrote this store."""


class StoreBusy(StoreError):
    """Other writers were in the way for too long."""


class VersionConflict(StoreBusy):
    """A fact was changed by somebody else between reading and writing it."""


class StoreClosed(StoreError):
    """The store was used after `close()`."""


class StoreUnreachable(StoreError):
    """The server did not answer in time, or nobody listens there."""


class StoreRefused(StoreError):
    """The server did not accept the user, the password, or what this user asked to do."""


class StoreTLSError(StoreError):
    """A TLS connection could not be made: a certificate was not accepted, or one side speaks no TLS."""


class FeedGap(StoreError):
    """The change feed no longer reaches back that far.

    Attributes
    ----------
    since, floor
        Position asked for, and the lowest one that can still be asked for.
    """

    def __init__(self, *, since: int, floor: int) -> None:
        super().__init__(f"changes after {since} were trimmed (the feed starts after {floor}): read the facts anew")
        self.since = since
        self.floor = floor


class EmbedderMismatch(StoreError):
    """The stored vectors come from another embedder, or from a release that made them of other text.

    Attributes
    ----------
    stored, offered
        What names the vectors in the store, and those of whoever opened it (`memstore.searchable.vectors_name`).
    """

    def __init__(self, *, stored: str, offered: str) -> None:
        super().__init__(
            f"the vectors of this store are {stored!r}, not {offered!r}: "
            "run `memstore reindex` to make them anew, or open the store with the embedder and release that made them"
        )
        self.stored = stored
        self.offered = offered


class BlobStoreError(StoreError):
    """The KV cache cannot do what it was asked to."""


class BlobStoreFull(BlobStoreError):
    """The encoding does not fit beside what is held, or the disk is full; nothing of it was written."""


class BlobStoreReadOnly(BlobStoreError):
    """The directory of the KV cache cannot be written."""


class BlobStoreInUse(BlobStoreError):
    """This process has the KV cache open already, or another has it open while it is to be compacted."""


class BlobStoreDamaged(BlobStoreError):
    """The KV cache is damaged, or of another release, and was not to be replaced or could not be; it is as it was."""


class CorruptBlob(BlobStoreError):
    """A stored value failed its checksum or its layout; it has been dropped."""
