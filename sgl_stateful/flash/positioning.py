"""One entry on its way ahead: prefilled behind its session, decoded to its decision point, and pinned.

Source: Speculative Pre-Positioning (arXiv 2606.29565).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sgl_stateful.errors import SessionNotFound
from sgl_stateful.sessions.service import SessionService
from sgl_stateful.sessions.session import Session

from .ahead import Ahead
from .choices import agrees, decide
from .entry_pins import EntryPins
from .entry_point import EntryPoint
from .evaluating import Evaluator, Work
from .metrics import FlashMetrics
from .outcomes import Run
from .port import Decoded, EnginePrompt, FlashEngine
from .prompts import FlashPrompts
from .table import FlashTable


class _Reached(NamedTuple):
    """What was decoded up to the decision point, or up to where decoding ended before it."""

    token_ids: tuple[int, ...]
    text: str
    is_there: bool
    last: Decoded | None = None
    ends: str | None = None


class Positioner(Evaluator):
    """Does pieces of work on entries. Of the event loop."""

    def __init__(
        self,
        table: FlashTable,
        prompts: FlashPrompts,
        engine: FlashEngine,
        metrics: FlashMetrics,
        *,
        sessions: SessionService,
        pins: EntryPins,
    ) -> None:
        super().__init__(table, prompts, engine, metrics)
        self._sessions = sessions
        self._pins = pins

    async def _evaluate(self, work: Work) -> None:
        entry = work.entry
        found = await self._prompts.of(entry.session_id, entry.question)
        if found.present.weight_version is None:
            self._table.put_back(entry)
            return
        work.run = run = self._table.begin(entry, found.present)
        if run is None:
            self._metrics.evaluation("unchanged")
            return
        session, prompt, before = self._session(entry.session_id), found.prompt, self._pins.budget.of(entry)
        assert prompt.hold is not None, "a prompt of a session without its hold"
        most = len(prompt.token_ids) + entry.question.max_tokens
        pinning = self._pins.claim(entry, session, prompt.hold, most)
        if pinning is None and self._pins.budget.limit:
            await self._pins.look()
            pinning = self._pins.claim(entry, session, prompt.hold, most)
        try:
            ahead, pinned = await self._ahead(run, prompt if pinning is None else replace(prompt, hold=pinning))
        except BaseException:
            if pinning is not None:
                self._pins.fails(entry, before)
            raise
        stored = self._table.evaluated(run, ahead)
        self._metrics.evaluation("void" if stored is None else "stored")
        if pinning is not None:
            self._pinned(run, prompt, pinned, is_kept=stored is not None)
        elif stored is not None:
            self._pins.release(entry)  # of an earlier version, and now in nobody's way but the others'
        if stored is not None and stored.superseded_at is None and run.since is not None:
            self._metrics.fresh(stored.computed_at - run.since)

    def _give_up(self, work: Work, why: str | None) -> None:
        super()._give_up(work, why)
        if not work.is_audit:
            self._pins.release(work.entry)  # it would be of a version that is not the newest any more

    def _pinned(self, run: Run, prompt: EnginePrompt, tokens: int, *, is_kept: bool) -> None:
        """Keep what was pinned, unless it is of no use: void, or behind what its session no longer begins with."""
        entry = run.entry
        try:
            session = self._session(entry.session_id)
        except SessionNotFound:
            is_kept = False
        if not is_kept:
            self._pins.release(entry)
            return
        asked = entry.question.first if run.key.present.is_first else entry.question.behind
        base = prompt.token_ids[: len(prompt.token_ids) - len(asked)]
        self._pins.stands(entry, session, base, tokens)
        self._pins.moved(session, [entry])

    def _session(self, session_id: str) -> Session:
        return self._sessions.table.get(session_id, owner=None)

    # ---- decoding ----

    async def _ahead(self, run: Run, prompt: EnginePrompt) -> tuple[Ahead, int]:
        """What is known of the answer, and how many tokens are pinned with it."""
        point = run.entry.question
        assert isinstance(point, EntryPoint), point
        reached = _Reached((), "", is_there=True)
        if point.has_until or not point.choices:
            reached = await self._decode_until(point, prompt)
        if reached.is_there and point.choices:
            return await self._decide(run, prompt, reached)
        assert reached.last is not None, "nothing was decoded"
        ahead = Ahead(
            reached.text,
            reached.token_ids,
            ms=reached.last.ms,
            decoded_tokens=len(reached.last.token_ids),
            reply=reached.last.reply,
            ends=reached.ends,
        )
        return ahead, reached.last.pinned_tokens

    async def _decode_until(self, point: EntryPoint, prompt: EnginePrompt) -> _Reached:
        decoded = await self._ask(prompt, _sampling_until(point))
        reason = decoded.reply.get("meta_info", {}).get("finish_reason") or {}
        matched = reason.get("matched")
        is_there = matched in point.until or (matched in point.until_ids and isinstance(matched, int))
        ids = decoded.token_ids
        if isinstance(matched, int) and not is_there and ids and ids[-1] == matched:
            ids = ids[:-1]
        ends = None if point.has_until else reason.get("type")
        return _Reached(ids, decoded.text, is_there, decoded, ends)

    async def _decide(self, run: Run, prompt: EnginePrompt, reached: _Reached) -> tuple[Ahead, int]:
        """Weigh the choices at the decision point; where the gate does not fire, decode on for real."""
        entry, point = run.entry, run.entry.question
        assert isinstance(point, EntryPoint), point
        there = replace(prompt, token_ids=[*prompt.token_ids, *reached.token_ids])
        ms = reached.last.ms if reached.last is not None else 0.0
        decoded_tokens = len(reached.token_ids)
        if entry.gate is not None and entry.gate.is_calibrated:
            scanned = await self._ask(there, _sampling_on(point, 1), label_ids=point.label_ids)
            choice, gap = decide(point.choices, scanned.label_logprobs)
            ms, decoded_tokens = ms + scanned.ms, decoded_tokens + 1
            if entry.gate.fires(gap):
                ahead = Ahead(
                    reached.text,
                    reached.token_ids,
                    by="gate",
                    choice=choice.text,
                    gap=gap,
                    ms=ms,
                    decoded_tokens=decoded_tokens,
                    reply=scanned.reply,
                    before=reached.text,
                )
                return ahead, scanned.pinned_tokens
        longest = max(len(choice.token_ids) for choice in point.choices)
        left = max(point.max_tokens - len(reached.token_ids), longest)
        decoded = await self._ask(there, _sampling_on(point, left), label_ids=point.label_ids)
        choice, gap = decide(point.choices, decoded.label_logprobs)
        agreed = agrees(choice, decoded.text)
        if not run.is_void:
            self._table.observed(entry, gap, agreed=agreed)
        ahead = Ahead(
            reached.text + decoded.text,
            (*reached.token_ids, *_without_end(decoded)),
            choice=choice.text,
            gap=gap,
            ms=ms + decoded.ms,
            decoded_tokens=decoded_tokens + len(decoded.token_ids),
            reply=decoded.reply,
            before=reached.text,
            agreed=agreed,
        )
        return ahead, decoded.pinned_tokens

    # ---- audits ----

    async def _audit(self, run: Run) -> None:
        await super()._audit(run)
        if run.entry.retired is not None:
            self._pins.release(run.entry)

    async def _agrees(self, run: Run, prompt: EnginePrompt) -> bool:
        """Whether decoding again says what was served: from the decision point on where the gate has answered."""
        point, served = run.entry.question, run.audits
        assert isinstance(point, EntryPoint), point
        assert isinstance(served, Ahead), served
        if served.by != "gate":
            decoded = await self._ask(prompt, _sampling_until(point))
            return decoded.text == served.text
        choice = next(one for one in point.choices if one.text == served.choice)
        there = replace(prompt, token_ids=[*prompt.token_ids, *served.token_ids])
        decoded = await self._ask(there, _sampling_on(point, max(len(choice.token_ids), 1)))
        return agrees(choice, decoded.text)


def _sampling_until(point: EntryPoint) -> Mapping[str, Any]:
    """As a request has it, with what ends it at the decision point; tokens that end it are shown, not trimmed."""
    if not point.has_until:
        return point.sampling_params
    given = point.sampling_params
    return {
        **given,
        "stop": [*_listed(given.get("stop")), *point.until],
        "stop_token_ids": [*(given.get("stop_token_ids") or ()), *point.until_ids],
        "no_stop_trim": True,
    }


def _sampling_on(point: EntryPoint, max_tokens: int) -> Mapping[str, Any]:
    return {**point.sampling_params, "max_new_tokens": max_tokens}


def _listed(stop: Any) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else list(stop or ())


def _without_end(decoded: Decoded) -> tuple[int, ...]:
    matched = (decoded.reply.get("meta_info", {}).get("finish_reason") or {}).get("matched")
    ids = decoded.token_ids
    return ids[:-1] if isinstance(matched, int) and ids and ids[-1] == matched else ids
