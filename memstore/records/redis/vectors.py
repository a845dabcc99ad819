"""Reading stored vectors into one matrix."""

from collections.abc import Iterable

import numpy as np

from memstore.records.base import StoredVectors
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import unpack_rows
from memstore.records.redis.walk import chunks


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
