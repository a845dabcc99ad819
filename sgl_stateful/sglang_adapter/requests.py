"""Memory on SGLang's own doors: every request, from any route or ``sgl.Engine``, passes ``generate_request``.

The OpenAI chat route prepares its prompt earlier, where the messages are still known (``chat``); what arrives here
with ``custom_params.memory`` and is not prepared comes from ``/generate`` or the engine's Python API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_stateful.directive import DIRECTIVE_KEY, dump_directive
from sgl_stateful.errors import BadMemoryRequest, BadSessionRequest, MemoryDisabled, SessionError
from sgl_stateful.params import MEMORY_KEY, MemoryParams, parse_memory_params
from sgl_stateful.planner import Prepared
from sgl_stateful.report import Report
from sgl_stateful.service import MemoryService
from sgl_stateful.sessions.content import Content
from sgl_stateful.sessions.params import SESSION_KEY, parse_session_params

from . import entry_serving, flash_serving, session_requests
from .engine import INTERNAL, SGLangEngine, scheduler_report
from .prepared import MARKER, REPORTS, reserve_tokens
from .session_questions import Asked, ask, with_facts
from .session_requests import ASKED, Answered, AnswerReader
from .session_start import ready_sessions

SERVICE = "_sgl_stateful_service"  # attribute of the tokenizer manager
ENGINE = "_sgl_stateful_engine"
SHOWN = "_sgl_stateful_shown"  # attribute of a finished request: what its responses show, by prompt
READER = "_sgl_stateful_reader"  # attribute of a request of a session: what follows its answer


def service_of(tokenizer_manager: Any) -> MemoryService | None:
    """The memory of a server; None where it has none."""
    return getattr(tokenizer_manager, SERVICE, None)


def require_service(tokenizer_manager: Any) -> MemoryService:
    """The memory of a server.

    Raises
    ------
    MemoryDisabled
        The server has none.
    """
    if (service := service_of(tokenizer_manager)) is None:
        raise MemoryDisabled(
            "this server has no memory: start it with --memory DIR or --memory redis://... (SGL_STATEFUL_MEMORY)"
        )
    return service


def refuse_unsupported(request: GenerateReqInput) -> None:
    """Refuse, by name, what a prompt with memory cannot be combined with."""
    for field in ("image_data", "video_data", "audio_data", "input_embeds", "session_params", "lora_path"):
        if getattr(request, field, None):
            raise BadMemoryRequest(f"custom_params.memory cannot be combined with {field}")


def apply_prepared(request: GenerateReqInput, prepared: Prepared) -> None:
    """Put a prepared prompt into a request of one prompt."""
    request.text, request.input_ids = None, prepared.token_ids
    request.sampling_params = _with_directive(request.sampling_params, prepared)
    request.cache_salt = _salted(request.cache_salt, prepared.salt)
    _note_salt(prepared.report, request, request.cache_salt)
    setattr(request, REPORTS, [prepared.report])


def _with_directive(sampling_params: dict[str, Any] | None, prepared: Prepared) -> dict[str, Any]:
    merged = dict(sampling_params or {})
    custom = {key: value for key, value in (merged.get("custom_params") or {}).items() if key != MEMORY_KEY}
    if prepared.directive is not None:
        custom[DIRECTIVE_KEY] = dump_directive(prepared.directive)
    merged["custom_params"] = custom or None
    return merged


def _note_salt(report: Report, request: GenerateReqInput, salt: str) -> None:
    """Tell a prompt's block under which salt it is cached; where ``extra_key`` decides as well, none is told."""
    if report.block is not None and not request.extra_key:
        report.block = replace(report.block, salt=salt)


def _salted(cache_salt: str | None, salt: str) -> str:
    return f"{salt}/{cache_salt}" if cache_salt else salt


async def _prepare_one(
    service: MemoryService, tokenizer: Any, params: MemoryParams, text: Any, ids: Any, sampling: dict[str, Any]
) -> Prepared:
    if ids is not None:
        if params.needs_query:
            raise BadMemoryRequest("custom_params.memory.query is needed with input_ids")
        if params.insert_at > len(ids):
            raise BadMemoryRequest(f"custom_params.memory.insert_at is {params.insert_at} of {len(ids)} tokens")
        before, after, query = "", "", params.query or ""
    elif isinstance(text, str):
        before, marker, after = text.partition(MARKER)
        if not marker:
            before, after = "", text
        query = before + after
    else:
        raise BadMemoryRequest("custom_params.memory needs a prompt as text or input_ids")
    retrieved = await service.retrieve(params, query)

    def assemble() -> Prepared:
        if ids is not None:
            head, tail = ids[: params.insert_at], ids[params.insert_at :]
        else:
            head = tokenizer.encode(before, add_special_tokens=True)
            tail = tokenizer.encode(after, add_special_tokens=False)
        reserve = reserve_tokens(sampling)
        return service.prepare_ids(
            params, head=head, tail=tail, query=query, reserve_tokens=reserve, retrieved=retrieved
        )

    return await asyncio.to_thread(assemble)


async def prepare_request(tokenizer_manager: Any, request: GenerateReqInput) -> None:
    """Retrieve and assemble for a request that is not prepared yet; does nothing for one without memory.

    Raises
    ------
    ForgedDirective, BadMemoryRequest, MemoryDisabled
        All of them become HTTP 400.
    """
    sampling = request.sampling_params
    if isinstance(sampling, list) and len(sampling) == 1 and isinstance(request.text, str):
        sampling = request.sampling_params = sampling[0]
    per_prompt = sampling if isinstance(sampling, list) else [sampling]
    wanted = [parse_memory_params((s or {}).get("custom_params")) for s in per_prompt]
    if not any(wanted):
        return
    service = require_service(tokenizer_manager)
    refuse_unsupported(request)
    await service.start()
    texts, ids = request.text, request.input_ids
    is_batch = isinstance(texts, list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
    count = len(texts if texts is not None else ids) if is_batch else 1
    if isinstance(sampling, list) and len(sampling) != count:
        raise BadMemoryRequest(f"{len(sampling)} sampling_params for {count} prompts")
    jobs = []
    for i in range(count):
        params = wanted[i] if isinstance(sampling, list) else wanted[0]
        if params is None:
            raise BadMemoryRequest("a batch takes custom_params.memory for all of its prompts or for none")
        text = texts[i] if is_batch and texts is not None else texts
        one = ids[i] if is_batch and ids is not None else ids
        own = per_prompt[i] if isinstance(sampling, list) else per_prompt[0]
        jobs.append((params, text, one, own or {}))
    tokenizer = tokenizer_manager.tokenizer
    prepared = await asyncio.gather(*(_prepare_one(service, tokenizer, *job) for job in jobs))
    if not is_batch:
        apply_prepared(request, prepared[0])
        return
    request.text, request.input_ids = None, [p.token_ids for p in prepared]
    request.sampling_params = [_with_directive(job[3], p) for job, p in zip(jobs, prepared, strict=True)]
    given = request.cache_salt
    salts = given if isinstance(given, list) else [given] * count
    request.cache_salt = [_salted(salt, p.salt) for salt, p in zip(salts, prepared, strict=True)]
    for one, salt in zip(prepared, request.cache_salt, strict=True):
        _note_salt(one.report, request, salt)
    setattr(request, REPORTS, [p.report for p in prepared])


async def _asked(tokenizer_manager: Any, request: GenerateReqInput) -> Asked | None:
    """The question that a request has for a session; None where it has none.

    Raises
    ------
    ForgedDirective, SessionError, BadMemoryRequest, MemoryDisabled, StoreError
    """
    sampling = request.sampling_params
    several = sampling if isinstance(sampling, list) else [sampling]
    # Each of them, whatever else is known: this is where a caller's forged directive is refused.
    for one in several:
        parse_memory_params((one or {}).get("custom_params"))
    wanted = [parse_session_params((one or {}).get("custom_params")) for one in several]
    if (asked := getattr(request, ASKED, None)) is not None:
        return asked
    params = next((one for one in wanted if one is not None), None)
    if params is None:
        return None
    text, ids = request.text, request.input_ids
    if len(several) != 1 or isinstance(text, list) or (ids and isinstance(ids[0], list)):
        raise BadSessionRequest("a session takes one prompt, as text or input_ids")
    request.sampling_params = several[0]
    memory = parse_memory_params((several[0] or {}).get("custom_params"))
    content = Content(text=text, input_ids=None if text is not None or ids is None else tuple(ids))
    asked = await ask(await ready_sessions(tokenizer_manager), params, content, memory)
    return asked if memory is None else await with_facts(require_service(tokenizer_manager), asked)


async def around_generate_request(
    original: Callable[..., AsyncGenerator[Any, None]], tokenizer_manager: Any, request: Any, raw_request: Any = None
) -> AsyncGenerator[Any, None]:
    """AROUND ``TokenizerManager.generate_request``: prepare, run, and put the reports on the last reply."""
    if not isinstance(request, GenerateReqInput) or getattr(request, INTERNAL, False):
        async with aclosing(original(tokenizer_manager, request, raw_request)) as replies:
            async for reply in replies:
                yield reply
        return
    try:
        asked = None if hasattr(request, REPORTS) else await _asked(tokenizer_manager, request)
        if asked is not None and (stored := await _stored(tokenizer_manager, request, asked)) is not None:
            setattr(request, READER, Answered(stored["meta_info"][SESSION_KEY]))
            yield stored
            return
        reader = await _prepare(tokenizer_manager, request, asked)
        async with aclosing(_run(original, tokenizer_manager, request, raw_request, reader)) as replies:
            async for reply in replies:
                yield reply
    except SessionError as error:
        session_requests.note_failure(raw_request, error)
        raise


async def _stored(tokenizer_manager: Any, request: GenerateReqInput, asked: Asked) -> dict[str, Any] | None:
    """The reply to what needs no engine: a registered question, or an entry of which all is known."""
    stored = await flash_serving.serve(tokenizer_manager, request, asked)
    return entry_serving.serve(tokenizer_manager, request, asked) if stored is None else stored


async def _prepare(tokenizer_manager: Any, request: GenerateReqInput, asked: Asked | None) -> AnswerReader | None:
    """Put session and facts into a request; returns what follows its answer where it has a session."""
    if hasattr(request, REPORTS):
        return None
    if asked is None:
        await prepare_request(tokenizer_manager, request)
        return None
    sessions, samples = await ready_sessions(tokenizer_manager), _samples(request)
    session_requests.refuse_unsupported(request, is_turn=asked.params.mode == "turn", samples=samples)
    wanted = flash_serving.wanted_of(request)
    use = await session_requests.begin(sessions, service_of(tokenizer_manager), request, asked)
    try:
        resumed = entry_serving.resume(tokenizer_manager, request, wanted, asked, use)
    except BaseException:
        await sessions.answering.drop(use)
        raise
    return AnswerReader(
        sessions,
        use,
        rid=request.rid,
        abort=tokenizer_manager.abort_request,
        samples=samples,
        incremental=bool(request.stream) and tokenizer_manager.incremental_streaming_output,
        resumed=resumed,
    )


async def _run(
    original: Callable[..., AsyncGenerator[Any, None]],
    tokenizer_manager: Any,
    request: GenerateReqInput,
    raw_request: Any,
    reader: AnswerReader | None,
) -> AsyncGenerator[Any, None]:
    reports: list[Report] = getattr(request, REPORTS, [])
    engine: SGLangEngine | None = getattr(tokenizer_manager, ENGINE, None)
    collector = _Collector(service_of(tokenizer_manager), reports, samples=_samples(request))
    setattr(request, SHOWN, collector.shown)
    setattr(request, READER, reader)
    if engine is not None:
        engine.foreground.began()
    try:
        if reader is not None and (early := reader.early()) is not None:
            yield early
        async with aclosing(original(tokenizer_manager, request, raw_request)) as replies:
            async for reply in replies:
                for position, item in enumerate(reply if isinstance(reply, list) else [reply]):
                    found = collector.see(item, position if isinstance(reply, list) else item.get("index", 0))
                    if reader is not None:
                        await reader.see(item, found)
                yield reply
    finally:
        if engine is not None:
            engine.foreground.ended()
        if reader is not None:
            await reader.drop()


def _samples(request: GenerateReqInput) -> int:
    sampling = request.sampling_params
    first = sampling[0] if isinstance(sampling, list) and sampling else sampling
    return max(int((first or {}).get("n") or 1), 1) if isinstance(first, dict) or first is None else 1


class _Collector:
    """Joins the two halves of each report: retrieval from here, splice from the scheduler."""

    def __init__(self, service: MemoryService | None, reports: list[Report], *, samples: int) -> None:
        self._service = service
        self._reports = reports
        self._samples = samples  # answers to each prompt, which follow one another
        self._scheduler: dict[int, dict[str, Any]] = {}
        self.shown: dict[int, dict[str, Any]] = {}

    def see(self, item: Any, index: int) -> dict[str, Any] | None:
        """Take one reply; returns what the scheduler said with it, if anything."""
        meta = item.get("meta_info") if isinstance(item, dict) else None
        if meta is None:
            return None
        if (found := scheduler_report(meta)) is not None:
            self._scheduler[index] = found
        if not self._reports or self._service is None or not meta.get("finish_reason"):
            return found
        prompt = min(index // self._samples, len(self._reports) - 1)
        report = self._reports[prompt]
        meta[MEMORY_KEY] = self._service.finish(
            report,
            self._scheduler.get(index),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
        )
        self.shown[prompt] = meta[MEMORY_KEY]
        return found
