"""Entries on SGLang's own doors: a question that begins with one needs what is not known yet of its answer alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_stateful.flash.ahead import Ahead, Ends, usable
from sgl_stateful.flash.entries import EntryService
from sgl_stateful.flash.entry_point import EntryPoint, decoding_path
from sgl_stateful.flash.metrics import EntryUse
from sgl_stateful.flash.outcomes import Hit, Miss, MissCause
from sgl_stateful.flash.sampling import canonical_sampling
from sgl_stateful.sessions.hold import HOLD_KEY, dump_hold
from sgl_stateful.sessions.session import Session
from sgl_stateful.sessions.use import Use

from .flash_serving import Wanted, askable, engine_free_meta, flash_of, sampling_defaults, stored_reply, wanted_of
from .resumed import Resumed, told
from .session_questions import Asked

_CONTEXT_TOKENS = 5  # before an answer, with which SGLang makes text of its first tokens
_UNFINISHED = "\ufffd"  # stands for a character of which a part is to come


def serve(tokenizer_manager: Any, request: GenerateReqInput, asked: Asked) -> dict[str, Any] | None:
    """The reply to an entry whose answer needs no engine; None: it does, or what is asked is none."""
    began = time.perf_counter()
    flash = flash_of(tokenizer_manager)
    if flash is None or asked.params.mode != "query" or not flash.entries.has(asked.params.id):
        return None
    entries, session = flash.entries, askable(flash, asked)
    if session is None or asked.memory is not None:
        return None
    wanted = wanted_of(request)
    found = _find(entries, session, wanted, asked)
    if not isinstance(found, Hit) or not entries.is_exact(session, found.entry, _ids(asked)):
        return None
    known = _known(found, wanted)
    if known is None:
        return None
    answer, by = known
    prompt_tokens = session.num_tokens + len(_ids(asked))
    answer = replace(answer, reply={"meta_info": {**answer.reply.get("meta_info", {}), "prompt_tokens": prompt_tokens}})
    entries.table.served(found)
    flash.wake()  # it may be audited
    flash.sessions.touch(session)
    entries.metrics.used(by, len(answer.token_ids))
    said = told(entries, found, by, len(answer.token_ids))
    reply = stored_reply(
        session, request, answer, data_version=found.stored.key.present.data_version, told=said, began=began
    )
    entries.metrics.hit_took(1e3 * reply["meta_info"]["e2e_latency"])
    return reply


def resume(tokenizer_manager: Any, request: GenerateReqInput, wanted: Wanted, asked: Asked, use: Use) -> Resumed | None:
    """Have a request that has begun go on from what is known; None where it is decoded for real. Counts misses.

    Parameters
    ----------
    wanted
        Of the request before it began.
    """
    flash = flash_of(tokenizer_manager)
    if flash is None or asked.params.mode != "query" or not flash.entries.has(use.session.header.id):
        return None
    entries, session = flash.entries, use.session
    if asked.memory is not None or session.version != use.data_version:
        return None
    found = _find(entries, session, wanted, asked)
    if found is None or isinstance(found, str):
        if found is not None:
            entries.metrics.missed(found)
        return None
    ids: tuple[int, ...] = ()
    if entries.is_exact(session, found.entry, _ids(asked)):
        ids = _ahead_of(tokenizer_manager, found, wanted.sampling)
    if ids:
        use.hold = replace(use.hold, ahead=ids)
        custom = (request.sampling_params or {})["custom_params"]
        custom[HOLD_KEY] = dump_hold(use.hold)
    early = None
    if ids and request.stream:
        early = _early(tokenizer_manager, request, wanted.sampling, found, [*use.token_ids, *_ids(asked)], ids)
    return Resumed(entries, found, session_tokens=len(use.token_ids), tokens_ahead=len(ids), early=early)


def _find(entries: EntryService, session: Session, wanted: Wanted, asked: Asked) -> Hit | MissCause | None:
    """What is known of what is asked; why that is of no use; or None, where it begins with no entry."""
    ids = _ids(asked)
    entry = entries.asked(session, ids)
    if entry is None:
        return None
    if asked.params.fresh:
        return "fresh"
    found = entries.look(session, entry)
    if isinstance(found, Miss):
        return found.cause
    if not entries.is_exact(session, entry, ids):
        return found  # it is the tokens of the prompt that are known, whatever comes behind them
    if wanted.is_more:
        return "unsupported"
    return found if decoding_path(wanted.sampling, sampling_defaults()) == _point(found).sampling else "sampling"


def _known(hit: Hit, wanted: Wanted) -> tuple[Ahead, EntryUse] | None:
    """The whole answer, where it is known; None: it has to be gone on with."""
    ahead, point = hit.stored.answer, _point(hit)
    assert isinstance(ahead, Ahead), ahead
    sampling = wanted.sampling
    room = _limit(sampling)
    ends = ("stop", "stop_token_ids", "no_stop_trim")
    is_same_end = _canonical(sampling, ends) == _canonical(point.sampling_params, ends)
    gate = hit.entry.gate
    if ahead.by == "gate" and gate is not None and ahead.gap is not None and gate.fires(ahead.gap):
        choice = next(one for one in point.choices if one.text == ahead.choice)
        ids = (*ahead.token_ids, *choice.token_ids)
        if is_same_end and len(ids) <= room:
            return replace(ahead, text=f"{ahead.before}{choice.text}", token_ids=ids), "gate"
        return None
    said = tuple(ahead.reply.get("output_ids", ()))
    fits = room == point.max_tokens if ahead.ends == "length" else len(said) <= room
    if ahead.ends in ("stop", "length") and said and is_same_end and fits:
        return replace(ahead, token_ids=said), "whole"
    return None


def _ahead_of(tokenizer_manager: Any, hit: Hit, sampling: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens of the answer that a request may begin with."""
    tokenizer, config = tokenizer_manager.tokenizer, tokenizer_manager.model_config
    stop = sampling.get("stop") or ()
    stop_ids: set[int] = set()
    if not sampling.get("ignore_eos"):
        own = {tokenizer.eos_token_id} - {None}
        own |= set(config.hf_eos_token_id or ()) | set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        stop_ids = own | set(sampling.get("stop_token_ids") or ())
    ends = Ends(_limit(sampling), [stop] if isinstance(stop, str) else list(stop), stop_ids)
    ids = hit.stored.answer.token_ids
    return ids[: usable(ids, ends, tokenizer.decode)]


def _early(
    tokenizer_manager: Any,
    request: GenerateReqInput,
    sampling: Mapping[str, Any],
    hit: Hit,
    prompt: Sequence[int],
    ids: Sequence[int],
) -> dict[str, Any] | None:
    """What a stream may show before the engine has begun; None where a stop text may end within or behind it."""
    if sampling.get("stop"):
        return None
    shown = {
        "skip_special_tokens": sampling.get("skip_special_tokens", True),
        "spaces_between_special_tokens": sampling.get("spaces_between_special_tokens", True),
    }
    decode, context = tokenizer_manager.tokenizer.decode, list(prompt[-_CONTEXT_TOKENS:])
    text = decode([*context, *ids], **shown)[len(decode(context, **shown)) :]
    if not text or text.endswith(_UNFINISHED):
        return None
    meta = engine_free_meta(request, hit.stored.answer)
    meta |= {
        "finish_reason": None,
        "prompt_tokens": len(prompt),
        "cached_tokens": len(prompt),
        "completion_tokens": len(ids),
    }
    return {"text": text, "output_ids": list(ids), "meta_info": meta}


def _ids(asked: Asked) -> tuple[int, ...]:
    return (*asked.head, *asked.tail)


def _point(hit: Hit) -> EntryPoint:
    point = hit.entry.question
    assert isinstance(point, EntryPoint), point
    return point


def _limit(sampling: Mapping[str, Any]) -> int:
    given = sampling.get("max_new_tokens", sampling_defaults()["max_new_tokens"])
    return 1 << 30 if given is None else int(given)


def _canonical(sampling: Mapping[str, Any], names: Sequence[str]) -> str:
    return canonical_sampling({name: sampling[name] for name in names if name in sampling}, sampling_defaults())
