"""Stored answers on SGLang's own doors: what is asked of a session and registered on it needs no engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from functools import cache
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_stateful.flash.outcomes import Hit, MissCause
from sgl_stateful.flash.prompts import fact_versions
from sgl_stateful.flash.question import Ask, Prompt, memory_key
from sgl_stateful.flash.sampling import canonical_sampling
from sgl_stateful.flash.service import FlashService, shown_hit
from sgl_stateful.params import MEMORY_KEY
from sgl_stateful.sessions.params import SESSION_KEY
from sgl_stateful.sessions.session import Session

from .session_questions import Asked
from .session_requests import NOT_TOGETHER
from .session_start import starter_of

_OURS = frozenset({SESSION_KEY, MEMORY_KEY})
_MORE_THAN_AN_ANSWER = (
    *NOT_TOGETHER,
    "return_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_prompt_token_ids",
    "return_sampling_mask",
    "custom_logit_processor",
    "max_thinking_tokens",
)


@cache
def sampling_defaults() -> dict[str, Any]:
    """What SGLang takes for sampling parameters that are not given."""
    defaults = SamplingParams()
    return {name: getattr(defaults, name) for name in SamplingParams.__struct_fields__}


def flash_of(tokenizer_manager: Any) -> FlashService | None:
    """The registered questions of a server; None before its sessions have started, or without any."""
    starter = starter_of(tokenizer_manager)
    return None if starter is None else starter.flash


async def serve(tokenizer_manager: Any, request: GenerateReqInput, asked: Asked) -> dict[str, Any] | None:
    """The reply to a question that has been answered already; None where it has to be decoded.

    What is wrong with the request, the ordinary way says. Waits for nothing unless other words may be meant.
    """
    began = time.perf_counter()
    flash, params = flash_of(tokenizer_manager), asked.params
    if flash is None or params.mode != "query" or not flash.has(params.id):
        return None
    session = _session(flash, asked)
    if session is None:
        return None
    sampling = dict(request.sampling_params or {})
    custom = {name: value for name, value in (sampling.pop("custom_params", None) or {}).items() if name not in _OURS}
    ask = Ask(
        Prompt(tuple(asked.head), tuple(asked.tail)),
        canonical_sampling(sampling, sampling_defaults()),
        memory_key(asked.memory),
    )
    miss: MissCause | None = None
    if params.fresh:
        miss = "fresh"
    elif custom or any(getattr(request, name, None) for name in _MORE_THAN_AN_ANSWER):
        miss = "unsupported"
    elif asked.retrieved is not None and asked.retrieved.failure is not None:
        miss = "facts"
    facts = fact_versions(asked.retrieved)
    hit = flash.find(session, ask, facts=facts, max_staleness_s=params.max_staleness_s, miss=miss)
    if hit is None and miss is None and (wording := await flash.semantic.wording(session, ask, asked.content)):
        # Meanwhile the session may have changed, or ended.
        if (session := _session(flash, asked)) is None:
            return None
        hit = flash.find_alike(session, ask, wording, max_staleness_s=params.max_staleness_s)
    if hit is None:
        return None
    request.normalize_batch_and_arguments()  # what SGLang's handlers rely on afterwards
    reply = _reply(flash, session, hit, request, began, num_asked=len(ask.prompt))
    flash.metrics.hit_took(1e3 * reply["meta_info"]["e2e_latency"])
    return reply


def _session(flash: FlashService, asked: Asked) -> Session | None:
    """The session that is asked, where a stored answer may be given for it."""
    params, sessions = asked.params, flash.sessions
    try:
        session = sessions.table.get(params.id, owner=params.owner)
    except ValueError:  # as every refusal of a session is
        return None
    if params.if_version not in (None, session.version) or asked.is_first != (session.num_tokens == 0):
        return None
    if asked.memory is not None and asked.memory.owner != session.header.owner:
        return None
    return session


def _reply(
    flash: FlashService, session: Session, hit: Hit, request: GenerateReqInput, began: float, *, num_asked: int
) -> dict[str, Any]:
    answer, now = hit.stored.answer, flash.table.clock()
    shown = shown_hit(hit, now)
    kept: Mapping[str, Any] = answer.reply.get("meta_info", {})
    meta = {name: value for name, value in kept.items() if "logprobs" not in name}
    finish_reason = meta.get("finish_reason")
    if answer.by == "gate":
        finish_reason = {"type": "stop", "matched": None}
    prompt_tokens = meta.get("prompt_tokens", 0)
    of_asked = ("age_s", "staleness_s", "confidence", "by")
    if hit.similarity is not None:
        prompt_tokens += num_asked - len(hit.stored.key.ask.prompt)
        of_asked += ("similarity",)
    meta |= {
        "prompt_tokens": prompt_tokens,
        "id": request.rid if isinstance(request.rid, str) else uuid.uuid4().hex,
        "finish_reason": finish_reason,
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": prompt_tokens,
        SESSION_KEY: {
            "id": session.header.id,
            "data_version": shown["data_version"],
            "version": None,
            "tokens": session.num_tokens,
            "pin": session.pin_state,
            "cached_tokens": prompt_tokens,
            "prefilled_tokens": 0,
            "rebuilt": None,
            "served_from": shown["served_from"],
            "flash": {
                "name": hit.entry.name,
                **{name: shown[name] for name in of_asked},
            },
        },
        "e2e_latency": time.perf_counter() - began,
    }
    return {"text": answer.text, "output_ids": list(answer.token_ids), "meta_info": meta}
