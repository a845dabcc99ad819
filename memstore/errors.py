"""Everything that `memstore` raises.

::

    MemStoreError
    ├── InvalidInput (ValueError)     what the caller passed; nothing was changed
    │   ├── InvalidOwner
    │   ├── InvalidFact
    │   ├── InvalidQuery
    │   └── InvalidEncoding
    ├── FactNotFound (LookupError)    unknown id, or an id of another owner
    ├── EmbeddingError                the embedder returned something that is no direction
    └── StoreError                    the store itself; the message says what to do
        ├── StoreLocked               another MemStore holds the directory
        ├── StoreReadOnly             no permission to write
        ├── StoreFull                 no space left
        ├── StoreDamaged              the file is not, or no longer, a record database
        ├── StoreTooNew               written by a newer release
        ├── StoreBusy                 the writer lock was not free in time
        ├── StoreClosed               used after close()
        ├── EmbedderMismatch          the vectors were made by another embedder
        └── BlobStoreError            the KV cache; facts are never affected
            ├── BlobStoreFull
            ├── BlobStoreReadOnly
            ├── BlobStoreInUse        opened twice in one process
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


class InvalidQuery(InvalidInput):
    """A search or listing asks for something that has no meaning."""


class InvalidEncoding(InvalidInput):
    """K, V and the metadata of an encoding do not fit together."""


class FactNotFound(MemStoreError, LookupError):
    """The owner has no such fact.

    A fact of another owner raises the same error with the same words, so that ids cannot be probed.
    """

    def __init__(self, fact_id: str) -> None:
        super().__init__(f"this owner has no fact {fact_id!r}")
        self.fact_id = fact_id


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


class StoreLocked(StoreError):
    """Another MemStore, in this or another process, holds the directory.

    Attributes
    ----------
    pid
        The process that holds it, or None where that could not be read.
    """

    def __init__(self, message: str, *, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class StoreReadOnly(StoreError):
    """The directory or a file in it cannot be written."""


class StoreFull(StoreError):
    """The disk or the quota is full; the transaction was rolled back."""


class StoreDamaged(StoreError):
    """The file is not a record database, or a part of it cannot be read."""


class StoreTooNew(StoreError):
    """A newer release wrote this store."""


class StoreBusy(StoreError):
    """Another connection kept the writer lock for too long."""


class StoreClosed(StoreError):
    """The store was used after `close()`."""


class EmbedderMismatch(StoreError):
    """The stored vectors come from another embedder; a reindex is needed.

    Attributes
    ----------
    stored, offered
        Fingerprint in the store, and of the embedder that it was opened with.
    """

    def __init__(self, *, stored: str, offered: str) -> None:
        super().__init__(
            f"the vectors of this store were made by embedder {stored!r}, not {offered!r}: "
            "reindex the store with the new embedder, or open it with the old one"
        )
        self.stored = stored
        self.offered = offered


class BlobStoreError(StoreError):
    """The KV cache cannot do what it was asked to."""


class BlobStoreFull(BlobStoreError):
    """The map or the disk is full; nothing of this encoding was written."""


class BlobStoreReadOnly(BlobStoreError):
    """The directory of the KV cache cannot be written."""


class BlobStoreInUse(BlobStoreError):
    """The process has the same KV cache open already."""


class CorruptBlob(BlobStoreError):
    """A stored value failed its checksum or its layout; it has been dropped."""
