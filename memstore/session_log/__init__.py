"""Sessions' token logs, beside the facts: on SQLite, on Redis, or in this process alone."""

from __future__ import annotations

from pathlib import Path

from memstore.location import directory_of
from memstore.session_log.base import (
    LogEntry,
    OnFull,
    Segment,
    SegmentKind,
    SessionHeader,
    SessionId,
    SessionLog,
    TokenIds,
)
from memstore.session_log.sqlite import FILE_NAME, SQLiteSessionLog
from memstore.session_log.volatile import VolatileSessionLog
from memstore.settings import MemStoreSettings

__all__ = [
    "LogEntry",
    "OnFull",
    "SQLiteSessionLog",
    "Segment",
    "SegmentKind",
    "SessionHeader",
    "SessionId",
    "SessionLog",
    "TokenIds",
    "VolatileSessionLog",
    "may_have_sessions",
    "open_session_log",
]


def open_session_log(location: str | Path | None, settings: MemStoreSettings) -> SessionLog:
    """Return the token log of the store at `location`, as `memstore.location.open_records` returns its records.

    Parameters
    ----------
    location
        A directory, ``sqlite:///DIR``, or a Redis URL; None: there is no store, and sessions end with the process.

    Raises
    ------
    InvalidLocation, StoreError
    """
    if location is None:
        return VolatileSessionLog()
    directory = directory_of(location)
    if directory is not None:
        return SQLiteSessionLog(directory, busy_timeout_s=settings.busy_timeout_s)
    # Here and not above: who has no Redis should not wait for its client.
    from memstore.records.redis import RedisOptions
    from memstore.session_log.redis import RedisSessionLog

    return RedisSessionLog(str(location), RedisOptions.from_settings(settings))


def may_have_sessions(location: str | Path) -> bool:
    """Return False where no session was ever kept in the store at `location`, which opening its log would begin."""
    directory = directory_of(location)
    return directory is None or (directory / FILE_NAME).exists()
