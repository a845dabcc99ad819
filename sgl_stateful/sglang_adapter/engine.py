"""Prompts and control calls of the server's own, through SGLang's tokenizer manager."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_stateful.directive import DIRECTIVE_KEY, Directive, dump_directive
from sgl_stateful.engine_port import PrefillResult
from sgl_stateful.foreground import Foreground
from sgl_stateful.sessions.hold import HOLD_KEY, Hold, dump_hold

from .control import call_schedulers

INTERNAL = "_sgl_stateful_internal"  # attribute of requests that the server itself makes; unreachable from JSON


class SGLangEngine:
    """The ``EnginePort`` of a running server or ``sgl.Engine``."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._tokenizer_manager = tokenizer_manager
        self.foreground = Foreground()

    async def prefill(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        directive: Directive | None,
        top_logprobs: int = 0,
        hold: Hold | None = None,
    ) -> PrefillResult:
        """Run one prompt as an ordinary request; see ``EnginePort``."""
        sampling: dict[str, Any] = {"max_new_tokens": 1 if top_logprobs else 0, "temperature": 0.0}
        custom: dict[str, str] = {}
        if directive is not None:
            custom[DIRECTIVE_KEY] = dump_directive(directive)
        if hold is not None:
            custom[HOLD_KEY] = dump_hold(hold)
        if custom:
            sampling["custom_params"] = custom
        request = GenerateReqInput(
            rid=f"sgl-stateful-{uuid.uuid4().hex}",  # aborts match by prefix: every rid has the same length
            input_ids=list(token_ids),
            sampling_params=sampling,
            return_logprob=top_logprobs > 0,
            top_logprobs_num=top_logprobs,
            cache_salt=salt,
            log_metrics=False,
        )
        setattr(request, INTERNAL, True)
        try:
            async with aclosing(self._tokenizer_manager.generate_request(request, None)) as replies:
                reply = await anext(replies)
        except HTTPException as error:
            raise RuntimeError(f"the engine refuses: {error.detail}") from error
        meta = reply["meta_info"]
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            raise RuntimeError(f"the engine has aborted the prefill: {meta['finish_reason'].get('message')}")
        top: dict[int, float] = {}
        if top_logprobs:
            top = {token_id: logprob for logprob, token_id, _ in meta["output_top_logprobs"][0]}
        return PrefillResult(
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            scheduler=scheduler_report(meta) or {},
            top_logprobs=top,
        )

    async def control(self, op: str, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """A control call; see ``EnginePort``."""
        return await call_schedulers(self._tokenizer_manager, op, dict(payload or {}))

    def is_closing(self) -> bool:
        """SGLang has been told to exit."""
        return bool(self._tokenizer_manager.gracefully_exit)

    def foreground_requests(self) -> int:
        """Callers' requests in flight."""
        return self.foreground.count


def scheduler_report(meta_info: dict[str, Any]) -> dict[str, Any] | None:
    """Take the scheduler's report out of a reply's ``meta_info``; None where this reply carries none.

    A request of a session has ``session`` in it, on its last reply.
    """
    report: dict[str, Any] | None = _reported(meta_info, DIRECTIVE_KEY)
    session = _reported(meta_info, HOLD_KEY)  # of a stream, whose report went out with the first reply
    return report if session is None else {**(report or {}), "session": session}


def _reported(meta_info: dict[str, Any], key: str) -> Any:
    values = meta_info.pop(key, None) or []
    text = next((value for value in values if value is not None), None)
    return None if text is None else json.loads(text)
