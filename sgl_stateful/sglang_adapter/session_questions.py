"""What is asked of a session: rendered to go behind it, with a place for facts.

Put behind the session only when the request begins: until then nothing is held that a caller who goes away could
leave behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sgl_stateful.errors import BadMemoryRequest, BadSessionRequest
from sgl_stateful.params import MemoryParams
from sgl_stateful.prompt import SENTINEL, split_at_sentinel
from sgl_stateful.retrieval import Retrieved
from sgl_stateful.service import MemoryService
from sgl_stateful.sessions.content import Content, Renderer
from sgl_stateful.sessions.params import SessionParams
from sgl_stateful.sessions.service import SessionService

from .messages import mark_messages
from .prepared import MARKER


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to a session.

    Attributes
    ----------
    head, tail
        Token ids before and after the place of memory facts.
    is_first
        It was rendered for a session without content.
    query
        What facts are searched for unless the caller says so.
    content
        As it was asked; None where only its tokens are known.
    """

    params: SessionParams
    head: Sequence[int]
    tail: Sequence[int]
    is_chat: bool
    is_first: bool
    query: str = ""
    content: Content | None = None
    memory: MemoryParams | None = None
    retrieved: Retrieved | None = None


async def ask(sessions: SessionService, params: SessionParams, content: Content, memory: MemoryParams | None) -> Asked:
    """The question that ``content`` is.

    Raises
    ------
    SessionError, BadMemoryRequest, StoreError
    """
    is_first = (await sessions.get(params.id, params.owner)).num_tokens == 0
    head, tail, query = render_question(sessions.renderer, content, memory, is_first=is_first)
    return Asked(
        params,
        head,
        tail,
        is_chat=content.messages is not None,
        is_first=is_first,
        query=query,
        content=content,
        memory=memory,
    )


class Rendered(NamedTuple):
    """Token ids before and after the place of facts, and what facts are searched for."""

    head: Sequence[int]
    tail: Sequence[int]
    query: str


def render_question(renderer: Renderer, content: Content, memory: MemoryParams | None, *, is_first: bool) -> Rendered:
    """The token ids of a question behind what a session holds, or in one that holds nothing (``is_first``).

    Raises
    ------
    BadSessionRequest, BadMemoryRequest
    """
    if memory is None:
        return Rendered((), renderer.question(content, is_first=is_first), "")
    if content.input_ids is not None:
        return _ids_with_place(renderer.question(content, is_first=is_first), memory)
    if content.messages is not None:
        messages, query = mark_messages([dict(message) for message in content.messages], memory.placement)
        text, marker = renderer.question_text(messages, is_first=is_first), SENTINEL
    else:
        text, marker = content.text or "", MARKER
        query = text.replace(MARKER, "")
    head, tail = _split(text, marker)
    is_plain = content.messages is None
    return Rendered(renderer.encode(head, add_special_tokens=is_first and is_plain), renderer.encode(tail), query)


def _split(text: str, marker: str) -> tuple[str, str]:
    if marker == MARKER:
        before, found, after = text.partition(MARKER)
        return (before, after) if found else ("", text)
    try:
        return split_at_sentinel(text)
    except ValueError as error:
        raise BadMemoryRequest(f"memory cannot be placed: {error}") from error


def _ids_with_place(question: Sequence[int], memory: MemoryParams) -> Rendered:
    if memory.insert_at > len(question):
        raise BadSessionRequest(f"memory.insert_at is {memory.insert_at} of {len(question)} tokens")
    if memory.needs_query:
        raise BadSessionRequest("memory.query is needed with input_ids")
    return Rendered(question[: memory.insert_at], question[memory.insert_at :], "")


async def with_facts(service: MemoryService, asked: Asked) -> Asked:
    """The question, and what the memory has for it."""
    if asked.memory is None:
        return asked
    await service.start()
    return replace(asked, retrieved=await service.retrieve(asked.memory, asked.query))
