"""Records and vectors as bytes that say whether they are still what was written."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

from memstore.embedding import Vectors
from memstore.errors import StoreDamaged
from memstore.records.base import StoredVectors
from memstore.types import Fact, FactId, FactState, NewFact, OwnerId

_VECTOR_DIGEST_BYTES = 8
_BODY_FIELDS = tuple(spec.name for spec in dataclasses.fields(Fact) if spec.name != "seq")


def content_digest(fact: NewFact | Fact) -> str:
    """Return 64 hex digits that two facts of one owner share exactly when their content is the same."""
    content = [fact.text, fact.stream, fact.speaker, fact.time, dict(fact.metadata)]
    canonical = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=32).hexdigest()


def record_body(fact: Fact) -> str:
    """Return every field of `fact` but its seq as JSON; raise `UnicodeEncodeError` where it is not storable."""
    body = {name: getattr(fact, name) for name in _BODY_FIELDS}
    body["metadata"] = dict(fact.metadata)
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
    fact = fact_from_fields(json.loads(body) | {"seq": int(seq)})
    if owner is not None and fact.owner != owner:
        raise ValueError("the record belongs to another owner")
    return fact


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
    payload = data[_VECTOR_DIGEST_BYTES:]
    if data[:_VECTOR_DIGEST_BYTES] != _vector_digest(seq, version, payload):
        return None
    if not payload or len(payload) % (4 * dimension):
        return None
    return np.frombuffer(payload, dtype="<f4").reshape(-1, dimension)


def carried_vectors(seq: int, version: int, to_version: int, data: bytes) -> bytes | None:
    """Return packed vectors of `version` packed as those of `to_version`, or None where they are damaged."""
    payload = data[_VECTOR_DIGEST_BYTES:]
    if data[:_VECTOR_DIGEST_BYTES] != _vector_digest(seq, version, payload):
        return None
    return _vector_digest(seq, to_version, payload) + payload


def stored_vectors(packed: Iterable[tuple[int, int, bytes]], *, dimension: int) -> StoredVectors:
    """Return packed vectors, given as (seq, version, data) by seq, in one matrix."""
    seqs, versions, rows, damaged = [], [], [], []
    for seq, version, data in packed:
        vectors = unpack_vectors(seq, version, data, dimension=dimension)
        if vectors is None:
            damaged.append(seq)
            continue
        seqs += [seq] * len(vectors)
        versions += [version] * len(vectors)
        rows.append(vectors)
    matrix = np.concatenate(rows) if rows else np.empty((0, dimension))
    return StoredVectors(
        np.array(seqs, dtype=np.int64), np.array(versions, dtype=np.int64), matrix.astype(np.float32), damaged
    )


def _vector_digest(seq: int, version: int, payload: bytes) -> bytes:
    digest = xxhash.xxh3_64(b"%d:%d:" % (seq, version))
    digest.update(payload)
    return digest.digest()


def _parts(sealed: str) -> tuple[str, str, str]:
    seq, _, rest = sealed.partition(":")
    digest, _, body = rest.partition(":")
    return seq, digest, body
