"""The memory of one server, in the HTTP process: what is in ``sgl_stateful`` put together, and its start and end.

Knows nothing of SGLang: an ``EnginePort`` runs its prompts. ``encode`` and ``prepare_ids`` are thread-safe, because
SGLang converts requests on worker threads; everything else belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from memstore import FactId, KVBlobs, MemStore, PurgeReceipt
from sgl_stateful.encoding import policies_of
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.encoding.encoder import Encoder
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.errors import BadMemoryRequest, UnverifiedSplice
from sgl_stateful.facts import Facts
from sgl_stateful.faithfulness.gate import FaithfulnessGate
from sgl_stateful.faithfulness.measure import Subject
from sgl_stateful.feed import FeedFollower, OwnChanges, nobody_cares
from sgl_stateful.forgetting import Forgetting
from sgl_stateful.metrics import MemoryMetrics, process_metrics
from sgl_stateful.params import MemoryParams
from sgl_stateful.planner import Prepared, PromptPlanner
from sgl_stateful.promotion import Promoter
from sgl_stateful.prompt import Tokenizer
from sgl_stateful.report import Report
from sgl_stateful.request_planner import RequestPlanner
from sgl_stateful.retrieval import Retrieved, Retriever
from sgl_stateful.salts import Salts
from sgl_stateful.selftest import SELF_TEST_OWNER, SelfTestVerdict, run_self_test
from sgl_stateful.served_kv import ServedKV
from sgl_stateful.settings import KVStorage, StatefulSettings
from sgl_stateful.status import StoreStatus
from sgl_stateful.threads import StoreThreads

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def _no_sessions(owner: str) -> None:
    """There are none to end."""


class MemoryService:
    """Memory for one server.

    Parameters
    ----------
    context
        Chat template text up to where facts go in a fresh conversation; stands before every encoding.
    context_end
        What the chat template puts behind a first user message.
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
        context_end: str = "",
        metrics: MemoryMetrics | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.metrics = metrics or process_metrics()
        self._blobs = blobs
        self._tokenizer = tokenizer
        self._engine = engine
        self._context, self._context_end = context, context_end
        self._context_len = context_len
        self._ladders = {ladder.name: ladder for ladder in settings.ladders()}
        self._policies = policies_of(list(self._ladders.values()))
        self._salts = Salts()
        self._weights_epoch = ""
        self._start = asyncio.Lock()
        self._threads = StoreThreads(settings.store_threads)
        self._retriever = Retriever(
            store, self._salts, threads=settings.retrieve_threads, timeout_s=settings.retrieve_timeout_s
        )
        self._arena = ServedKV(engine=engine, blobs=blobs, policies=[policy.name for policy in self._policies])
        own, self._forgetting = OwnChanges(), Forgetting(blobs, strict=settings.strict_forgetting)
        self.facts = Facts(  # adds, changes and removes them
            store,
            threads=self._threads,
            tokenizer=tokenizer,
            max_tokens=min(settings.max_fact_tokens, context_len // 2),
            own=own,
            forgetting=self._forgetting,
            notify=self.notify,
            arena=self._arena,
            changed=self._fact_changed,
        )
        self._follower = FeedFollower(
            store=store,
            blobs=blobs,
            threads=self._threads.background,
            own=own,
            forgetting=self._forgetting,
            notify=self.notify,
            forget=self._forget,
            sweep=self._arena.sweep,
            poll_s=settings.feed_poll_s,
            expire_every_s=settings.expire_every_s,
            changed=self._fact_changed,
        )
        self._status = StoreStatus(
            store=store,
            blobs=blobs,
            engine=engine,
            follower=self._follower,
            forgetting=self._forgetting,
            threads=self._threads.requests,
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Future[object]] = set()
        self._end_sessions: Callable[[str], Awaitable[object]] = _no_sessions
        self._tell_facts: Callable[[str, str | None], None] = nobody_cares
        self.verdict: SelfTestVerdict | None = None
        self.description: dict[str, Any] = {}
        self.codec: FactCodec | None = None
        self.encoder: Encoder | None = None
        self.promoter: Promoter | None = None
        self.gate: FaithfulnessGate | None = None
        self._planner: RequestPlanner | None = None

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
            self._run("feed", self._follower.run())

    async def _verify(self, codec: FactCodec) -> None:
        salt, dtype = self._salts.named("self-test"), self.description["dtype"]
        storage = KVStorage(self.description["kv_storage"])
        try:
            self.verdict = await run_self_test(self._engine, codec, salt=salt, dtype=dtype, storage=storage)
            logger.info("splice self-test: %s", self.verdict)
            if not self.verdict.passed:
                raise UnverifiedSplice(f"the splice self-test failed on this model: {self.verdict}")
        except UnverifiedSplice as failed:
            if not self.settings.allow_unverified_splice:
                raise UnverifiedSplice(f"{failed}. Report it, or serve anyway with --allow-unverified-splice") from None
            logger.warning("%s; serving anyway, as the settings allow", failed)
        finally:
            await self.in_thread(self._blobs.drop_owner, SELF_TEST_OWNER)

    def _new_codec(self) -> FactCodec:
        plain = FactCodec(self._tokenizer, context=(), model_fingerprint="")
        context = plain.encode_text(self._context) + plain.encode_text(self.settings.header)
        fingerprint = f"{self.description['fact_fingerprint']}{self._weights_epoch}"
        return FactCodec(self._tokenizer, context=context, model_fingerprint=fingerprint)

    def _adopt(self, codec: FactCodec) -> None:
        planner = PromptPlanner(
            codec=codec,
            blobs=self._blobs,
            header=self.settings.header,
            footer=self.settings.footer,
            max_tokens=min(self._context_len, int(self.description["pool_tokens"])),
        )
        self.gate = self._new_gate(codec, planner)
        self._planner = RequestPlanner(
            ladders=self._ladders, retriever=self._retriever, planner=planner, gate=self.gate
        )
        self._run("faithfulness", self.gate.run())
        self.codec = codec
        self._arena.fingerprint = codec.fingerprint
        self.encoder = Encoder(
            store=self.store,
            blobs=self._blobs,
            codec=codec,
            policies=self._policies,
            engine=self._engine,
            forgetting=self._forgetting,
            salt=self.salt,
            concurrency=self.settings.encode_concurrency,
            max_job_tokens=self._job_budget(),
            threads=self._threads.background,
        )
        self._run("encoder", self.encoder.run())
        budget = self.settings.promotion_budget(int(self.description["pool_tokens"]))
        self.promoter = Promoter(self._engine, budget_tokens=budget, on_event=self.metrics.promotion)
        self._run("promoter", self.promoter.run())

    def _new_gate(self, codec: FactCodec, planner: PromptPlanner) -> FaithfulnessGate:
        subject = Subject(
            engine=self._engine,
            blobs=self._blobs,
            codec=codec,
            planner=planner,
            ladder=next(iter(self._ladders.values())),
            head=codec.encode_text(self._context),
            tail=self._context_end,
            salt=self._salts.named(f"faithfulness:{codec.fingerprint}"),
            max_tokens=self._job_budget(),
            threads=self._threads.background,
        )
        # Weights that were updated in place have no name that would be theirs after the next start as well.
        return FaithfulnessGate.of(self.settings, subject, is_kept=not self._weights_epoch)

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a background task, in place of the one of that name."""
        if (former := self._tasks.get(name)) is not None:
            former.cancel()
        self._tasks[name] = asyncio.get_running_loop().create_task(work, name=f"sgl-stateful {name}")

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
        dropped = await self.in_thread(self._blobs.drop_fingerprint, old.fingerprint)
        logger.info("weights changed: %d encodings of the old ones dropped", dropped)

    def close(self) -> None:
        """Stop what runs in the background, wait for what the stores are at, and release them."""
        for task in self._tasks.values():
            task.cancel()
        # Whoever reads the KV store's map when it is gone takes the process along.
        self._threads.close()
        self._retriever.close()
        self.store.close()
        self._blobs.close()

    # ---- facts ----

    def salt(self, owner: str) -> str:
        """Cache salt of an owner at their current epoch; asks the store."""
        return self._salts.of(owner, self.store.epoch(owner))

    def notify(self, owner: str) -> None:
        """Let the encoder look at the owner's facts; to be called on the event loop."""
        if self.encoder is not None:
            self.encoder.notify(owner)

    async def wait_for_kv(self, owner: str, fact_ids: Sequence[FactId]) -> list[FactId]:
        """Wait for KV of the facts; returns those that have none when the time is up."""
        await self.start()
        assert self.encoder is not None
        return await self.encoder.wait_for(owner, fact_ids, timeout_s=self.settings.encode_wait_s)

    async def purge(self, owner: str) -> PurgeReceipt:
        """Remove everything of an owner; what is cached of them can no longer be reached."""
        try:
            return await self.facts.purge(owner)
        finally:
            # Whatever came of it: no answer does not mean that nothing was done.
            self._forget_prompts(owner)
            await self._end_sessions(owner)
            await self._arena.sweep()

    def on_purge(self, end_sessions: Callable[[str], Awaitable[object]]) -> None:
        """Have the sessions of an owner ended when the owner is purged, here or by another process."""
        self._end_sessions = end_sessions

    def on_facts(self, tell: Callable[[str, str | None], None]) -> None:
        """Have somebody told of facts that were changed or are gone, by whatever process, and of new ones (None)."""
        self._tell_facts = tell

    def _fact_changed(self, owner: str, fact_id: str | None) -> None:
        self._tell_facts(owner, fact_id)

    def _forget(self, owner: str) -> None:
        """Another process has purged the owner."""
        self._forget_prompts(owner)
        ending: asyncio.Future[object] = asyncio.ensure_future(self._end_sessions(owner))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _forget_prompts(self, owner: str) -> None:
        self._retriever.forget(owner)
        if self.promoter is not None:
            self.promoter.table.forget(owner)

    async def in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Wait for the store on a thread that no request needs."""
        return await asyncio.get_running_loop().run_in_executor(self._threads.requests, partial(call, *args, **kwargs))

    # ---- requests ----

    async def retrieve(self, params: MemoryParams, query: str) -> Retrieved:
        """See ``Retriever.find``."""
        return await self._retriever.find(params, query)

    def encode(self, text: str) -> Sequence[int]:
        """The token ids of a part of a prompt, for ``prepare_ids``."""
        return self._require_codec().encode_text(text)

    def prepare_ids(
        self,
        params: MemoryParams,
        *,
        head: Sequence[int],
        tail: Sequence[int],
        query: str,
        reserve_tokens: int,
        retrieved: Retrieved | None = None,
    ) -> Prepared:
        """Build the prompt ``head + facts + tail`` from token ids.

        A store that fails costs the facts, not the request: the prompt goes out without them, and says so.

        Parameters
        ----------
        retrieved
            What ``retrieve`` found; None searches now, in this thread.

        Raises
        ------
        BadMemoryRequest
            An unknown policy, or an owner, query or filter that the store refuses.
        """
        self._require_codec()
        assert self._planner is not None, "a codec without its planner"
        return self._planner.plan(
            params, head=head, tail=tail, query=query, reserve_tokens=reserve_tokens, retrieved=retrieved
        )

    def finish(
        self, report: Report, scheduler: dict[str, Any] | None, *, prompt_tokens: int, cached_tokens: int
    ) -> dict[str, Any]:
        """The report that a response shows; lost KV is queued to be encoded again."""
        shown = report.finish(scheduler, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        self.metrics.observe(shown)
        if self.promoter is not None:
            self.promoter.see(report.block, shown["tier"])
        if self.gate is not None:
            self.gate.interrupt()
        if self.encoder is not None and (shown["reason"] or "").startswith(("not_encoded", "facts_lost")):
            self.encoder.report_missing(report.owner)
        return shown

    async def status(self) -> dict[str, Any]:
        """Everything that an operator asks first; what fails is shown in its place."""
        await self.start()
        assert self.codec is not None
        assert self.encoder is not None
        assert self.promoter is not None
        assert self.gate is not None
        return {
            "verified": self.verdict is not None and self.verdict.passed,
            "self_test": None if self.verdict is None else self.verdict.as_dict(),
            "model": self.description,
            "fingerprint": self.codec.fingerprint,
            "embedder": self.store.embedder.fingerprint,
            "policies": list(self._ladders),
            "repair": self.settings.repair,
            "encoder": self.encoder.as_dict(),
            "faithfulness": self.gate.as_dict(),
            "promotion": self.promoter.as_dict(),
            "requests": self.metrics.totals(),
            **await self._status.parts(),
        }

    def _require_codec(self) -> FactCodec:
        if self.codec is None:
            raise BadMemoryRequest("memory is still starting; try again in a moment")
        return self.codec
