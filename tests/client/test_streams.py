"""Answers in pieces: put together, cut in the middle, and refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import httpx
import pytest
from wire import SESSION, Wire

from sgl_stateful.client import (
    Answer,
    ClientError,
    Refused,
    Session,
    SessionTooLong,
    StreamCut,
    UnexpectedReply,
    Unreachable,
)

# What str.splitlines takes for the end of a line, and a character of more than one byte.
TEXT = "Bed\u2028 3\x85 \x0b\x1c wants ü!"
PIECES = [TEXT[:5], TEXT[5:9], TEXT[9:]]
DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def generated(text: str, ids: list[int], completion: int, **more: Any) -> bytes:
    meta = {"completion_tokens": completion, "finish_reason": None} | more.pop("meta_info", {})
    return event({"text": text, "output_ids": ids, "meta_info": meta, **more})


def cumulative() -> list[bytes]:
    parts = [generated(TEXT[:5], [1], 1), generated(TEXT[:9], [1, 2], 2)]
    last = generated(TEXT, [1, 2, 3], 3, data_version=2, version=3, meta_info={"session": {"id": "s1", "version": 3}})
    return [*parts, last, DONE]


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Bytes in these chunks, and then perhaps a failure."""

    def __init__(self, chunks: list[bytes], failure: Exception | None = None) -> None:
        self._chunks = chunks
        self._failure = failure
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        if self._failure is not None:
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.is_closed = True

    async def aclose(self) -> None:
        self.is_closed = True


def serving(body: Body) -> Wire:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=SESSION)
        return httpx.Response(200, stream=body, headers={"Content-Type": "text/event-stream"})

    return Wire(answer)


def session_on(wire: Wire) -> Session:
    return wire.client(owner="ana").sessions.get("s1")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_pieces_join_to_the_answer_however_the_bytes_are_cut(size: int) -> None:
    whole = b"".join(cumulative())
    body = Body([whole[i : i + size] for i in range(0, len(whole), size)])
    wire = serving(body)
    session = session_on(wire)
    stream = session.stream_turn("Which bed?")
    assert list(stream) == PIECES
    assert stream.result == Answer(
        text=TEXT,
        output_ids=(1, 2, 3),
        data_version=2,
        version=3,
        meta_info={"completion_tokens": 3, "finish_reason": None, "session": {"id": "s1", "version": 3}},
    )
    assert session.version == 3
    assert json.loads(wire.requests[-1].content)["stream"] is True
    assert body.is_closed


def test_events_that_hold_only_what_is_new_are_understood() -> None:
    body = Body(
        [generated("Bed", [1], 1), generated(" 3", [2], 2), generated(" 3", [3], 3), generated("", [], 3), DONE]
    )
    answer = session_on(serving(body)).stream("x").read()
    assert (answer.text, answer.output_ids) == ("Bed 3 3", (1, 2, 3))


def test_comments_and_what_follows_the_end_are_passed_over() -> None:
    body = Body([b": alive\n\n\n", *cumulative(), event({"nonsense": 1})])
    assert session_on(serving(body)).stream("x").read().text == TEXT


@pytest.mark.parametrize("failure", [httpx.ReadError("reset"), httpx.RemoteProtocolError("incomplete"), None])
def test_a_stream_that_is_cut_has_what_arrived_and_is_not_repeated(failure: Exception | None) -> None:
    second = cumulative()[1]
    wire = serving(Body([cumulative()[0], second, cumulative()[2][:20]], failure))
    stream = session_on(wire).stream("x")
    pieces = []
    with pytest.raises(StreamCut) as caught:
        pieces.extend(piece for piece in stream)
    assert caught.value.text == stream.text == TEXT[:9]
    assert isinstance(caught.value, Unreachable)
    assert len(wire.requests) == 2
    with pytest.raises(ClientError, match="read to its end"):
        _ = stream.result


def test_leaving_a_stream_closes_it() -> None:
    body = Body(cumulative())
    with session_on(serving(body)).stream("x") as stream:
        assert next(stream) == PIECES[0]
        assert not body.is_closed
    assert body.is_closed
    with pytest.raises(ClientError):
        _ = stream.result


def test_an_error_in_the_middle_is_that_error() -> None:
    error = {"error": {"message": "no room", "type": "SessionTooLong", "code": 413}}
    with pytest.raises(SessionTooLong, match="no room"):
        session_on(serving(Body([cumulative()[0], event(error), DONE]))).stream("x").read()


def test_an_abort_is_an_error() -> None:
    reason = {"type": "abort", "message": "out of memory", "status_code": 503}
    body = Body([generated("", [], 0, meta_info={"finish_reason": reason}), DONE])
    with pytest.raises(Refused, match="out of memory") as caught:
        session_on(serving(body)).stream("x").read()
    assert caught.value.status == 503


@pytest.mark.parametrize(
    "chunk", [b"data: {\n\n", b"data: []\n\n", b'data: {"text": "x"}\n\n', b"data: \xff\n\n", DONE]
)
def test_events_of_something_else_are_unexpected(chunk: bytes) -> None:
    with pytest.raises(UnexpectedReply):
        session_on(serving(Body([chunk, DONE]))).stream("x").read()


def test_a_refusal_before_the_stream_is_read_whole() -> None:
    error = {"error": {"message": "gone", "type": "SessionClosed", "code": 404}}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=SESSION) if request.method == "GET" else httpx.Response(404, json=error)

    with pytest.raises(Refused, match="gone"):
        session_on(Wire(answer)).stream("x").read()


def chunk(choice: dict[str, Any] | None, **more: Any) -> bytes:
    return event({"choices": [] if choice is None else [{"index": 0, **choice}], **more})


CHAT = [
    chunk({"delta": {"role": "assistant", "content": ""}}),
    chunk({"delta": {"content": "Bed"}}),
    chunk({"delta": {"content": " 3"}}),
    chunk({"delta": {"content": None}, "finish_reason": "stop"}, memory={"tier": "spliced"}),
    chunk(None, usage={"total_tokens": 9}),
    DONE,
]


def test_chat_in_pieces() -> None:
    with serving(Body(CHAT)).client() as client, client.chat("x", stream=True) as stream:
        assert list(stream) == ["Bed", " 3"]
    answer = stream.result
    assert (answer.text, answer.finish_reason, answer.memory) == ("Bed 3", "stop", {"tier": "spliced"})
    assert answer.usage == {"total_tokens": 9}


def test_the_other_stream_reads_alike() -> None:
    async def main() -> None:
        async with serving(Body(CHAT)).async_client() as client:
            stream = client.chat("x", stream=True)
            assert [piece async for piece in stream] == ["Bed", " 3"]
            assert stream.result.memory == {"tier": "spliced"}
        async with serving(Body(cumulative())).async_client(owner="ana") as client:
            session = await client.sessions.get("s1")
            assert (await session.stream_turn("x").read()).text == TEXT
            assert session.version == 3
        cut = Body(cumulative()[:2], httpx.ReadError("reset"))
        async with serving(cut).async_client(owner="ana") as client:
            session = await client.sessions.get("s1")
            with pytest.raises(StreamCut) as caught:
                await session.stream("x").read()
            assert caught.value.text == TEXT[:9]
        left = Body(cumulative())
        async with serving(left).async_client(owner="ana") as client:
            session = await client.sessions.get("s1")
            async with session.stream("x") as stream:
                async for piece in stream:
                    assert piece == PIECES[0]
                    break
            assert left.is_closed

    anyio.run(main)
