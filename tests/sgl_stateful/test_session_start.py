"""The beginning of a server's sessions: what they are told of the model, and of weights that changed before."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pinning_engine import POOL_TOKENS, PinningEngine
from session_values import ANA, segment
from words import ByteTokenizer

from memstore import MemStore, OwnerId
from memstore.kv.session_files import session_file
from memstore.session_log import LogEntry, SessionHeader, SessionId
from sgl_stateful.errors import SessionOfAnotherModel
from sgl_stateful.service import MemoryService
from sgl_stateful.sessions.content import Content
from sgl_stateful.sessions.service import Options, SessionService
from sgl_stateful.sessions.snapshot_file import SnapshotHeader, tokens_digest, write_snapshot
from sgl_stateful.sessions.snapshots import SnapshotFolder
from sgl_stateful.settings import StatefulSettings
from sgl_stateful.sglang_adapter.session_start import SessionStarter, tokenizer_digest

pytestmark = pytest.mark.anyio

IDS = list(range(300))


class Tokenizer(ByteTokenizer):
    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(257)}


class DescribingEngine(PinningEngine):
    """Says what the scheduler says of its model and pool."""

    def __init__(self, *, fingerprint: str = "f", model: str = "m") -> None:
        super().__init__()
        self.described = {"fingerprint": fingerprint, "model": model, "former_fingerprint": "an earlier one"}

    async def control(self, op: str, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        if op == "describe":
            return {**self.described, "pool_tokens": POOL_TOKENS, "bytes_per_token": 16}
        return {} if op.startswith("snapshot_") and op != "snapshot_fence" else await super().control(op, payload)


@pytest.fixture
def memory(make_service: Callable[..., MemoryService]) -> MemoryService:
    return make_service()


@asynccontextmanager
async def starting(
    memory: MemoryService, tmp_path: Path, **described: str
) -> AsyncIterator[tuple[SessionStarter, Any]]:
    engine = DescribingEngine(**described)
    manager = SimpleNamespace(
        tokenizer=Tokenizer(), model_config=SimpleNamespace(vocab_size=300), context_len=POOL_TOKENS
    )
    settings = StatefulSettings(memory=str(tmp_path / "store"), kv_dir=tmp_path / "kv")
    starter = SessionStarter(manager, settings, engine, memory)  # type: ignore[arg-type]
    yield starter, engine
    starter.close()
    await asyncio.gather(*starter._upkeep, return_exceptions=True)


def stored(store: MemStore, tmp_path: Path, *, model: str, fingerprint: str) -> SessionId:
    """A session of an earlier process, with a snapshot."""
    name = SessionId("stored")
    header = SessionHeader(name, OwnerId(ANA), model, created_at=1.0, used_at=1.0)
    store.session_log.create(header, LogEntry(1, 0, 0, (segment(*IDS),)))
    folder = tmp_path / "kv" / "sessions"
    folder.mkdir()
    file = session_file(header.owner, name)
    of = SnapshotHeader(fingerprint, tokens_digest(IDS), (1, len(IDS), 1, 2), "float32")
    write_snapshot(folder / file, file, of, torch.zeros(of.shape), torch.ones(of.shape))
    return name


def named(*parts: str) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


async def readback(sessions: SessionService, name: SessionId) -> Any:
    """What a query of the session tells the scheduler of its snapshot."""
    use = await sessions.answering.begin(name, ANA, "query")
    await sessions.answering.drop(use)
    return use.hold.snapshot


MODEL = named("m", tokenizer_digest(Tokenizer()))


# ---- models ----


async def test_a_stored_session_is_read_under_another_kv_layout(
    memory: MemoryService, store: MemStore, tmp_path: Path
) -> None:
    async with starting(memory, tmp_path, fingerprint="of bfloat16") as (starter, _):
        made = await (await starter.ready()).create(ANA, Content(text="abc"), Options(ttl_s=None))
        assert made.header.model == MODEL
    async with starting(memory, tmp_path, fingerprint="of float32") as (starter, _):
        assert (await (await starter.ready()).get(made.header.id, ANA)).token_ids() == made.token_ids()
    async with starting(memory, tmp_path, fingerprint="of bfloat16", model="another") as (starter, _):
        with pytest.raises(SessionOfAnotherModel):
            await (await starter.ready()).get(made.header.id, ANA)


async def test_a_session_of_an_earlier_release_is_read(memory: MemoryService, store: MemStore, tmp_path: Path) -> None:
    former = named("an earlier one", tokenizer_digest(Tokenizer()))
    name = stored(store, tmp_path, model=former, fingerprint="f")
    async with starting(memory, tmp_path) as (starter, _):
        assert (await (await starter.ready()).get(name, ANA)).token_ids() == IDS


# ---- weights ----


async def test_without_an_update_snapshots_are_read(memory: MemoryService, store: MemStore, tmp_path: Path) -> None:
    name = stored(store, tmp_path, model=MODEL, fingerprint="f")
    async with starting(memory, tmp_path) as (starter, engine):
        sessions = await starter.ready()
        assert (await readback(sessions, name)).tokens == len(IDS)
        assert engine.weights == ""
        await starter.weights_changing()
        assert await readback(sessions, name) is None
        await starter.weights_changed()
        assert await readback(sessions, name) is None


async def test_an_update_before_the_sessions_start_counts(
    memory: MemoryService, store: MemStore, tmp_path: Path
) -> None:
    name = stored(store, tmp_path, model=MODEL, fingerprint="f")
    async with starting(memory, tmp_path) as (starter, engine):
        await starter.weights_changing()
        assert engine.weights is None
        await starter.weights_changed()
        assert engine.weights.startswith("+")
        sessions = await starter.ready()
        assert await readback(sessions, name) is None
        await sessions.refresh(name, ANA)
        assert engine.sent[-1].salt == memory.salt(ANA) + engine.weights, "nor is KV of the pool"


@pytest.mark.parametrize("ends", [True, False], ids=["and its end", "alone"])
async def test_an_update_that_begins_while_they_start_counts(
    memory: MemoryService, store: MemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    name = stored(store, tmp_path, model=MODEL, fingerprint="f")
    reading, go_on, scan = threading.Event(), threading.Event(), SnapshotFolder.scan

    def slow_scan(folder: SnapshotFolder, *args: Any, **more: Any) -> Any:
        found = scan(folder, *args, **more)
        assert set(found) == {name}
        reading.set()
        assert go_on.wait(10)
        return found

    monkeypatch.setattr(SnapshotFolder, "scan", slow_scan)
    async with starting(memory, tmp_path) as (starter, engine):
        ready = asyncio.create_task(starter.ready())
        await asyncio.to_thread(reading.wait, 10)
        await starter.weights_changing()
        if ends:
            await starter.weights_changed()
        go_on.set()
        sessions = await ready
        assert await readback(sessions, name) is None
        if not ends:
            assert engine.weights is None
            await starter.weights_changed()
        assert engine.weights.startswith("+")
