"""Stored answers on SGLang's own doors: what is asked of a session and registered on it needs no engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_stateful.flash.answers import Answer
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


class Wanted(NamedTuple):
    """What a caller wants: sampling parameters without what is ours, and whether it is more than an answer."""

    sampling: dict[str, Any]
    is_more: bool


def wanted_of(request: GenerateReqInput) -> Wanted:
    """What is wanted of a request that has not begun."""
    sampling = dict(request.sampling_params or {})
    custom = {name: value for name, value in (sampling.pop("custom_params", None) or {}).items() if name not in _OURS}
    return Wanted(sampling, bool(custom) or any(getattr(request, name, None) for name in _MORE_THAN_AN_ANSWER))


async def serve(tokenizer_manager: Any, request: GenerateReqInput, asked: Asked) -> dict[str, Any] | None:
    """The reply to a question that has been answered already; None where it has to be decoded.

    What is wrong with the request, the ordinary way says. Waits for nothing unless other words may be meant.
    """
    began = time.perf_counter()
    flash, params = flash_of(tokenizer_manager), asked.params
    if flash is None or params.mode != "query" or not flash.has(params.id):
        return None
    session = askable(flash, asked)
    if session is None:
        return None
    sampling, is_more = wanted_of(request)
    ask = Ask(
        Prompt(tuple(asked.head), tuple(asked.tail)),
        canonical_sampling(sampling, sampling_defaults()),
        memory_key(asked.memory),
    )
    miss: MissCause | None = None
    if params.fresh:
        miss = "fresh"
    elif is_more:
        miss = "unsupported"
    elif asked.retrieved is not None and asked.retrieved.failure is not None:
        miss = "facts"
    facts = fact_versions(asked.retrieved)
    hit = flash.find(session, ask, facts=facts, max_staleness_s=params.max_staleness_s, miss=miss)
    if hit is None and miss is None and (wording := await flash.semantic.wording(session, ask, asked.content)):
        # Meanwhile the session may have changed, or ended.
        if (session := askable(flash, asked)) is None:
            return None
        hit = flash.find_alike(session, ask, wording, max_staleness_s=params.max_staleness_s)
    if hit is None:
        return None
    reply = _reply(flash, session, hit, request, began, num_asked=len(ask.prompt))
    flash.metrics.hit_took(1e3 * reply["meta_info"]["e2e_latency"])
    return reply


def askable(flash: FlashService, asked: Asked) -> Session | None:
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
    answer = hit.stored.answer
    shown = shown_hit(hit, flash.table.clock())
    told = {"name": hit.entry.name, **{name: shown[name] for name in ("age_s", "staleness_s", "confidence", "by")}}
    if hit.similarity is not None:
        told["similarity"] = hit.similarity
        meta = answer.reply.get("meta_info", {})
        prompt_tokens = meta.get("prompt_tokens", 0) + num_asked - len(hit.stored.key.ask.prompt)
        answer = replace(answer, reply={"meta_info": {**meta, "prompt_tokens": prompt_tokens}})
    return stored_reply(
        session,
        request,
        answer,
        data_version=shown["data_version"],
        told={"served_from": "flash", "flash": told},
        began=began,
    )


def stored_reply(
    session: Session,
    request: GenerateReqInput,
    answer: Answer,
    *,
    data_version: int,
    told: Mapping[str, Any],
    began: float,
) -> dict[str, Any]:
    """A reply of the usual shape to what needs no engine.

    Parameters
    ----------
    told
        What it says of its session besides.
    began
        When it was asked, of ``time.perf_counter``.
    """
    request.normalize_batch_and_arguments()  # what SGLang's handlers rely on afterwards
    meta = engine_free_meta(request, answer)
    if answer.by == "gate":
        meta["finish_reason"] = {"type": "stop", "matched": None}
    prompt_tokens = meta["prompt_tokens"]
    meta |= {
        "completion_tokens": len(answer.token_ids),
        SESSION_KEY: {
            "id": session.header.id,
            "data_version": data_version,
            "version": None,
            "tokens": session.num_tokens,
            "pin": session.pin_state,
            "cached_tokens": prompt_tokens,
            "prefilled_tokens": 0,
            "rebuilt": None,
            **told,
        },
        "e2e_latency": time.perf_counter() - began,
    }
    return {"text": answer.text, "output_ids": list(answer.token_ids), "meta_info": meta}


def engine_free_meta(request: GenerateReqInput, answer: Answer) -> dict[str, Any]:
    """What the engine said with an answer, for another request; the prompt counts as cached."""
    kept: Mapping[str, Any] = answer.reply.get("meta_info", {})
    meta = {name: value for name, value in kept.items() if "logprobs" not in name}
    prompt_tokens = meta.get("prompt_tokens", 0)
    return meta | {
        "id": request.rid if isinstance(request.rid, str) else uuid.uuid4().hex,
        "finish_reason": meta.get("finish_reason"),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": prompt_tokens,
    }
