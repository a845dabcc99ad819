"""Encodes facts in the background: finds those without KV, prefills them behind their prefix, and waits for nobody.

Runs on the HTTP process's event loop as ordinary requests of the server. While callers' requests are in flight it
keeps one request of its own; otherwise as many as the settings allow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from memstore import Encoding, EncodingId, Fact, FactId, KVBlobs, MemStore, MemStoreError
from sgl_stateful.directive import Capture, CaptureItem, Span
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.outage import OUTAGES, Outage

from .codec import FactCodec
from .counts import EncodeCounts
from .planning import EncodePlanner
from .policies import EncodeJob, EncodingPolicy

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_RETRY_AFTER_S = 30.0  # how long facts that could not be encoded are left alone, whoever asks for them
_STORE_RETRY_S = 1.0

T = TypeVar("T")


@dataclass(slots=True)
class _OwnerWork:
    """Facts of one owner that still lack KV, by policy; None until the owner has been looked at."""

    missing: dict[str, set[FactId]] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    attempts: int = 0
    generation: int = 0  # grows with every notification, so that a plan that was made before one is made again
    given_up_at: float = 0.0

    @property
    def is_open(self) -> bool:
        """There is something to do, and trying has not been given up."""
        return self.attempts < _ATTEMPTS and (self.missing is None or any(self.missing.values()))


class Encoder:
    """The background encoder of one server.

    Parameters
    ----------
    policies
        The default one first; each fact is encoded under all of them.
    salt
        Cache salt of an owner; asks the store.
    max_job_tokens
        Longest prompt that an encoding may take; longer prefixes are cut from the front.
    threads
        Where the store and the KV store are waited for; None is the event loop's own.
    """

    def __init__(
        self,
        *,
        store: MemStore,
        blobs: KVBlobs,
        codec: FactCodec,
        policies: Sequence[EncodingPolicy],
        engine: EnginePort,
        salt: Callable[[str], str],
        concurrency: int,
        max_job_tokens: int,
        threads: Executor | None = None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._codec = codec
        self._policies = tuple(policies)
        self._publishes = {policy.name: policy.extends_prompts for policy in policies}
        self._engine = engine
        self._salt = salt
        self._concurrency = concurrency
        self._planner = EncodePlanner(store=store, blobs=blobs, codec=codec, max_job_tokens=max_job_tokens)
        self._threads = threads
        self._outage = Outage("the store fails, encoding waits for it", logger)
        self._owners: dict[str, _OwnerWork] = {}
        self._wake = asyncio.Event()
        self._in_flight = 0
        self._slot_free = asyncio.Condition()
        self.counts = {policy.name: EncodeCounts() for policy in policies}

    # ---- what callers use ----

    def notify(self, owner: str) -> None:
        """The owner's facts changed: look at them, however often that failed before."""
        work = self._owners.setdefault(owner, _OwnerWork())
        work.missing, work.attempts = None, 0
        work.generation += 1
        self._wake.set()

    def report_missing(self, owner: str) -> None:
        """A request met a fact without KV: look at the owner, unless that is under way or has just been given up."""
        work = self._owners.get(owner)
        if work is None or (work.attempts >= _ATTEMPTS and time.monotonic() - work.given_up_at > _RETRY_AFTER_S):
            self.notify(owner)

    async def wait_for(self, owner: str, fact_ids: Sequence[FactId], *, timeout_s: float) -> list[FactId]:
        """Look at the owner, and wait until the facts have KV under every policy.

        Returns
        -------
        Those that still have none when the time is up or trying has been given up.
        """
        deadline = time.monotonic() + timeout_s
        if owner not in self._owners:
            self.notify(owner)
        while (work := self._owners.get(owner)) is not None:
            left = list(fact_ids)
            if work.missing is not None:
                left = [fact_id for fact_id in fact_ids if any(fact_id in m for m in work.missing.values())]
            if not left or work.attempts >= _ATTEMPTS:
                return left
            work.changed.clear()
            try:
                await asyncio.wait_for(work.changed.wait(), max(deadline - time.monotonic(), 0))
            except TimeoutError:
                return left
        return []

    def pending(self) -> int:
        """Encodings known to be missing now; owners not yet looked at count one each."""
        return sum(1 if w.missing is None else sum(map(len, w.missing.values())) for w in self._owners.values())

    async def run(self) -> None:
        """Encode what is missing, until the server shuts down; cancel to stop."""
        for owner in await self._all_owners():
            self.notify(owner)
        while not self._engine.is_closing():
            todo = [name for name, work in self._owners.items() if work.is_open]
            if not todo:
                self._wake.clear()
                await self._wake.wait()
                continue
            for name in todo:
                try:
                    await self._encode_owner(name)
                except asyncio.CancelledError:
                    raise
                except OUTAGES as error:
                    # Of no use to try the others; this owner is still to be done.
                    self._outage.failed(error)
                    self._owners[name] = self._owners.pop(name)  # in case it is this owner alone
                    await asyncio.sleep(_STORE_RETRY_S)
                    break
                except Exception:
                    # The encoder serves every owner: what fails for one is logged, counted and tried again later.
                    logger.exception("encoding facts failed; they are served as text until it succeeds")
                    self._fail(name)
                else:
                    self._outage.worked()

    async def _all_owners(self) -> Sequence[str]:
        while True:
            try:
                return await self._in_thread(self._store.owners)
            except MemStoreError as error:
                self._outage.failed(error)
                await asyncio.sleep(_STORE_RETRY_S)

    def _fail(self, owner: str) -> None:
        work = self._owners[owner]
        work.attempts += 1
        work.given_up_at = time.monotonic()
        work.changed.set()

    # ---- one owner ----

    async def _encode_owner(self, owner: str) -> None:
        work = self._owners[owner]
        generation = work.generation
        plans: dict[str, list[EncodeJob]] = {}
        missing: dict[str, set[FactId]] = {}
        salt = await self._in_thread(self._salt, owner)
        facts = await self._in_thread(self._planner.facts, owner)
        for policy in self._policies:
            jobs = await self._in_thread(self._planner.plan, owner, facts, policy)
            plans[policy.name] = jobs
            missing[policy.name] = {fact.id for job in jobs for fact in job.facts}
        if work.generation != generation:  # facts changed while this was planned
            return
        work.missing = missing
        work.changed.set()
        before = sum(c.failures for c in self.counts.values())
        for name, jobs in plans.items():
            await self._run_jobs(owner, name, jobs, salt)
            if work.generation != generation:
                return
        if sum(c.failures for c in self.counts.values()) > before:
            self._fail(owner)
            if work.attempts < _ATTEMPTS:
                work.missing = None
        elif not any(missing.values()):
            self._owners.pop(owner, None)
            work.changed.set()

    async def _run_jobs(self, owner: str, policy: str, jobs: Sequence[EncodeJob], salt: str) -> None:
        started = time.monotonic()
        by_prefix: dict[tuple[FactId, ...], list[EncodeJob]] = {}
        for job in jobs:
            by_prefix.setdefault(tuple(f.id for f in job.prefix), []).append(job)
        async with asyncio.TaskGroup() as group:
            for same_prefix in by_prefix.values():
                if len(same_prefix) > 1:
                    async with self._slot() as is_serving:
                        if is_serving:
                            await self._prime(policy, same_prefix[0], salt)
                for job in same_prefix:
                    await self._take_slot()
                    group.create_task(self._run_in_slot(owner, policy, job, salt))
        self.counts[policy].seconds += time.monotonic() - started

    async def _take_slot(self) -> None:
        async with self._slot_free:
            await self._slot_free.wait_for(self._has_slot)
            self._in_flight += 1

    async def _give_back_slot(self) -> None:
        async with self._slot_free:
            self._in_flight -= 1
            self._slot_free.notify_all()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[bool]:
        """One request's turn; yields whether the server still serves."""
        await self._take_slot()
        try:
            yield not self._engine.is_closing()
        finally:
            await self._give_back_slot()

    async def _run_in_slot(self, owner: str, policy: str, job: EncodeJob, salt: str) -> None:
        try:
            if not self._engine.is_closing():
                await self._run_job(owner, policy, job, salt)
        finally:
            await self._give_back_slot()

    def _has_slot(self) -> bool:
        return self._in_flight < (1 if self._engine.foreground_requests() else self._concurrency)

    async def _prime(self, policy: str, job: EncodeJob, salt: str) -> None:
        """Prefill a prefix that several jobs share, once; where that fails, each job prefills it."""
        ids = [*self._codec.context, *self._planner.prefix_ids(job)]
        try:
            result = await self._engine.prefill(ids, salt=salt, directive=None)
        except Exception:
            logger.exception("prefilling a shared prefix failed")
            return
        self.counts[policy].tokens_prefilled += result.prompt_tokens - result.cached_tokens

    async def _run_job(self, owner: str, policy: str, job: EncodeJob, salt: str) -> None:
        counts = self.counts[policy]
        try:
            ids = [*self._codec.context, *self._planner.prefix_ids(job)]
            items = []
            for index, fact in enumerate(job.facts):
                tokens = self._codec.encode_fact(fact)
                saw = job.saw(index)
                encoding_id = self._codec.encoding_id(
                    tokens, policy=policy, saw=saw, saw_ids=ids[len(self._codec.context) :]
                )
                span = Span(encoding_id, len(ids), len(ids) + len(tokens.token_ids))
                ids += tokens.token_ids
                encoding = Encoding(
                    id=encoding_id,
                    owner=fact.owner,
                    fact_id=fact.id,
                    fact_version=fact.version,
                    fingerprint=self._codec.fingerprint,
                    policy=policy,
                    saw=saw,
                    token_ids=(),  # the scheduler fills in the ids that it captured
                )
                items.append(CaptureItem(span, dataclasses.asdict(encoding)))
            directive = Capture(tuple(items), publish=self._publishes[policy])
            result = await self._engine.prefill(ids, salt=salt, directive=directive)
            if result.scheduler.get("captured") != len(items):
                raise RuntimeError(f"the scheduler captured {result.scheduler} of {len(items)} facts")
            counts.facts += len(items)
            counts.fact_tokens += sum(len(item.span) for item in items)
            counts.tokens_prefilled += result.prompt_tokens - result.cached_tokens
            counts.bytes += result.scheduler.get("captured_bytes", 0)
            if orphans := await self._in_thread(self._drop_orphans, owner, items):
                await self._engine.control("drop", {"encoding_ids": orphans})
            self._done(owner, policy, job.facts)
        except Exception:
            counts.failures += 1
            logger.exception("encoding of %d facts failed", len(job.facts))

    def _drop_orphans(self, owner: str, items: Sequence[CaptureItem]) -> list[EncodingId]:
        """A fact may have been changed or deleted while its KV was computed: then the KV goes as well.

        Returns the ids of the encodings that must leave the scheduler's arena too.
        """
        try:
            alive = {f.id: f.version for f in self._store.get_many(owner, [i.encoding["fact_id"] for i in items])}
        except OUTAGES:
            # Whether the facts are still there cannot be known, and nobody would look again.
            self._drop_encodings([item.span.encoding_id for item in items])
            raise
        orphans = [
            item.span.encoding_id
            for item in items
            if alive.get(item.encoding["fact_id"]) != item.encoding["fact_version"]
        ]
        self._drop_encodings(orphans)
        return orphans

    def _drop_encodings(self, encoding_ids: Sequence[EncodingId]) -> None:
        for encoding_id in encoding_ids:
            self._blobs.drop_encoding(encoding_id)

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args))

    def _done(self, owner: str, policy: str, facts: Sequence[Fact]) -> None:
        work = self._owners.get(owner)
        if work is not None and work.missing is not None:
            work.missing.get(policy, set()).difference_update(fact.id for fact in facts)
            work.changed.set()
