"""Memory on ``/v1/chat/completions``: where the facts go is decided while the messages are still messages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, NamedTuple

from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ChatCompletionResponse

from memstore import MemStoreError
from sgl_stateful.errors import BadMemoryRequest, BadSessionRequest, PinRefused, SessionError, StatefulError
from sgl_stateful.params import MEMORY_KEY, MemoryParams, parse_memory_params
from sgl_stateful.prompt import split_at_sentinel
from sgl_stateful.retrieval import Retrieved
from sgl_stateful.sessions.content import BEFORE, MARK, Content
from sgl_stateful.sessions.params import SESSION_KEY, parse_session_params

from .messages import mark_messages, text_of
from .prepared import reserve_tokens
from .requests import (
    READER,
    SHOWN,
    apply_prepared,
    refuse_unsupported,
    require_service,
    service_of,
)
from .session_questions import Asked
from .session_requests import ASKED, FAILED, Answered, AnswerReader
from .session_start import ready_sessions, started_sessions

_FOUND = "sgl_stateful_found"  # attribute of an HTTP request's state


class _Found(NamedTuple):
    """What was found before a prompt is converted, and what for."""

    memory: MemoryParams | None
    query: str | None
    retrieved: Retrieved | None
    is_first: bool  # the session has no content yet


_messages_type: Any = ChatCompletionRequest.model_fields["messages"].annotation
_MESSAGES: TypeAdapter[Any] = TypeAdapter(_messages_type)


async def around_handle(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None) -> Any:
    """AROUND ``OpenAIServingChat.handle_request``: find facts and session before the prompt is converted.

    Facts on threads of our own. A session that refuses is answered here: SGLang's handlers would make 400 of it.
    """
    custom = request.custom_params or {}
    if MEMORY_KEY not in custom and SESSION_KEY not in custom:
        return await original(serving, request, raw_request)
    manager = serving.tokenizer_manager
    try:
        # What is wrong with the parameters, or with the messages, the conversion says.
        session, memory, query = parse_session_params(custom), parse_memory_params(custom), _query_of(request)
        is_first = False
        if session is not None:
            is_first = (await (await ready_sessions(manager)).get(session.id, session.owner)).num_tokens == 0
        retrieved = None
        if memory is not None and query is not None and (service := service_of(manager)) is not None:
            await service.start()
            retrieved = await service.retrieve(memory, query)
        if raw_request is not None:
            setattr(raw_request.state, _FOUND, _Found(memory, query, retrieved, is_first))
        answered = await original(serving, request, raw_request)
    except SessionError as error:
        return _refusal(error)
    except BadMemoryRequest as error:
        return serving.create_error_response(str(error), err_type="BadRequest", status_code=400)
    except MemStoreError as error:
        return serving.create_error_response(str(error), err_type=type(error).__name__, status_code=503)
    except StatefulError as error:
        return serving.create_error_response(str(error), err_type=type(error).__name__, status_code=503)
    refused = getattr(raw_request.state, FAILED, None) if raw_request is not None else None
    is_error = getattr(answered, "status_code", 200) >= 400
    return _refusal(refused) if refused is not None and is_error else answered


def _refusal(error: SessionError) -> JSONResponse:
    body = {"object": "error", "message": str(error), "type": type(error).__name__, "param": None}
    if isinstance(error, PinRefused):
        body |= asdict(error.numbers)
    headers = None if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse({**body, "code": error.status_code}, status_code=error.status_code, headers=headers)


def _query_of(request: ChatCompletionRequest) -> str | None:
    """What a request searches for unless it says so; None where it has no user message."""
    messages = [message.model_dump() for message in request.messages or []]
    users = [message for message in messages if message.get("role") == "user"]
    return text_of(users[-1].get("content")) if users else None


def around_convert(
    original: Callable[..., tuple[Any, Any]], serving: Any, request: ChatCompletionRequest, raw_request: Any = None
) -> tuple[Any, Any]:
    """AROUND ``OpenAIServingChat._convert_to_internal_request``; SGLang runs it on a worker thread."""
    session, memory = parse_session_params(request.custom_params), parse_memory_params(request.custom_params)
    if session is None and memory is None:
        return original(serving, request, raw_request)
    manager = serving.tokenizer_manager
    if manager.model_config.is_multimodal:
        raise BadMemoryRequest("custom_params.memory and session are not supported with multimodal models")
    if request.input_ids is not None:
        raise BadMemoryRequest("custom_params.memory and session need messages; send input_ids to /generate instead")
    found: _Found | None = getattr(raw_request.state, _FOUND, None) if raw_request is not None else None
    messages, query = [message.model_dump() for message in request.messages], ""
    if memory is not None:
        messages, query = mark_messages(messages, memory.placement)
    retrieved = found.retrieved if found is not None and (found.memory, found.query) == (memory, query) else None
    is_behind = session is not None and not (found is not None and found.is_first)
    if is_behind:
        _check_behind(request)
        messages = [*BEFORE, *messages]
    # The messages alone are parsed again: other fields (a JSON schema, say) do not survive a round trip.
    marked = request.model_copy(update={"messages": _MESSAGES.validate_python(messages)})
    adapted, processed = original(serving, marked, raw_request)
    refuse_unsupported(adapted)
    text = _text(manager.tokenizer, adapted)
    if is_behind:
        text = started_sessions(manager).renderer.behind(text)
    head, tail = ("", text) if memory is None else _split(text)
    processed.messages = request.messages
    if session is not None:
        encode = manager.tokenizer.encode
        asked = Asked(
            session,
            encode(head, add_special_tokens=False) if head else (),
            encode(tail, add_special_tokens=False),
            is_chat=True,
            is_first=not is_behind,
            query=query,
            content=_as_asked(request),
            memory=memory,
            retrieved=retrieved,
        )
        setattr(adapted, ASKED, asked)
        return adapted, processed
    assert memory is not None, "neither"
    service = require_service(manager)
    prepared = service.prepare_ids(
        memory,
        head=service.encode(head),
        tail=service.encode(tail),
        query=query,
        reserve_tokens=reserve_tokens(adapted.sampling_params),
        retrieved=retrieved,
    )
    apply_prepared(adapted, prepared)
    return adapted, processed


def _as_asked(request: ChatCompletionRequest) -> Content:
    """The messages without the fields that a caller has left out."""
    return Content(messages=tuple(message.model_dump(exclude_none=True) for message in request.messages))


def _check_behind(request: ChatCompletionRequest) -> None:
    """Refuse what a template would put in front of a conversation, where the session stands already."""
    if request.tools:
        raise BadSessionRequest("a session cannot be combined with tools: put their description into its messages")
    if request.continue_final_message:
        raise BadSessionRequest("a session cannot be combined with continue_final_message")
    if any(MARK in text_of(message.model_dump().get("content")) for message in request.messages):
        raise BadSessionRequest("a message contains the server's own marker")


def _text(tokenizer: Any, adapted: Any) -> str:
    """The prompt as text, whether SGLang has tokenised it or not."""
    if adapted.text is not None:
        return str(adapted.text)
    text: str = tokenizer.decode(adapted.input_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if tokenizer.encode(text, add_special_tokens=False) != list(adapted.input_ids):
        raise BadMemoryRequest("this model's tokenizer cannot render its chat template as text and back")
    return text


def _split(text: str) -> tuple[str, str]:
    try:
        return split_at_sentinel(text)
    except ValueError as error:
        raise BadMemoryRequest(f"custom_params.memory cannot be placed: {error}") from error


def _shown(adapted: Any) -> dict[str, Any]:
    """What the response says beside the answer."""
    shown: dict[str, Any] = {}
    if memory := getattr(adapted, SHOWN, None):
        shown[MEMORY_KEY] = memory[0]
    reader: AnswerReader | Answered | None = getattr(adapted, READER, None)
    if reader is not None and reader.shown is not None:
        shown[SESSION_KEY] = reader.shown
    return shown


async def around_non_streaming(original: Callable[..., Any], serving: Any, adapted: Any, *args: Any) -> Any:
    """AROUND ``OpenAIServingChat._handle_non_streaming_request``: add ``memory`` and ``session`` to the response."""
    response = await original(serving, adapted, *args)
    shown = _shown(adapted)
    if not shown or not isinstance(response, ChatCompletionResponse):
        return response
    return JSONResponse({**json.loads(response.model_dump_json()), **shown})


async def around_stream(
    original: Callable[..., AsyncGenerator[str, None]], serving: Any, adapted: Any, *args: Any
) -> AsyncGenerator[str, None]:
    """AROUND ``OpenAIServingChat._generate_chat_stream``: add both to the chunk that ends a choice."""
    async with aclosing(original(serving, adapted, *args)) as chunks:
        async for chunk in chunks:
            shown = _shown(adapted)
            yield _with_shown(chunk, shown) if shown else chunk


def _with_shown(chunk: str, shown: dict[str, Any]) -> str:
    prefix = "data: "
    if not chunk.startswith(prefix + "{"):
        return chunk
    body = json.loads(chunk[len(prefix) :])
    if not any(choice.get("finish_reason") for choice in body.get("choices", [])):
        return chunk
    return f"{prefix}{json.dumps({**body, **shown}, ensure_ascii=False)}\n\n"
