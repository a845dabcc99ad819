"""Measures how far spliced answers are from full prefill: the built-in set, served by the code that serves callers.

Facts are planned and captured by the encoder's own classes, and prompts planned by the server's own planner. Of every
prompt the distribution of the next token is compared with that of full prefill of the same token ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from memstore import Fact, KVBlobs, SearchHit
from sgl_stateful.directive import Splice
from sgl_stateful.encoding import Ladder
from sgl_stateful.encoding.capture import Capturer
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.encoding.counts import EncodeCounts
from sgl_stateful.encoding.planning import EncodePlanner
from sgl_stateful.encoding.refusals import Refusals
from sgl_stateful.engine_port import EnginePort
from sgl_stateful.errors import UnverifiedSplice
from sgl_stateful.forgetting import Forgetting
from sgl_stateful.idle import IdleTime
from sgl_stateful.params import MemoryParams, Mode
from sgl_stateful.planner import PromptPlanner
from sgl_stateful.repair import Repair
from sgl_stateful.report import Report
from sgl_stateful.selftest import kl_divergence

from .conversations import OWNER, ConversationSet, Question, another_order
from .table import FLOOR, WITHOUT, Row, Table

logger = logging.getLogger(__name__)

ORDERS = 2
"""Other orders that the floor of a question is a mean over."""

_TOP = 1000  # tokens that a distribution lists; the rest is one outcome

Distribution = Mapping[int, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model as one server serves it.

    Attributes
    ----------
    head, tail
        Token ids that the chat template puts in front of a first user message, and text that it puts behind one.
    salt
        Cache salt of the measurement's own; different ones are made from it.
    max_tokens
        Longest prompt that is measured, and that an encoding takes.
    threads
        Where the KV store is waited for; None is the event loop's own.
    """

    engine: EnginePort
    blobs: KVBlobs
    codec: FactCodec
    planner: PromptPlanner
    ladder: Ladder
    head: Sequence[int]
    tail: str
    salt: str
    max_tokens: int
    threads: Executor | None = None


async def measure(
    subject: Subject,
    conversations: ConversationSet,
    *,
    questions_at: Mapping[int, int],
    repairs: Sequence[Repair],
    idle: IdleTime,
) -> Table:
    """Encode the set, serve its questions in every way, and drop the encodings again.

    Parameters
    ----------
    questions_at
        How many of the set's questions, from the first on, are served with each number of facts.
    repairs
        What spliced facts are served with.

    Raises
    ------
    UnverifiedSplice
        A prompt that was to be spliced was served in another way.
    ServerClosing
    Exception
        Whatever the engine or the KV store raises. What has been encoded by then, the next measurement drops.
    """
    running = _Measurement(subject, conversations, repairs, idle)
    await running.drop()
    await running.encode()
    rows, skipped = list[Row](), list[int]()
    for k, count in sorted(questions_at.items()):
        questions = conversations.questions[:count]
        if running.fits(questions, k):
            rows += await running.rows(questions, k)
        else:
            skipped.append(k)
    await running.drop()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Table(subject.ladder.name, tuple(rows), now, tuple(skipped))


class _Measurement:
    """One run over one subject."""

    def __init__(
        self, subject: Subject, conversations: ConversationSet, repairs: Sequence[Repair], idle: IdleTime
    ) -> None:
        self._subject = subject
        self._conversations = conversations
        self._repairs = repairs
        self._idle = idle
        self._without: dict[str, Distribution] = {}  # by question

    async def drop(self) -> None:
        """Drop every encoding of the set, from the KV store and from the scheduler's memory."""
        await self._in_thread(self._subject.blobs.drop_owner, OWNER)
        await self._subject.engine.control("sweep")

    async def encode(self) -> None:
        """Encode every fact under every policy of the ladder, as the encoder does for callers' facts."""
        subject, facts = self._subject, self._conversations.facts
        planner = EncodePlanner(
            store=self._conversations,
            blobs=subject.blobs,
            codec=subject.codec,
            max_job_tokens=subject.max_tokens,
            refusals=Refusals(subject.codec),
        )
        capturer = Capturer(
            store=self._conversations,
            blobs=subject.blobs,
            codec=subject.codec,
            planner=planner,
            engine=subject.engine,
            forgetting=Forgetting(subject.blobs, strict=False),
            salt=lambda owner: subject.salt,
            threads=subject.threads,
        )
        for policy in subject.ladder.policies:
            primed: tuple[Fact, ...] = ()
            for job in await self._in_thread(planner.plan, OWNER, facts, policy):
                await self._idle.wait()
                if job.prefix != primed:
                    await capturer.prime(job, salt=subject.salt)
                    primed = job.prefix
                await capturer.run(OWNER, policy, job, salt=subject.salt, counts=EncodeCounts())

    def fits(self, questions: Sequence[Question], k: int) -> bool:
        """Whether every question can be served with ``k`` facts."""
        prompts = [self._prompt(question, self._conversations.facts_for(question, k)) for question in questions]
        return k <= len(self._conversations.facts) and all(
            len(ids) <= self._subject.max_tokens and not report.dropped_for_length for ids, _, report in prompts
        )

    async def rows(self, questions: Sequence[Question], k: int) -> list[Row]:
        """Serve the questions with ``k`` facts in every way."""
        served: dict[str, list[float]] = {name: [] for name in (WITHOUT, FLOOR, *(r.name for r in self._repairs))}
        shares: dict[str, list[float]] = {repair.name: [] for repair in self._repairs}
        for question in questions:
            facts = self._conversations.facts_for(question, k)
            full = await self._prefilled(question, facts)
            served[WITHOUT].append(kl_divergence(full, await self._of_none(question)))
            orders = [another_order(facts, f"{question.text}\n{number}") for number in range(ORDERS)]
            floors = [kl_divergence(full, await self._prefilled(question, other)) for other in orders]
            served[FLOOR].append(fmean(floors))
            for repair in self._repairs:
                spliced, share = await self._spliced(question, facts, repair)
                served[repair.name].append(kl_divergence(full, spliced))
                shares[repair.name].append(share)
        return [Row(k, name, tuple(kl), fmean(shares.get(name, [0.0]))) for name, kl in served.items()]

    async def _of_none(self, question: Question) -> Distribution:
        if (known := self._without.get(question.text)) is None:
            known = self._without[question.text] = await self._prefilled(question, [])
        return known

    async def _prefilled(self, question: Question, facts: Sequence[Fact]) -> Distribution:
        """The next token behind full prefill."""
        ids, _, _ = self._prompt(question, facts)
        salt = f"{self._subject.salt}:exact"  # a splice finds what was prefilled exactly under its own salt
        return (await self._idle.prefill(ids, salt=salt, top_logprobs=_TOP)).result.top_logprobs

    async def _spliced(self, question: Question, facts: Sequence[Fact], repair: Repair) -> tuple[Distribution, float]:
        """The next token behind spliced facts, and the share of their tokens that was computed anew."""
        ids, directive, report = await self._in_thread(self._prompt, question, facts, repair)
        salt = f"{self._subject.salt}:spliced"
        result = await self._idle.serve(ids, salt=salt, directive=directive, top_logprobs=_TOP)
        if result.scheduler.get("tier") != "spliced":
            said = dict(result.scheduler) or report.reason
            raise UnverifiedSplice(f"{len(facts)} facts of the built-in set were not spliced: {said}")
        return result.top_logprobs, report.repaired_share

    def _prompt(
        self, question: Question, facts: Sequence[Fact], repair: Repair | None = None
    ) -> tuple[list[int], Splice | None, Report]:
        """A question's prompt as the server plans it; as text without a repair."""
        subject = self._subject
        mode: Mode = "text" if repair is None else "splice"
        params = MemoryParams(owner=OWNER, facts=tuple(fact.id for fact in facts), mode=mode)
        report = Report(mode, OWNER, subject.ladder.name, [])
        prepared = subject.planner.plan(
            params,
            subject.ladder,
            repair or Repair(),
            [SearchHit(fact, 1.0, 1.0) for fact in facts],
            head=subject.head,
            tail=subject.codec.encode_text(question.text + subject.tail),
            reserve_tokens=1,
            salt=subject.salt,
            report=report,
        )
        assert prepared.directive is None or isinstance(prepared.directive, Splice), prepared.directive
        return prepared.token_ids, prepared.directive, report

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._subject.threads, partial(call, *args))
