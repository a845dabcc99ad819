"""Keys of a KV cache: fixed-length digests, so that everything of an owner, or of a fact, lies side by side.

The layout of each table is in `memstore.kv.rows`.
"""

import hashlib
from typing import Any, NamedTuple

from memstore.kv.encoding import Encoding
from memstore.types import EncodingId, FactId, OwnerId

OWNER_BYTES = 16
FACT_BYTES = 32  # an owner's and a fact's digest
SLOT_BYTES = 52
STAMP_BYTES = 8
_SHARD_BYTES = 2


class Place(NamedTuple):
    """Where an encoding is."""

    slot: bytes
    stamp: int


def digest(text: str) -> bytes:
    """Return 16 bytes that stand for `text` in keys."""
    # Not xxHash: an owner chooses their own name, and must not be able to choose another one's prefix.
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def id_bytes(encoding_id: EncodingId) -> bytes:
    """Return an encoding's id as it is in keys."""
    return encoding_id.encode(errors="surrogateescape")


def id_text(key: bytes) -> EncodingId:
    """Return the id in a key, such that `id_bytes` gives the key back, even a damaged one."""
    return EncodingId(key.decode(errors="surrogateescape"))


def fact_key(owner: OwnerId, fact_id: FactId) -> bytes:
    """Return what the keys of a fact's slots and blobs begin with."""
    return digest(owner) + digest(fact_id)


def kind_key(fingerprint: str, policy: str) -> bytes:
    """Return what tells the slots of one fact apart, but for the rung."""
    return digest(f"{len(fingerprint)}:{fingerprint}{policy}")


def slot_key(encoding: Encoding) -> bytes:
    """Return the key of the one slot that can hold `encoding`."""
    kind = kind_key(encoding.fingerprint, encoding.policy)
    return fact_key(encoding.owner, encoding.fact_id) + kind + encoding.rung.to_bytes(4, "big")


def saw_key(owner: OwnerId, fact_id: FactId, encoding_id: EncodingId) -> bytes:
    """Return the key for: this encoding saw that fact."""
    return fact_key(owner, fact_id) + id_bytes(encoding_id)


def anchors_key(owner: OwnerId, policy: str) -> bytes:
    """Return the key of an owner's anchors."""
    return digest(owner) + digest(policy)


def blob_prefix(slot: bytes, encoding_id: EncodingId) -> bytes:
    """Return what the keys of all shards of an encoding begin with."""
    return slot[:FACT_BYTES] + id_bytes(encoding_id) + b"/"


def blob_key(slot: bytes, encoding_id: EncodingId, shard: int) -> bytes:
    """Return the key of one shard's tensors."""
    return blob_prefix(slot, encoding_id) + shard.to_bytes(_SHARD_BYTES, "big")


def id_in_blob_key(key: bytes) -> EncodingId:
    """Return the encoding that a blob is of."""
    return id_text(key[FACT_BYTES : -_SHARD_BYTES - 1])


def place_in(value: Any) -> Place | None:
    """Return what a row of `ids` says, or None where it is damaged."""
    if len(value) != SLOT_BYTES + STAMP_BYTES:
        return None
    return Place(bytes(value[:SLOT_BYTES]), int.from_bytes(value[SLOT_BYTES:], "big"))


def order_key(stamp: int, encoding_id: bytes) -> bytes:
    """Return the key that puts an encoding where its last use belongs."""
    return stamp.to_bytes(STAMP_BYTES, "big") + encoding_id
