"""What goes into a session, a question, and ``custom_params``, from the arguments of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgl_stateful.client.call import given
from sgl_stateful.client.errors import InvalidCall

Message = Mapping[str, Any]
Messages = str | Sequence[Message]


def messages_of(messages: Messages, *, role: str) -> list[dict[str, Any]]:
    """Chat messages; a string is one of ``role``."""
    if isinstance(messages, str):
        return [{"role": role, "content": messages}]
    return [dict(message) for message in messages]


def content(
    messages: Messages | None, text: str | None, input_ids: Sequence[int] | None, *, role: str = "user"
) -> dict[str, Any]:
    """The one of the three fields that is given.

    Raises
    ------
    InvalidCall
        None is, or more than one.
    """
    fields = given(
        messages=None if messages is None else messages_of(messages, role=role),
        text=text,
        input_ids=None if input_ids is None else [int(token) for token in input_ids],
    )
    if len(fields) != 1:
        raise InvalidCall(f"give exactly one of messages, text and input_ids, not {', '.join(fields) or 'none'}")
    return fields


def owner_of(owner: str | None, default: str | None) -> str:
    """The owner of a call.

    Raises
    ------
    InvalidCall
        Neither the call nor the client names one.
    """
    found = default if owner is None else owner
    if found is None:
        raise InvalidCall("whose? give owner=, here or to the client")
    return found


def memory_of(memory: Mapping[str, Any] | None, owner: str | None) -> dict[str, Any] | None:
    """The field ``memory``, of the caller's owner unless it names another."""
    if memory is None:
        return None
    return {**given(owner=owner), **memory}
