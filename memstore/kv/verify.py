"""Checking a KV cache while it is in use: every value against its checksum, every row against the rows it belongs to.

Each transaction spans a few dozen rows, and what it reads of other tables it reads in the same snapshot. A repair is a
transaction of its own, which checks the row once more before it removes anything.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

from memstore.kv.encoding import Encoding, unpack_blob, unpack_encoding, unseal
from memstore.kv.keys import (
    FACT_BYTES,
    OWNER_BYTES,
    STAMP_BYTES,
    blob_prefix,
    fact_key,
    id_bytes,
    id_in_blob_key,
    id_text,
    order_key,
    place_in,
    saw_key,
    slot_key,
)
from memstore.kv.rows import Rows, clear, scan
from memstore.kv.writer import OpenRows
from memstore.types import EncodingId, FactId, OwnerId

Alive: TypeAlias = Callable[[OwnerId, Sequence[tuple[FactId, int]]], Collection[FactId]]
"""Given an owner and (fact id, version) pairs, no fact twice: the facts that are there at that very version."""

_BATCH_ROWS = 64
_BATCH_BYTES = 32 * 2**20
_ASKED_FACTS = 500

_SETTLING_NS = 60 * 10**9
"""Shards put one after the other, and anchors come before the first encoding: younger rows may be waiting."""


class BlobReport(NamedTuple):
    """What a check of a KV cache found."""

    encodings: int
    """Descriptions that were read."""

    corrupt: int
    """Encodings, and anchors, with a value that fails its checksum or layout."""

    orphans: int
    """Encodings of facts that the records do not have, or not at that version."""

    dangling: int
    """Rows that belong to no description, and descriptions that lack one of their rows."""

    repaired: int
    """Of the three above, those that were removed."""

    bytes: int
    """Size of all tensors that were read."""


class _Damage(Enum):
    CORRUPT = auto()
    DANGLING = auto()
    ORPHAN = auto()


class _Found(NamedTuple):
    damage: _Damage | None
    read_bytes: int = 0


class _Described(NamedTuple):
    # Not the whole description, whose token ids are most of it: there is one of these for each encoding.
    slot: bytes
    encoding_id: EncodingId
    owner: OwnerId
    fact_id: FactId
    version: int


_Check: TypeAlias = Callable[[Rows, bytes, Any], _Found]
_Remove: TypeAlias = Callable[[Rows, bytes], None]


def verify(open_rows: OpenRows, *, alive: Alive | None, repair: bool) -> BlobReport:
    """Check all tables; see `KVBlobs.verify`."""
    counts = dict.fromkeys(_Damage, 0)
    repaired = encodings = read_bytes = 0
    described: list[_Described] = []

    def check_slot(rows: Rows, slot: bytes, value: Any) -> _Found:
        found = _check_slot(rows, slot, value)
        if found.damage is None and alive is not None:
            encoding = unpack_encoding(slot, value)
            described.append(_Described(slot, encoding.id, encoding.owner, encoding.fact_id, encoding.fact_version))
        return found

    passes: tuple[tuple[str, _Check, _Remove], ...] = (
        ("slots", check_slot, _remove_slot),
        ("ids", _check_id, _remove_id),
        ("order", _check_order, lambda rows, key: _delete(rows, rows.tables.order, key)),
        ("blobs", _check_blob, lambda rows, key: _delete(rows, rows.tables.blobs, key)),
        ("saw", _check_saw, lambda rows, key: _delete(rows, rows.tables.saw, key)),
        ("anchors", _check_anchors, lambda rows, key: _delete(rows, rows.tables.anchors, key)),
    )
    for table, check, remove in passes:
        for seen, found, size in _findings(open_rows, table, check):
            encodings += seen if table == "slots" else 0
            read_bytes += size
            for damage in found.values():
                counts[damage] += 1
            if repair and found:
                repaired += _repair(open_rows, table, list(found), check, remove)
    if alive is not None:
        for orphans in _orphans(described, alive):
            counts[_Damage.ORPHAN] += len(orphans)
            if repair:
                repaired += _remove_orphans(open_rows, orphans)
    return BlobReport(
        encodings, counts[_Damage.CORRUPT], counts[_Damage.ORPHAN], counts[_Damage.DANGLING], repaired, read_bytes
    )


def _findings(open_rows: OpenRows, table: str, check: _Check) -> Iterator[tuple[int, dict[bytes, _Damage], int]]:
    """Return for each batch of rows: how many they are, which of them are damaged, and the bytes read for them."""
    start: bytes | None = b""
    while start is not None:
        seen, size, found = 0, 0, dict[bytes, _Damage]()
        with open_rows(buffers=True) as rows:
            following = None
            for key, value in scan(rows.txn, getattr(rows.tables, table), start=start):
                if seen == _BATCH_ROWS or size >= _BATCH_BYTES:
                    following = key
                    break
                seen += 1
                damage, read_bytes = check(rows, key, value)
                size += read_bytes
                if damage is not None:
                    found[key] = damage
        start = following
        yield seen, found, size


def _repair(open_rows: OpenRows, table: str, keys: Sequence[bytes], check: _Check, remove: _Remove) -> int:
    repaired = 0
    with open_rows(write=True) as rows:
        for key in keys:
            value = rows.txn.get(key, db=getattr(rows.tables, table))
            if value is not None and check(rows, key, value).damage is not None:
                remove(rows, key)
                repaired += 1
    return repaired


def _check_slot(rows: Rows, slot: bytes, value: Any) -> _Found:
    try:
        encoding = unpack_encoding(slot, value)
    except ValueError:
        return _Found(_Damage.CORRUPT)
    read_bytes = 0
    for key, packed in scan(rows.txn, rows.tables.blobs, blob_prefix(slot, encoding.id)):
        read_bytes += len(packed)
        try:
            unpack_blob(key, packed)
        except ValueError:
            return _Found(_Damage.CORRUPT, read_bytes)
    return _Found(None if read_bytes and _is_indexed(rows, slot, encoding) else _Damage.DANGLING, read_bytes)


def _is_indexed(rows: Rows, slot: bytes, encoding: Encoding) -> bool:
    place = rows.place(encoding.id)
    return (
        slot == slot_key(encoding)
        and place is not None
        and place.slot == slot
        and rows.txn.get(order_key(place.stamp, id_bytes(encoding.id)), db=rows.tables.order) is not None
        and all(
            rows.txn.get(saw_key(encoding.owner, fact_id, encoding.id), db=rows.tables.saw) is not None
            for fact_id, _ in encoding.saw
        )
    )


def _check_id(rows: Rows, key: bytes, value: Any) -> _Found:
    place = place_in(value)
    if place is None:
        return _Found(_Damage.DANGLING)
    is_expected = _is_described(rows, place.slot, key) or _is_settling(place.stamp)
    return _Found(None if is_expected else _Damage.DANGLING)


def _check_order(rows: Rows, key: bytes, _: Any) -> _Found:
    place = rows.place(id_text(key[STAMP_BYTES:]))
    is_last = place is not None and key == order_key(place.stamp, key[STAMP_BYTES:])
    return _Found(None if is_last else _Damage.DANGLING)


def _check_blob(rows: Rows, key: bytes, _: Any) -> _Found:
    place = rows.place(id_in_blob_key(key))
    is_there = place is not None and place.slot[:FACT_BYTES] == key[:FACT_BYTES]
    return _Found(None if is_there else _Damage.DANGLING)


def _check_saw(rows: Rows, key: bytes, _: Any) -> _Found:
    place = rows.place(id_text(key[FACT_BYTES:]))
    value = None if place is None else rows.txn.get(place.slot, db=rows.tables.slots)
    if place is None or value is None:
        return _Found(_Damage.DANGLING)
    try:
        encoding = unpack_encoding(place.slot, value)
    except ValueError:
        return _Found(None)  # goes with its slot
    is_seen = key[FACT_BYTES:] == id_bytes(encoding.id) and any(
        key[:FACT_BYTES] == fact_key(encoding.owner, fact_id) for fact_id, _ in encoding.saw
    )
    return _Found(None if is_seen else _Damage.DANGLING)


def _check_anchors(rows: Rows, key: bytes, value: Any) -> _Found:
    try:
        payload = unseal(key, value)
    except ValueError:
        return _Found(_Damage.CORRUPT)
    if _is_settling(int.from_bytes(payload[:STAMP_BYTES], "big")):
        return _Found(None)
    has_encoding = any(True for _ in scan(rows.txn, rows.tables.slots, key[:OWNER_BYTES]))
    return _Found(None if has_encoding else _Damage.DANGLING)


def _is_described(rows: Rows, slot: bytes, encoding_id: bytes) -> bool:
    value = rows.txn.get(slot, db=rows.tables.slots)
    if value is None:
        return False
    try:
        return id_bytes(unpack_encoding(slot, value).id) == encoding_id
    except ValueError:
        return True  # goes with its slot


def _is_settling(stamp: int) -> bool:
    return time.time_ns() - stamp < _SETTLING_NS


def _remove_slot(rows: Rows, slot: bytes) -> None:
    value = rows.txn.get(slot, db=rows.tables.slots)
    try:
        rows.empty(slot, unpack_encoding(slot, value))
    except ValueError:
        rows.empty(slot, None)


def _remove_id(rows: Rows, key: bytes) -> None:
    place = rows.place(id_text(key))
    _delete(rows, rows.tables.ids, key)
    if place is not None:
        _delete(rows, rows.tables.order, order_key(place.stamp, key))
        clear(rows.txn, rows.tables.blobs, blob_prefix(place.slot, id_text(key)))


def _delete(rows: Rows, table: Any, key: bytes) -> None:
    rows.txn.delete(key, db=table)


def _orphans(described: Sequence[_Described], alive: Alive) -> Iterator[list[tuple[bytes, EncodingId]]]:
    # Slots of one fact may hold several versions, but only one of a fact can be asked for at a time.
    groups: dict[tuple[OwnerId, int], dict[FactId, int]] = {}
    by_fact: dict[tuple[OwnerId, FactId], list[int]] = {}
    slots: dict[tuple[OwnerId, FactId, int], list[tuple[bytes, EncodingId]]] = {}
    for slot, encoding_id, owner, fact_id, version in described:
        versions = by_fact.setdefault((owner, fact_id), [])
        if version not in versions:
            groups.setdefault((owner, len(versions)), {})[fact_id] = version
            versions.append(version)
        slots.setdefault((owner, fact_id, version), []).append((slot, encoding_id))
    for (owner, _), versions_by_fact in groups.items():
        asked = list(versions_by_fact.items())
        for start in range(0, len(asked), _ASKED_FACTS):
            batch = asked[start : start + _ASKED_FACTS]
            there = alive(owner, batch)
            yield [
                slot for fact_id, version in batch if fact_id not in there for slot in slots[owner, fact_id, version]
            ]


def _remove_orphans(open_rows: OpenRows, orphans: Sequence[tuple[bytes, EncodingId]]) -> int:
    repaired = 0
    for start in range(0, len(orphans), _BATCH_ROWS):
        with open_rows(write=True) as rows:
            for slot, encoding_id in orphans[start : start + _BATCH_ROWS]:
                encoding = rows.description(slot)
                if encoding is not None and encoding.id == encoding_id:
                    rows.empty(slot, encoding)
                    repaired += 1
    return repaired
