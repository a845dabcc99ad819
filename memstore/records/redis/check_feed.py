"""Whether the feed, and what every owner's caches are fenced by, can be read."""

from collections.abc import Iterable, Iterator

from memstore.records.base import Problem
from memstore.records.redis.changes import read_change
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import Keys
from memstore.types import OwnerId

_BATCH = 1000


def check_feed(connections: RedisConnections, keys: Keys, owners: Iterable[OwnerId], *, repair: bool) -> list[Problem]:
    """Return the entries of the feed that say nothing; where there are any, the feed starts after them if `repair`."""
    streams = {keys.feed: None, **{f"{keys.of(owner)}changes": owner for owner in owners}}
    problems, last = [], 0
    for key, owner in streams.items():
        for position in _damaged(connections, key, owner):
            last = max(last, position)
            problems.append(Problem("damaged-change", owner, None, f"change {position} is damaged", repair))
    floor = connections.do("hget", keys.meta, "feed_floor") or b"0"
    if not floor.isdigit():
        last = max(last, _last_position(connections, keys))
        problems.append(Problem("damaged-change", None, None, "where the feed starts is damaged", repair))
    if problems and repair:
        # As if they had been trimmed: who follows the feed reads the facts anew.
        connections.do("hset", keys.meta, "feed_floor", max(last, int(floor) if floor.isdigit() else 0))
        for key in streams:
            connections.do("xtrim", key, None, False, f"{last + 1}-0")
    return problems


def check_head(connections: RedisConnections, keys: Keys, owner: OwnerId, *, repair: bool) -> list[Problem]:
    """Return what is no number in an owner's head; it becomes a number that none before was greater than."""
    key = f"{keys.of(owner)}head"
    problems = []
    for name in ("epoch", "position"):
        value = connections.do("hget", key, name)
        if value is not None and not value.isdigit():
            if repair:
                # Each purge has a position of its own, so the epoch is not greater either.
                connections.do("hset", key, name, _last_position(connections, keys))
            problems.append(Problem("damaged-head", owner, None, f"the owner's {name} is no number", repair))
    return problems


def _damaged(connections: RedisConnections, key: str, owner: OwnerId | None) -> Iterator[int]:
    after = "-"
    while entries := connections.do("xrange", key, after, "+", _BATCH):
        for position, fields in entries:
            try:
                read_change(position, fields, owner)
            except (ValueError, KeyError):
                yield int(position.partition(b"-")[0])
        after = f"({entries[-1][0].decode()}"


def _last_position(connections: RedisConnections, keys: Keys) -> int:
    value = connections.do("get", keys.position) or b"0"
    entries = connections.do("xrevrange", keys.feed, "+", "-", 1)
    of_feed = int(entries[0][0].partition(b"-")[0]) if entries else 0
    return max(of_feed, int(value) if value.isdigit() else 0)
