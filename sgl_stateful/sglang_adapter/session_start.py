"""The beginning and end of a server's sessions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from memstore.session_log import SessionLog, VolatileSessionLog
from sgl_stateful.errors import BadSessionRequest
from sgl_stateful.flash.metrics import process_entry_metrics, process_flash_metrics
from sgl_stateful.flash.service import FlashService
from sgl_stateful.flash.wording import direction
from sgl_stateful.salts import Salts
from sgl_stateful.service import MemoryService
from sgl_stateful.sessions.content import Renderer
from sgl_stateful.sessions.metrics import SessionMetrics, process_session_metrics
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.snapshots import SnapshotFolder
from sgl_stateful.sessions.snapshotting import SessionSnapshots
from sgl_stateful.sessions.weights import Weights
from sgl_stateful.settings import StatefulSettings

from .engine import SGLangEngine
from .flash_engine import SGLangFlashEngine

logger = logging.getLogger(__name__)

STARTER = "_sgl_stateful_session_starter"  # attribute of the tokenizer manager

_ROOM_TOKENS = 32  # of a session's context that is left for a question and an answer
_THREADS = 4


def starter_of(tokenizer_manager: Any) -> SessionStarter | None:
    """What starts the sessions of a server; None where SGLang's own cache backend is in use."""
    return getattr(tokenizer_manager, STARTER, None)


async def ready_sessions(tokenizer_manager: Any) -> SessionService:
    """The sessions of a server, started.

    Raises
    ------
    BadSessionRequest
        It has none.
    """
    if (starter := starter_of(tokenizer_manager)) is None:
        raise BadSessionRequest("this server has no sessions: start it with --radix-cache-backend stateful")
    return await starter.ready()


def started_sessions(tokenizer_manager: Any) -> SessionService:
    """The sessions of a server that ``ready_sessions`` has been called for."""
    starter = starter_of(tokenizer_manager)
    assert starter is not None, "no sessions"
    assert starter.sessions is not None, "sessions that have not started"
    return starter.sessions


def tokenizer_digest(tokenizer: Any) -> str:
    """Names the token ids and the chat template of a tokenizer."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    body = json.dumps([vocabulary, getattr(tokenizer, "chat_template", None)], default=str)
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()


def _model(model: str, tokenizer: str) -> str:
    """Names what gives token ids their meaning."""
    return hashlib.blake2b(json.dumps([model, tokenizer]).encode(), digest_size=16).hexdigest()


class SessionStarter:
    """Makes the sessions once the scheduler can be asked about its pool, at the first use or at start-up.

    Parameters
    ----------
    memory
        The server's memory, whose store then keeps the token logs; without one they live in this process alone.
    """

    def __init__(
        self, tokenizer_manager: Any, settings: StatefulSettings, engine: SGLangEngine, memory: MemoryService | None
    ) -> None:
        self.settings = settings
        self._manager = tokenizer_manager
        self._engine = engine
        self._memory = memory
        self._start = asyncio.Lock()
        self.sessions: SessionService | None = None
        self.flash: FlashService | None = None
        self._upkeep: list[asyncio.Task[None]] = []
        self._weights = Weights(engine)
        self._threads: Executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="sgl-stateful sessions")

    async def ready(self) -> SessionService:
        """The sessions."""
        if self.sessions is not None:
            return self.sessions
        async with self._start:
            if self.sessions is None:
                sessions = await self._make()
                loop = asyncio.get_running_loop()
                self._upkeep = [
                    loop.create_task(sessions.run(every_s=self.settings.session_sweep_s), name="sgl-stateful sessions"),
                    loop.create_task(sessions.write_snapshots(), name="sgl-stateful snapshots"),
                ]
                if self._memory is not None:
                    self._memory.on_purge(sessions.purged)
                self.flash = self._make_flash(sessions)
                self._upkeep.append(loop.create_task(self.flash.worker.run(), name="sgl-stateful flash"))
                self.sessions = sessions
        return self.sessions

    async def ready_flash(self) -> FlashService:
        """The registered questions."""
        await self.ready()
        assert self.flash is not None, "sessions without their questions"
        return self.flash

    def _make_flash(self, sessions: SessionService) -> FlashService:
        settings, memory = self.settings, self._memory
        flash = FlashService(
            sessions=sessions,
            memory=memory,
            engine=SGLangFlashEngine(self._engine, self._manager),
            metrics=process_flash_metrics(),
            entry_metrics=process_entry_metrics(),
            limit=settings.flash_limit,
            owner_limit=settings.flash_owner_limit,
            entry_limit=settings.entry_limit,
            entry_owner_limit=settings.entry_owner_limit,
            entry_cells=settings.entry_budget(sessions.pool_tokens),
            batch=settings.flash_batch,
            aging_s=settings.flash_aging_s,
            busy_share=settings.flash_busy_share,
            rest_s=settings.flash_rest_s,
            audit_every=settings.flash_audit_every,
            embed=None if memory is None else partial(memory.in_thread, direction, memory.store.embedder),
            semantic_audit_every=settings.flash_semantic_audit_every,
            kept_events=settings.flash_events,
            readers=settings.flash_readers,
        )
        if memory is not None:
            memory.on_facts(flash.facts_changed)
        return flash

    async def _make(self) -> SessionService:
        settings, tokenizer = self.settings, self._manager.tokenizer
        description = await self._engine.control("describe")
        pool_tokens = int(description["pool_tokens"])
        budget = pool_tokens // 2 if settings.session_budget_tokens is None else settings.session_budget_tokens
        log: SessionLog = VolatileSessionLog()
        salt: Callable[[str], str] = partial(Salts().of, epoch=0)
        if self._memory is not None:
            log, salt = await asyncio.to_thread(getattr, self._memory.store, "session_log"), self._memory.salt
        digest = await asyncio.to_thread(tokenizer_digest, tokenizer)
        metrics = process_session_metrics(settings.owner_classes())
        return SessionService(
            log=log,
            engine=self._engine,
            renderer=Renderer(tokenizer, vocab_size=self._manager.model_config.vocab_size),
            salt=salt,
            threads=self._threads,
            metrics=metrics,
            model=_model(description["model"], digest),
            former_models=[_model(description["former_fingerprint"], digest)],
            budget=min(budget, pool_tokens),
            quota=budget if settings.session_quota_tokens is None else settings.session_quota_tokens,
            pool_tokens=pool_tokens,
            max_tokens=min(int(self._manager.context_len), pool_tokens) - _ROOM_TOKENS,
            versions=settings.session_versions,
            queue=settings.session_queue,
            snapshots=await self._snapshots(description, metrics),
        )

    async def _snapshots(self, description: Mapping[str, Any], metrics: SessionMetrics) -> SessionSnapshots:
        path = self.settings.snapshot_path()
        if path is None:
            return SessionSnapshots(None, self._engine, metrics, weights=self._weights)
        snapshots = SessionSnapshots(
            SnapshotFolder(path, budget_bytes=self.settings.session_snapshots_mib << 20),
            self._engine,
            metrics,
            fingerprint=description["fingerprint"],
            bytes_per_token=int(description["bytes_per_token"]),
            weights=self._weights,
        )
        await snapshots.start()
        return snapshots

    async def weights_changing(self) -> None:
        """Weights are about to be updated in place, before the sessions have started or after."""
        if self.sessions is not None:
            await self.sessions.weights_changing()
        else:
            await self._weights.changing()

    async def weights_changed(self) -> None:
        """Weights were updated in place, or may have been."""
        if self.sessions is not None:
            await self.sessions.weights_changed()
        else:
            await self._weights.changed()

    def close(self) -> None:
        """Stop what runs in the background, and wait for the log."""
        for task in self._upkeep:
            task.cancel()
        if self.sessions is not None:
            self.sessions.close_all()
        self._threads.shutdown(wait=True, cancel_futures=True)
