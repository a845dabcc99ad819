"""What SQLite and the file system report, as the errors of this package."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memstore.errors import StoreBusy, StoreDamaged, StoreError, StoreFull, StoreReadOnly

_READ_ONLY = "{path} cannot be written: give this user write permission on the directory and its files"
_FULL = "no space left for {path}: free some, then repeat; what was stored before is intact"

_BY_SQLITE_NAME: tuple[tuple[str, type[StoreError], str], ...] = (
    ("SQLITE_FULL", StoreFull, _FULL),
    ("SQLITE_READONLY", StoreReadOnly, _READ_ONLY),
    ("SQLITE_PERM", StoreReadOnly, _READ_ONLY),
    ("SQLITE_CANTOPEN", StoreReadOnly, "{path} cannot be opened: check that the directory exists and is writable"),
    ("SQLITE_NOTADB", StoreDamaged, "{path} is not a record database: restore a copy, or use another directory"),
    ("SQLITE_CORRUPT", StoreDamaged, "{path} is damaged: restore a copy; what can be read is left as it is"),
    ("SQLITE_BUSY", StoreBusy, "{path} is being written by another program: repeat, or end that program"),
    ("SQLITE_IOERR", StoreError, "{path} cannot be read or written: check the disk and its quota"),
)

_BY_ERRNO: dict[int, tuple[type[StoreError], str]] = {
    errno.EACCES: (StoreReadOnly, _READ_ONLY),
    errno.EPERM: (StoreReadOnly, _READ_ONLY),
    errno.EROFS: (StoreReadOnly, _READ_ONLY),
    errno.ENOSPC: (StoreFull, _FULL),
    errno.EDQUOT: (StoreFull, _FULL),
}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise what SQLite or the file system raises inside as one `StoreError` that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        for prefix, kind, advice in _BY_SQLITE_NAME:
            if name.startswith(prefix):
                raise kind(f"{advice.format(path=path)} ({name}: {error})") from error
        if "decode to UTF-8" in str(error):
            raise StoreDamaged(f"{path} is damaged: a text in it is no text ({error})") from error
        raise StoreError(f"{path} refused an operation ({name or type(error).__name__}: {error})") from error
    except UnicodeDecodeError as error:
        # SQLite's own message quotes a schema that is no text.
        raise StoreDamaged(f"{path} is damaged: a text in it is no text ({error})") from error
    except OSError as error:
        kind, advice = _BY_ERRNO.get(error.errno or 0, (StoreError, "{path} cannot be used as a store"))
        raise kind(f"{advice.format(path=path)} ({error})") from error
