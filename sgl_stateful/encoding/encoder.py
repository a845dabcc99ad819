"""Encodes facts in the background: finds those without KV, prefills them behind their prefix, and waits for nobody.

Runs on the HTTP process's event loop as ordinary requests of the server. While callers' requests are in flight it
keeps one request of its own; otherwise as many as the settings allow.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from memstore import BlobStoreError, FactId, KVBlobs, MemStore, MemStoreError
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.forgetting import Forgetting
from sgl_stateful.outage import OUTAGES, Outage

from .capture import Capturer
from .codec import FactCodec
from .counts import EncodeCounts
from .planning import EncodePlanner
from .policies import EncodeJob, EncodingPolicy
from .refusals import Refusals
from .slots import Slots
from .work import OwnerWork

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 30.0  # how long facts that could not be encoded are left alone, whoever asks for them
_STORE_RETRY_S = 1.0
_KV_REST_S = 30.0  # how long a KV store that takes nothing is left alone, twice as long each time
_LONGEST_KV_REST_S = 600.0

T = TypeVar("T")


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
        forgetting: Forgetting,
        salt: Callable[[str], str],
        concurrency: int,
        max_job_tokens: int,
        threads: Executor | None = None,
    ) -> None:
        self._store = store
        self._policies = tuple(policies)
        self._engine = engine
        self._salt = salt
        self._refusals = Refusals(codec)
        self._planner = EncodePlanner(
            store=store,
            blobs=blobs,
            codec=codec,
            max_job_tokens=max_job_tokens,
            refusals=self._refusals,
            strict=forgetting.is_strict,
        )
        self._capturer = Capturer(
            store=store,
            blobs=blobs,
            codec=codec,
            planner=self._planner,
            engine=engine,
            forgetting=forgetting,
            salt=salt,
            threads=threads,
        )
        self._threads = threads
        self._slots = Slots(engine, concurrency)
        self._outage = Outage("the store fails, encoding waits for it", logger)
        self._kv_outage = Outage("the KV store takes nothing, encoding waits for it", logger)
        self._kv_failure: BlobStoreError | None = None  # of a job that ran just now
        self._kv_rest_s = _KV_REST_S
        self._is_resting = False
        self._owners: dict[str, OwnerWork] = {}
        self._notifications = 0
        self._wake = asyncio.Event()
        self.counts = {policy.name: EncodeCounts() for policy in policies}

    # ---- what callers use ----

    @property
    def error(self) -> str | None:
        """What encoding waits for; None where it does not."""
        return self._kv_outage.error or self._outage.error

    def notify(self, owner: str) -> None:
        """The owner's facts changed: look at them, however often that failed before."""
        self._notifications += 1
        work = self._owners.setdefault(owner, OwnerWork())
        work.wanted, work.attempts = self._notifications, 0
        self._wake.set()

    def report_missing(self, owner: str) -> None:
        """A request met a fact without KV: look at the owner, unless that is under way or has just been given up."""
        work = self._owners.get(owner)
        if work is None:
            looked = self._refusals.since_look_s(owner)  # what was met may be a fact that has been refused
            is_due = looked is None or looked > _RETRY_AFTER_S
        else:
            is_due = work.is_given_up and time.monotonic() - work.given_up_at > _RETRY_AFTER_S
        if is_due:
            self.notify(owner)

    async def wait_for(self, owner: str, fact_ids: Sequence[FactId], *, timeout_s: float) -> list[FactId]:
        """Look at the owner, and wait until the facts have KV under every policy.

        Returns
        -------
        Those that still have none when the time is up, trying has been given up, or the KV store takes nothing; and
        those whose KV has been refused.
        """
        without = set(await self._wait_for(owner, fact_ids, timeout_s=timeout_s))
        without |= self._refusals.among(owner)
        return [fact_id for fact_id in fact_ids if fact_id in without]

    async def _wait_for(self, owner: str, fact_ids: Sequence[FactId], *, timeout_s: float) -> list[FactId]:
        deadline = time.monotonic() + timeout_s
        if owner not in self._owners:
            self.notify(owner)
        wanted = self._owners[owner].wanted
        while (work := self._owners.get(owner)) is not None:
            left = work.left(fact_ids, wanted=wanted)
            if not left or work.is_given_up or self._is_resting:
                return left
            work.changed.clear()
            try:
                await asyncio.wait_for(work.changed.wait(), max(deadline - time.monotonic(), 0))
            except TimeoutError:
                return left
        return []

    def pending(self) -> int:
        """Encodings known to be missing now; owners not yet looked at count one each."""
        return sum(work.pending for work in self._owners.values())

    def as_dict(self) -> dict[str, Any]:
        """As the status shows it."""
        return {
            "pending": self.pending(),
            "error": self.error,
            "policies": {name: counts.as_dict() for name, counts in self.counts.items()},
        }

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
                    self._put_last(name)
                    await asyncio.sleep(_STORE_RETRY_S)
                    break
                except BlobStoreError as error:
                    self._kv_outage.failed(error)
                    self._put_last(name)
                    await self._rest()
                    break
                except Exception:
                    # The encoder serves every owner: what fails for one is logged, counted and tried again later.
                    logger.exception("encoding facts failed; they are served as text until it succeeds")
                    self._fail(name)
                else:
                    self._outage.worked()

    def _put_last(self, owner: str) -> None:
        """Look at the others first, in case it is this owner alone."""
        self._owners[owner] = self._owners.pop(owner)

    async def _rest(self) -> None:
        """Leave a KV store alone that takes nothing; whoever waits for KV is told so."""
        self._is_resting = True
        for work in self._owners.values():
            work.changed.set()
        await asyncio.sleep(self._kv_rest_s)
        self._is_resting = False
        self._kv_rest_s = min(2 * self._kv_rest_s, _LONGEST_KV_REST_S)

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
        planned = work.wanted
        plans: list[tuple[EncodingPolicy, list[EncodeJob]]] = []
        salt = await self._in_thread(self._salt, owner)
        facts = await self._in_thread(self._planner.facts, owner)
        for policy in self._policies:
            plans.append((policy, await self._in_thread(self._planner.plan, owner, facts, policy)))
        missing = {policy.name: {fact.id for job in jobs for fact in job.facts} for policy, jobs in plans}
        work.begin(missing, planned=planned)
        before = sum(c.failures for c in self.counts.values())
        # Also where facts have changed since: an owner whose facts keep changing would never get KV otherwise. What
        # has gone is dropped as soon as it is captured, and the owner is looked at again.
        for policy, jobs in plans:
            await self._run_jobs(owner, policy, jobs, salt)
        if sum(c.failures for c in self.counts.values()) > before:
            self._fail(owner)
        elif work.planned == work.wanted and not any(missing.values()):
            self._owners.pop(owner, None)
            work.changed.set()

    async def _run_jobs(self, owner: str, policy: EncodingPolicy, jobs: Sequence[EncodeJob], salt: str) -> None:
        started = time.monotonic()
        by_prefix: dict[tuple[FactId, ...], list[EncodeJob]] = {}
        for job in jobs:
            by_prefix.setdefault(tuple(f.id for f in job.prefix), []).append(job)
        async with asyncio.TaskGroup() as group:
            for same_prefix in by_prefix.values():
                if len(same_prefix) > 1 and self._kv_outage.error is None:
                    async with self._slots.one():
                        if self._may_run():
                            await self._prime(policy.name, same_prefix[0], salt)
                for job in same_prefix:
                    await self._slots.take()
                    running = group.create_task(self._run_in_slot(owner, policy, job, salt))
                    if self._kv_outage.error is not None:
                        await running  # alone: it finds out whether the KV store takes something again
        self.counts[policy.name].seconds += time.monotonic() - started
        if self._kv_failure is not None:
            failure, self._kv_failure = self._kv_failure, None
            raise failure

    def _may_run(self) -> bool:
        return self._kv_failure is None and not self._engine.is_closing()

    async def _run_in_slot(self, owner: str, policy: EncodingPolicy, job: EncodeJob, salt: str) -> None:
        try:
            if self._may_run():
                await self._run_job(owner, policy, job, salt)
        finally:
            await self._slots.give_back()

    async def _prime(self, policy: str, job: EncodeJob, salt: str) -> None:
        """Prefill a prefix that several jobs share, once; where that fails, each job prefills it."""
        try:
            self.counts[policy].tokens_prefilled += await self._capturer.prime(job, salt=salt)
        except Exception:
            logger.exception("prefilling a shared prefix failed")

    async def _run_job(self, owner: str, policy: EncodingPolicy, job: EncodeJob, salt: str) -> None:
        work, counts = self._owners[owner], self.counts[policy.name]
        try:
            if work.planned < work.wanted and not await self._capturer.is_worth_it(owner, job, salt=salt):
                return  # whoever has changed these facts has the owner looked at again
            refused = await self._capturer.run(owner, policy, job, salt=salt, counts=counts)
        except BlobStoreError as error:
            counts.failures += 1
            self._kv_failure = error
        except Exception:
            counts.failures += 1
            logger.exception("encoding of %d facts failed", len(job.facts))
        else:
            self._kv_outage.worked()
            self._kv_rest_s = _KV_REST_S
            self._refusals.add(owner, policy.name, refused)
            work.done(policy.name, [fact.id for fact in job.facts])  # there is no more to do for the refused either

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args))
