"""Memory on ``/v1/chat/completions``: where the facts go is decided while the messages are still messages."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ChatCompletionResponse

from sgl_stateful.errors import BadMemoryRequest, StatefulError
from sgl_stateful.params import MEMORY_KEY, MemoryParams, parse_memory_params
from sgl_stateful.prompt import SENTINEL, Placement, split_at_sentinel
from sgl_stateful.retrieval import Retrieved

from .requests import SHOWN, apply_prepared, refuse_unsupported, require_service, reserve_tokens, service_of

_FOUND = "sgl_stateful_found"  # attribute of an HTTP request's state


class _Found(NamedTuple):
    """What was found before a prompt is converted, and what for."""

    params: MemoryParams
    query: str
    retrieved: Retrieved


_messages_type: Any = ChatCompletionRequest.model_fields["messages"].annotation
_MESSAGES: TypeAdapter[Any] = TypeAdapter(_messages_type)


def _text_of(content: Any) -> str:
    """The text of a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or [] if isinstance(part, dict) and part.get("type") == "text")


def mark_messages(messages: list[dict[str, Any]], placement: Placement) -> tuple[list[dict[str, Any]], str]:
    """Messages with the sentinel where the facts go, and the text of the last user message.

    Raises
    ------
    BadMemoryRequest
        There is no user message.
    """
    last_user = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), None)
    if last_user is None:
        raise BadMemoryRequest("custom_params.memory needs a user message")
    if any(SENTINEL in _text_of(message.get("content")) for message in messages):
        raise BadMemoryRequest("a message contains the server's own insertion marker")
    marked = [dict(message) for message in messages]
    query = _text_of(messages[last_user].get("content"))
    if placement == "tail":
        marked[last_user]["content"] = _put(marked[last_user].get("content"), at_end=False)
    elif marked[0].get("role") == "system":
        marked[0]["content"] = _put(marked[0].get("content"), at_end=True)
    else:
        marked.insert(0, {"role": "system", "content": SENTINEL})
    return marked, query


def _put(content: Any, *, at_end: bool) -> Any:
    if isinstance(content, list):
        part = {"type": "text", "text": SENTINEL}
        return [*content, part] if at_end else [part, *content]
    text = content or ""
    if not at_end:
        return f"{SENTINEL}{text}"
    return f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{SENTINEL}"


async def around_handle(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None) -> Any:
    """AROUND ``OpenAIServingChat.handle_request``: search before the prompt is converted, on threads of our own."""
    service = service_of(serving.tokenizer_manager)
    if service is None or MEMORY_KEY not in (request.custom_params or {}):
        return await original(serving, request, raw_request)
    try:
        await service.start()
        # What is wrong with the parameters, or with the messages, the conversion says.
        params, query = parse_memory_params(request.custom_params), _query_of(request)
        if params is not None and query is not None and raw_request is not None:
            found = _Found(params, query, await service.retrieve(params, query))
            setattr(raw_request.state, _FOUND, found)
    except BadMemoryRequest as error:
        return serving.create_error_response(str(error), err_type="BadRequest", status_code=400)
    except StatefulError as error:
        return serving.create_error_response(str(error), err_type=type(error).__name__, status_code=503)
    return await original(serving, request, raw_request)


def _query_of(request: ChatCompletionRequest) -> str | None:
    """What a request searches for unless it says so; None where it has no user message."""
    messages = [message.model_dump() for message in request.messages or []]
    users = [message for message in messages if message.get("role") == "user"]
    return _text_of(users[-1].get("content")) if users else None


def around_convert(
    original: Callable[..., tuple[Any, Any]], serving: Any, request: ChatCompletionRequest, raw_request: Any = None
) -> tuple[Any, Any]:
    """AROUND ``OpenAIServingChat._convert_to_internal_request``; SGLang runs it on a worker thread."""
    params = parse_memory_params(request.custom_params)
    if params is None:
        return original(serving, request, raw_request)
    manager = serving.tokenizer_manager
    service = require_service(manager)
    if manager.model_config.is_multimodal:
        raise BadMemoryRequest("custom_params.memory is not supported with multimodal models")
    if request.input_ids is not None:
        raise BadMemoryRequest("custom_params.memory needs messages; send input_ids to /generate instead")
    messages, query = mark_messages([message.model_dump() for message in request.messages], params.placement)
    # The messages alone are parsed again: other fields (a JSON schema, say) do not survive a round trip.
    marked = request.model_copy(update={"messages": _MESSAGES.validate_python(messages)})
    adapted, processed = original(serving, marked, raw_request)
    refuse_unsupported(adapted)
    head, tail = _split(manager.tokenizer, adapted)
    found: _Found | None = getattr(raw_request.state, _FOUND, None) if raw_request is not None else None
    prepared = service.prepare_ids(
        params,
        head=service.encode(head),
        tail=service.encode(tail),
        query=query,
        reserve_tokens=reserve_tokens(adapted.sampling_params),
        retrieved=found.retrieved if found is not None and found[:2] == (params, query) else None,
    )
    apply_prepared(adapted, prepared)
    processed.messages = request.messages
    return adapted, processed


def _split(tokenizer: Any, adapted: Any) -> tuple[str, str]:
    text = adapted.text
    if text is None:
        text = tokenizer.decode(adapted.input_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if tokenizer.encode(text, add_special_tokens=False) != list(adapted.input_ids):
            raise BadMemoryRequest("this model's tokenizer cannot render its chat template as text and back")
    try:
        return split_at_sentinel(text)
    except ValueError as error:
        raise BadMemoryRequest(f"custom_params.memory cannot be placed: {error}") from error


async def around_non_streaming(original: Callable[..., Any], serving: Any, adapted: Any, *args: Any) -> Any:
    """AROUND ``OpenAIServingChat._handle_non_streaming_request``: add ``memory`` to the response."""
    response = await original(serving, adapted, *args)
    shown = getattr(adapted, SHOWN, None)
    if not shown or not isinstance(response, ChatCompletionResponse):
        return response
    return JSONResponse({**json.loads(response.model_dump_json()), MEMORY_KEY: shown[0]})


async def around_stream(
    original: Callable[..., AsyncGenerator[str, None]], serving: Any, adapted: Any, *args: Any
) -> AsyncGenerator[str, None]:
    """AROUND ``OpenAIServingChat._generate_chat_stream``: add ``memory`` to the chunk that ends a choice."""
    async with aclosing(original(serving, adapted, *args)) as chunks:
        async for chunk in chunks:
            shown = getattr(adapted, SHOWN, None)
            yield _with_memory(chunk, shown[0]) if shown else chunk


def _with_memory(chunk: str, shown: dict[str, Any]) -> str:
    prefix = "data: "
    if not chunk.startswith(prefix + "{"):
        return chunk
    body = json.loads(chunk[len(prefix) :])
    if not any(choice.get("finish_reason") for choice in body.get("choices", [])):
        return chunk
    return f"{prefix}{json.dumps({**body, MEMORY_KEY: shown}, ensure_ascii=False)}\n\n"
