"""The memory of one server, in the HTTP process: retrieval, prompt assembly, reports, and the background encoder.

Knows nothing of SGLang: an ``EnginePort`` runs its prompts. Everything that a request waits for here is synchronous
and thread-safe, because SGLang converts requests on worker threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from memstore import Fact, FactId, InvalidInput, KVBlobs, MemStore, MemStoreError, NewFact, OwnerId, SearchHit
from sgl_stateful.encoding import policies_of
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.encoding.encoder import Encoder
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.errors import BadMemoryRequest, UnverifiedSplice
from sgl_stateful.metrics import MemoryMetrics, process_metrics
from sgl_stateful.params import MemoryParams
from sgl_stateful.planner import Prepared, PromptPlanner
from sgl_stateful.prompt import Tokenizer, render
from sgl_stateful.report import Report
from sgl_stateful.selftest import SELF_TEST_OWNER, SelfTestVerdict, run_self_test
from sgl_stateful.settings import StatefulSettings

logger = logging.getLogger(__name__)


class MemoryService:
    """Memory for one server.

    Parameters
    ----------
    context
        Chat template text up to where facts go in a fresh conversation; stands before every encoding.
    context_len
        The model's context, tokens.
    metrics
        None counts into the process's own.
    """

    def __init__(
        self,
        *,
        settings: StatefulSettings,
        store: MemStore,
        blobs: KVBlobs,
        tokenizer: Tokenizer,
        engine: EnginePort,
        context: str,
        context_len: int,
        metrics: MemoryMetrics | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.metrics = metrics or process_metrics()
        self._blobs = blobs
        self._tokenizer = tokenizer
        self._engine = engine
        self._context = context
        self._context_len = context_len
        self._ladders = {ladder.name: ladder for ladder in settings.ladders()}
        self._policies = policies_of(list(self._ladders.values()))
        self._secret = secrets.token_bytes(16)
        self._weights_epoch = ""
        self._start = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.verdict: SelfTestVerdict | None = None
        self.description: dict[str, Any] = {}
        self.codec: FactCodec | None = None
        self.encoder: Encoder | None = None
        self._planner: PromptPlanner | None = None

    # ---- start-up ----

    async def start(self) -> None:
        """Learn the model's fingerprint, verify splicing, start the encoder; harmless when repeated.

        Raises
        ------
        UnverifiedSplice
            The self-test failed and the settings do not allow that.
        """
        async with self._start:
            if self.codec is not None:
                return
            self.description = dict(await self._engine.control("describe"))
            if self.settings.self_test:
                await self._verify(self._new_codec())
            self._adopt(self._new_codec())  # not the one from before the self-test: weights may have changed since

    async def _verify(self, codec: FactCodec) -> None:
        salt, dtype = self._internal_salt("self-test"), self.description["dtype"]
        try:
            self.verdict = await run_self_test(self._engine, codec, salt=salt, dtype=dtype)
            logger.info("splice self-test: %s", self.verdict)
            if not self.verdict.passed:
                raise UnverifiedSplice(f"the splice self-test failed on this model: {self.verdict}")
        except UnverifiedSplice as failed:
            if not self.settings.allow_unverified_splice:
                raise UnverifiedSplice(f"{failed}. Report it, or serve anyway with --allow-unverified-splice") from None
            logger.warning("%s; serving anyway, as the settings allow", failed)
        finally:
            await asyncio.to_thread(self._blobs.drop_owner, SELF_TEST_OWNER)

    def _new_codec(self) -> FactCodec:
        plain = FactCodec(self._tokenizer, context=(), model_fingerprint="")
        context = plain.encode_text(self._context) + plain.encode_text(self.settings.header)
        fingerprint = f"{self.description['fingerprint']}{self._weights_epoch}"
        return FactCodec(self._tokenizer, context=context, model_fingerprint=fingerprint)

    def _adopt(self, codec: FactCodec) -> None:
        for task in self._tasks:
            task.cancel()
        self._planner = PromptPlanner(
            codec=codec,
            blobs=self._blobs,
            header=self.settings.header,
            footer=self.settings.footer,
            max_tokens=min(self._context_len, int(self.description["pool_tokens"])),
        )
        self.codec = codec
        self.encoder = Encoder(
            store=self.store,
            blobs=self._blobs,
            codec=codec,
            policies=self._policies,
            engine=self._engine,
            salt=self.salt,
            concurrency=self.settings.encode_concurrency,
            max_job_tokens=self._job_budget(),
        )
        task = asyncio.get_running_loop().create_task(self.encoder.run(), name="sgl-stateful encoder")
        self._tasks = {task}

    def _job_budget(self) -> int:
        return min(self._context_len - 8, int(self.description["pool_tokens"]) // 2)

    async def weights_changing(self) -> None:
        """Weights are about to be updated in place: from now on nothing is spliced."""
        if self.codec is not None:
            await self._engine.control("fence", {"fingerprint": None})

    async def weights_changed(self) -> None:
        """Weights were updated in place, or may have been: no encoding made so far may be spliced again."""
        # Not under the lock of start(): that may be waiting for the very engine whose weights are being updated.
        old, self._weights_epoch = self.codec, f"+{secrets.token_hex(8)}"
        if old is None:
            return
        new = self._new_codec()
        self._adopt(new)
        await self._engine.control("fence", {"fingerprint": new.fingerprint})
        dropped = await asyncio.to_thread(self._blobs.drop_fingerprint, old.fingerprint)
        logger.info("weights changed: %d encodings of the old ones dropped", dropped)

    def close(self) -> None:
        """Stop the encoder and release the store."""
        for task in self._tasks:
            task.cancel()
        self.store.close()
        self._blobs.close()

    # ---- facts ----

    def salt(self, owner: str) -> str:
        """Cache salt of an owner at their current epoch; nobody outside can compute it."""
        return self._internal_salt(f"{self.store.epoch(owner)}:{owner}")

    def _internal_salt(self, name: str) -> str:
        mac = hmac.new(self._secret, name.encode(), hashlib.sha256)
        return f"sgl_stateful:{mac.hexdigest()[:32]}"

    def check_lengths(self, facts: Sequence[NewFact]) -> None:
        """Refuse facts that are too long for the model.

        Raises
        ------
        InvalidInput
            Naming the first one, its length and the limit, in tokens.
        """
        limit = min(self.settings.max_fact_tokens, self._context_len // 2)
        for index, fact in enumerate(facts):
            try:
                rendered = render(fact.text, speaker=fact.speaker, time=fact.time)
                if len(rendered.encode()) <= limit:  # a token is at least one byte
                    continue
            except UnicodeEncodeError:
                continue  # the store refuses it, by name
            length = len(self._tokenizer.encode(rendered, add_special_tokens=False))
            if length > limit:
                raise InvalidInput(f"fact {index} has {length} tokens; the limit of this server is {limit}: split it")

    def add(self, owner: str, facts: Sequence[NewFact]) -> list[Fact]:
        """Store facts durably; their KV follows in the background."""
        self.check_lengths(facts)
        return self.store.add_many(owner, facts)

    def notify(self, owner: str) -> None:
        """Let the encoder look at the owner's facts; to be called on the event loop."""
        if self.encoder is not None:
            self.encoder.notify(owner)

    async def wait_for_kv(self, owner: str, fact_ids: Sequence[FactId]) -> list[FactId]:
        """Wait for KV of the facts; returns those that have none when the time is up."""
        await self.start()
        assert self.encoder is not None
        return await self.encoder.wait_for(owner, fact_ids, timeout_s=self.settings.encode_wait_s)

    async def delete(self, owner: str, fact_id: str) -> Fact:
        """Delete a fact with its KV; facts whose encoding saw it are encoded again."""
        encodings = await asyncio.to_thread(self._encoding_ids, owner, FactId(fact_id))
        fact = await asyncio.to_thread(self.store.delete, owner, fact_id)
        self.notify(owner)
        if encodings:
            try:
                await self._engine.control("drop", {"encoding_ids": encodings})
            except Exception:
                # The fact is deleted: nobody will ask for its KV, which leaves the arena as the least recently used.
                logger.exception("the scheduler did not drop the KV of a deleted fact")
        return fact

    def _encoding_ids(self, owner: str, fact_id: FactId) -> list[str]:
        if self.codec is None:
            return []
        fact = self.store.get(owner, fact_id)
        return [
            encoding.id
            for policy in self._policies
            for rungs in self._blobs.current(
                OwnerId(owner), [(fact.id, fact.version)], fingerprint=self.codec.fingerprint, policy=policy.name
            ).values()
            for encoding in rungs.values()
        ]

    # ---- requests ----

    def prepare(self, params: MemoryParams, *, head: str, tail: str, query: str, reserve_tokens: int) -> Prepared:
        """Retrieve facts and build the prompt ``head + facts + tail`` from text."""
        codec = self._require_codec()
        return self.prepare_ids(
            params,
            head=codec.encode_text(head),
            tail=codec.encode_text(tail),
            query=query,
            reserve_tokens=reserve_tokens,
        )

    def prepare_ids(
        self, params: MemoryParams, *, head: Sequence[int], tail: Sequence[int], query: str, reserve_tokens: int
    ) -> Prepared:
        """Retrieve facts and build the prompt ``head + facts + tail`` from token ids.

        A store that fails costs the facts, not the request: the prompt goes out without them, and says so.

        Raises
        ------
        BadMemoryRequest
            An unknown policy, or an owner or query that the store refuses.
        """
        self._require_codec()
        name = params.policy or next(iter(self._ladders))
        if (ladder := self._ladders.get(name)) is None:
            known = ", ".join(self._ladders)
            raise BadMemoryRequest(f"custom_params.memory.policy: {name!r} is not served here; choose from {known}")
        report = Report(params.mode, params.owner, name, [])
        started = time.perf_counter()
        hits: list[SearchHit] = []
        try:
            salt = self.salt(params.owner)
            if params.mode != "off" and params.k > 0:
                hits = self.store.search(params.owner, params.query or query, k=params.k, min_score=params.min_score)
        except InvalidInput as error:
            raise BadMemoryRequest(f"custom_params.memory: {error}") from error
        except MemStoreError as error:
            logger.exception("retrieval failed; serving without facts")
            salt = self._internal_salt(f"degraded:{params.owner}")
            report.degraded, report.reason = True, f"retrieval_failed: {type(error).__name__}"
        report.retrieve_ms = 1e3 * (time.perf_counter() - started)
        started = time.perf_counter()
        assert self._planner is not None, "a codec without its planner"
        prepared = self._planner.plan(
            params, ladder, hits, head=head, tail=tail, reserve_tokens=reserve_tokens, salt=salt, report=report
        )
        report.assemble_ms = 1e3 * (time.perf_counter() - started)
        return prepared

    def finish(
        self, report: Report, scheduler: dict[str, Any] | None, *, prompt_tokens: int, cached_tokens: int
    ) -> dict[str, Any]:
        """The report that a response shows; lost KV is queued to be encoded again."""
        shown = report.finish(scheduler, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        self.metrics.observe(shown)
        if self.encoder is not None and (shown["reason"] or "").startswith(("not_encoded", "facts_lost")):
            self.encoder.report_missing(report.owner)
        return shown

    async def status(self) -> dict[str, Any]:
        """Everything that an operator asks first."""
        await self.start()
        assert self.codec is not None
        assert self.encoder is not None
        owners = await asyncio.to_thread(self.store.owners)
        blobs = await asyncio.to_thread(self._blobs.stats)
        return {
            "verified": self.verdict is not None and self.verdict.passed,
            "self_test": None if self.verdict is None else self.verdict.as_dict(),
            "model": self.description,
            "fingerprint": self.codec.fingerprint,
            "embedder": self.store.embedder.fingerprint,
            "policies": list(self._ladders),
            "owners": len(owners),
            "encoder": {
                "pending": self.encoder.pending(),
                "policies": {name: _cost(counts) for name, counts in self.encoder.counts.items()},
            },
            "kv_store": {**blobs._asdict(), "corrupt": self._blobs.corrupt_count},
            "scheduler": await self._engine.control("stats"),
            "requests": self.metrics.totals(),
        }

    def _require_codec(self) -> FactCodec:
        if self.codec is None:
            raise BadMemoryRequest("memory is still starting; try again in a moment")
        return self.codec


def _cost(counts: Any) -> dict[str, Any]:
    ratio = counts.tokens_prefilled / counts.fact_tokens if counts.fact_tokens else None
    return {
        "facts": counts.facts,
        "fact_tokens": counts.fact_tokens,
        "tokens_prefilled": counts.tokens_prefilled,
        "tokens_prefilled_per_fact_token": None if ratio is None else round(ratio, 4),
        "bytes": counts.bytes,
        "failures": counts.failures,
        "seconds": round(counts.seconds, 3),
    }
