"""Entries of the feed as changes."""

from memstore.records.redis.keys import decode_owner
from memstore.types import Change, ChangeKind, FactId, OwnerId


def read_change(position: bytes, fields: dict[bytes, bytes], owner: OwnerId | None) -> Change:
    """Return an entry of an owner's stream, or of everybody's for None; raise `ValueError` or `KeyError` if damaged."""
    fact_id = fields[b"id"].decode()
    return Change(
        int(position.partition(b"-")[0]),
        ChangeKind(fields[b"kind"].decode()),
        decode_owner(fields[b"owner"]) if owner is None else owner,
        FactId(fact_id) if fact_id else None,
        int(fields[b"seq"]) if fact_id else None,
        int(fields[b"version"]) if fact_id else None,
        float(fields[b"at"]),
    )
