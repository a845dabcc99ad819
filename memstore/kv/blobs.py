"""KV blobs: a memory-mapped cache that the HTTP process and the scheduler process share.

Tables and keys are in `memstore.kv.rows`. A slot holds the newest version alone, so a stale encoding can never be
returned for a newer fact.

What is dropped or evicted can no longer be found by any key. Its bytes stay in free pages of the file, as they do on
a disk behind a deleted file, until LMDB writes over them; `KVBlobs.compact` leaves none.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from memstore.errors import CorruptBlob
from memstore.kv.encoding import Encoding, KVBlob, pack_blob, unpack_blob, validate_encoding
from memstore.kv.environment import Environment
from memstore.kv.keys import blob_key, digest, fact_key, slot_key
from memstore.kv.rows import Rows
from memstore.kv.verify import Alive, BlobReport, verify
from memstore.kv.writer import BlobWriter
from memstore.settings import MemStoreSettings
from memstore.types import EncodingId, FactId, OwnerId

if TYPE_CHECKING:
    import torch

    from kv_splice.quantise import KVScales

logger = logging.getLogger(__name__)


class BlobStats(NamedTuple):
    """Size of a KV cache."""

    encodings: int

    blob_bytes: int
    """Disk space of all tensors, of all shards."""

    map_size_bytes: int
    """Upper bound that `put` keeps, of all tables together."""

    evicted: int
    """Encodings that this instance evicted."""


class KVBlobs:
    """KV encodings of facts in one directory.

    Safe for several threads and for several processes, each with one instance of its own, opened after the process
    started (LMDB does not survive a fork). Losing the directory loses time, never facts.

    A put beyond the budget evicts the encodings that were put or loaded longest ago. A load is noted in memory; the
    notes are written with this instance's next put, `flush` or `close`, under the time of the load. Until then the
    puts of other processes do not know of it: they may evict what this one has loaded since its own last put. A
    process that ends without `close` takes its notes along.

    Parameters
    ----------
    path
        Directory of the cache, made if absent.
    shard
        Tensor-parallel rank whose heads this instance reads and writes. Shard 0 writes the descriptions.
    settings
        None reads them from the environment.
    replace_damaged
        Whether a cache that is damaged as a whole, or of another release, is moved aside for an empty one. For whoever
        only looks: False raises `BlobStoreDamaged` instead, and leaves it where it is.

    Attributes
    ----------
    corrupt_count
        Damaged values that this instance found and dropped; a damaged environment counts as one.
    replaced
        What was wrong with the cache that was moved aside at open; None where none was.

    Raises
    ------
    BlobStoreDamaged, BlobStoreReadOnly, BlobStoreFull, BlobStoreInUse, BlobStoreError
    """

    def __init__(
        self,
        path: str | Path,
        *,
        shard: int = 0,
        settings: MemStoreSettings | None = None,
        replace_damaged: bool = True,
    ) -> None:
        assert 0 <= shard < 2**16, f"shard {shard}"
        settings = settings or MemStoreSettings()
        self.path = Path(path)
        self.shard = shard
        self._limit_bytes = settings.blob_map_size_bytes
        self._env = Environment(
            self.path,
            limit_bytes=self._limit_bytes,
            max_readers=settings.blob_max_readers,
            replace_damaged=replace_damaged,
        )
        self.corrupt_count = int(self._env.was_damaged)
        self.replaced = self._env.replaced
        self._is_open = True
        try:
            self._writer = BlobWriter(self._rows, limit_bytes=self._limit_bytes, path=self.path)
        except BaseException:
            self._env.close()
            raise

    @property
    def evicted_count(self) -> int:
        """Encodings that this instance evicted."""
        return self._writer.evicted_count

    def put(
        self, encoding: Encoding, k: "torch.Tensor", v: "torch.Tensor", *, scales: "KVScales | None" = None
    ) -> bool:
        """Store one encoding in place of the older one of its fact, fingerprint, policy and rung.

        Beyond the budget the least recently used encodings that this instance does not hold are evicted.

        Parameters
        ----------
        encoding
            Its description; `nbytes` is filled in.
        k, v
            `[num_layers, num_tokens, num_kv_heads, head_dim]` of this shard; K before rotation.
        scales
            Of K and V in int8, as `kv_splice.quantise` returns all three.

        Returns
        -------
        bool
            False where an encoding of a newer version of the fact is there; nothing is stored then.

        Raises
        ------
        BlobStoreFull
            Where it does not fit beside what is held, or the disk is full.
        InvalidEncoding, BlobStoreReadOnly
            With nothing changed, as for `BlobStoreFull`.
        """
        validate_encoding(encoding, k, v, scales)
        blob = KVBlob(k, v, encoding.token_ids, scales)
        encoding = dataclasses.replace(encoding, nbytes=blob.nbytes)
        slot = slot_key(encoding)
        value = pack_blob(blob_key(slot, encoding.id, self.shard), blob)
        return self._writer.put(encoding, slot, value, shard=self.shard)

    def load(self, encoding_id: EncodingId) -> KVBlob | None:
        """Return this shard's tensors of an encoding, bit for bit as they were put, or None where there are none.

        Raises
        ------
        CorruptBlob
            Where a bit of it has changed; the encoding has been dropped and counted.
        """
        with self._rows(buffers=True) as rows:
            place = rows.place(encoding_id)
            if place is None:
                return None
            key = blob_key(place.slot, encoding_id, self.shard)
            value = rows.blob(key)
            if value is None:
                return None
            try:
                blob = unpack_blob(key, value)
                self._writer.recency.use(encoding_id)
                return blob
            except ValueError as error:
                damage = error
        self.corrupt_count += 1
        self.drop_encoding(encoding_id)
        logger.warning("KV of encoding %s is damaged (%s): dropped, to be encoded anew", encoding_id, damage)
        raise CorruptBlob(f"KV of encoding {encoding_id} is damaged ({damage}): it was dropped, encode the fact anew")

    def has(self, encoding_id: EncodingId) -> bool:
        """Return whether an encoding is there, of any shard; what it holds is checked when it is loaded."""
        with self._rows() as rows:
            return rows.place(encoding_id) is not None

    def touch(self, encoding_ids: Sequence[EncodingId]) -> None:
        """Note that encodings are in use whose tensors the caller has from an earlier `load`, or `put`."""
        for encoding_id in encoding_ids:
            self._writer.recency.use(encoding_id)

    def acquire(self, encoding_ids: Sequence[EncodingId]) -> None:
        """Keep encodings from being evicted by this instance, until each is released as often as it was acquired.

        For a caller that loads several and must find them all, whatever it or another thread puts meanwhile. The
        server's scheduler does not need it: it loads one at a time, and keeps in memory what it has loaded.

        They can still be dropped, replaced by a newer version, and evicted by another process. An id that is not
        there is held all the same.
        """
        self._writer.holds.acquire(encoding_ids)

    def release(self, encoding_ids: Sequence[EncodingId]) -> None:
        """Undo one `acquire` of each."""
        self._writer.holds.release(encoding_ids)

    def anchors(self, owner: OwnerId, policy: str) -> tuple[FactId, ...]:
        """Return the facts that stand before this owner's others under `policy`, as they were last set."""
        with self._rows() as rows:
            return rows.anchors(owner, policy)

    def set_anchors(self, owner: OwnerId, policy: str, fact_ids: Sequence[FactId]) -> None:
        """Keep the facts that stand before this owner's others under `policy`."""
        with self._rows(write=True) as rows:
            rows.set_anchors(owner, policy, fact_ids)

    def current(
        self, owner: OwnerId, facts: Sequence[tuple[FactId, int]], *, fingerprint: str, policy: str
    ) -> dict[FactId, dict[int, Encoding]]:
        """Return the encodings of these (fact id, version), by fact and rung; those without one are left out.

        That is no use of them: only `load` and `put` count for what is evicted.
        """
        with self._rows(buffers=True) as rows:
            return rows.current(owner, facts, fingerprint=fingerprint, policy=policy)

    def dependents(self, owner: OwnerId, fact_id: FactId) -> list[Encoding]:
        """Return the encodings of other facts that saw this one, in any version."""
        with self._rows() as rows:
            return rows.dependents(owner, fact_id)

    def drop_encoding(self, encoding_id: EncodingId) -> bool:
        """Remove one encoding with all its shards; return whether it was there."""
        with self._rows(write=True) as rows:
            return rows.remove(encoding_id)

    def drop_fact(self, owner: OwnerId, fact_id: FactId) -> int:
        """Remove every encoding of a fact, of all versions and shards; return how many there were."""
        with self._rows(write=True) as rows:
            return rows.remove_facts(fact_key(owner, fact_id))

    def drop_older(self, owner: OwnerId, fact_id: FactId, version: int) -> int:
        """Remove the encodings of a fact that are of versions before `version`; return how many there were."""
        with self._rows(write=True) as rows:
            return rows.remove_older(fact_key(owner, fact_id), version)

    def drop_owner(self, owner: OwnerId) -> int:
        """Remove every row of an owner, anchors included; return how many encodings there were.

        Their bytes are free space of the file from then on; see above.
        """
        with self._rows(write=True) as rows:
            return rows.remove_owner(digest(owner))

    def drop_fingerprint(self, fingerprint: str) -> int:
        """Remove every encoding of one fingerprint, of all owners; return how many there were."""
        with self._rows() as rows:
            ids = [e.id for _, e in rows.descriptions(b"") if e is not None and e.fingerprint == fingerprint]
        # One transaction each: the scheduler must not wait for all of them.
        return sum(self.drop_encoding(encoding_id) for encoding_id in ids)

    def flush(self) -> None:
        """Write down which encodings were loaded since the last put, so that other processes know of it."""
        self._writer.flush()

    def verify(self, *, alive: Alive | None = None, repair: bool) -> BlobReport:
        """Read every description and every tensor, and check that the rows of all tables belong together.

        The cache stays in use: a transaction spans a few dozen rows, and a repair looks again before it removes.

        Parameters
        ----------
        alive
            Given an owner and (fact id, version) pairs, no fact twice, returns the facts that the records have at
            that very version; encodings of the others are orphans. None asks for none.
        repair
            Whether what is damaged, dangling or an orphan is removed; a removed fact is encoded anew when needed.
        """
        report = verify(self._rows, alive=alive, repair=repair)
        if repair:
            self.corrupt_count += report.corrupt
        return report

    def compact(self) -> tuple[int, int]:
        """Rewrite the file without its free pages; return its bytes before and after.

        Copies of damaged caches, and of other releases' ones, that were moved aside are deleted too. A crash on the
        way leaves the old file as it is. Other threads of this process wait meanwhile.

        Raises
        ------
        BlobStoreInUse
            Where another process has the cache open; nothing is changed then.
        BlobStoreFull
            Where the disk has no room for the copy; nothing is changed then.
        """
        self.flush()
        return self._env.compact()

    def stats(self) -> BlobStats:
        """Return the number of encodings and their size."""
        with self._rows() as rows:
            size = rows.table_bytes(rows.tables.blobs)
            return BlobStats(rows.count(), size, self._limit_bytes, self.evicted_count)

    def close(self) -> None:
        """Write down what was loaded, and unmap the file; may be called twice."""
        if self._is_open:
            self._is_open = False
            try:
                self.flush()
            finally:
                self._env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _rows(self, *, write: bool = False, buffers: bool = False) -> Iterator[Rows]:
        with self._env.transaction(write=write, buffers=buffers) as txn:
            yield Rows(txn, self._env.tables, self._count_damage)

    def _count_damage(self, damage: str) -> None:
        self.corrupt_count += 1
        logger.warning("the description of a KV encoding is damaged (%s): its fact is encoded anew", damage)
