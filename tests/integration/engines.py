"""What the fixtures hand to tests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from redis_server import RedisServer

from locomo.client import MemoryClient
from locomo.server import ServerProcess
from memstore import MemStore

T = TypeVar("T")


@dataclass(frozen=True)
class RunningServer:
    """The shared fp32 server: window:16 is exact for the first facts of a stream, ladder:0+4 is the default."""

    url: str
    memory: Path
    client: MemoryClient
    process: ServerProcess


@dataclass(frozen=True)
class StoreServer:
    """A server whose facts are on Redis, and ``elsewhere``: the same store as another process has it, without KV."""

    url: str
    redis: RedisServer
    elsewhere: MemStore
    log: Path
    kv: Path


@dataclass(frozen=True)
class RunningEngine:
    """``sgl.Engine`` with our cache, in this process; ``run`` drives its event loop."""

    engine: Any
    service: Any
    port: Any
    page_size: int
    run: Callable[[Coroutine[Any, Any, T]], T]
