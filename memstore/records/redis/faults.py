"""What Redis and the network report, as the errors of this package."""

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions as redis_errors

from memstore.errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreRefused,
    StoreTLSError,
    StoreUnreachable,
)

_UNREACHABLE = (
    "{where} cannot be reached: check that the server runs, and host and port; one that expects TLS needs rediss://"
)
_TIMEOUT = "{where} did not answer in time; whether a change was made is unknown: read, or repeat it with its key"
_TLS = "no TLS connection to {where}: check ca, cert and key, and that both sides use TLS"
_NO_REDIS = "{where} does not answer as a Redis server does: if it expects TLS, write rediss://"
_REFUSED = "{where} refused the user or what this user asked to do: check user, password and ACL"
_LOADING = "{where} is still loading its data: try again later"

_BY_KIND: tuple[tuple[type[Exception], type[StoreError], str], ...] = (
    (redis_errors.AuthenticationError, StoreRefused, _REFUSED),
    (redis_errors.AuthorizationError, StoreRefused, _REFUSED),
    (redis_errors.AuthenticationWrongNumberOfArgsError, StoreRefused, _REFUSED),
    (redis_errors.NoPermissionError, StoreRefused, _REFUSED),
    (redis_errors.BusyLoadingError, StoreBusy, _LOADING),
    (redis_errors.InvalidResponse, StoreTLSError, _NO_REDIS),
    (redis_errors.TimeoutError, StoreUnreachable, _TIMEOUT),
)

# A script's error has the code somewhere in its text. The first that fits counts.
_BY_CODE: tuple[tuple[str, type[StoreError], str], ...] = (
    ("NOPERM", StoreRefused, _REFUSED),
    ("can't run this command or subcommand", StoreRefused, _REFUSED),
    ("NOAUTH", StoreRefused, _REFUSED),
    ("READONLY", StoreReadOnly, "{where} is a read-only replica: write to the master"),
    ("OOM", StoreFull, "the memory of {where} is full (maxmemory): free some or raise it; nothing was changed"),
    ("No space left", StoreFull, "the disk of {where} is full: free some; it takes no writes until then"),
    ("MISCONF", StoreError, "{where} cannot save to its disk and takes no writes: see its log"),
    ("NOREPLICAS", StoreBusy, "{where} has fewer good replicas than it needs to accept a write"),
    ("LOADING", StoreBusy, _LOADING),
    ("BUSY", StoreBusy, "{where} is running another script for too long: try again later"),
    ("DB index is out of range", StoreError, "{where} has no database of that number: name another"),
    ("TRYAGAIN", StoreBusy, "{where} is moving data: try again later"),
    ("MASTERDOWN", StoreUnreachable, _UNREACHABLE),
    ("max number of clients reached", StoreBusy, "{where} accepts no more connections: raise its maxclients"),
    ("DAMAGED", StoreDamaged, "{where} holds something that was not written like this: run `memstore verify --repair`"),
    ("WRONGTYPE", StoreDamaged, "{where} has a key of another program under this prefix: use another prefix"),
    ("not an integer", StoreDamaged, "a counter of {where} is damaged: run `memstore verify --repair`"),
    ("XADD is equal or smaller", StoreDamaged, "the feed of {where} is ahead: run `memstore verify --repair`"),
)


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Raise what redis-py or the network raises inside as one `StoreError` that says what to do.

    Parameters
    ----------
    where
        The location without credentials.
    """
    try:
        yield
    except (redis_errors.RedisError, OSError) as error:
        kind, advice = _meaning(error)
        raise kind(f"{advice.format(where=where)} ({_brief(error)})") from error


def is_worth_repeating(error: Exception) -> bool:
    """Return whether a new connection may do better: not where the server has answered, nor after a timeout."""
    kind, _ = _meaning(error)
    return kind is StoreUnreachable and not isinstance(error, redis_errors.TimeoutError | TimeoutError)


def was_cut_off(error: BaseException | None) -> bool:
    """Return whether the other side ended a connection that it had accepted."""
    while error is not None:
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionResetError | BrokenPipeError):
            return True
        if isinstance(error, redis_errors.ConnectionError) and "closed by server" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _meaning(error: BaseException) -> tuple[type[StoreError], str]:
    if _has_tls_cause(error):
        return StoreTLSError, _TLS
    for exception, kind, advice in _BY_KIND:
        if isinstance(error, exception):
            return kind, advice
    text = f"{getattr(error, 'status_code', None) or ''} {error}"
    for code, kind, advice in _BY_CODE:
        if re.search(rf"(?<![A-Za-z]){re.escape(code)}", text):
            return kind, advice
    if isinstance(error, redis_errors.ConnectionError | OSError):
        return StoreUnreachable, _UNREACHABLE
    return StoreError, "{where} refused an operation"


def _has_tls_cause(error: BaseException | None) -> bool:
    while error is not None:
        # A connection that just ends is no matter of certificates.
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _brief(error: BaseException) -> str:
    # A Sentinel's error goes on with all that the clients were made with.
    text = " ".join(str(error).partition(" : <")[0].split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
