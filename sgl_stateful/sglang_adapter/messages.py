"""Where facts go among the messages of a conversation."""

from __future__ import annotations

from typing import Any

from sgl_stateful.errors import BadMemoryRequest
from sgl_stateful.prompt import SENTINEL, Placement


def text_of(content: Any) -> str:
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
    if any(SENTINEL in text_of(message.get("content")) for message in messages):
        raise BadMemoryRequest("a message contains the server's own insertion marker")
    marked = [dict(message) for message in messages]
    query = text_of(messages[last_user].get("content"))
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
