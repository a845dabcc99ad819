"""Storing vectors, and reading them into one matrix."""

from collections.abc import Iterable, Sequence

import numpy as np

from memstore.errors import EmbedderMismatch
from memstore.records.base import StoredVectors, VectorUpdate
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import encode_owner, pack_rows, short_digest, unpack_rows
from memstore.records.redis.scripts import Scripts
from memstore.records.redis.walk import chunks
from memstore.types import OwnerId


def read_vectors(connections: RedisConnections, key: str, seqs: Iterable[int], *, dimension: int) -> StoredVectors:
    """Return the vectors of those facts that have any in the hash `key`, by seq."""
    found: list[int] = []
    versions: list[int] = []
    damaged: list[int] = []
    rows = [np.empty((0, dimension), dtype=np.float32)]
    for chunk in chunks(sorted({int(seq) for seq in seqs})):
        for seq, value in zip(chunk, connections.do("hmget", key, chunk), strict=True):
            if value is None:
                continue
            version, of_fact = unpack_rows(seq, value, dimension=dimension)
            if of_fact is None:
                damaged.append(seq)
                continue
            found += [seq] * len(of_fact)
            versions += [version] * len(of_fact)
            rows.append(of_fact)
    return StoredVectors(
        np.array(found, dtype=np.int64),
        np.array(versions, dtype=np.int64),
        np.concatenate(rows).astype(np.float32, copy=False),
        damaged,
    )


def put_vectors(
    scripts: Scripts, owner: OwnerId, updates: Sequence[VectorUpdate], *, embedder: str, is_reindex: bool
) -> int:
    """Store vectors of facts that still have the version they were made of; return how many."""
    stored = 0
    # At least once, to learn whether the embedder is the store's.
    for chunk in list(chunks(updates)) or [[]]:
        arguments: list[bytes | str | int] = [embedder, short_digest(embedder), int(is_reindex), len(chunk)]
        for seq, version, vectors in chunk:
            arguments += [int(seq), int(version), pack_rows(vectors)]
        reply = scripts.run("put_vectors", owner, arguments)
        if isinstance(reply, bytes):
            raise EmbedderMismatch(stored=reply.decode(), offered=embedder)
        stored += int(reply)
    return stored


def adopt(scripts: Scripts, owners: Sequence[OwnerId], fingerprint: str) -> bool | None:
    """Return whether an embedder has become the store's; None where `owners` are not all that have a fact."""
    arguments: list[bytes | str | int] = [fingerprint, short_digest(fingerprint), len(owners)]
    for owner in owners:
        arguments += [owner, encode_owner(owner)]
    verdict = int(scripts.run("adopt", None, arguments))
    return bool(verdict) if verdict >= 0 else None
