"""One evaluation, or one audit, from the prompt to the table."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from memstore import MemStoreError
from sgl_stateful.errors import BadSessionRequest, SessionNotFound, StatefulError

from .answers import Answer
from .choices import agrees, decide
from .entry import Entry
from .metrics import FlashMetrics
from .outcomes import Run
from .port import Decoded, EnginePrompt, FlashEngine
from .prompts import FlashPrompts, MemoryFails
from .semantic import says_the_same
from .table import FlashTable

logger = logging.getLogger(__name__)

_KNOWN = (StatefulError, MemStoreError, MemoryFails, RuntimeError, ValueError)


@dataclass(slots=True, eq=False)
class Work:
    """A piece of work: an entry that was taken, or an audit; ``run`` once it has begun."""

    entry: Entry
    run: Run | None = None

    @property
    def is_audit(self) -> bool:
        """Whether a hit is decoded again."""
        return self.run is not None and self.run.audits is not None


class Evaluator:
    """Does pieces of work. Of the event loop."""

    def __init__(self, table: FlashTable, prompts: FlashPrompts, engine: FlashEngine, metrics: FlashMetrics) -> None:
        self.table = self._table = table
        self._prompts = prompts
        self._engine = engine
        self._metrics = metrics

    async def do(self, work: Work) -> None:
        """Do it to its end; cancelled, it is to be given back by ``give_back``."""
        try:
            await (self._audit(work.run) if work.is_audit and work.run is not None else self._evaluate(work))
        except SessionNotFound:
            self._give_up(work, None)
        except Exception as error:
            # The serving boundary: whatever one question raises, the others are evaluated.
            known = isinstance(error, _KNOWN)
            if not known:
                logger.exception("evaluating question %r failed", work.entry.name)
            self._give_up(work, str(error) if known else repr(error))

    def give_back(self, work: Work) -> None:
        """It was cancelled, as callers' requests go first."""
        self._metrics.evaluation("preempted")
        if work.is_audit and work.run is not None:
            self._table.put_back_audit(work.run)
        else:
            self._table.put_back(work.entry, work.run)

    def _give_up(self, work: Work, why: str | None) -> None:
        if work.is_audit and work.run is not None:
            self._table.drop_audit(work.run)
        elif why is None:
            self._table.abandon(work.entry, work.run)
        else:
            self._metrics.evaluation("failed")
            self._table.failed(work.entry, work.run, why)

    async def _evaluate(self, work: Work) -> None:
        entry = work.entry
        prompt = await self._prompts.of(entry.session_id, entry.question)
        if prompt.present.weight_version is None:
            self._table.put_back(entry)
            return
        work.run = run = self._table.begin(entry, prompt.present, prompt.facts)
        if run is None:
            self._metrics.evaluation("unchanged")
            return
        answer = await self._scanned(entry, prompt.prompt) or await self._decoded(run, prompt.prompt)
        stored = self._table.evaluated(run, answer)
        self._metrics.evaluation("void" if stored is None else "stored")
        if stored is not None and stored.superseded_at is None and run.since is not None:
            self._metrics.fresh(stored.computed_at - run.since)

    async def _audit(self, run: Run) -> None:
        """Decode a hit again, on the version that it was of, as far as that can still be had."""
        entry, then, question = run.entry, run.key.present, run.entry.question
        if run.asked is not None:
            question = replace(question, behind=run.asked, first=run.asked)
        try:
            prompt = await self._prompts.of(entry.session_id, question, version=then.data_version)
        except BadSessionRequest:  # that version is not kept
            self._table.drop_audit(run)
            return
        if prompt.present != then or prompt.facts != run.key.facts:
            self._table.drop_audit(run)
            return
        agreed = await self._agrees(run, prompt.prompt)
        if run.asked is not None:
            self._metrics.semantic_audited(agreed=agreed)
            self._table.audited(run, agreed=agreed)
            return
        self._metrics.audited(agreed=agreed)
        self._table.audited(run, agreed=agreed)

    async def _agrees(self, run: Run, prompt: EnginePrompt) -> bool:
        """Whether decoding again says what was served."""
        question, served = run.entry.question, run.audits
        assert served is not None, "an audit of nothing"
        decoded = await self._ask(prompt, question.sampling_params)
        if run.asked is not None:
            return says_the_same(question, served.text, decoded.text)
        if served.by == "gate":
            choice = next(c for c in question.choices if c.text == served.choice)
            return agrees(choice, decoded.text)
        return decoded.token_ids == served.token_ids

    async def _scanned(self, entry: Entry, prompt: EnginePrompt) -> Answer | None:
        """The answer by the next-token distribution alone; None where the gate does not fire, or is not calibrated."""
        gate, question = entry.gate, entry.question
        if gate is None or not gate.is_calibrated:
            return None
        sampling = {**question.sampling_params, "max_new_tokens": 1}
        scanned = await self._ask(prompt, sampling, label_ids=question.label_ids)
        choice, gap = decide(question.choices, scanned.label_logprobs)
        if not gate.fires(gap):
            return None
        return Answer(
            choice.text,
            choice.token_ids,
            by="gate",
            choice=choice.text,
            gap=gap,
            ms=scanned.ms,
            decoded_tokens=1,
            reply=scanned.reply,
        )

    async def _decoded(self, run: Run, prompt: EnginePrompt) -> Answer:
        question = run.entry.question
        decoded = await self._ask(prompt, question.sampling_params, label_ids=question.label_ids)
        choice, gap = None, None
        if question.choices:
            best, gap = decide(question.choices, decoded.label_logprobs)
            choice = best.text
            if not run.is_void:
                self._table.observed(run.entry, gap, agreed=agrees(best, decoded.text))
        return Answer(
            decoded.text,
            decoded.token_ids,
            choice=choice,
            gap=gap,
            ms=decoded.ms,
            decoded_tokens=len(decoded.token_ids),
            reply=decoded.reply,
        )

    async def _ask(self, prompt: EnginePrompt, sampling: Any, *, label_ids: list[int] | None = None) -> Decoded:
        decoded = await self._engine.decode(prompt, sampling, label_ids=label_ids or ())
        self._metrics.tokens(
            prefilled=decoded.prompt_tokens - decoded.cached_tokens,
            cached=decoded.cached_tokens,
            decoded=len(decoded.token_ids),
        )
        return decoded
