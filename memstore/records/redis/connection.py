"""Connections to a Redis server, or to the one that Sentinels say is the master."""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from pydantic import SecretStr
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.connection import ConnectionPool
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from memstore.breaker import Breaker
from memstore.errors import StoreBusy, StoreClosed, StoreFull, StoreTLSError, StoreUnreachable
from memstore.records.redis.faults import is_worth_repeating, translated, was_cut_off
from memstore.records.redis.options import Address, RedisLocation, RedisOptions

T = TypeVar("T")

_PATIENCE = 30
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.05, 0.5


class RedisConnections:
    """Runs commands, each call as a whole: repeated where the connection was lost, not tried while it is hopeless.

    What is called may run twice on the server, so it has to be something of which the second time does no harm.
    Thread-safe.
    """

    def __init__(self, location: RedisLocation, options: RedisOptions) -> None:
        self.location = location
        self.where = location.url
        self._timeout_s = options.timeout_s
        self._breaker = Breaker(options.breaker_s)
        self._slots = threading.BoundedSemaphore(options.max_connections)
        self._max_connections = options.max_connections
        self._retry = Retry(
            ExponentialWithJitterBackoff(base=_BACKOFF_S, cap=_LONGEST_BACKOFF_S),
            options.retries,
            supported_errors=(redis.RedisError, OSError),
        )
        self._closed = False
        self._sentinel: Sentinel | None = None
        if location.service:
            self._sentinel = self._watchers(options)
        # Their types are unions of what the asynchronous client returns.
        self._client: Any = self._connect_later(answer_s=self._timeout_s)
        self._patient_client: Any = self._connect_later(answer_s=_PATIENCE * self._timeout_s)

    def call(self, command: Callable[[Any], T], *, patient: bool = False) -> T:
        """Return what `command` returns when called with a client; raise `StoreError`.

        A patient one may keep the server busy for long, so it is only tried on a server that answers.
        """
        if patient:
            self.do("exists", f"{self.location.prefix}:meta")
        if self._closed:
            raise StoreClosed(f"{self.where} has been closed: open a new store")
        if not self._slots.acquire(timeout=self._timeout_s):
            raise StoreBusy(f"all {self._max_connections} connections to {self.where} are in use: allow more")
        try:
            return self._through_breaker(command, self._patient_client if patient else self._client)
        finally:
            self._slots.release()

    def do(self, name: str, *arguments: object) -> Any:
        """Return the reply to one command, given as the name of redis-py's method."""
        return self.call(lambda client: getattr(client, name)(*arguments))

    def together(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the replies to several commands, sent at once and done in this order; others may come between."""
        return self.call(lambda client: _replies(client.pipeline(transaction=False), commands))

    def at_one_moment(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Return the replies to several commands, between which nothing happens."""
        try:
            return self.call(lambda client: _replies(client.pipeline(transaction=True), commands))
        except StoreFull:
            # A server without memory queues no commands, not even reading ones. It takes no new facts either.
            return self.together(*commands)

    def script(self, source: str) -> Callable[[Any, list[str], list[bytes | str]], Any]:
        """Return what runs a Lua script: called with a client, keys and arguments."""
        script = self._client.register_script(source)
        return lambda client, keys, arguments: script(keys=keys, args=arguments, client=client)

    def explain_refused_handshake(self, error: StoreUnreachable) -> None:
        """Raise `StoreTLSError` where TLS is why the first command of all got no answer, which was `error`.

        To a handshake a server without TLS says nothing at all. One that does not accept a client's certificate says
        so after the handshake (TLS 1.3, RFC 8446 section 4.4.2.4) and hangs up, so that the alert may be lost.
        """
        if not self.location.tls:
            return
        if any(_answers_in_plain(address, self._timeout_s) for address in self.location.addresses):
            raise StoreTLSError(f"{self.where} speaks no TLS: turn it on there, or write redis:// instead of rediss://")
        if was_cut_off(error):
            raise StoreTLSError(
                f"{self.where} ended every TLS connection before it answered: if it asks for a client's certificate,"
                " check cert and key"
            ) from error

    def close(self) -> None:
        """Close every connection; may be called twice."""
        self._closed = True
        for client in (self._client, self._patient_client):
            client.connection_pool.disconnect()
        if self._sentinel is not None:
            self._sentinel.close()

    def _through_breaker(self, command: Callable[[Any], T], client: Any) -> T:
        if not self._breaker.may_call():
            raise StoreUnreachable(f"{self.where} did not answer a moment ago: try again later")
        answered = True
        try:
            with translated(self.where):
                return self._retry.call_with_retry(
                    lambda: command(client), lambda error: None, is_retryable=is_worth_repeating
                )
        except StoreUnreachable:
            answered = False
            raise
        finally:
            if answered:
                self._breaker.succeeded()
            else:
                self._breaker.failed()

    def _connect_later(self, *, answer_s: float) -> redis.Redis:
        arguments = {**self._data_server(), "socket_timeout": answer_s}
        if self._sentinel is not None:
            pool: ConnectionPool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
                self.location.service, self._sentinel, **arguments, **({"ssl": True} if self.location.tls else {})
            )
        else:
            [(host, port)] = self.location.addresses
            kind = redis.SSLConnection if self.location.tls else redis.Connection
            pool = ConnectionPool(host=host, port=port, connection_class=kind, **arguments)
        return redis.Redis(connection_pool=pool)

    def _watchers(self, options: RedisOptions) -> Sentinel:
        arguments = {**self._socket(), **_login(None, options.sentinel_password), **self._tls()}
        secure = {"ssl": True} if self.location.tls else {}
        return Sentinel(self.location.addresses, sentinel_kwargs={**arguments, **secure})  # type: ignore[no-untyped-call]

    def _data_server(self) -> dict[str, Any]:
        return {
            **self._socket(),
            **self._tls(),
            **_login(self.location.username, self.location.password),
            "db": self.location.db,
            "max_connections": self._max_connections,
        }

    def _socket(self) -> dict[str, Any]:
        # Repeating is up to `call` alone; connections that repeat on their own would multiply it.
        return {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,
        }

    def _tls(self) -> dict[str, Any]:
        if not self.location.tls:
            return {}
        files = {"ssl_ca_certs": self.location.ca, "ssl_certfile": self.location.cert, "ssl_keyfile": self.location.key}
        return {
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            **{name: str(path) for name, path in files.items() if path is not None},
        }


def _login(username: str | None, password: SecretStr | None) -> dict[str, Any]:
    # Behind a provider, since redis-py puts a pool's arguments into its repr and some errors.
    if username is None and password is None:
        return {}
    secret = "" if password is None else password.get_secret_value()
    return {"credential_provider": UsernamePasswordCredentialProvider(username, secret)}


def _replies(pipeline: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    with pipeline:
        for name, *arguments in commands:
            getattr(pipeline, name)(*arguments)
        replies: list[Any] = pipeline.execute()
        return replies


def _answers_in_plain(address: Address, timeout_s: float) -> bool:
    try:
        with socket.create_connection(address, timeout=timeout_s) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")
    except OSError:
        return False
