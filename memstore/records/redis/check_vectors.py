"""Whether every current fact has its vectors, and no other has any."""

from memstore.records.base import Problem
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import Keys, read_entry, short_digest, unpack_rows
from memstore.records.redis.walk import fields, members
from memstore.types import FactId, OwnerId


def check_vectors(
    connections: RedisConnections, keys: Keys, owner: OwnerId, *, embedder: str, dimension: int, repair: bool
) -> list[Problem]:
    """Return what is wrong with the vectors of `owner`; remove what is not right if `repair`, to be made anew."""
    problems = []
    made_by = short_digest(embedder)
    embedders = {digest.decode() for digest in connections.do("hkeys", keys.embedders)}
    for digest in sorted(embedders | {made_by}):
        key = f"{keys.of(owner)}vectors:{digest}"
        for batch in fields(connections, key):
            seqs = [seq for seq, _ in batch if seq.isdigit()]
            found = _stored(connections, keys, owner, key, seqs, dimension if digest == made_by else None)
            detail = "a vector is stored under what is no seq"
            found += [
                (seq, Problem("orphan-vector", owner, None, detail, False)) for seq, _ in batch if not seq.isdigit()
            ]
            for seq, problem in found:
                if repair:
                    connections.do("hdel", key, seq)
                problems.append(problem._replace(repaired=repair))
    for current in members(connections, f"{keys.of(owner)}current"):
        problems += _missing(connections, owner, f"{keys.of(owner)}vectors:{made_by}", current)
    return problems


def _stored(
    connections: RedisConnections, keys: Keys, owner: OwnerId, key: str, seqs: list[bytes], dimension: int | None
) -> list[tuple[bytes, Problem]]:
    if not seqs:
        return []
    own = keys.of(owner)
    values, *found = connections.at_one_moment(
        ("hmget", key, seqs), *(("zrangebyscore", f"{own}current", seq, seq) for seq in seqs)
    )
    ids = [facts[0] if facts else b"" for facts in found]
    entries = connections.do("hmget", f"{own}index", ids)
    problems = []
    for seq, value, fact_id, raw in zip(seqs, values, ids, entries, strict=True):
        if value is None:
            continue
        version, rows = unpack_rows(int(seq), value, dimension=dimension)
        entry = read_entry(raw)
        if not fact_id:
            kind, detail = "orphan-vector", f"seq {int(seq)} has a vector and no current fact"
        elif rows is None:
            kind, detail = "damaged-vector", f"the vector of seq {int(seq)} fails its checksum"
        elif entry is not None and entry.version != version:
            kind, detail = "stale-vector", f"the vector of seq {int(seq)} is of version {version}"
        else:
            continue
        named = FactId(fact_id.decode()) if fact_id else None
        problems.append((seq, Problem(kind, owner, named, detail, repaired=False)))
    return problems


def _missing(
    connections: RedisConnections, owner: OwnerId, key: str, current: list[tuple[bytes, float]]
) -> list[Problem]:
    present = connections.at_one_moment(*(("hexists", key, int(seq)) for _, seq in current))
    return [
        Problem("missing-vector", owner, FactId(fact_id.decode()), "the fact is found by no search", repaired=False)
        for (fact_id, _), found in zip(current, present, strict=True)
        if not found
    ]
