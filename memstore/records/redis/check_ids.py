"""Whether every id that is kept for an owner is one of the owner's facts."""

from collections.abc import Collection, Iterator

from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import Keys, encode_owner, read_owner
from memstore.records.redis.walk import fields
from memstore.types import OwnerId


def stray_ids(
    connections: RedisConnections, keys: Keys, refused: Collection[OwnerId | None]
) -> Iterator[tuple[bytes, OwnerId | None]]:
    """Yield ids kept for an owner who has no such fact, or for None where that is no owner; not those of `refused`."""
    for batch in fields(connections, keys.ids):
        holders = [(fact_id, read_owner(holder)) for fact_id, holder in batch]
        kept = [(fact_id, owner) for fact_id, owner in holders if owner is not None and owner not in refused]
        commands: list[tuple[object, ...]] = []
        for fact_id, owner in kept:
            commands += [("hget", keys.ids, fact_id), ("hexists", f"{keys.of(owner)}records", fact_id)]
        replies = connections.at_one_moment(*commands)
        for (fact_id, owner), holder, is_there in zip(kept, replies[::2], replies[1::2], strict=True):
            if holder == encode_owner(owner).encode() and not is_there:
                yield fact_id, owner
        yield from ((fact_id, None) for fact_id, owner in holders if owner is None)
