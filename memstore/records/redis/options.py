"""Where a Redis record store is and how to get there."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from pydantic import SecretStr

from memstore.errors import InvalidLocation
from memstore.settings import REDIS_PREFIX, REDIS_SCHEMES, MemStoreSettings

_PARAMETERS = ("prefix", "ca", "cert", "key")
_SYNTAX = (
    "write redis[s]://[user[:password]@]host[:port][/db][?prefix=NAME&ca=FILE&cert=FILE&key=FILE], or"
    " redis[s]+sentinel://[user[:password]@]host:port,host:port/service[/db];"
    " percent-encode what a password has besides letters and digits"
)
_PORT, _SENTINEL_PORT = 6379, 26379


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How to use a Redis server; what the URL says comes first.

    Attributes
    ----------
    prefix
        What the name of every key starts with: several stores may share one database.
    ca, cert, key
        PEM files: whom to trust instead of the system's authorities, and what to identify with.
    password
        Of the data servers' user; `sentinel_password` is the Sentinels'.
    max_connections
        Of this process; further callers wait up to `timeout_s` for one.
    timeout_s
        How long to wait for a connection, and for an answer.
    retries
        Repetitions after a lost or refused connection. A timeout is not repeated.
    breaker_s
        For how long no call is tried after one found the server unreachable.
    feed_retention
        Changes that the feed keeps at least.
    idempotency_ttl_s
        How long an idempotency key is remembered at least; older ones go as new ones come, or with `compact`.
    disk_wait_s
        How long a purge waits until the server has rewritten its files.
    """

    prefix: str = "memstore"
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    password: SecretStr | None = None
    sentinel_password: SecretStr | None = None
    max_connections: int = 32
    timeout_s: float = 2.0
    retries: int = 2
    breaker_s: float = 1.0
    feed_retention: int = 100_000
    idempotency_ttl_s: float = 7 * 86400.0
    disk_wait_s: float = 30.0

    @classmethod
    def from_settings(cls, settings: MemStoreSettings) -> Self:
        """Return what the settings say."""
        return cls(
            prefix=settings.redis_prefix,
            ca=settings.redis_ca,
            cert=settings.redis_cert,
            key=settings.redis_key,
            password=settings.redis_password,
            sentinel_password=settings.sentinel_password,
            max_connections=settings.redis_max_connections,
            timeout_s=settings.redis_timeout_s,
            retries=settings.redis_retries,
            feed_retention=settings.feed_retention,
            idempotency_ttl_s=settings.idempotency_ttl_s,
        )


class Address(NamedTuple):
    """A host name or address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """A parsed store URL."""

    addresses: tuple[Address, ...]
    """One server, or the Sentinels."""

    service: str | None
    """Name of the service that the Sentinels watch; None for one server."""

    db: int
    tls: bool
    prefix: str
    ca: Path | None
    cert: Path | None
    key: Path | None
    username: str | None = field(repr=False)
    password: SecretStr | None

    @property
    def url(self) -> str:
        """The location without credentials."""
        scheme = ("rediss" if self.tls else "redis") + ("+sentinel" if self.service else "")
        path = f"{self.service}/{self.db}" if self.service else str(self.db)
        return f"{scheme}://{','.join(map(str, self.addresses))}/{path}?prefix={self.prefix}"

    @property
    def is_local(self) -> bool:
        """Whether nothing leaves this machine."""
        return all(host in ("localhost", "::1") or host.startswith("127.") for host, _ in self.addresses)


def parse_location(url: str, options: RedisOptions) -> RedisLocation:
    """Return what `url` says, completed from `options`; raise `InvalidLocation`, which never quotes credentials."""
    try:
        parts = urlsplit(url)
        parameters = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        parts, parameters = None, {}
    if parts is None or parts.scheme not in REDIS_SCHEMES:
        raise InvalidLocation(f"this is no Redis URL: {_SYNTAX}")
    # Nothing of it is quoted: with a password that is not percent-encoded, any part may be one of the password.
    if "#" in url:
        raise InvalidLocation(f"a Redis URL has no fragment: {_SYNTAX}")
    if not set(parameters) <= set(_PARAMETERS):
        raise InvalidLocation(f"unknown parameter in the Redis URL: {_SYNTAX}")
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = (unquote(part) for part in credentials.partition(":"))
    is_sentinel, tls = parts.scheme.endswith("+sentinel"), parts.scheme.startswith("rediss")
    service, db = _path(parts, is_sentinel=is_sentinel)
    addresses = tuple(_address(host, _SENTINEL_PORT if is_sentinel else _PORT) for host in hosts.split(","))
    if len(addresses) > 1 and not is_sentinel:
        raise InvalidLocation(f"several hosts need the scheme redis+sentinel: {_SYNTAX}")
    files = {name: _file(name, parameters.get(name), getattr(options, name)) for name in ("ca", "cert", "key")}
    if not tls and any(name in parameters for name in files):
        raise InvalidLocation("ca, cert and key need TLS: write rediss:// or rediss+sentinel://")
    prefix = parameters.get("prefix", [options.prefix])[-1]
    if not re.fullmatch(REDIS_PREFIX, prefix):
        raise InvalidLocation("the prefix is not made of 1 to 64 letters, digits and `_.-`: choose another one")
    secret = SecretStr(password) if password else options.password
    return RedisLocation(
        addresses, service, db, tls, prefix, files["ca"], files["cert"], files["key"], username or None, secret
    )


def _path(parts: SplitResult, *, is_sentinel: bool) -> tuple[str | None, int]:
    pieces = [unquote(piece) for piece in parts.path.strip("/").split("/") if piece]
    service = pieces.pop(0) if is_sentinel and pieces else None
    if is_sentinel and not service:
        raise InvalidLocation(f"the Sentinel URL names no service: {_SYNTAX}")
    db = pieces.pop(0) if pieces else "0"
    if pieces or not db.isdecimal():
        raise InvalidLocation(f"the number of the database is not understood: {_SYNTAX}")
    return service, int(db)


def _address(text: str, default_port: int) -> Address:
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?", text)
    if not found:
        raise InvalidLocation(f"a host or port is not understood: {_SYNTAX}")
    port = int(found[3] or default_port)
    if not 0 < port < 2**16:
        raise InvalidLocation(f"a port is not in 1 to 65535: {_SYNTAX}")
    return Address(found[1] or found[2], port)


def _file(name: str, given: list[str] | None, default: Path | None) -> Path | None:
    path = Path(given[-1]) if given else default
    if path is not None and not path.is_file():
        quoted = f" {path}" if given is None else ""
        raise InvalidLocation(f"{name} file{quoted} does not exist: name a PEM file")
    return path
