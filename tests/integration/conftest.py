"""One engine in this process and one server, each started once for the whole session."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import RunningEngine, RunningServer, StoreServer
from redis_server import BINARY, RedisServer

from locomo.client import MemoryClient
from locomo.server import ServerProcess
from memstore import MemStore
from sgl_stateful.model_files import default_model_dir

POOL_TOKENS = 6000
PAGE_SIZE = int(os.environ.get("TEST_PAGE_SIZE", "1"))  # of the engine; the server has pages of one token
REDIS_PASSWORD = "open-sesame"
# What is spliced is held against full prefill to 1e-4, which int8 is not for.
SERVER_FLAGS = ("--dtype", "float32", "--kv-storage", "native", "--enable-metrics")
SERVER_FLAGS += ("--max-total-tokens", str(POOL_TOKENS), "--arena-mib", "512")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct, as scripts/setup provides it."""
    path = default_model_dir(os.environ)
    if not (path / "config.json").exists():
        pytest.fail(f"no model at {path}: run scripts/setup")
    return path


@pytest.fixture(scope="session")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of ours in fp32 with a pool of 6,000 tokens."""
    folder = tmp_path_factory.mktemp("server")
    flags = ["--policy", "ladder:0+4", "--also-encode", "window:16,ladder:live+4", *SERVER_FLAGS]
    with ServerProcess(model_dir, folder / "memory", flags=flags, log=folder / "server.log") as process:
        client = MemoryClient(process.url)
        yield RunningServer(process.url, folder / "memory", client, process)
        client.close()


@pytest.fixture(scope="session")
def store_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """A server whose facts are on a Redis with a password."""
    if BINARY is None:
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("store-server")
    flags = ["--kv-dir", str(folder / "kv"), "--policy", "ladder:0+4", "--also-encode", "window:16", *SERVER_FLAGS]
    with RedisServer("appendonly yes", 'save ""', password=REDIS_PASSWORD) as redis:
        location = redis.url.replace("//", f"//:{REDIS_PASSWORD}@")
        with (
            ServerProcess(model_dir, location, flags=flags, log=folder / "server.log") as process,
            MemStore(location) as elsewhere,
        ):
            yield StoreServer(process.url, redis, elsewhere, folder / "server.log", folder / "kv")


@pytest.fixture(scope="session")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine in fp32 whose scheduler can be given directives."""
    settings = {
        "SGL_STATEFUL_MEMORY": str(tmp_path_factory.mktemp("engine") / "memory"),
        "SGL_STATEFUL_KV_STORAGE": "native",
        "SGL_STATEFUL_PROMOTE_TOKENS": "0",
        "SGL_STATEFUL_FAITHFULNESS": "off",
    }
    os.environ |= settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang and what it imports
        import sglang

        running = sglang.Engine(
            model_path=str(model_dir),
            dtype="float32",
            max_total_tokens=POOL_TOKENS,
            page_size=PAGE_SIZE,
            radix_cache_backend="stateful",
            log_level="warning",
        )
        from sgl_stateful.sglang_adapter.requests import ENGINE, service_of
    for name in settings:
        del os.environ[name]

    manager = running.tokenizer_manager
    service = service_of(manager)
    yield RunningEngine(running, service, getattr(manager, ENGINE), PAGE_SIZE, running.loop.run_until_complete)
    service.close()
    running.shutdown()
