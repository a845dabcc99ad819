"""Where a store is: a directory, or a URL."""

import time
from collections.abc import Callable
from pathlib import Path

from memstore.errors import InvalidLocation
from memstore.records.base import RecordStore
from memstore.records.sqlite import SQLiteRecords
from memstore.settings import REDIS_SCHEMES, MemStoreSettings

_SYNTAX = f"use a directory, sqlite:///DIR, or a URL with {', '.join(f'{scheme}://' for scheme in REDIS_SCHEMES)}"


def directory_of(location: str | Path) -> Path | None:
    """Return the directory of a store on this machine, or None where it is on a server.

    Raises
    ------
    InvalidLocation
        A scheme that is not known, or one that is, and no URL. The message never quotes it: it may be a password.
    """
    if isinstance(location, Path):
        return location
    scheme, separator, rest = location.partition("://")
    if not separator:
        if not location:
            raise InvalidLocation("the store's location is empty: pass a directory or a URL")
        if location.partition(":")[0].lower() in ("sqlite", *REDIS_SCHEMES) and ":" in location:
            raise InvalidLocation(f"this begins as a URL, and is none: {_SYNTAX}")
        return Path(location)
    if scheme == "sqlite":
        if not rest.startswith("/") or rest == "/":
            raise InvalidLocation("write sqlite:///DIR for a directory, and sqlite:////DIR for an absolute one")
        # As SQLAlchemy has it: three slashes are relative, four are absolute.
        return Path(rest[1:])
    if scheme in REDIS_SCHEMES:
        return None
    raise InvalidLocation(f"this is no scheme of a store: {_SYNTAX}")


def open_records(
    location: str | Path, settings: MemStoreSettings, *, clock: Callable[[], float] = time.time
) -> RecordStore:
    """Return the record store at `location`: a directory, `sqlite:///DIR`, or a Redis URL.

    Parameters
    ----------
    clock
        Unix seconds, for what the records stamp and for twins that have expired.

    Raises
    ------
    InvalidLocation, StoreError
    """
    directory = directory_of(location)
    if directory is not None:
        return SQLiteRecords(
            directory,
            busy_timeout_s=settings.busy_timeout_s,
            feed_retention=settings.feed_retention,
            idempotency_ttl_s=settings.idempotency_ttl_s,
            clock=clock,
        )
    # Here and not above: who has no Redis should not wait for its client.
    from memstore.records.redis import RedisOptions, RedisRecords

    return RedisRecords(str(location), options=RedisOptions.from_settings(settings), clock=clock)
