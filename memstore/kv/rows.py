"""The rows of a KV cache, and what must happen to them together, inside one transaction of LMDB.

`owner` and `fact` are 16-byte digests in every key:

=======  =========================================  ===============================================
slots    owner fact digest(fingerprint, policy) rung  the description, checksummed
ids      encoding id                                its slot, and the stamp of its last use
order    stamp of last use, encoding id             nothing
blobs    owner fact "encoding id/" shard            the tensors, checksummed
saw      owner fact-that-was-seen encoding id       nothing
anchors  owner digest(policy)                       ids of the facts that stand before others, checksummed
=======  =========================================  ===============================================

Every encoding that has a blob of any shard has a row in `ids` and `order`; one that shard 0 has put has the others too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memstore.kv.encoding import Encoding, seal, unpack_encoding, unseal
from memstore.kv.environment import Tables
from memstore.kv.keys import (
    FACT_BYTES,
    OWNER_BYTES,
    SLOT_BYTES,
    STAMP_BYTES,
    Place,
    anchors_key,
    blob_prefix,
    digest,
    fact_key,
    id_bytes,
    id_in_blob_key,
    id_text,
    kind_key,
    order_key,
    place_in,
    saw_key,
    slot_key,
)
from memstore.types import EncodingId, FactId, OwnerId


class Rows:
    """One transaction on all tables.

    Parameters
    ----------
    on_damage
        Called with what was wrong with a description; it counts as absent then.
    """

    def __init__(self, txn: Any, tables: Tables, on_damage: Callable[[str], None]) -> None:
        self.txn = txn
        self.tables = tables
        self._on_damage = on_damage

    def description(self, slot: bytes) -> Encoding | None:
        """Return what the slot describes, or None where it is empty or damaged."""
        value = self.txn.get(slot, db=self.tables.slots)
        return None if value is None else self._unpacked(slot, value)

    def descriptions(self, prefix: bytes) -> Iterator[tuple[bytes, Encoding | None]]:
        """Return the slots that begin with `prefix`, with None for a damaged description."""
        for slot, value in scan(self.txn, self.tables.slots, prefix):
            yield slot, self._unpacked(slot, value)

    def current(
        self, owner: OwnerId, facts: Sequence[tuple[FactId, int]], *, fingerprint: str, policy: str
    ) -> dict[FactId, dict[int, Encoding]]:
        """Return the encodings of these (fact id, version), by fact and rung; those without one are left out."""
        cursor = self.txn.cursor(self.tables.slots)
        start, kind = digest(owner), kind_key(fingerprint, policy)
        found: dict[FactId, dict[int, Encoding]] = {}
        for fact_id, version in facts:
            prefix = start + digest(fact_id) + kind
            more = cursor.set_range(prefix)
            while more and (slot := bytes(cursor.key())).startswith(prefix):
                encoding = self._unpacked(slot, cursor.value())
                if encoding is not None and (encoding.owner, encoding.fact_id) == (owner, fact_id):
                    assert slot_key(encoding) == slot, f"{encoding.id} lies in another slot"
                    if encoding.fact_version == version:
                        found.setdefault(fact_id, {})[encoding.rung] = encoding
                more = cursor.next()
        return found

    def dependents(self, owner: OwnerId, fact_id: FactId) -> list[Encoding]:
        """Return the encodings of other facts that saw this one, in any version."""
        seen_by = []
        for key, _ in scan(self.txn, self.tables.saw, fact_key(owner, fact_id)):
            place = self.place(id_text(key[FACT_BYTES:]))
            encoding = None if place is None else self.description(place.slot)
            if encoding is not None and encoding.fact_id != fact_id:
                seen_by.append(encoding)
        return seen_by

    def place(self, encoding_id: EncodingId) -> Place | None:
        """Return where an encoding is, or None where it is not, or its row is damaged."""
        value = self._place_value(encoding_id)
        return None if value is None else place_in(value)

    def blob(self, key: bytes) -> Any:
        """Return the packed tensors under a key, or None."""
        return self.txn.get(key, db=self.tables.blobs)

    def used_bytes(self) -> int:
        """Return the disk space of all tables."""
        return sum(map(self.table_bytes, self.tables))

    def table_bytes(self, table: Any) -> int:
        """Return the disk space of one table."""
        stat = self.txn.stat(table)
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def count(self) -> int:
        """Return the number of described encodings."""
        return int(self.txn.stat(self.tables.slots)["entries"])

    def newest_stamp(self) -> int:
        """Return the stamp of the encoding that was used last, 0 where there is none."""
        cursor = self.txn.cursor(self.tables.order)
        return int.from_bytes(cursor.key()[:STAMP_BYTES], "big") if cursor.last() else 0

    def least_recent(self) -> Iterator[EncodingId]:
        """Return the encodings from the least recently used one on; they may be removed meanwhile."""
        for key, _ in scan(self.txn, self.tables.order):
            yield id_text(key[STAMP_BYTES:])

    def touch(self, encoding_id: EncodingId, slot: bytes, stamp: int) -> None:
        """Note the use of an encoding in `slot`, unless a later one is noted."""
        key = id_bytes(encoding_id)
        before = self.place(encoding_id)
        if before is not None:
            if before.slot == slot and before.stamp >= stamp:
                return
            self.txn.delete(order_key(before.stamp, key), db=self.tables.order)
        self.txn.put(key, slot + stamp.to_bytes(STAMP_BYTES, "big"), db=self.tables.ids)
        self.txn.put(order_key(stamp, key), b"", db=self.tables.order)

    def describe(self, slot: bytes, encoding: Encoding, packed: bytes) -> None:
        """Write the description of an encoding, in an empty slot."""
        self.txn.put(slot, packed, db=self.tables.slots)
        for fact_id, _ in encoding.saw:
            self.txn.put(saw_key(encoding.owner, fact_id, encoding.id), b"", db=self.tables.saw)

    def put_blob(self, key: bytes, value: bytes) -> None:
        """Write packed tensors."""
        self.txn.put(key, value, db=self.tables.blobs)

    def anchors(self, owner: OwnerId, policy: str) -> tuple[FactId, ...]:
        """Return an owner's anchors, empty where there are none or they are damaged."""
        key = anchors_key(owner, policy)
        value = self.txn.get(key, db=self.tables.anchors)
        try:
            payload = b"" if value is None else unseal(key, value)[STAMP_BYTES:]
        except ValueError as error:
            self._on_damage(f"anchors: {error}")
            return ()
        return tuple(FactId(fact_id) for fact_id in payload.decode().split("\n")) if payload else ()

    def set_anchors(self, owner: OwnerId, policy: str, fact_ids: Sequence[FactId]) -> None:
        """Write an owner's anchors."""
        key = anchors_key(owner, policy)
        payload = time.time_ns().to_bytes(STAMP_BYTES, "big") + "\n".join(fact_ids).encode()
        self.txn.put(key, seal(key, payload), db=self.tables.anchors)

    def remove(self, encoding_id: EncodingId) -> bool:
        """Remove all rows of one encoding, of all shards; return whether it was there."""
        value = self._place_value(encoding_id)
        if value is None:
            return False
        place = place_in(value)
        if place is None:
            self.txn.delete(id_bytes(encoding_id), db=self.tables.ids)
            return True
        encoding = self.description(place.slot)
        if encoding is None or encoding.id == encoding_id:
            self.txn.delete(place.slot, db=self.tables.slots)
        else:
            encoding = None
        self._remove(encoding_id, place.slot, encoding)
        return True

    def empty(self, slot: bytes, described: Encoding | None, *, keep: EncodingId | None = None) -> None:
        """Remove all rows of what is in a slot, given its description, None where that is damaged.

        Of the encoding `keep` the tensors stay, which other shards may have put.
        """
        self.txn.delete(slot, db=self.tables.slots)
        if described is not None:
            ids = {described.id}
        else:
            found = self._ids_of_blobs(slot[:FACT_BYTES])
            ids = {i for i in found if (place := self.place(i)) is None or place.slot == slot}
        for encoding_id in ids - {keep}:
            self._remove(encoding_id, slot, described)
        if described is not None and described.id == keep:
            self._remove_saw(described)

    def remove_facts(self, prefix: bytes) -> int:
        """Remove everything of the facts whose keys begin with `prefix`; return how many slots were filled."""
        count = 0
        for slot, encoding in self.descriptions(prefix):
            self.empty(slot, encoding)
            count += 1
        for encoding_id in self._ids_of_blobs(prefix):
            self.remove(encoding_id)
        clear(self.txn, self.tables.blobs, prefix)
        return count

    def remove_older(self, prefix: bytes, version: int) -> int:
        """Remove what the slots that begin with `prefix` hold of versions before `version`; return how many.

        What is damaged may be of any version, and goes too.
        """
        count = 0
        for slot, encoding in self.descriptions(prefix):
            if encoding is None or encoding.fact_version < version:
                self.empty(slot, encoding)
                count += 1
        return count

    def remove_owner(self, prefix: bytes) -> int:
        """Remove every row of an owner, also damaged ones; return how many slots were filled."""
        count = self.remove_facts(prefix)
        clear(self.txn, self.tables.saw, prefix)
        clear(self.txn, self.tables.anchors, prefix)
        # Rows that nothing but damage can have left.
        for key, value in scan(self.txn, self.tables.ids):
            if value[:OWNER_BYTES] == prefix:
                self._remove(id_text(key), bytes(value[:SLOT_BYTES]), None)
        return count

    def _place_value(self, encoding_id: EncodingId) -> Any:
        # An empty id comes from a damaged key; LMDB refuses it.
        return self.txn.get(id_bytes(encoding_id), db=self.tables.ids) if encoding_id else None

    def _remove(self, encoding_id: EncodingId, slot: bytes, encoding: Encoding | None) -> None:
        key = id_bytes(encoding_id)
        place = self.place(encoding_id)
        self.txn.delete(key, db=self.tables.ids)
        if place is not None:
            self.txn.delete(order_key(place.stamp, key), db=self.tables.order)
        clear(self.txn, self.tables.blobs, blob_prefix(slot, encoding_id))
        if encoding is not None:
            self._remove_saw(encoding)
        else:
            for saw, _ in scan(self.txn, self.tables.saw, slot[:OWNER_BYTES]):
                if saw[FACT_BYTES:] == key:
                    self.txn.delete(saw, db=self.tables.saw)

    def _remove_saw(self, encoding: Encoding) -> None:
        for fact_id, _ in encoding.saw:
            self.txn.delete(saw_key(encoding.owner, fact_id, encoding.id), db=self.tables.saw)

    def _ids_of_blobs(self, prefix: bytes) -> set[EncodingId]:
        return {id_in_blob_key(key) for key, _ in scan(self.txn, self.tables.blobs, prefix)}

    def _unpacked(self, slot: bytes, value: Any) -> Encoding | None:
        try:
            return unpack_encoding(slot, value)
        except ValueError as error:
            self._on_damage(str(error))
            return None


def scan(txn: Any, table: Any, prefix: bytes = b"", *, start: bytes = b"") -> Iterator[tuple[bytes, Any]]:
    """Return the rows whose keys begin with `prefix`, from `start` on; a returned row may be removed."""
    cursor = txn.cursor(table)
    more = cursor.set_range(max(prefix, start))
    while more and (key := bytes(cursor.key())).startswith(prefix):
        yield key, cursor.value()
        # A row that was removed in between has moved the cursor.
        more = cursor.set_range(key) and (cursor.key() != key or cursor.next())


def clear(txn: Any, table: Any, prefix: bytes) -> None:
    """Remove the rows whose keys begin with `prefix`."""
    cursor = txn.cursor(table)
    more = cursor.set_range(prefix)
    while more and bytes(cursor.key()).startswith(prefix):
        more = cursor.delete()
