"""Records and vectors as bytes that say whether they are still what was written."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from memstore.embedding import Vectors
from memstore.errors import StoreDamaged
from memstore.records.base import StoredVectors
from memstore.types import Fact, FactId, FactState, NewFact, OwnerId

_VECTOR_DIGEST_BYTES = 8
_SEED_BITS = 2**64 - 1
_BODY_FIELDS = tuple(spec.name for spec in dataclasses.fields(Fact) if spec.name != "seq")
# What most records have: left out of them.
_USUAL: dict[str, Any] = {
    "stream": "",
    "speaker": None,
    "time": None,
    "metadata": {},
    "version": 1,
    "state": "current",
    "event_at": None,
    "expires_at": None,
    "supersedes": None,
}


def content_digest(fact: NewFact | Fact) -> str:
    """Return 32 hex digits that two facts of one owner share exactly when their content is the same."""
    content = [fact.text, fact.stream, fact.speaker, fact.time, dict(fact.metadata)]
    canonical = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def record_body(fact: Fact) -> str:
    """Return every field of `fact` but its seq, and those that are as usual, as JSON.

    Raises `UnicodeEncodeError` where it is no text.
    """
    body = {name: getattr(fact, name) for name in _BODY_FIELDS}
    body["metadata"] = dict(fact.metadata)
    body = {name: value for name, value in body.items() if name not in _USUAL or value != _USUAL[name]}
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text.encode()
    return text


def seal(seq: int, body: str) -> str:
    """Return the stored form of a record: `seq:sha1("seq:body"):body`.

    SHA-1 because Redis can compute it inside a script, where the seq is assigned; it guards against damage, not
    against people.
    """
    return f"{seq}:{hashlib.sha1(f'{seq}:{body}'.encode()).hexdigest()}:{body}"


def unseal(sealed: str, *, owner: OwnerId | None) -> Fact:
    """Return the fact in a stored record; raise `ValueError` where it is damaged, or not of `owner`, None being any."""
    if not isinstance(sealed, str):
        raise ValueError("it is no text")
    seq, digest, body = _parts(sealed)
    if hashlib.sha1(f"{seq}:{body}".encode()).hexdigest() != digest:
        raise ValueError("checksum does not match")
    fact = fact_from_fields({**_USUAL, "metadata": {}, **json.loads(body), "seq": int(seq)})
    if owner is not None and fact.owner != owner:
        raise ValueError("the record belongs to another owner")
    return fact


def unsealed(where: object, owner: OwnerId, fact_id: str, record: str | bytes | None) -> Fact:
    """Return the fact in a stored record; raise `StoreDamaged` where it is not what was written."""
    try:
        text = record.decode() if isinstance(record, bytes) else record
        if text is None:
            raise ValueError("it is missing")
        return unseal(text, owner=owner)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreDamaged(
            f"{where}: the record of fact {fact_id!r} is damaged ({error}): run `memstore verify --repair`, "
            "which sets it aside"
        ) from error


def is_same(one: Fact, other: Fact) -> bool:
    """Return whether two facts are the same in every field; to `==`, 1 and True are the same metadata."""
    return one.seq == other.seq and record_body(one) == record_body(other)


def check_order(where: object, facts: Iterable[Fact], *, after_seq: int) -> None:
    """Raise `StoreDamaged` unless seqs grow from `after_seq` on: paging on would come by the same facts again."""
    for fact in facts:
        if fact.seq <= after_seq:
            raise StoreDamaged(f"{where}: fact {fact.id!r} is out of order: run `memstore verify --repair`")
        after_seq = fact.seq


def fact_from_fields(fields: Mapping[str, Any]) -> Fact:
    """Return the fact with these fields, JSON types throughout."""
    return Fact(**{**fields, "state": FactState(fields["state"])})


def fact_from_new(owner: OwnerId, fact_id: str, new: NewFact, *, event_at: float | None, now: float) -> Fact:
    """Return the first version of `new`, with a seq of 0 until the store assigns one."""
    return Fact(
        id=FactId(fact_id),
        owner=owner,
        text=new.text,
        stream=new.stream,
        speaker=new.speaker,
        time=new.time,
        metadata=dict(new.metadata),
        version=1,
        seq=0,
        created_at=now,
        updated_at=now,
        event_at=event_at,
        expires_at=new.expires_at,
    )


def pack_vectors(seq: int, version: int, vectors: Vectors) -> bytes:
    """Return the stored form of a fact's vectors `[num_chunks, dimension]`: checksum, then float32 rows."""
    payload = np.ascontiguousarray(vectors, dtype="<f4").tobytes()
    return _vector_digest(seq, version, payload) + payload


def unpack_vectors(seq: int, version: int, data: bytes, *, dimension: int) -> Vectors | None:
    """Return the vectors `[num_chunks, dimension]`, or None where they are not what was packed for that version."""
    if not _is_sound(seq, version, data, row_bytes=4 * dimension):
        return None
    return np.frombuffer(data, dtype="<f4", offset=_VECTOR_DIGEST_BYTES).reshape(-1, dimension)


def carried_vectors(seq: int, version: int, to_version: int, data: bytes) -> bytes | None:
    """Return packed vectors of `version` packed as those of `to_version`, or None where they are damaged."""
    if not _is_sound(seq, version, data, row_bytes=4):
        return None
    payload = data[_VECTOR_DIGEST_BYTES:]
    return _vector_digest(seq, to_version, payload) + payload


def stored_vectors(packed: Sequence[tuple[int, int, bytes]], *, dimension: int) -> StoredVectors:
    """Return packed vectors, given as (seq, version, data) by seq, in one matrix."""
    row_bytes = 4 * dimension
    sound = [row for row in packed if _is_sound(*row, row_bytes=row_bytes)]
    damaged = [] if len(sound) == len(packed) else sorted({row[0] for row in packed} - {row[0] for row in sound})
    num_chunks = np.array([(len(data) - _VECTOR_DIGEST_BYTES) // row_bytes for *_, data in sound], dtype=np.int64)
    # Filled in place: at 100,000 facts each further copy is a tenth of a second.
    matrix = np.empty((int(num_chunks.sum()), dimension), dtype="<f4")
    target, start = matrix.reshape(-1).view(np.uint8), 0
    for _, _, data in sound:
        stop = start + len(data) - _VECTOR_DIGEST_BYTES
        target[start:stop] = np.frombuffer(data, dtype=np.uint8, offset=_VECTOR_DIGEST_BYTES)
        start = stop
    seqs = np.array([seq for seq, _, _ in sound], dtype=np.int64)
    versions = np.array([version for _, version, _ in sound], dtype=np.int64)
    rows = matrix.astype(np.float32, copy=False)
    return StoredVectors(seqs.repeat(num_chunks), versions.repeat(num_chunks), rows, damaged)


def _is_sound(seq: int, version: int, data: bytes, *, row_bytes: int) -> bool:
    num_bytes = len(data) - _VECTOR_DIGEST_BYTES
    if num_bytes <= 0 or num_bytes % row_bytes:
        return False
    view = memoryview(data)
    return bool(view[:_VECTOR_DIGEST_BYTES] == _vector_digest(seq, version, view[_VECTOR_DIGEST_BYTES:]))


def _vector_digest(seq: int, version: int, payload: bytes | memoryview) -> bytes:
    # The seed names the fact: vectors that were moved to another one, or kept for another version, do not fit.
    return xxhash.xxh3_64_digest(payload, seed=(seq << 24 ^ version) & _SEED_BITS)


def _parts(sealed: str) -> tuple[str, str, str]:
    seq, _, rest = sealed.partition(":")
    digest, _, body = rest.partition(":")
    return seq, digest, body
