"""Connections to one SQLite database: a writer under a lock, and readers that run beside it."""

import fcntl
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memstore.errors import StoreBusy, StoreClosed, StoreDamaged
from memstore.records.sqlite.faults import translated
from memstore.records.sqlite.schema import apply_schema


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is made if absent; the kernel releases it when the process ends."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replacing(text: bytes) -> str:
    """Return a stored text, with U+FFFD for each part that is none."""
    return text.decode(errors="replace")


class SQLiteConnections:
    """Transactions and reads on the database at `path`, which is made if absent.

    Raises
    ------
    StoreError
    """

    def __init__(self, path: Path, *, busy_timeout_s: float) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._closed = False
        self._writing = threading.Lock()
        self._idle_readers: list[sqlite3.Connection] = []
        with translated(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        # One at a time: a database that another process is just making looks like one that was emptied.
        with translated(path), locked(path.with_name("opening.lock")):
            self._refuse_emptied_file()
            self._writer = self._connect()
            try:
                apply_schema(self._writer, path)
            except BaseException:
                self._writer.close()
                raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection inside a write transaction, which is committed unless the block raises."""
        with self.exclusive() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                # A full disk may have rolled back already.
                if db.in_transaction:
                    db.execute("ROLLBACK")

    @contextmanager
    def exclusive(self) -> Iterator[sqlite3.Connection]:
        """Yield the writing connection, outside a transaction."""
        # As long as for another process, lest the last of many threads waits for the timeouts of all before it.
        if not self._writing.acquire(timeout=self._busy_timeout_s):
            raise StoreBusy(f"{self.path} is being written by other threads of this process: repeat")
        try:
            with translated(self.path):
                self._check_open()
                yield self._writer
        finally:
            self._writing.release()

    def read(self, query: str, *arguments: object) -> list[Any]:
        """Return all rows of a query, on a connection that waits for no writer."""
        return self._read(query, arguments, str)

    def read_damaged(self, query: str, *arguments: object) -> list[Any]:
        """Return all rows of a query, with U+FFFD for each part of a text that is none."""
        return self._read(query, arguments, replacing)

    def _read(
        self, query: str, arguments: Sequence[object], text_factory: Callable[[bytes], str] | type[str]
    ) -> list[Any]:
        with translated(self.path):
            self._check_open()
            try:
                connection = self._idle_readers.pop()
            except IndexError:
                connection = self._connect()
            try:
                connection.text_factory = text_factory
                return connection.execute(query, arguments).fetchall()
            finally:
                if self._closed:
                    connection.close()
                else:
                    self._idle_readers.append(connection)

    def truncate_log(self) -> str | None:
        """Move everything from the write-ahead log into the database; return what keeps that from happening."""
        with self.exclusive() as db:
            [(busy, *_)] = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return f"{self.path}-wal, while another process reads: run `memstore compact` later" if busy else None

    def close(self) -> None:
        """Close every connection; may be called twice."""
        with self._writing:
            self._closed = True
            while self._idle_readers:
                self._idle_readers.pop().close()
            self._writer.close()

    def _refuse_emptied_file(self) -> None:
        # SQLite takes an empty file for a new database: facts that were cut off would be gone without a word.
        if self.path.exists() and self.path.stat().st_size == 0:
            raise StoreDamaged(f"{self.path} is empty: restore a copy, or delete it where the store was never used")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA synchronous = FULL")
        # What was removed is overwritten, not left in free pages.
        connection.execute("PRAGMA secure_delete = ON").fetchall()
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.path} has been closed: open a new store")
