"""Registered questions as requests of the server's own, through SGLang's tokenizer manager."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_stateful.directive import DIRECTIVE_KEY, dump_directive
from sgl_stateful.flash.port import Decoded, EnginePrompt
from sgl_stateful.foreground import Listener
from sgl_stateful.sessions.hold import HOLD_KEY, dump_hold

from .engine import INTERNAL, SGLangEngine, scheduler_report


class SGLangFlashEngine:
    """The ``FlashEngine`` of a running server."""

    def __init__(self, engine: SGLangEngine, tokenizer_manager: Any) -> None:
        self._engine = engine
        self._tokenizer_manager = tokenizer_manager

    async def decode(
        self, prompt: EnginePrompt, sampling_params: Mapping[str, Any], *, label_ids: Sequence[int] = ()
    ) -> Decoded:
        """Run one prompt; see ``FlashEngine``. SGLang aborts a request whose caller is cancelled."""
        custom: dict[str, str] = {}
        if prompt.directive is not None:
            custom[DIRECTIVE_KEY] = dump_directive(prompt.directive)
        if prompt.hold is not None:
            custom[HOLD_KEY] = dump_hold(prompt.hold)
        request = GenerateReqInput(
            rid=f"sgl-stateful-{uuid.uuid4().hex}",  # aborts match by prefix: every rid has the same length
            input_ids=list(prompt.token_ids),
            sampling_params={**sampling_params, "custom_params": custom or None},
            return_logprob=bool(label_ids),
            token_ids_logprob=list(label_ids) or None,
            cache_salt=prompt.salt,
            log_metrics=False,
        )
        setattr(request, INTERNAL, True)
        began = time.perf_counter()
        try:
            async with aclosing(self._tokenizer_manager.generate_request(request, None)) as replies:
                reply = await anext(replies)
        except HTTPException as error:
            raise RuntimeError(f"the engine refuses: {error.detail}") from error
        meta = reply["meta_info"]
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            raise RuntimeError(f"the engine has ended it: {meta['finish_reason'].get('message')}")
        report = scheduler_report(meta) or {}  # takes what is for us alone out of what callers will see
        return Decoded(
            text=reply["text"],
            token_ids=tuple(reply["output_ids"]),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            ms=1e3 * (time.perf_counter() - began),
            label_logprobs=_first_logprobs(meta) if label_ids else {},
            reply=reply,
            pinned_tokens=int((report.get("session") or {}).get("pinned_tokens", 0)),
        )

    def foreground_requests(self) -> int:
        """Callers' requests in flight, as all idle work counts them."""
        return self._engine.foreground_requests()

    def listen(self, listener: Listener) -> None:
        """See ``Foreground.listen``."""
        self._engine.foreground.listen(listener)

    def is_closing(self) -> bool:
        """SGLang has been told to exit."""
        return self._engine.is_closing()


def _first_logprobs(meta: Mapping[str, Any]) -> dict[int, float]:
    """Of the first token: log probability by token id."""
    return {token_id: logprob for logprob, token_id, *_ in meta["output_token_ids_logprobs"][0]}
