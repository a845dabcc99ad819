"""SGLang's scheduler as we extend it: control calls from the HTTP process, and pins and sessions in its loop."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from sglang.srt.managers import io_struct, scheduler, tokenizer_control_mixin
from sglang.srt.managers.io_struct import BaseReq

from sgl_stateful.settings import StatefulSettings

from . import pressure, waiting
from .pins import PinTable
from .prefix_cache import StatefulRadixCache
from .request_state import begin_ahead
from .session_kv import cached_tokens, snapshot_control

logger = logging.getLogger(__name__)

COMMUNICATOR = "sgl_stateful"


class StatefulControlReqInput(BaseReq, kw_only=True):
    """Ask every scheduler to do ``op`` with the JSON in ``payload``."""

    op: str
    payload: str = "{}"


class StatefulControlReqOutput(BaseReq, kw_only=True):
    """One scheduler's answer, as JSON."""

    payload: str


class StatefulScheduler(scheduler.Scheduler):
    """SGLang's scheduler with one more control call, sessions in its queue, and pins that yield to requests."""

    def init_request_dispatcher(self) -> None:
        """Register the control call beside SGLang's own."""
        super().init_request_dispatcher()
        self._session_aging_s = StatefulSettings().session_aging_s
        self._request_dispatcher._mapping[StatefulControlReqInput] = self.handle_stateful_control

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        """Queue a request; one whose answer's beginning is known as if it had decoded that and been retracted."""
        if not is_retracted:
            begin_ahead(req)
        super()._add_request_to_queue(req, is_retracted)

    def get_new_batch_prefill(self, running_batch: Any) -> Any:
        """Prefill what requests of sessions share once; make room where pins leave none."""
        pressure.relieve_chunk(self)
        held = waiting.prepare_pass(self, running_batch, aging_s=self._session_aging_s)
        try:
            plan = super().get_new_batch_prefill(running_batch)
            if plan.batch_to_run is None:  # the queue is still as SGLang went through it
                pressure.relieve_prefill(self, plan.running_batch)
        finally:
            waiting.restore_queue(self, held)
        return plan

    def update_running_batch(self, batch: Any) -> Any:
        """Give up pins before SGLang would end a request for want of memory."""
        pressure.relieve_decode(self, batch)
        return super().update_running_batch(batch)

    def handle_stateful_control(self, request: StatefulControlReqInput) -> StatefulControlReqOutput:
        """Answer one control call; see ``_stateful_control`` for those there are."""
        cache = self.tree_cache
        if not isinstance(cache, StatefulRadixCache):
            return StatefulControlReqOutput(payload=json.dumps({"error": "--radix-cache-backend is not 'stateful'"}))
        try:
            answer = self._stateful_control(cache, request.op, json.loads(request.payload))
        except Exception as error:
            # An exception here would end the scheduler.
            logger.exception("control call %s failed", request.op)
            answer = {"error": f"{type(error).__name__}: {error}"}
        return StatefulControlReqOutput(payload=json.dumps(answer))

    @staticmethod
    def _stateful_control(cache: StatefulRadixCache, op: str, body: dict[str, Any]) -> dict[str, Any]:
        match op:
            case "describe":
                return dict(cache.description)
            case "stats":
                return {} if cache.facts is None else dict(cache.facts.stats())
            case "drop":
                return {"dropped": 0 if cache.facts is None else cache.facts.drop(body["encoding_ids"])}
            case "sweep":
                return {"dropped": 0 if cache.facts is None else cache.facts.sweep()}
            case "fence":
                if cache.facts is not None:
                    cache.facts.fence(body["fingerprint"])
                return {}
            case "pins":
                return _pins(cache, body.get("session_ids"))
            case "unpin":
                pins = attached_pins(cache)
                return {"unpinned": sum(pins.unpin(i, fence) for i, fence in body["session_ids"].items())}
            case "cached":
                return {"tokens": cached_tokens(cache, body)}
            case "snapshot_write" | "snapshot_state" | "snapshot_drop" | "snapshot_fence":
                return snapshot_control(cache, op, body)
            case _:
                return {"error": f"unknown control call {op!r}"}


def attached_pins(cache: StatefulRadixCache) -> PinTable:
    """The pins of a cache that serves."""
    assert cache.pins is not None, "a control call before the cache was attached"
    return cache.pins


def _pins(cache: StatefulRadixCache, session_ids: list[str] | None) -> dict[str, Any]:
    """What is pinned and what has been lost, of all sessions or of those asked for, and how full the pool is."""
    pins, allocator = attached_pins(cache), cache.token_to_kv_pool_allocator
    return {
        "pins": pins.tokens(session_ids),
        "lost": pins.lost(session_ids),
        "pool_tokens": int(allocator.size),
        "available": int(allocator.available_size()),
        "evictable": int(cache.evictable_size()),
        "protected": int(cache.protected_size()),
        **pins.stats(),
    }


def register_control_types() -> None:
    """Teach SGLang's IPC the two message types and the HTTP process its side of the call."""
    io_struct.hook_custom_types(StatefulControlReqInput, StatefulControlReqOutput)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append((COMMUNICATOR, StatefulControlReqOutput))


async def call_schedulers(tokenizer_manager: Any, op: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a control call and return the first scheduler's answer.

    Raises
    ------
    RuntimeError
        A scheduler answered with an error.
    """
    tokenizer_manager.auto_create_handle_loop()
    communicator = getattr(tokenizer_manager, f"{COMMUNICATOR}_communicator")
    request = StatefulControlReqInput(op=op, payload=json.dumps(payload or {}))
    # Not to be cancelled: SGLang would give the late answer to whoever asks next.
    outputs = await asyncio.shield(asyncio.ensure_future(communicator(request)))
    answers = [json.loads(output.payload) for output in outputs]
    if error := next((a["error"] for a in answers if "error" in a), None):
        raise RuntimeError(f"control call {op!r} failed: {error}")
    first: dict[str, Any] = answers[0]
    return first
