import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from bigrams import BigramEmbedder
from redis_fixtures import certificates, has_redis, redis_server, redis_url  # noqa: F401
from small_kv import encoding, kv

from memstore import KVBlobs, MemStore, MemStoreSettings, SentenceTransformerEmbedder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def minilm() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder()


@pytest.fixture
def settings() -> MemStoreSettings:
    return MemStoreSettings(blob_map_size_bytes=64 * 2**20, max_open_indexes=4)


@pytest.fixture
def blobs(tmp_path: Path, settings: MemStoreSettings) -> Iterator[KVBlobs]:
    with KVBlobs(tmp_path / "kv", settings=settings) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "redis"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty store is, on each backend."""
    return f"sqlite:///{tmp_path / 'store'}" if request.param == "sqlite" else request.getfixturevalue("redis_url")


@pytest.fixture
def store(location: str, settings: MemStoreSettings, blobs: KVBlobs) -> Iterator[MemStore]:
    with MemStore(location, embedder=BigramEmbedder(), settings=settings, blobs=blobs) as opened:
        yield opened


@pytest.fixture
def read_only_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        yield Path(name)
        os.chmod(name, 0o755)


@pytest.fixture
def run_unprivileged() -> Callable[[str], str]:
    """Runs Python code in a process that file permissions apply to, also where the tests run as root."""

    def run(code: str) -> str:
        # The interpreter itself may be readable by root alone, so the imports come first.
        start = "import os, memstore\nif os.geteuid() == 0:\n    os.setuid(65534)\n"
        done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def put_kv(blobs: KVBlobs) -> Callable[..., str]:
    """Puts a small encoding of a fact and returns its id."""

    def put(owner: str, fact_id: str, *, number: int) -> str:
        described = encoding(number, owner=owner, fact_id=fact_id)
        blobs.put(described, *kv(number))
        return described.id

    return put
