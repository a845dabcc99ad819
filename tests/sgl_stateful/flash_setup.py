"""Real sessions with registered questions on them, over engines without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from flash_engine import DigestEngine
from pinning_engine import POOL_TOKENS, PinningEngine
from prometheus_client import CollectorRegistry
from session_values import ANA
from words import ByteTokenizer

from memstore.session_log import VolatileSessionLog
from sgl_stateful.flash.ahead import Ahead
from sgl_stateful.flash.entry_point import EntryPoint
from sgl_stateful.flash.metrics import EntryMetrics, FlashMetrics
from sgl_stateful.flash.outcomes import Hit
from sgl_stateful.flash.question import Prompt, Question
from sgl_stateful.flash.service import FlashService
from sgl_stateful.service import MemoryService
from sgl_stateful.sessions.content import Content, Renderer
from sgl_stateful.sessions.metrics import SessionMetrics
from sgl_stateful.sessions.service import Options, SessionService
from sgl_stateful.sessions.session import Session

LONGEST = 500


class Setup:
    """Sessions, questions on them, and both engines."""

    def __init__(self, flash: FlashService, engine: DigestEngine, pinning: PinningEngine) -> None:
        self.flash = flash
        self.sessions = flash.sessions
        self.engine = engine
        self.pinning = pinning

    async def open(self, content: str = "data", owner: str = ANA) -> Session:
        return await self.sessions.create(owner, Content(text=content) if content else None, Options(ttl_s=None))

    async def register(self, session: Session, word: str = "what", name: str = "q", **more: Any) -> Question:
        asked = ask(word, name, **more)
        await self.flash.register(session.header.id, session.header.owner, asked)
        return asked

    async def enter(self, session: Session, word: str = "next", name: str = "e", **more: Any) -> EntryPoint:
        made = entry(word, name, **more)
        await self.flash.entries.register(session.header.id, session.header.owner, made)
        return made

    def ahead(self, session: Session, word: str) -> Ahead | None:
        """What is known behind a question that begins with an entry, if it holds now."""
        entries, ids = self.flash.entries, tuple(word.encode())
        found = entries.asked(session, ids if session.num_tokens else (ByteTokenizer.BOS, *ids))
        if found is None:
            return None
        hit = entries.look(session, found)
        if not isinstance(hit, Hit):
            return None
        answer = hit.stored.answer
        assert isinstance(answer, Ahead)
        return answer

    def entry_pins(self) -> dict[str, int]:
        """Tokens that the engine has pinned for entries, by the pin's name."""
        return {name: len(ids) for name, ids in self.pinning.pins.items() if "/" in name}

    async def append(self, session: Session, content: str) -> None:
        await self.sessions.append(session.header.id, session.header.owner, Content(text=content))

    def found(self, session: Session, asked: Question, **more: Any) -> Hit | None:
        is_first = session.num_tokens == 0
        return self.flash.find(session, asked.ask(is_first=is_first), **more)

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """Until nothing waits or runs."""
        await self.until(lambda: not len(self.flash.table.queue) and not self.flash.worker.is_running)

    def outcomes(self) -> dict[str, int]:
        counts: dict[str, int] = self.flash.metrics.totals()["evaluations"]
        return {name: count for name, count in counts.items() if count}


def entry(word: str = "next", name: str = "e", **more: Any) -> EntryPoint:
    """An entry whose token ids are the bytes of a word."""
    ids = tuple(word.encode())
    tokens = more.get("max_tokens", 4)
    values: dict[str, Any] = {
        "name": name,
        "content": Content(text=word),
        "behind": Prompt((), ids),
        "first": Prompt((), (ByteTokenizer.BOS, *ids)),
        "max_tokens": tokens,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens},
        "sampling": "{}",
    }
    return EntryPoint(**(values | more))


def ask(word: str = "what", name: str = "q", **more: Any) -> Question:
    ids = tuple(word.encode())
    values: dict[str, Any] = {
        "name": name,
        "content": Content(text=word),
        "behind": Prompt((), ids),
        "first": Prompt((), (ByteTokenizer.BOS, *ids)),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 32},
        "sampling": "{}",
    }
    return Question(**(values | more))


@asynccontextmanager
async def starting(memory: MemoryService | None = None, **more: Any) -> AsyncIterator[Setup]:
    pinning = PinningEngine()
    engine = DigestEngine(pinning)
    with ThreadPoolExecutor(2) as threads:
        sessions = SessionService(
            log=VolatileSessionLog(),
            engine=pinning,
            renderer=Renderer(ByteTokenizer(), vocab_size=300),
            salt=lambda owner: f"salt of {owner}",
            threads=threads,
            metrics=SessionMetrics(CollectorRegistry()),
            model="model",
            budget=1000,
            quota=1000,
            pool_tokens=POOL_TOKENS,
            max_tokens=LONGEST,
            versions=100,
            queue=4,
        )
        values: dict[str, Any] = {
            "limit": 100,
            "owner_limit": 50,
            "entry_limit": 100,
            "entry_owner_limit": 50,
            "entry_cells": 1000,
            "batch": 8,
            "aging_s": 5.0,
            "kept_events": 8,
            "readers": 2,
            **more,
        }
        registry = CollectorRegistry()
        flash = FlashService(
            sessions=sessions,
            memory=memory,
            engine=engine,
            metrics=FlashMetrics(registry),
            entry_metrics=EntryMetrics(registry),
            **values,
        )
        if memory is not None:
            memory.on_facts(flash.facts_changed)
        task = asyncio.create_task(flash.worker.run())
        try:
            yield Setup(flash, engine, pinning)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
