"""Opening an LMDB environment that is a cache: whatever is damaged is moved aside."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from memstore.errors import BlobStoreError, BlobStoreFull, BlobStoreInUse, BlobStoreReadOnly

logger = logging.getLogger(__name__)

DATABASES = (b"slots", b"ids", b"blobs", b"saw", b"anchors")
_FORMAT = b"1"
_SLACK_BYTES = 16 * 2**20
_DAMAGE = (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)
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


def open_environment(path: Path, *, limit_bytes: int, max_readers: int) -> tuple[Any, dict[bytes, Any], bool]:
    """Return the environment at `path`, its databases by name, and whether a damaged one was moved aside.

    Raises
    ------
    BlobStoreError
    """
    with translated(path):
        path.mkdir(parents=True, exist_ok=True)
        try:
            return *_open(path, limit_bytes, max_readers), False
        except (*_DAMAGE, ValueError) as error:
            # One copy is kept, not one per accident: nothing in it is needed.
            os.replace(path / "data.mdb", path / "data.mdb.damaged")
            (path / "lock.mdb").unlink(missing_ok=True)
            logger.warning(
                "the KV cache %s was damaged (%s): moved aside, every fact will be encoded anew", path, error
            )
            return *_open(path, limit_bytes, max_readers), True


def _open(path: Path, limit_bytes: int, max_readers: int) -> tuple[Any, dict[bytes, Any]]:
    env = lmdb.open(
        os.fspath(path),
        # Room behind the limit: LMDB copies pages in order to delete, and cannot use freed ones at once, so that in
        # a map that is full to the brim nothing could be dropped.
        map_size=limit_bytes + max(limit_bytes // 4, _SLACK_BYTES),
        max_dbs=len(DATABASES),
        max_readers=max_readers,
        # No fsync: a put comes from the serving path, and losing this file loses time alone. A killed process
        # loses nothing; after a power cut, what is torn fails to open or fails its checksum.
        sync=False,
        # Without it a full disk is an error; with it, a SIGBUS.
        writemap=False,
        # Blobs are read whole and at random.
        readahead=False,
    )
    try:
        env.reader_check()
        shortened = _restore_length(env, path / "data.mdb")
        with env.begin(write=True) as txn:
            found = txn.get(b"format")
            if found is None and not txn.stat()["entries"]:
                txn.put(b"format", _FORMAT)
            elif found != _FORMAT:
                raise ValueError(f"format {found!r}")
        databases = {name: env.open_db(name, dupsort=name == b"saw") for name in DATABASES}
        if shortened:
            _walk(env, databases)
    except BaseException:
        env.close()
        raise
    return env, databases


def _restore_length(env: Any, data: Path) -> bool:
    """Return whether the file was shorter than its header says; if so, fill it up with zeros.

    Reading a mapped page behind the end of the file would be a SIGBUS; a page of zeros is an error, or fails its
    checksum. LMDB itself may leave a file a few pages short, so that this alone is no damage.
    """
    expected = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    # A new environment counts its header pages before they are written.
    shorter = bool(0 < data.stat().st_size < expected)
    if shorter:
        os.truncate(data, expected)
    return shorter


def _walk(env: Any, databases: dict[bytes, Any]) -> None:
    with env.begin(buffers=True) as txn:
        for database in databases.values():
            for _ in txn.cursor(database).iternext(values=False):
                pass
