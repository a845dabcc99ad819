"""Encodes facts in the background: finds those without KV, prefills them behind their prefix, and waits for nobody.

Runs on the HTTP process's event loop as ordinary requests of the server. While callers' requests are in flight it
keeps one request of its own; otherwise as many as the settings allow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from memstore import Encoding, Fact, FactId, KVBlobs, MemStore, MemStoreError, OwnerId
from sgl_stateful.directive import Capture, CaptureItem, Span
from sgl_stateful.engine_port import EnginePort

from .codec import FactCodec
from .policies import EncodeJob, EncodingPolicy

logger = logging.getLogger(__name__)

_PAGE = 1000  # facts read from the store at once
_ATTEMPTS = 3
_RETRY_AFTER_S = 30.0  # how long facts that could not be encoded are left alone, whoever asks for them
_STORE_RETRY_S = 1.0


@dataclass(slots=True)
class EncodeCounts:
    """What one policy has cost so far. ``tokens_prefilled`` counts what the engine computed, prefixes included."""

    facts: int = 0
    fact_tokens: int = 0
    tokens_prefilled: int = 0
    bytes: int = 0
    failures: int = 0
    seconds: float = 0.0


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
        Cache salt of an owner.
    max_job_tokens
        Longest prompt that an encoding may take; longer prefixes are cut from the front.
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
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._codec = codec
        self._policies = tuple(policies)
        self._publishes = {policy.name: policy.extends_prompts for policy in policies}
        self._engine = engine
        self._salt = salt
        self._concurrency = concurrency
        self._max_job_tokens = max_job_tokens
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
                except Exception:
                    # The encoder serves every owner: what fails for one is logged, counted and tried again later.
                    logger.exception("encoding facts failed; they are served as text until it succeeds")
                    self._fail(name)

    async def _all_owners(self) -> Sequence[str]:
        while True:
            try:
                return await asyncio.to_thread(self._store.owners)
            except MemStoreError:
                logger.exception("the store did not list its owners; trying again")
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
        facts = await asyncio.to_thread(self._all_facts, owner)
        for policy in self._policies:
            jobs = await asyncio.to_thread(self._plan, owner, facts, policy)
            plans[policy.name] = jobs
            missing[policy.name] = {fact.id for job in jobs for fact in job.facts}
        if work.generation != generation:  # facts changed while this was planned
            return
        work.missing = missing
        work.changed.set()
        before = sum(c.failures for c in self.counts.values())
        for name, jobs in plans.items():
            await self._run_jobs(owner, name, jobs)
            if work.generation != generation:
                return
        if sum(c.failures for c in self.counts.values()) > before:
            self._fail(owner)
            if work.attempts < _ATTEMPTS:
                work.missing = None
        elif not any(missing.values()):
            self._owners.pop(owner, None)
            work.changed.set()

    def _plan(self, owner: str, facts: Sequence[Fact], policy: EncodingPolicy) -> list[EncodeJob]:
        current = {fact.id: fact for fact in facts}
        stored = self._blobs.anchors(OwnerId(owner), policy.name)
        anchors = policy.choose_anchors(facts, stored)
        if anchors != stored:
            self._blobs.set_anchors(OwnerId(owner), policy.name, anchors)
        versions = [(fact.id, fact.version) for fact in facts]
        encoded = self._blobs.current(OwnerId(owner), versions, fingerprint=self._codec.fingerprint, policy=policy.name)
        missing = [
            fact
            for fact in facts
            if (encoding := encoded.get(fact.id, {}).get(0)) is None
            or _is_stale(encoding, current, policy.constant_prefix(fact, current, anchors))
        ]
        return [part for job in policy.plan(facts, missing, anchors) for part in self._within_budget(job)]

    def _within_budget(self, job: EncodeJob) -> list[EncodeJob]:
        """The job, or several where its facts would not fit one prompt: each then sees the end of the one before."""
        room = self._max_job_tokens - len(self._codec.context)
        parts: list[EncodeJob] = []
        seen, facts, used = list(job.prefix), list[Fact](), 0
        for fact in job.facts:
            length = len(self._codec.encode_fact(fact).token_ids)
            if facts and used + length > room // 2:
                parts.append(EncodeJob(tuple(seen), tuple(facts)))
                seen, facts, used = seen + facts, [], 0
            facts.append(fact)
            used += length
        return [*parts, EncodeJob(tuple(seen), tuple(facts))]

    def _all_facts(self, owner: str) -> list[Fact]:
        facts: list[Fact] = []
        while page := self._store.list(owner, limit=_PAGE, after_seq=facts[-1].seq if facts else 0):
            facts += page
        return facts

    async def _run_jobs(self, owner: str, policy: str, jobs: Sequence[EncodeJob]) -> None:
        started = time.monotonic()
        by_prefix: dict[tuple[FactId, ...], list[EncodeJob]] = {}
        for job in jobs:
            by_prefix.setdefault(tuple(f.id for f in job.prefix), []).append(job)
        async with asyncio.TaskGroup() as group:
            for same_prefix in by_prefix.values():
                if len(same_prefix) > 1:
                    async with self._slot() as is_serving:
                        if is_serving:
                            await self._prime(owner, policy, same_prefix[0])
                for job in same_prefix:
                    await self._take_slot()
                    group.create_task(self._run_in_slot(owner, policy, job))
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

    async def _run_in_slot(self, owner: str, policy: str, job: EncodeJob) -> None:
        try:
            if not self._engine.is_closing():
                await self._run_job(owner, policy, job)
        finally:
            await self._give_back_slot()

    def _has_slot(self) -> bool:
        return self._in_flight < (1 if self._engine.foreground_requests() else self._concurrency)

    async def _prime(self, owner: str, policy: str, job: EncodeJob) -> None:
        """Prefill a prefix that several jobs share, once; where that fails, each job prefills it."""
        ids = [*self._codec.context, *self._prefix_ids(job)]
        try:
            result = await self._engine.prefill(ids, salt=self._salt(owner), directive=None)
        except Exception:
            logger.exception("prefilling a shared prefix failed")
            return
        self.counts[policy].tokens_prefilled += result.prompt_tokens - result.cached_tokens

    def _prefix_ids(self, job: EncodeJob) -> list[int]:
        room = self._max_job_tokens - len(self._codec.context)
        room -= sum(len(self._codec.encode_fact(fact).token_ids) for fact in job.facts)
        kept: list[tuple[int, ...]] = []
        for fact in reversed(job.prefix):
            ids = self._codec.encode_fact(fact).token_ids
            if len(ids) > room:
                break
            room -= len(ids)
            kept.append(ids)
        return [i for ids in reversed(kept) for i in ids]

    async def _run_job(self, owner: str, policy: str, job: EncodeJob) -> None:
        counts = self.counts[policy]
        try:
            ids = [*self._codec.context, *self._prefix_ids(job)]
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
            result = await self._engine.prefill(ids, salt=self._salt(owner), directive=directive)
            if result.scheduler.get("captured") != len(items):
                raise RuntimeError(f"the scheduler captured {result.scheduler} of {len(items)} facts")
            counts.facts += len(items)
            counts.fact_tokens += sum(len(item.span) for item in items)
            counts.tokens_prefilled += result.prompt_tokens - result.cached_tokens
            counts.bytes += result.scheduler.get("captured_bytes", 0)
            if orphans := await asyncio.to_thread(self._drop_orphans, owner, items):
                await self._engine.control("drop", {"encoding_ids": orphans})
            self._done(owner, policy, job.facts)
        except Exception:
            counts.failures += 1
            logger.exception("encoding of %d facts failed", len(job.facts))

    def _drop_orphans(self, owner: str, items: Sequence[CaptureItem]) -> list[str]:
        """A fact may have been deleted while its KV was computed: then the KV goes as well.

        Returns the ids of the encodings that must leave the scheduler's arena too.
        """
        alive = {f.id: f.version for f in self._store.get_many(owner, [i.encoding["fact_id"] for i in items])}
        orphans = [i for i in items if alive.get(i.encoding["fact_id"]) != i.encoding["fact_version"]]
        for item in orphans:
            self._blobs.drop_fact(OwnerId(owner), item.encoding["fact_id"])
        return [item.span.encoding_id for item in orphans]

    def _done(self, owner: str, policy: str, facts: Sequence[Fact]) -> None:
        work = self._owners.get(owner)
        if work is not None and work.missing is not None:
            work.missing.get(policy, set()).difference_update(fact.id for fact in facts)
            work.changed.set()


def _is_stale(encoding: Encoding, current: Mapping[FactId, Fact], prefix: Sequence[Fact] | None) -> bool:
    """Whether an encoding saw a fact that has changed or gone, or another constant list than the owner's."""
    for fact_id, version in encoding.saw:
        fact = current.get(fact_id)
        if fact is None or fact.version != version:
            return True
    return prefix is not None and encoding.saw != tuple((fact.id, fact.version) for fact in prefix)
