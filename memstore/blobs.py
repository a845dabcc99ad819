"""KV blobs: a memory-mapped cache that the HTTP process and the scheduler process share.

Five tables in one LMDB environment; `owner` and `fact` are 16-byte digests in every key:

=======  =====================================  =================================
slots    owner fact digest(fingerprint, policy) rung   the description, checksummed
ids      encoding id                            its slot
blobs    owner fact "encoding id/" shard        the tensors, checksummed
saw      owner fact-that-was-seen               ids of encodings that saw it (many)
anchors  owner digest(policy)                   ids of the facts that stand before others
=======  =====================================  =================================

A slot holds the newest version alone, so a stale encoding can never be returned for a newer fact.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from memstore.encoding import (
    Encoding,
    KVBlob,
    pack_blob,
    pack_encoding,
    unpack_blob,
    unpack_encoding,
    validate_encoding,
)
from memstore.errors import CorruptBlob
from memstore.lmdb_env import DATABASES, full, open_environment, translated
from memstore.settings import MemStoreSettings
from memstore.types import EncodingId, FactId, OwnerId

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class BlobStats(NamedTuple):
    """Size of a KV cache."""

    encodings: int

    blob_bytes: int
    """Disk space of all tensors, of all shards."""

    map_size_bytes: int
    """Upper bound that `put` keeps, of all tables together."""


class KVBlobs:
    """KV encodings of facts in one directory.

    Safe for several threads and for several processes, each with one instance of its own, opened after the process
    started (LMDB does not survive a fork). Losing the directory loses time, never facts.

    Parameters
    ----------
    path
        Directory of the cache, made if absent.
    shard
        Tensor-parallel rank whose heads this instance reads and writes. Shard 0 writes the descriptions.
    settings
        None reads them from the environment.

    Attributes
    ----------
    corrupt_count
        Damaged values that this instance found and dropped; a damaged environment counts as one.

    Raises
    ------
    BlobStoreReadOnly, BlobStoreFull, BlobStoreInUse, BlobStoreError
    """

    def __init__(self, path: str | Path, *, shard: int = 0, settings: MemStoreSettings | None = None) -> None:
        assert 0 <= shard < 2**16, f"shard {shard}"
        settings = settings or MemStoreSettings()
        self.path = Path(path)
        self.shard = shard
        self._env, databases, replaced = open_environment(
            self.path, limit_bytes=settings.blob_map_size_bytes, max_readers=settings.blob_max_readers
        )
        self._slots, self._ids, self._blobs, self._saw, self._anchors = (databases[name] for name in DATABASES)
        self._limit_bytes = settings.blob_map_size_bytes
        self.corrupt_count = int(replaced)

    def put(self, encoding: Encoding, k: "torch.Tensor", v: "torch.Tensor") -> bool:
        """Store one encoding in place of the older one of its fact, fingerprint, policy and rung.

        Parameters
        ----------
        encoding
            Its description; `nbytes` is filled in.
        k, v
            `[num_layers, num_tokens, num_kv_heads, head_dim]` of this shard; K before rotation.

        Returns
        -------
        bool
            False where an encoding of a newer version of the fact is there; nothing is stored then.

        Raises
        ------
        InvalidEncoding, BlobStoreFull, BlobStoreReadOnly
            With nothing changed.
        """
        validate_encoding(encoding, k, v)
        encoding = dataclasses.replace(encoding, nbytes=k.nbytes + v.nbytes)
        slot = _slot_key(encoding)
        key = _blob_key(slot, encoding.id, self.shard)
        value = pack_blob(key, KVBlob(k, v, encoding.token_ids))
        with self._transaction(write=True) as txn:
            previous = self._described(txn, slot)
            if previous is not None and previous.fact_version > encoding.fact_version:
                return False
            if self.shard == 0:
                if previous is not None:
                    self._remove_description(txn, slot, previous)
                    if previous.id != encoding.id:
                        self._remove_blobs(txn, _blob_prefix(slot, previous.id))
                txn.put(slot, pack_encoding(slot, encoding), db=self._slots)
                txn.put(encoding.id.encode(), slot, db=self._ids)
                for fact_id, _ in encoding.saw:
                    txn.put(_fact_key(encoding.owner, fact_id), encoding.id.encode(), db=self._saw)
            txn.put(key, value, db=self._blobs)
            if sum(_used_bytes(txn, db) for db in (self._slots, self._ids, self._blobs, self._saw)) > self._limit_bytes:
                raise full(self.path)
        return True

    def load(self, encoding_id: EncodingId) -> KVBlob | None:
        """Return this shard's tensors of an encoding, bit for bit as they were put, or None where there are none.

        Raises
        ------
        CorruptBlob
            Where a bit of it has changed; the encoding has been dropped and counted.
        """
        with self._transaction(buffers=True) as txn:
            slot = txn.get(encoding_id.encode(), db=self._ids)
            if slot is None:
                return None
            key = _blob_key(bytes(slot), encoding_id, self.shard)
            value = txn.get(key, db=self._blobs)
            if value is None:
                return None
            try:
                return unpack_blob(key, value)
            except ValueError as error:
                damage = error
        self.corrupt_count += 1
        self.drop_encoding(encoding_id)
        logger.warning("KV of encoding %s is damaged (%s): dropped, to be encoded anew", encoding_id, damage)
        raise CorruptBlob(f"KV of encoding {encoding_id} is damaged ({damage}): it was dropped, encode the fact anew")

    def has(self, encoding_id: EncodingId) -> bool:
        """Return whether an encoding is there, of any shard; what it holds is checked when it is loaded."""
        with self._transaction() as txn:
            return txn.get(encoding_id.encode(), db=self._ids) is not None

    def anchors(self, owner: OwnerId, policy: str) -> tuple[FactId, ...]:
        """Return the facts that stand before this owner's others under `policy`, as they were last set."""
        with self._transaction() as txn:
            value = txn.get(_anchors_key(owner, policy), db=self._anchors)
        return tuple(FactId(fact_id) for fact_id in value.decode().split("\n")) if value else ()

    def set_anchors(self, owner: OwnerId, policy: str, fact_ids: Sequence[FactId]) -> None:
        """Keep the facts that stand before this owner's others under `policy`."""
        with self._transaction(write=True) as txn:
            txn.put(_anchors_key(owner, policy), "\n".join(fact_ids).encode(), db=self._anchors)

    def current(
        self, owner: OwnerId, facts: Sequence[tuple[FactId, int]], *, fingerprint: str, policy: str
    ) -> dict[FactId, dict[int, Encoding]]:
        """Return the encodings of these (fact id, version), by fact and rung; those without one are left out."""
        kind = _digest(f"{len(fingerprint)}:{fingerprint}{policy}")
        found: dict[FactId, dict[int, Encoding]] = {}
        with self._transaction(buffers=True) as txn:
            cursor = txn.cursor(self._slots)
            for fact_id, version in facts:
                for slot, encoding in self._descriptions(cursor, _fact_key(owner, fact_id) + kind):
                    if encoding is not None and (encoding.owner, encoding.fact_id) == (owner, fact_id):
                        assert _slot_key(encoding) == slot, f"{encoding.id} lies in another slot"
                        if encoding.fact_version == version:
                            found.setdefault(fact_id, {})[encoding.rung] = encoding
        return found

    def dependents(self, owner: OwnerId, fact_id: FactId) -> list[Encoding]:
        """Return the encodings of other facts that saw this one, in any version."""
        with self._transaction() as txn:
            cursor = txn.cursor(self._saw)
            ids = list(cursor.iternext_dup()) if cursor.set_key(_fact_key(owner, fact_id)) else []
            slots = [txn.get(encoding_id, db=self._ids) for encoding_id in ids]
            seen_by = [self._described(txn, slot) for slot in slots if slot is not None]
        return [encoding for encoding in seen_by if encoding is not None and encoding.fact_id != fact_id]

    def drop_encoding(self, encoding_id: EncodingId) -> bool:
        """Remove one encoding with all its shards; return whether it was there."""
        with self._transaction(write=True) as txn:
            slot = txn.get(encoding_id.encode(), db=self._ids)
            if slot is None:
                return False
            encoding = self._described(txn, slot)
            if encoding is not None and encoding.id == encoding_id:
                self._remove_description(txn, slot, encoding)
            self._remove_blobs(txn, _blob_prefix(slot, encoding_id))
            return True

    def drop_fact(self, owner: OwnerId, fact_id: FactId) -> int:
        """Remove every encoding of a fact, of all versions and shards; return how many there were."""
        return self._drop(_fact_key(owner, fact_id))

    def drop_owner(self, owner: OwnerId) -> int:
        """Remove every encoding of an owner's facts, and their anchors; return how many encodings there were."""
        prefix = _digest(owner)
        with self._transaction(write=True) as txn:
            cursor = txn.cursor(self._anchors)
            more = cursor.set_range(prefix)
            while more and cursor.key().startswith(prefix):
                more = cursor.delete()
        return self._drop(prefix)

    def drop_fingerprint(self, fingerprint: str) -> int:
        """Remove every encoding of one fingerprint, of all owners; return how many there were."""
        with self._transaction() as txn:
            slots = [
                slot
                for slot, encoding in self._descriptions(txn.cursor(self._slots), b"")
                if encoding is not None and encoding.fingerprint == fingerprint
            ]
        # One transaction each: the scheduler must not wait for all of them.
        return sum(self._drop_slot(slot) for slot in slots)

    def stats(self) -> BlobStats:
        """Return the number of encodings and their size."""
        with self._transaction() as txn:
            return BlobStats(txn.stat(self._slots)["entries"], _used_bytes(txn, self._blobs), self._limit_bytes)

    def close(self) -> None:
        """Unmap the file; may be called twice."""
        self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # A transaction never outlives the call that opened it: a reader that stays open keeps every page that was
    # freed since from being used again.
    @contextmanager
    def _transaction(self, *, write: bool = False, buffers: bool = False) -> Iterator[Any]:
        with translated(self.path), self._env.begin(write=write, buffers=buffers) as txn:
            yield txn

    def _described(self, txn: Any, slot: bytes) -> Encoding | None:
        value = txn.get(slot, db=self._slots)
        return None if value is None else self._unpacked(slot, value)

    def _unpacked(self, slot: bytes, value: bytes) -> Encoding | None:
        try:
            return unpack_encoding(slot, value)
        except ValueError as error:
            self.corrupt_count += 1
            logger.warning("the description of a KV encoding is damaged (%s): its fact is encoded anew", error)
            return None

    def _descriptions(self, cursor: Any, prefix: bytes) -> Iterator[tuple[bytes, Encoding | None]]:
        more = cursor.set_range(prefix)
        while more and (slot := bytes(cursor.key())).startswith(prefix):
            yield slot, self._unpacked(slot, cursor.value())
            more = cursor.next()

    def _drop(self, prefix: bytes) -> int:
        with self._transaction(write=True) as txn:
            described = list(self._descriptions(txn.cursor(self._slots), prefix))
            for slot, encoding in described:
                self._remove_description(txn, slot, encoding)
            self._remove_blobs(txn, prefix)
            return len(described)

    def _drop_slot(self, slot: bytes) -> bool:
        with self._transaction(write=True) as txn:
            encoding = self._described(txn, slot)
            if encoding is None:
                return False
            self._remove_description(txn, slot, encoding)
            self._remove_blobs(txn, _blob_prefix(slot, encoding.id))
            return True

    def _remove_description(self, txn: Any, slot: bytes, encoding: Encoding | None) -> None:
        txn.delete(slot, db=self._slots)
        if encoding is not None:
            txn.delete(encoding.id.encode(), db=self._ids)
            for fact_id, _ in encoding.saw:
                txn.delete(_fact_key(encoding.owner, fact_id), encoding.id.encode(), db=self._saw)

    def _remove_blobs(self, txn: Any, prefix: bytes) -> None:
        cursor = txn.cursor(self._blobs)
        more = cursor.set_range(prefix)
        while more and (key := cursor.key()).startswith(prefix):
            # Also of encodings whose description was damaged, or never written.
            txn.delete(key[32:-3], db=self._ids)
            more = cursor.delete()


def _used_bytes(txn: Any, database: Any) -> int:
    stat = txn.stat(database)
    return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))


def _digest(text: str) -> bytes:
    # Not xxHash: an owner chooses their own name, and must not be able to choose another one's prefix.
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _fact_key(owner: OwnerId, fact_id: FactId) -> bytes:
    return _digest(owner) + _digest(fact_id)


def _anchors_key(owner: OwnerId, policy: str) -> bytes:
    return _digest(owner) + _digest(policy)


def _slot_key(encoding: Encoding) -> bytes:
    kind = _digest(f"{len(encoding.fingerprint)}:{encoding.fingerprint}{encoding.policy}")
    return _fact_key(encoding.owner, encoding.fact_id) + kind + encoding.rung.to_bytes(4, "big")


def _blob_prefix(slot: bytes, encoding_id: EncodingId) -> bytes:
    return slot[:32] + encoding_id.encode() + b"/"


def _blob_key(slot: bytes, encoding_id: EncodingId, shard: int) -> bytes:
    return _blob_prefix(slot, encoding_id) + shard.to_bytes(2, "big")
