"""What LMDB and the file system raise, as errors that say what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from memstore.errors import BlobStoreError, BlobStoreFull, BlobStoreInUse, BlobStoreReadOnly

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise what LMDB or the file system raises inside as one `BlobStoreError` that says what to do."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise full(path) from error
    except (lmdb.Error, OSError) as error:
        code = getattr(error, "code", 0) or getattr(error, "errno", 0)
        if isinstance(error, lmdb.DiskError | lmdb.TxnFullError) or code in _NO_SPACE:
            raise full(path) from error
        if isinstance(error, lmdb.ReadonlyError) or code in _NO_PERMISSION:
            raise BlobStoreReadOnly(
                f"the KV cache {path} cannot be written: give this user write permission on the directory ({error})"
            ) from error
        if "already open in this process" in str(error):
            raise BlobStoreInUse(f"the KV cache {path} is open in this process: share that instance") from error
        if isinstance(error, lmdb.MapResizedError):
            raise BlobStoreError(
                f"another process made the KV cache {path} larger: give both the same blob_map_size_bytes"
            ) from error
        raise BlobStoreError(f"the KV cache {path} refused an operation: {error}") from error


def full(path: Path) -> BlobStoreFull:
    """Return the error for a cache that has no room left."""
    return BlobStoreFull(f"the KV cache {path} is full: raise blob_map_size_bytes, free disk space, or drop encodings")
