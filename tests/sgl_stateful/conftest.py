from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from memory_engine import MemoryEngine
from prometheus_client import CollectorRegistry
from redis_fixtures import has_redis, redis_server, redis_url  # noqa: F401
from words import ByteTokenizer, WordEmbedder

from memstore import KVBlobs, MemStore, MemStoreSettings
from sgl_stateful.metrics import MemoryMetrics
from sgl_stateful.service import MemoryService
from sgl_stateful.settings import StatefulSettings
from sgl_stateful.sglang_adapter.routes import add_routes

CONTEXT = "<user>\n"
HEADER = "Notes:\n"
CONTEXT_TOKENS = 4096


def pytest_configure(config: pytest.Config) -> None:
    # SGLang's scheduler module says so while it is imported without a GPU.
    config.addinivalue_line("filterwarnings", "ignore:Triton is not supported:UserWarning")
    # What SGLang answers with itself.
    config.addinivalue_line("filterwarnings", "ignore:ORJSONResponse is deprecated")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[KVBlobs]:
    with KVBlobs(tmp_path / "kv", settings=MemStoreSettings(blob_map_size_bytes=64 << 20)) as opened:
        yield opened


@pytest.fixture
def store(tmp_path: Path, blobs: KVBlobs) -> Iterator[MemStore]:
    with MemStore(tmp_path / "store", embedder=WordEmbedder(), settings=MemStoreSettings(), blobs=blobs) as opened:
        yield opened


@pytest.fixture
def engine(blobs: KVBlobs) -> MemoryEngine:
    return MemoryEngine(blobs)


@pytest.fixture
def make_service(store: MemStore, blobs: KVBlobs, engine: MemoryEngine) -> Callable[..., MemoryService]:
    """Makes services over the store and the engine, each with metrics of its own."""

    def make(*, context_len: int = CONTEXT_TOKENS, **settings: Any) -> MemoryService:
        values: dict[str, Any] = {
            "policy": "anchor:2",
            "header": HEADER,
            "self_test": False,
            "faithfulness": "off",
            "encode_wait_s": 20.0,
        }
        return MemoryService(
            settings=StatefulSettings(**(values | settings)),
            store=store,
            blobs=blobs,
            tokenizer=ByteTokenizer(),
            engine=engine,
            context=CONTEXT,
            context_len=context_len,
            metrics=MemoryMetrics(CollectorRegistry()),
        )

    return make


@pytest.fixture
async def service(make_service: Callable[..., MemoryService]) -> AsyncIterator[MemoryService]:
    """A service that has started, for the routes."""
    service = make_service(max_fact_tokens=100, feed_poll_s=0.01)
    await service.start()
    yield service
    for task in service._tasks.values():
        task.cancel()


@pytest.fixture
def app(service: MemoryService) -> FastAPI:
    app = FastAPI()
    add_routes(app, service)
    return app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as opened:
        yield opened
