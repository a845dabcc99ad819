"""What a caller may take for done, and what not, after a call that did not simply succeed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import httpx
import pytest
from wire import SESSION, Step, Wire, refusal, script

from sgl_stateful import AsyncClient, Client
from sgl_stateful.client import (
    InvalidCall,
    SessionClosed,
    SessionExpired,
    SessionNotFound,
    StoreFull,
    TooMany,
    Unavailable,
    UnexpectedReply,
    Unreachable,
)

LOST = httpx.ReadError("reset")
NO_CONNECTION = [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow"), httpx.PoolTimeout("busy")]


def busy() -> httpx.Response:
    return refusal(503, "StoreBusy", retry_after="0")


def found(version: int = 2) -> httpx.Response:
    return httpx.Response(200, json=SESSION | {"version": version})


def append(steps: list[Step]) -> Any:
    """What comes of an append to version 2 where the server answers like this."""
    with script(found(), *steps).client(owner="ana", retries=0) as client:
        return client.sessions.get("s1").append("x", if_version=2)


# ---- was it sent? ----


@pytest.mark.parametrize("unsent", NO_CONNECTION, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("between", [[], [found()]], ids=["the look", "the second append"])
def test_an_append_that_was_sent_is_never_said_not_to_have_been(unsent: Exception, between: list[Step]) -> None:
    with pytest.raises(Unreachable) as caught:
        append([LOST, *between, unsent])
    assert caught.value.was_sent


@pytest.mark.parametrize(
    "answer",
    [refusal(503, "StoreUnreachable"), refusal(401, ""), httpx.Response(200, json=[]), refusal(429, "TooMany")],
    ids=["503", "401", "nonsense", "429"],
)
@pytest.mark.parametrize("between", [[], [found()]], ids=["the look", "the second append"])
def test_a_refusal_after_a_lost_append_does_not_stand_for_the_append(answer: Step, between: list[Step]) -> None:
    with pytest.raises(Unreachable) as caught:
        append([LOST, *between, answer])
    assert caught.value.was_sent


def test_a_session_that_is_gone_after_a_lost_append_is_gone() -> None:
    with pytest.raises(SessionExpired):
        append([LOST, found(), refusal(404, "SessionExpired")])


def test_an_append_without_a_connection_was_not_sent() -> None:
    with pytest.raises(Unreachable) as caught:
        append([NO_CONNECTION[0]])
    assert not caught.value.was_sent


def add_with_key(steps: list[Step]) -> None:
    with script(*steps).client(owner="ana", retries=len(steps) - 1) as client:
        client.facts.add("x", idempotency_key="k")


@pytest.mark.parametrize("first", [LOST, refusal(503, "StoreUnreachable", retry_after="0"), refusal(504, "")])
@pytest.mark.parametrize("unsent", NO_CONNECTION, ids=lambda error: type(error).__name__)
def test_a_call_that_was_sent_once_was_sent(first: Step, unsent: Exception) -> None:
    with pytest.raises(Unreachable, match=str(unsent)) as caught:
        add_with_key([first, unsent, unsent])
    assert caught.value.was_sent
    assert caught.value.earlier is not None


def test_a_call_that_never_found_a_server_was_not_sent() -> None:
    with pytest.raises(Unreachable) as caught:
        add_with_key([NO_CONNECTION[0], refusal(429, "TooMany", retry_after="0"), NO_CONNECTION[1]])
    assert (caught.value.was_sent, caught.value.earlier) == (False, None)


def test_a_refusal_says_that_an_attempt_before_it_may_have_been_done() -> None:
    with pytest.raises(StoreFull) as caught:
        add_with_key([LOST, NO_CONNECTION[0], refusal(507, "BlobStoreFull")])
    assert isinstance(caught.value.earlier, Unreachable)
    assert caught.value.earlier.was_sent
    with pytest.raises(UnexpectedReply) as unexpected:
        add_with_key([LOST, httpx.Response(200, json=[])])
    assert isinstance(unexpected.value.earlier, Unreachable)
    with pytest.raises(TooMany) as alone:
        add_with_key([refusal(429, "TooMany")])
    assert alone.value.earlier is None


def test_the_other_client_tells_the_same() -> None:
    async def main() -> None:
        async with script(LOST, NO_CONNECTION[0]).async_client(owner="ana", retries=1) as client:
            with pytest.raises(Unreachable) as caught:
                await client.facts.add("x", idempotency_key="k")
            assert caught.value.was_sent
        async with script(found(), LOST, NO_CONNECTION[0]).async_client(owner="ana", retries=0) as client:
            session = await client.sessions.get("s1")
            with pytest.raises(Unreachable) as caught:
                await session.append("x", if_version=2)
            assert caught.value.was_sent
        async with script(busy(), refusal(404, "SessionClosed")).async_client(owner="ana") as client:
            assert (await client.sessions.close("s1")).state == "closed"

    anyio.run(main)


# ---- closing ----


@pytest.mark.parametrize("kind", ["SessionClosed", "SessionNotFound"])
def test_a_session_whose_closing_was_told_by_the_second_attempt_is_closed(kind: str) -> None:
    wire = script(found(), busy(), refusal(404, kind), busy(), refusal(404, kind))
    with wire.client(owner="ana") as client:
        session = client.sessions.get("s1")
        closed = session.close()
        assert (closed.state, closed.id, closed.version) == ("closed", "s1", 2)
        assert session.info.state == "closed"
        unseen = client.sessions.close("s2")
        assert (unseen.state, unseen.id, unseen.owner, unseen.version) == ("closed", "s2", "ana", 0)
    assert [request.method for request in wire.requests] == ["GET", *["DELETE"] * 4]


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([refusal(404, "SessionClosed")], SessionClosed),
        ([httpx.ConnectError("refused"), refusal(404, "SessionClosed")], SessionClosed),
        ([refusal(429, "TooMany", retry_after="0"), refusal(404, "SessionNotFound")], SessionNotFound),
        ([busy(), refusal(404, "SessionExpired")], SessionExpired),
        ([refusal(503, "StoreUnreachable", retry_after="0")], Unavailable),
    ],
)
def test_what_has_not_been_closed_by_this_call_is_not_said_to_be(steps: list[Step], kind: type[Exception]) -> None:
    with script(*steps).client(owner="ana") as client, pytest.raises(kind):
        client.sessions.close("s1")


# ---- custom_params ----

CHAT = {"choices": [{"message": {"content": "Hi"}}]}
NAMED = {"session": {"id": "s1", "mode": "turn"}}


def test_custom_params_of_the_caller_go_beside_those_of_the_arguments() -> None:
    wire = Wire(lambda request: httpx.Response(200, json=CHAT))
    with wire.client(owner="ana") as client:
        client.chat("x", memory={"k": 1}, session="s1", custom_params={"mine": 3})
        client.chat("x", custom_params=NAMED | {"memory": {"owner": "bo"}})
        client.chat("x", memory={}, custom_params=None)
        client.chat("x", custom_params={})
    sent = [json.loads(request.content).get("custom_params") for request in wire.requests]
    memory, session = {"owner": "ana", "k": 1}, {"id": "s1", "mode": "query", "owner": "ana"}
    assert sent == [
        {"mine": 3, "memory": memory, "session": session},
        NAMED | {"memory": {"owner": "bo"}},
        {"memory": {"owner": "ana"}},
        None,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"session": "s1", "custom_params": NAMED}, "session"),
        ({"memory": {}, "custom_params": {"memory": {"owner": "bo"}}}, "memory"),
        ({"memory": {}, "custom_params": {"memory": None}}, "memory"),
        ({"custom_params": "session"}, "an object"),
        ({"mode": "turn"}, "which session"),
        ({"mode": "turn", "custom_params": NAMED}, "which session"),
    ],
)
def test_what_contradicts_itself_is_not_sent(arguments: dict[str, Any], message: str) -> None:
    wire = Wire(lambda request: httpx.Response(200, json=CHAT))
    with wire.client(owner="ana") as client, pytest.raises(InvalidCall, match=message):
        client.chat("x", **arguments)
    assert wire.requests == []


def test_a_turn_is_one_wherever_it_is_written() -> None:
    wire = script(LOST, LOST, httpx.Response(200, json=CHAT))
    with wire.client(owner="ana") as client:
        with pytest.raises(Unreachable):
            client.chat("x", custom_params=NAMED)
        assert len(wire.requests) == 1
        assert client.chat("x", custom_params={"session": {"id": "s1"}}).text == "Hi"
    assert len(wire.requests) == 3


# ---- what a session knows of itself ----


def test_a_session_never_goes_back_to_an_earlier_version() -> None:
    """Replies to several threads may be read in another order than the server wrote them in."""
    wire = script(found(2), found(4), found(3))
    with wire.client(owner="ana") as client:
        session = client.sessions.get("s1")
        session.reload()
        assert session.reload().version == 3
        assert (session.version, session.info.version) == (4, 4)


@pytest.mark.parametrize("by_chat", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_turn_tells_the_session_its_length(by_chat: bool, streamed: bool) -> None:
    told = {"id": "s1", "data_version": 1, "version": 2, "tokens": 40}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=SESSION | {"version": 1, "tokens": 0})
        if by_chat:
            message = {"delta" if streamed else "message": {"content": "Hi"}, "index": 0}
            body: dict[str, Any] = {"choices": [message], "session": told}
        else:
            body = {"text": "Hi", "output_ids": [5], "meta_info": {"session": told, "completion_tokens": 1}, **told}
        if not streamed:
            return httpx.Response(200, json=body)
        return httpx.Response(200, content=f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n")

    with Wire(answer).client(owner="ana") as client:
        session = client.sessions.get("s1")
        match (by_chat, streamed):
            case (True, True):
                client.chat("x", session=session, mode="turn", stream=True).read()
            case (True, False):
                client.chat("x", session=session, mode="turn")
            case (False, True):
                session.stream_turn("x").read()
            case _:
                session.turn("x")
        assert (session.version, session.info.version, session.info.tokens) == (2, 2, 40)
        assert session.info.raw == SESSION | {"version": 2, "tokens": 40}


def test_a_query_tells_nothing_of_the_sessions_length() -> None:
    """Its answer has the length of now beside the version of then."""
    told = {"id": "s1", "data_version": 2, "version": None, "tokens": 99}
    body = {"text": "Hi", "meta_info": {"session": told}, "data_version": 2}
    with script(found(), httpx.Response(200, json=body)).client(owner="ana") as client:
        session = client.sessions.get("s1")
        session.query("x")
        assert (session.version, session.info.tokens) == (2, 51)


def test_the_reason_of_a_pin_that_does_not_fit_is_its_numbers() -> None:
    numbers = {"needed": 90, "pinned": 2950, "budget": 3000, "owner_pinned": 400, "quota": 3000}
    demoted = SESSION | {"pin": {"state": "unpinned", "cells": 0, "reason": numbers}}
    with script(httpx.Response(200, json=demoted)).client(owner="ana") as client:
        assert client.sessions.get("s1").info.pin.reason == numbers


# ---- connections ----


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of an HTTP server that gives every GET the same session."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            content = json.dumps(SESSION).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    thread.join()
    http.server_close()


CLOSED: list[Callable[[Client, Any], Any]] = [
    lambda client, session: client.facts.get("f1"),
    lambda client, session: session.query("x"),
    lambda client, session: session.append("x", if_version=2),
    lambda client, session: session.close(),
    lambda client, session: session.stream("x").read(),
    lambda client, session: list(client.facts.list()),
]


@pytest.mark.parametrize("use", CLOSED)
def test_a_closed_client_says_so(server: str, use: Callable[[Client, Any], Any]) -> None:
    with Client(server, owner="ana") as client:
        session = client.sessions.get("s1")
    with pytest.raises(InvalidCall, match="client is closed"):
        use(client, session)


def test_a_closed_client_of_asyncio_says_so(server: str) -> None:
    async def main() -> None:
        async with AsyncClient(server, owner="ana") as client:
            session = await client.sessions.get("s1")
        with pytest.raises(InvalidCall, match="client is closed"):
            await session.query("x")
        with pytest.raises(InvalidCall, match="client is closed"):
            await session.stream("x").read()

    anyio.run(main)


def test_connections_are_given_up_before_the_server_does() -> None:
    from sglang.srt.environ import envs

    from sgl_stateful.session_wire import SessionServer

    with Client("http://server") as client:
        asyncs, shell = AsyncClient("http://server"), SessionServer("http://server", None)
        for http in (client._sender.http, asyncs._sender.http, shell._http):
            kept_s = http._transport._pool._keepalive_expiry  # type: ignore[attr-defined]  # httpx shows it nowhere
            assert kept_s <= envs.SGLANG_TIMEOUT_KEEP_ALIVE.default / 2
        anyio.run(asyncs.aclose)
        shell.close()
