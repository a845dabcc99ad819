"""Chat with memory, with a session, or with both: ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sgl_stateful.client.answers import ChatAnswer
from sgl_stateful.client.call import Call, given
from sgl_stateful.client.content import Messages, memory_of, messages_of
from sgl_stateful.client.errors import InvalidCall
from sgl_stateful.client.session import SessionOperations

Mode = Literal["query", "turn"]
SessionRef = str | SessionOperations[Any]


def custom_params(
    *,
    owner: str | None,
    memory: Mapping[str, Any] | None,
    session: SessionRef | None,
    mode: Mode = "query",
    if_version: int | None = None,
) -> dict[str, Any]:
    """What travels in ``custom_params`` of SGLang's own routes; empty where there is nothing to say."""
    named: dict[str, Any] | None = None
    if isinstance(session, SessionOperations):
        named = {"id": session.id, "mode": mode, "owner": session.owner, **given(if_version=if_version)}
    elif session is not None:
        named = {"id": session, "mode": mode, **given(owner=owner, if_version=if_version)}
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
    """The request; ``fields`` are further ones of its body.

    Raises
    ------
    InvalidCall
        ``mode`` is of no session, or ``fields["custom_params"]`` says what ``memory`` or ``session`` says too.
    """
    if mode == "turn" and session is None:
        raise InvalidCall("a turn of which session? mode belongs to session=")
    own = custom_params(owner=owner, memory=memory, session=session, mode=mode)
    others = dict(fields)
    params = _with_others(own, others.pop("custom_params", None))
    body = {"messages": messages_of(messages, role="user"), **others, **given(custom_params=params or None)}
    body |= {"stream": True} if is_streamed else {}
    is_repeatable = not is_streamed and not _is_turn(params.get("session"))

    def read(reply: Any) -> ChatAnswer:
        return seen_by(session, ChatAnswer.of(reply))

    return Call("POST", "/v1/chat/completions", read, body=body, is_repeatable=is_repeatable)


def seen_by(session: SessionRef | None, answer: ChatAnswer) -> ChatAnswer:
    """The answer, once the session that it is of has taken note of it."""
    if isinstance(session, SessionOperations):
        session.saw_turn(answer.session or {})
    return answer


def _with_others(own: dict[str, Any], given_by_caller: Any) -> dict[str, Any]:
    if given_by_caller is None:
        return own
    if not isinstance(given_by_caller, Mapping):
        raise InvalidCall(f"custom_params is an object, not {given_by_caller!r:.200}")
    if both := sorted(own.keys() & given_by_caller.keys()):
        raise InvalidCall(f"{' and '.join(both)}: give it as argument or in custom_params, not both")
    return {**given_by_caller, **own}


def _is_turn(session: Any) -> bool:
    return isinstance(session, Mapping) and session.get("mode", "query") != "query"
