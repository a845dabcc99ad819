"""Control calls from the HTTP process to the scheduler, over SGLang's own dispatcher."""

from __future__ import annotations

import json
import logging
from typing import Any

from sglang.srt.managers import io_struct, scheduler, tokenizer_control_mixin
from sglang.srt.managers.io_struct import BaseReq

from .prefix_cache import StatefulRadixCache

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
    """SGLang's scheduler with one more control call."""

    def init_request_dispatcher(self) -> None:
        """Register the control call beside SGLang's own."""
        super().init_request_dispatcher()
        self._request_dispatcher._mapping[StatefulControlReqInput] = self.handle_stateful_control

    def handle_stateful_control(self, request: StatefulControlReqInput) -> StatefulControlReqOutput:
        """Answer ``describe``, ``stats``, ``drop``, ``sweep`` or ``fence``."""
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
            case _:
                return {"error": f"unknown control call {op!r}"}


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
    answers = [json.loads(output.payload) for output in await communicator(request)]
    if error := next((a["error"] for a in answers if "error" in a), None):
        raise RuntimeError(f"control call {op!r} failed: {error}")
    first: dict[str, Any] = answers[0]
    return first
