"""Fixtures that give a test a Redis server, or skip it where none is installed."""

from collections.abc import Iterator

import pytest
from redis_server import BINARY, Certificates, RedisServer


@pytest.fixture(scope="session")
def has_redis() -> None:
    if BINARY is None:
        pytest.skip("redis-server is not installed")


@pytest.fixture(scope="session")
def redis_server(has_redis: None) -> Iterator[RedisServer]:
    """A server that keeps an append-only file, as one in production would."""
    with RedisServer("appendonly yes", "appendfsync everysec", 'save ""') as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of an empty database."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def certificates(has_redis: None, tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls") / "trusted")
