"""An LMDB environment that is a cache: damage is moved aside at open, and the file can be rewritten in place.

LMDB trusts the pages that it maps: a damaged one may end the process. So whoever opens the directory first walks the
page structure of the file, without LMDB, before LMDB sees it. That takes time by the page, not by the byte of tensors.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
from lmdb.verify import VerifyError

from memstore.errors import BlobStoreDamaged, BlobStoreError, BlobStoreInUse
from memstore.kv.faults import translated
from memstore.kv.lock import OpenersLock
from memstore.kv.pages import require_sound

logger = logging.getLogger(__name__)

_FORMAT = b"2"
_SLACK_BYTES = 16 * 2**20
_COPIED_BYTES = 64 * 2**20
"""Rows that a compaction holds in memory."""
_DAMAGE = (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)

_DATA = "data.mdb"
_COMPACTING = "data.mdb.compacting"
# One copy of each is kept, not one per accident: nothing in it is needed.
_DAMAGED = "data.mdb.damaged"
_OTHER_RELEASE = "data.mdb.other-release"


class Tables(NamedTuple):
    """Handles of the databases in one environment, for `db=` in its transactions."""

    slots: Any
    ids: Any
    order: Any
    blobs: Any
    saw: Any
    anchors: Any


class _OtherFormat(ValueError):
    pass


class Environment:
    """The environment of one directory, for all threads of a process.

    Parameters
    ----------
    replace_damaged
        Whether one that is damaged, or of another release, is moved aside for an empty one. Otherwise, and where
        another process has it open, it stays where it is.

    Attributes
    ----------
    was_damaged
        Whether a damaged one was moved aside at open.
    replaced
        What was wrong with the one that was moved aside at open, damaged or not; None where none was.

    Raises
    ------
    BlobStoreDamaged, BlobStoreError
    """

    def __init__(self, path: Path, *, limit_bytes: int, max_readers: int, replace_damaged: bool = True) -> None:
        self.path = path
        self.was_damaged = False
        self.replaced: str | None = None
        self._limit_bytes = limit_bytes
        self._max_readers = max_readers
        self._changed = threading.Condition()
        self._in_flight = 0
        self._is_paused = False
        self._env: Any = None
        self._is_closed = False
        self._replace_damaged = replace_damaged
        with translated(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = OpenersLock(path / "open.lock")
            try:
                alone = self._lock.try_exclusive()
                if not alone:
                    self._lock.share()
                # Whoever was writing it held the lock exclusively, so it is of a process that ended.
                (path / _COMPACTING).unlink(missing_ok=True)
                self._open_or_replace(alone=alone)
                self._lock.share()
            except BaseException:
                self._lock.close()
                raise

    @contextmanager
    def transaction(self, *, write: bool = False, buffers: bool = False) -> Iterator[Any]:
        """Commit at the end, abort on an exception. Never within another one; never longer than one call.

        A reader that stays open keeps every page that was freed since from being used again.
        """
        with self._in_use():
            try:
                with self._env.begin(write=write, buffers=buffers) as txn:
                    yield txn
            except lmdb.MapFullError:
                # Readers whose process was killed keep pages from being used again.
                self._env.reader_check()
                raise

    def compact(self) -> tuple[int, int]:
        """Rewrite the file without its free pages, and delete what was moved aside; return bytes before and after.

        Raises
        ------
        BlobStoreInUse
            Where another process has it open; nothing is changed then.
        BlobStoreFull
            Where the disk has no room for the copy; nothing is changed then.
        """
        with translated(self.path), self._pause():
            if self._is_closed:
                raise BlobStoreError(f"the KV cache {self.path} is closed")
            # LMDB's lock file tells of readers, not of openers, and an flock cannot be widened without a gap: in that
            # gap this instance must not have the file open, as another opener may believe it to be at rest.
            self._env.close()
            alone = self._lock.try_exclusive()
            if not alone:
                self._lock.share()
            self._open(alone=alone)
            if not alone:
                raise BlobStoreInUse(
                    f"another process has the KV cache {self.path} open: stop the server that uses it, then compact"
                )
            try:
                before = self._disk_bytes()
                self._rewrite()
                return before, self._disk_bytes()
            finally:
                self._lock.share()

    def close(self) -> None:
        """Unmap the file; may be called twice."""
        self._is_closed = True
        self._env.close()
        self._lock.close()

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._in_flight += 1
        try:
            with translated(self.path):
                yield
        finally:
            with self._changed:
                self._in_flight -= 1
                if self._is_paused:
                    self._changed.notify_all()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._is_paused = True
            self._changed.wait_for(lambda: not self._in_flight)
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def _rewrite(self) -> None:
        copy = self.path / _COMPACTING
        try:
            self._copy_rows(copy)
            self._env.close()
            try:
                os.replace(copy, self.path / _DATA)
                # It counts the transactions of the file before.
                (self.path / "lock.mdb").unlink(missing_ok=True)
                for name in (_DAMAGED, _OTHER_RELEASE):
                    (self.path / name).unlink(missing_ok=True)
            finally:
                self._open(alone=True)
        finally:
            copy.unlink(missing_ok=True)

    def _copy_rows(self, copy: Path) -> None:
        """Write all rows to a file of their own.

        Not LMDB's own copy: that takes over the inner pages of the trees, in which keys stand whose rows are gone.
        """
        map_size = self._env.info()["map_size"]
        fresh: Any = lmdb.open(
            os.fspath(copy), subdir=False, lock=False, map_size=map_size, max_dbs=len(Tables._fields), sync=False
        )
        try:
            with fresh.begin(write=True) as txn:
                txn.put(b"format", _FORMAT)
            with self._env.begin(buffers=True) as source:
                for name, table in self.tables._asdict().items():
                    target = fresh.open_db(name.encode())
                    cursor = source.cursor(table)
                    more = cursor.first()
                    while more:
                        with fresh.begin(write=True) as txn:
                            copied_bytes = 0
                            while more and copied_bytes < _COPIED_BYTES:
                                key, value = cursor.item()
                                txn.put(key, value, db=target, append=True)
                                copied_bytes += len(value)
                                more = cursor.next()
            fresh.sync(True)
        finally:
            fresh.close()

    def _disk_bytes(self) -> int:
        files = [self.path / name for name in (_DATA, _DAMAGED, _OTHER_RELEASE)]
        return sum(file.stat().st_size for file in files if file.exists())

    def _open_or_replace(self, *, alone: bool) -> None:
        try:
            if alone:
                require_sound(self.path / _DATA)
            self._open(alone=alone)
        except (*_DAMAGE, VerifyError, _OtherFormat) as error:
            is_foreign = isinstance(error, _OtherFormat)
            wrong = f"the KV cache {self.path} {'is of another release' if is_foreign else 'is damaged'} ({error})"
            if not alone:
                raise BlobStoreDamaged(
                    f"{wrong}, and another process has it open: stop that one first, then it can be replaced"
                ) from error
            if not self._replace_damaged:
                raise BlobStoreDamaged(
                    f"{wrong}: `memstore verify --repair` moves it aside, and so does a server that starts; "
                    "facts are encoded anew then"
                ) from error
            self.was_damaged, self.replaced = not is_foreign, wrong
            aside = _OTHER_RELEASE if is_foreign else _DAMAGED
            level = logging.INFO if is_foreign else logging.WARNING
            logger.log(level, "%s: moved aside, every fact will be encoded anew", wrong)
            os.replace(self.path / _DATA, self.path / aside)
            (self.path / "lock.mdb").unlink(missing_ok=True)
            self._open(alone=alone)

    def _open(self, *, alone: bool) -> None:
        env: Any = lmdb.open(
            os.fspath(self.path),
            # Room behind the limit: LMDB copies pages in order to delete, cannot use freed ones at once, and needs
            # neighbouring ones for a value, so that in a map that is full to the brim nothing could be exchanged.
            map_size=self._limit_bytes + max(self._limit_bytes // 4, _SLACK_BYTES),
            max_dbs=len(Tables._fields),
            max_readers=self._max_readers,
            # No fsync: a put comes from the serving path, and losing this file loses time alone. A killed process
            # loses nothing; after a power cut, what is torn is found at open or fails its checksum.
            sync=False,
            # Without it a full disk is an error; with it, a SIGBUS.
            writemap=False,
            # Blobs are read whole and at random.
            readahead=False,
        )
        try:
            env.reader_check()
            if alone:
                _restore_length(env, self.path / _DATA)
            with env.begin(write=True) as txn:
                found = txn.get(b"format")
                if found is None and not txn.stat()["entries"]:
                    txn.put(b"format", _FORMAT)
                elif found != _FORMAT:
                    raise _OtherFormat(f"format {found!r}, this one has {_FORMAT!r}")
            self.tables = Tables(*(env.open_db(name.encode()) for name in Tables._fields))
        except BaseException:
            env.close()
            raise
        self._env = env


def _restore_length(env: Any, data: Path) -> None:
    """Fill a file that is shorter than its header says up with zeros; it must be at rest.

    Reading a mapped page behind the end of the file would be a SIGBUS; a page of zeros fails its checksum.
    """
    expected = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    # A new environment counts its header pages before they are written.
    if 0 < data.stat().st_size < expected:
        os.truncate(data, expected)
