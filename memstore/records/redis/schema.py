"""Whether a database holds a store that this release can use."""

from memstore.errors import StoreDamaged, StoreFull, StoreReadOnly, StoreTooNew
from memstore.records.redis.connection import RedisConnections
from memstore.records.redis.keys import Keys
from memstore.records.redis.scripts import Scripts

SCHEMA_VERSION = 1


def open_schema(connections: RedisConnections, keys: Keys, scripts: Scripts) -> None:
    """Make a new store, or check that this release and this user can use the one that is there.

    Raises
    ------
    StoreTooNew
        A newer release wrote it.
    StoreRefused
        The user lacks a command that a write needs.
    StoreDamaged
        The keys are another program's.
    StoreReadOnly, StoreFull
        There is no store yet, and none can be made.
    """
    where = connections.where
    found = connections.do("hget", keys.meta, "schema_version")
    if found is None:
        kinds = connections.together(*[("type", key) for key in (keys.meta, keys.feed, keys.owners)])
        # Another process may have made the store, and written to it, between the two looks.
        found = connections.do("hget", keys.meta, "schema_version")
        if found is None and any(kind != b"none" for kind in kinds):
            raise StoreDamaged(f"{where} has keys of another program under this prefix: use another prefix")
    if found is None:
        connections.do("hsetnx", keys.meta, "schema_version", SCHEMA_VERSION)
        found = connections.do("hget", keys.meta, "schema_version")
    if not found.isdigit():
        raise StoreDamaged(f"{where} has keys of another program under this prefix: use another prefix")
    if int(found) > SCHEMA_VERSION:
        raise StoreTooNew(
            f"{where} has schema version {int(found)}, and this release reads up to {SCHEMA_VERSION}:"
            " install a newer one"
        )
    try:
        scripts.run("probe", None, [])
    except (StoreReadOnly, StoreFull):
        # Reading needs neither.
        return
