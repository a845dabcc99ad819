"""Registered questions of a session: ``session.flash``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import httpx

from sgl_stateful.client.call import Call, Steps, given, path, send
from sgl_stateful.client.content import Messages, content, memory_of
from sgl_stateful.client.errors import StreamCut, UnexpectedReply
from sgl_stateful.client.flash_results import FlashAnswer, FlashEvent, FlashQuestion, of_deleted
from sgl_stateful.client.named_events import NamedEventReader
from sgl_stateful.client.operation import AsyncSide, Operation, SyncSide
from sgl_stateful.client.reading import Unreadable, each, part
from sgl_stateful.client.replies import event_of, refused_by
from sgl_stateful.client.senders import AsyncSender, Sender

SESSIONS = "/v1/sessions"


class QuestionOptions(TypedDict, total=False):
    """How a question is asked; see ``docs/flash.md``."""

    data: Mapping[str, str | int | float]
    max_tokens: int
    sampling_params: Mapping[str, Any]
    choices: Sequence[str]
    min_interval_ms: int
    priority: int
    gate: Mapping[str, Any]
    audit_target: float
    semantic: Mapping[str, Any]
    memory: Mapping[str, Any]


class FlashOperations:
    """Operations on the questions of one session. Each raises the ``ClientError`` tree."""

    _session_id: str
    _owner: str

    def _at(self, *more: str) -> str:
        return SESSIONS + path(self._session_id, "flash", *more)

    def _question(
        self, messages: Messages | None, text: str | None, input_ids: Sequence[int] | None, options: QuestionOptions
    ) -> dict[str, Any]:
        more: dict[str, Any] = {**options}
        if "memory" in more:
            more["memory"] = memory_of(more["memory"], self._owner)
        return {"owner": self._owner, **content(messages, text, input_ids), **more}

    def _look(self, *more: str, **params: Any) -> dict[str, Any]:
        return {"path": self._at(*more), "params": {"owner": self._owner, **given(**params)}, "is_repeatable": True}

    @Operation
    def register(
        self,
        name: str,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[QuestionOptions],
    ) -> Steps[FlashQuestion]:
        """Register a question, or a template whose slots ``data`` fills; a string is one user message.

        Raises ``FlashExists``, ``FlashLimitReached``, ``BadFlashRequest``.
        """
        body = {"name": name, **self._question(messages, text, input_ids, options)}
        return (yield from send(Call("POST", self._at(), FlashQuestion.of, body=body)))

    @Operation
    def update(
        self,
        name: str,
        messages: Messages | None = None,
        *,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[QuestionOptions],
    ) -> Steps[FlashQuestion]:
        """Put another question under the name; what is not given is as by default, not as before."""
        body = self._question(messages, text, input_ids, options)
        return (yield from send(Call("PUT", self._at(name), FlashQuestion.of, body=body, is_repeatable=True)))

    @Operation
    def get(self, name: str) -> Steps[FlashQuestion]:
        """One question. Raises ``FlashNotFound``."""
        return (yield from send(Call("GET", read=FlashQuestion.of, **self._look(name))))

    @Operation
    def list(self) -> Steps[tuple[FlashQuestion, ...]]:
        """All of them, by name."""
        return (yield from send(Call("GET", read=_read_questions, **self._look())))

    @Operation
    def answer(self, name: str, *, max_staleness_s: float | None = None) -> Steps[FlashAnswer]:
        """The answer, if it holds now. Raises ``FlashNotReady``.

        ``max_staleness_s`` allows one of a version that was the session's newest so many seconds ago.
        """
        look = self._look(name, "answer", max_staleness_s=max_staleness_s)
        return (yield from send(Call("GET", read=FlashAnswer.of, **look)))

    @Operation
    def delete(self, name: str) -> Steps[FlashQuestion]:
        """End a registration; the question as it was."""
        params = {"owner": self._owner}
        return (yield from send(Call("DELETE", self._at(name), of_deleted, params=params)))

    def _follow(self, last_event_id: str | None) -> Call[None]:
        return Call("GET", read=lambda _: None, **self._look("events", last_event_id=last_event_id))


def _read_questions(reply: Any) -> tuple[FlashQuestion, ...]:
    return each(part(reply, "questions"), FlashQuestion.of)


def _events(reader: NamedEventReader, chunk: bytes) -> list[FlashEvent]:
    """The events that a chunk completes. Raises ``Refused`` where the server lets this reader go."""
    events = []
    try:
        for name in reader.feed(chunk):
            data = event_of(name.data)
            if name.kind == "dropped":
                error = part(data, "error")
                raise refused_by({"error": error}, int(part(error, "code")))
            events.append(FlashEvent(name.id, name.kind, data))
    except Unreadable as error:
        raise UnexpectedReply(str(error)) from error
    return events


class Flash(SyncSide, FlashOperations):
    """``Session.flash``."""

    def __init__(self, sender: Sender, session_id: str, owner: str) -> None:
        self._sender = sender
        self._session_id, self._owner = session_id, owner

    def follow(self, *, last_event_id: str | None = None) -> Generator[FlashEvent]:
        """Iterate what happens to the answers, until the session has ended.

        Raises ``FlashReaderTooSlow`` where changes came faster than they were read, and ``StreamCut``: go on with the
        ``id`` of the last event.
        """
        reader = NamedEventReader()
        with self._sender.open(self._follow(last_event_id)) as response:
            try:
                for chunk in response.iter_bytes():
                    yield from _events(reader, chunk)
            except httpx.RequestError as error:
                raise StreamCut(f"the stream was cut: {str(error) or type(error).__name__}", text="") from error


class AsyncFlash(AsyncSide, FlashOperations):
    """``AsyncSession.flash``."""

    def __init__(self, sender: AsyncSender, session_id: str, owner: str) -> None:
        self._sender = sender
        self._session_id, self._owner = session_id, owner

    async def follow(self, *, last_event_id: str | None = None) -> AsyncGenerator[FlashEvent]:
        """``Flash.follow``, with ``async for``."""
        reader = NamedEventReader()
        async with self._sender.open(self._follow(last_event_id)) as response:
            try:
                async for chunk in response.aiter_bytes():
                    for event in _events(reader, chunk):
                        yield event
            except httpx.RequestError as error:
                raise StreamCut(f"the stream was cut: {str(error) or type(error).__name__}", text="") from error
