"""Going through what is many in batches: keys of a store, fields of one key, arguments of a command."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import Keys

T = TypeVar("T")

_BATCH = 500


def chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield `items` in lists of a size that one command may ask for."""
    rest = iter(items)
    while chunk := list(islice(rest, _BATCH)):
        yield chunk


def all_keys(connections: RedisConnections, keys: Keys) -> Iterator[list[bytes]]:
    """Yield the names of all keys under the store's prefix, which holds no wildcard; some may come twice."""
    yield from _walk(connections, "scan", (), f"{keys.root}*")


def fields(connections: RedisConnections, key: str) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the fields and values of a hash; some may come twice."""
    for batch in _walk(connections, "hscan", (key,), None):
        yield list(batch.items())


def members(connections: RedisConnections, key: str) -> Iterator[list[tuple[bytes, float]]]:
    """Yield the members and scores of a sorted set; some may come twice."""
    yield from _walk(connections, "zscan", (key,), None)


def _walk(connections: RedisConnections, name: str, key: tuple[str, ...], match: str | None) -> Iterator[Any]:
    cursor = 0
    while True:
        cursor, batch = connections.do(name, *key, cursor, match, _BATCH)
        if batch:
            yield batch
        if int(cursor) == 0:
            return
