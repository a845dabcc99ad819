"""Chat with memory, with a session, or with both: ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sgl_stateful.client.answers import ChatAnswer
from sgl_stateful.client.call import Call, given
from sgl_stateful.client.content import Messages, memory_of, messages_of
from sgl_stateful.client.session import SessionOperations

Mode = Literal["query", "turn"]
SessionRef = str | SessionOperations[Any]


def custom_params(
    *, owner: str | None, memory: Mapping[str, Any] | None, session: SessionRef | None, mode: Mode = "query"
) -> dict[str, Any]:
    """What travels in ``custom_params`` of SGLang's own routes; empty where there is nothing to say."""
    named = None
    if isinstance(session, SessionOperations):
        named = {"id": session.id, "mode": mode, "owner": session.owner}
    elif session is not None:
        named = {"id": session, "mode": mode, **given(owner=owner)}
    return given(memory=memory_of(memory, owner), session=named)


def chat_call(
    messages: Messages,
    *,
    owner: str | None,
    memory: Mapping[str, Any] | None,
    session: SessionRef | None,
    mode: Mode,
    is_streamed: bool,
    fields: Mapping[str, Any],
) -> Call[ChatAnswer]:
    """The request; ``fields`` are further ones of its body."""
    params = custom_params(owner=owner, memory=memory, session=session, mode=mode)
    body = {"messages": messages_of(messages, role="user"), **given(custom_params=params or None), **fields}
    body |= {"stream": True} if is_streamed else {}
    changes_nothing = session is None or mode == "query"
    is_repeatable = changes_nothing and not is_streamed
    return Call("POST", "/v1/chat/completions", ChatAnswer.of, body=body, is_repeatable=is_repeatable)
