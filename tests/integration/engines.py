"""What the fixtures hand to tests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from locomo.client import MemoryClient
from locomo.server import ServerProcess

T = TypeVar("T")


@dataclass(frozen=True)
class RunningServer:
    """The shared fp32 server: window:16 is exact for the first facts of a stream, ladder:0+4 is the default."""

    url: str
    memory: Path
    client: MemoryClient
    process: ServerProcess


@dataclass(frozen=True)
class RunningEngine:
    """``sgl.Engine`` with our cache, in this process; ``run`` drives its event loop."""

    engine: Any
    service: Any
    port: Any
    page_size: int
    run: Callable[[Coroutine[Any, Any, T]], T]
