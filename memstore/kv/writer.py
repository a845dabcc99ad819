"""Puts under a budget: what was used longest ago makes room for what is new."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import lmdb

from memstore.errors import BlobStoreFull
from memstore.kv.encoding import Encoding, pack_encoding
from memstore.kv.eviction import Holds, Recency
from memstore.kv.faults import full
from memstore.kv.keys import blob_key
from memstore.kv.rows import Rows
from memstore.types import EncodingId

_DEFRAGMENTATIONS = 8
"""How often a put makes room where the budget has some, but no free pages lie side by side."""


class OpenRows(Protocol):
    """Starts a transaction that is committed at the end of the `with`, or aborted on an exception."""

    def __call__(self, *, write: bool = False, buffers: bool = False) -> AbstractContextManager[Rows]: ...


class BlobWriter:
    """Writes encodings, and the times of their use, for one instance of the cache. Thread-safe.

    Attributes
    ----------
    holds, recency
        What may not be evicted, and what first.
    evicted_count
        Encodings that were evicted.
    """

    def __init__(self, open_rows: OpenRows, *, limit_bytes: int, path: Path) -> None:
        self._open_rows = open_rows
        self._limit_bytes = limit_bytes
        self._path = path
        self.holds = Holds()
        with open_rows() as rows:
            self.recency = Recency(rows.newest_stamp())
        self.evicted_count = 0
        self._counting = threading.Lock()

    def put(self, encoding: Encoding, slot: bytes, value: bytes, *, shard: int) -> bool:
        """Store packed tensors; see `KVBlobs.put`."""
        if len(value) > self._limit_bytes:
            raise full(self._path)
        for _ in range(_DEFRAGMENTATIONS):
            try:
                return self._put(encoding, slot, value, shard)
            except BlobStoreFull as error:
                # The budget has room, but the file has no free pages side by side. Nothing else frees some.
                if not isinstance(error.__cause__, lmdb.MapFullError) or not self._evict(len(value), encoding.id):
                    raise
        return self._put(encoding, slot, value, shard)

    def flush(self) -> None:
        """Write down which encodings were used since the last put."""
        used = self.recency.pending()
        if used:
            with self._open_rows(write=True) as rows:
                _note(rows, used)
            self.recency.settle(used)

    def _put(self, encoding: Encoding, slot: bytes, value: bytes, shard: int) -> bool:
        used = self.recency.pending()
        with self._open_rows(write=True) as rows:
            previous = rows.description(slot)
            if previous is not None and previous.fact_version > encoding.fact_version:
                return False
            _note(rows, used)
            if shard == 0:
                rows.empty(slot, previous, keep=encoding.id)
                rows.describe(slot, encoding, pack_encoding(slot, encoding))
            rows.put_blob(blob_key(slot, encoding.id, shard), value)
            rows.touch(encoding.id, slot, self.recency.stamp(rows.newest_stamp()))
            evicted = 0
            least_recent = rows.least_recent()
            while rows.used_bytes() > self._limit_bytes:
                if not self._evict_next(rows, least_recent, encoding.id):
                    raise full(self._path)
                evicted += 1
        self.recency.settle(used)
        self._count(evicted)
        return True

    def _evict(self, wanted_bytes: int, newest: EncodingId) -> bool:
        """Evict as much as a value takes up; return whether there was anything to evict."""
        freed_bytes = 0
        while freed_bytes < wanted_bytes:
            # One transaction each: what one frees, the next but one can use.
            with self._open_rows(write=True) as rows:
                before = rows.used_bytes()
                if not self._evict_next(rows, rows.least_recent(), newest):
                    break
                freed_bytes += before - rows.used_bytes()
            self._count(1)
        return freed_bytes > 0

    def _evict_next(self, rows: Rows, least_recent: Iterator[EncodingId], newest: EncodingId) -> bool:
        return any(i != newest and i not in self.holds and rows.remove(i) for i in least_recent)

    def _count(self, evicted: int) -> None:
        with self._counting:
            self.evicted_count += evicted


def _note(rows: Rows, used: dict[EncodingId, int]) -> None:
    for encoding_id, stamp in used.items():
        place = rows.place(encoding_id)
        if place is not None:
            rows.touch(encoding_id, place.slot, stamp)
