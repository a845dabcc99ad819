"""One encoding job: prefilled, captured by the scheduler, and dropped again where its facts have gone meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from memstore import BlobStoreError, Encoding, EncodingId, Fact, KVBlobs, MemStoreError, OwnerId
from sgl_stateful.directive import Capture, CaptureItem, Span
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.forgetting import Forgetting, Gone

from .codec import FactCodec
from .counts import EncodeCounts
from .planning import EncodePlanner
from .policies import EncodeJob, EncodingPolicy
from .source import FactSource

_KINDS: list[type[BlobStoreError]] = [BlobStoreError, *BlobStoreError.__subclasses__()]
_KV_STORE_ERRORS = {kind.__name__ for kind in _KINDS}

T = TypeVar("T")


class Capturer:
    """Runs jobs of one codec.

    Parameters
    ----------
    salt
        Cache salt of an owner at their present epoch; asks the store.
    threads
        Where the store and the KV store are waited for; None is the event loop's own.
    """

    def __init__(
        self,
        *,
        store: FactSource,
        blobs: KVBlobs,
        codec: FactCodec,
        planner: EncodePlanner,
        engine: EnginePort,
        forgetting: Forgetting,
        salt: Callable[[str], str],
        threads: Executor | None,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._codec = codec
        self._planner = planner
        self._engine = engine
        self._forgetting = forgetting
        self._salt = salt
        self._threads = threads

    async def prime(self, job: EncodeJob, *, salt: str) -> int:
        """Prefill the prefix that jobs share; return how many tokens that took."""
        ids = [*self._codec.context, *self._planner.prefix_ids(job)]
        result = await self._engine.prefill(ids, salt=salt, directive=None)
        return result.prompt_tokens - result.cached_tokens

    async def run(
        self, owner: str, policy: EncodingPolicy, job: EncodeJob, *, salt: str, counts: EncodeCounts
    ) -> list[Fact]:
        """Make the KV of a job's facts.

        Returns
        -------
        The facts that have none now, because int8 does not hold their keys or values.

        Raises
        ------
        BlobStoreError
            The KV store takes nothing at the moment, here or in the scheduler.
        """
        items, ids = self._items(policy, job)
        directive = Capture(tuple(items), publish=policy.extends_prompts)
        result = await self._engine.prefill(ids, salt=salt, directive=directive)
        said = result.scheduler
        if said.get("error_type") in _KV_STORE_ERRORS:
            raise BlobStoreError(str(said.get("error")))
        refused_ids = set(said.get("refused", ()))
        refused = [fact for fact, item in zip(job.facts, items, strict=True) if item.span.encoding_id in refused_ids]
        items = [item for item in items if item.span.encoding_id not in refused_ids]
        if said.get("captured") != len(items):
            raise RuntimeError(f"the scheduler captured {said} of {len(items)} facts")
        counts.facts += len(items)
        counts.refused += len(refused)
        counts.fact_tokens += sum(len(item.span) for item in items)
        counts.tokens_prefilled += result.prompt_tokens - result.cached_tokens
        counts.bytes += said.get("captured_bytes", 0)
        if orphans := await self._in_thread(self._drop_orphans, owner, items, salt):
            await self._engine.control("drop", {"encoding_ids": orphans})
        return refused

    async def is_worth_it(self, owner: str, job: EncodeJob, *, salt: str) -> bool:
        """Whether any of a job's facts is still what it was when the job was planned."""
        return await self._in_thread(self._is_worth_it, owner, job, salt)

    def _is_worth_it(self, owner: str, job: EncodeJob, salt: str) -> bool:
        if self._salt(owner) != salt:
            return False
        alive = {fact.id: fact.version for fact in self._store.get_many(owner, [fact.id for fact in job.facts])}
        return any(alive.get(fact.id) == fact.version for fact in job.facts)

    def _items(self, policy: EncodingPolicy, job: EncodeJob) -> tuple[list[CaptureItem], list[int]]:
        """What is to be captured, and the prompt."""
        items = []
        ids = [*self._codec.context, *self._planner.prefix_ids(job)]
        for index, fact in enumerate(job.facts):
            tokens = self._codec.encode_fact(fact)
            saw = job.saw(index)
            saw_ids = ids[len(self._codec.context) :]
            encoding_id = self._codec.encoding_id(tokens, policy=policy.name, saw=saw, saw_ids=saw_ids)
            span = Span(encoding_id, len(ids), len(ids) + len(tokens.token_ids))
            ids += tokens.token_ids
            encoding = Encoding(
                id=encoding_id,
                owner=fact.owner,
                fact_id=fact.id,
                fact_version=fact.version,
                fingerprint=self._codec.fingerprint,
                policy=policy.name,
                saw=saw,
                token_ids=(),  # the scheduler fills in the ids that it captured
            )
            items.append(CaptureItem(span, dataclasses.asdict(encoding)))
        return items, ids

    def _drop_orphans(self, owner: str, items: Sequence[CaptureItem], salt: str) -> list[EncodingId]:
        """A fact may have been changed or deleted while its KV was computed: then the KV goes as well.

        Returns the ids of the encodings that must leave the scheduler's arena too.
        """
        facts = {item.encoding["fact_id"] for item in items}
        saw = {seen for item in items for seen, _ in item.encoding["saw"]} if self._forgetting.is_strict else set()
        try:
            is_over = self._salt(owner) != salt
            alive = {fact.id: fact.version for fact in self._store.get_many(owner, sorted(facts | saw))}
        except MemStoreError:
            # Whether the facts are still there cannot be known, and nobody would look again.
            self._drop_encodings([item.span.encoding_id for item in items])
            raise
        orphans, gone, stale = [], [], []
        for item in items:
            fact_id, version = item.encoding["fact_id"], item.encoding["fact_version"]
            if is_over or alive.get(fact_id) != version:
                orphans.append(item.span.encoding_id)
                gone.append(Gone(OwnerId(owner), fact_id, None if is_over else alive.get(fact_id)))
            elif self._forgetting.is_strict and any(alive.get(seen) != then for seen, then in item.encoding["saw"]):
                stale.append(item.span.encoding_id)
        orphans += self._forgetting.drop(gone)
        self._drop_encodings(stale)
        return orphans + stale

    def _drop_encodings(self, encoding_ids: Sequence[EncodingId]) -> None:
        for encoding_id in encoding_ids:
            self._blobs.drop_encoding(encoding_id)

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args))
