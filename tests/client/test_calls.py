"""What the client sends, and how it reads replies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
from wire import SESSION, Wire

from sgl_stateful import AsyncClient, Client
from sgl_stateful.client import InvalidCall, Session, SessionInfo, UnexpectedReply

FACT = {"id": "f1", "owner": "ana", "text": "My office is in Porto.", "version": 2, "state": "current"}
# Each names something that a path, a query or JSON could be broken by.
ODD = ["ana/../bo", "a?b#c", "%2F", "..", " ", "ü\u2028\u0000", '"}', "a&owner=bo"]


def test_importing_the_client_brings_neither_sglang_nor_torch() -> None:
    code = (
        "import sys, sgl_stateful; assert 'httpx' not in sys.modules; from sgl_stateful import Client, AsyncClient;"
        "print(sorted({'sglang', 'torch', 'pydantic', 'memstore'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("owner", ODD)
def test_odd_owners_arrive_as_they_are(owner: str) -> None:
    wire = Wire(lambda request: httpx.Response(200, json={"facts": [], "next": None}))
    with wire.client(owner=owner) as client:
        assert list(client.facts.list()) == []
    [request] = wire.requests
    assert dict(request.url.params) == {"owner": owner, "limit": "1000"}


@pytest.mark.parametrize("fact_id", ODD)
def test_odd_ids_are_one_part_of_the_path(fact_id: str) -> None:
    wire = Wire(lambda request: httpx.Response(200, json={"deleted": FACT}))
    with wire.client(owner="ana") as client:
        client.facts.delete(fact_id)
    [request] = wire.requests
    sent = request.url.raw_path.split(b"?")[0]
    assert sent.startswith(b"/v1/memory/facts/")
    assert sent.count(b"/") == 4
    assert httpx.URL("http://x" + sent.decode()).path == f"/v1/memory/facts/{fact_id}"


def test_an_empty_id_would_be_another_route() -> None:
    wire = Wire(lambda request: httpx.Response(200, json={}))
    with wire.client(owner="ana") as client:
        with pytest.raises(InvalidCall):
            client.facts.delete("")
        with pytest.raises(InvalidCall):
            client.facts.purge("")
        with pytest.raises(InvalidCall):
            client.sessions.close("")
    assert wire.requests == []


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.facts.add("\ud800"),
        lambda client: client.facts.get("\ud800"),
        lambda client: client.facts.add("x", metadata={"score": float("nan")}),
        lambda client: client.facts.add("x", metadata={"when": object()}),
        lambda client: client.sessions.create("x", text="y"),
        lambda client: Session(client._sender, SessionInfo.of(SESSION)).append(),
        lambda client: Session(client._sender, SessionInfo.of(SESSION)).query("x", sampling_params={"n": 2}),
    ],
)
def test_what_cannot_be_sent_is_said_before_it_is(call: Callable[[Client], Any]) -> None:
    wire = Wire(lambda request: httpx.Response(200, json={}))
    with wire.client(owner="ana") as client, pytest.raises(InvalidCall):
        call(client)
    assert wire.requests == []


def test_a_call_needs_an_owner_from_somewhere() -> None:
    wire = Wire(lambda request: httpx.Response(200, json=FACT))
    with wire.client() as client:
        with pytest.raises(InvalidCall, match="owner="):
            client.facts.get("f1")
        assert client.facts.get("f1", owner="bo").id == "f1"
    [request] = wire.requests
    assert request.url.params["owner"] == "bo"


def test_a_url_without_a_scheme_is_said_at_once() -> None:
    with pytest.raises(InvalidCall, match="http://"):
        Client("localhost:30000")


def test_fields_that_this_client_does_not_know_are_ignored_and_kept() -> None:
    newer = SESSION | {"colour": "red", "pin": SESSION["pin"] | {"tier": 2}}
    info = SessionInfo.of(newer)
    assert (info.id, info.version, info.pin.cells, info.ttl_s, info.window) == ("s1", 2, 51, 3600, None)
    assert info.raw["colour"] == "red"
    assert info.pin.raw["tier"] == 2
    assert info == SessionInfo.of(SESSION)


@pytest.mark.parametrize("reply", [b"<html>", b"[]", b"{}", b'{"id": "s1"}', b"null"])
def test_a_reply_of_something_else_is_unexpected(reply: bytes) -> None:
    wire = Wire(lambda request: httpx.Response(200, content=reply))
    with wire.client(owner="ana") as client, pytest.raises(UnexpectedReply):
        client.sessions.get("s1")


def test_an_update_sends_what_is_given_and_null_clears() -> None:
    wire = Wire(lambda request: httpx.Response(200, json={"fact": FACT, "kv_pending": ["f1"]}))
    with wire.client(owner="ana") as client:
        changed = client.facts.update("f1", speaker=None)
    assert json.loads(wire.requests[0].content) == {"owner": "ana", "wait": False, "speaker": None}
    assert (changed.fact.id, changed.is_encoded) == ("f1", False)


def test_lists_are_read_page_after_page() -> None:
    pages = {
        None: {"facts": [FACT, FACT | {"id": "f2"}], "next": 7},
        "7": {"facts": [FACT | {"id": "f3"}], "next": 9},
        "9": {"facts": [], "next": None},
    }
    wire = Wire(lambda request: httpx.Response(200, json=pages[request.url.params.get("after")]))
    with wire.client(owner="ana") as client:
        assert [fact.id for fact in client.facts.list()] == ["f1", "f2", "f3"]


def test_a_session_follows_the_versions_that_replies_name() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/v1/sessions":
                return httpx.Response(201, json=SESSION | {"version": 1})
            case "/v1/sessions/s1/append":
                grown = SESSION | {"version": 2, "tokens": 75}
                return httpx.Response(200, json={"session": grown, "version": 2, "appended_tokens": 24})
            case "/v1/sessions/s1/turn":
                reply = {"text": "Bed 3.", "output_ids": [1, 2], "meta_info": {}, "data_version": 2, "version": 3}
                return httpx.Response(200, json=reply)
        return httpx.Response(200, json={"closed": SESSION | {"version": 3, "state": "closed"}})

    wire = Wire(answer)
    with wire.client(owner="ana") as client:
        with client.sessions.create("You watch a greenhouse.", ttl_s=60) as session:
            assert session.append("bed 3: dry").appended_tokens == 24
            assert (session.version, session.info.tokens) == (2, 75)
            reply = session.turn("Which bed?", sampling_params={"max_new_tokens": 4}, memory={"k": 2})
            assert (reply.text, reply.data_version, session.version) == ("Bed 3.", 2, 3)
        assert session.info.state == "closed"
    bodies = [json.loads(request.content) for request in wire.requests[:3]]
    assert bodies == [
        {"owner": "ana", "messages": [{"role": "system", "content": "You watch a greenhouse."}], "ttl_s": 60},
        {"owner": "ana", "messages": [{"role": "user", "content": "bed 3: dry"}]},
        {
            "owner": "ana",
            "messages": [{"role": "user", "content": "Which bed?"}],
            "sampling_params": {"max_new_tokens": 4},
            "memory": {"owner": "ana", "k": 2},
        },
    ]
    assert wire.requests[3].method == "DELETE"


def test_leaving_a_session_that_has_expired_is_no_error() -> None:
    gone = {"error": {"message": "it has expired", "type": "SessionExpired", "code": 404}}
    wire = Wire(
        lambda request: (
            httpx.Response(404, json=gone) if request.method == "DELETE" else httpx.Response(201, json=SESSION)
        )
    )
    with wire.client(owner="ana") as client, client.sessions.create():
        pass
    assert [request.method for request in wire.requests] == ["POST", "DELETE"]


def test_both_clients_send_the_same() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/append"):
            return httpx.Response(200, json={"session": SESSION, "version": 2, "appended_tokens": 3})
        if request.url.path == "/v1/memory/search":
            return httpx.Response(200, json={"hits": [{"score": 0.5, "unboosted": 0.25, "fact": FACT}]})
        if request.url.path == "/v1/chat/completions":
            return httpx.Response(200, json={"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]})
        return httpx.Response(200, json=SESSION)

    blocking, waiting = Wire(answer), Wire(answer)
    with blocking.client(owner="ana", api_key="key") as client:
        session = client.sessions.get("s1")
        session.append(text="x", if_version=2)
        first = session.fork(version=1, pin=False)
        found = client.facts.search("office", where={"stream": "chat"})
        said = client.chat("Hello", session=session, memory={}, mode="turn", max_tokens=3)

    assert [(hit.score, hit.unboosted) for hit in found] == [(0.5, 0.25)]

    async def same() -> None:
        async with waiting.async_client(owner="ana", api_key="key") as client:
            session = await client.sessions.get("s1")
            await session.append(text="x", if_version=2)
            assert (await session.fork(version=1, pin=False)).info == first.info
            assert await client.facts.search("office", where={"stream": "chat"}) == found
            assert await client.chat("Hello", session=session, memory={}, mode="turn", max_tokens=3) == said

    anyio.run(same)
    sent = [(r.method, str(r.url), r.content, r.headers["authorization"]) for r in blocking.requests]
    assert sent == [(r.method, str(r.url), r.content, r.headers["authorization"]) for r in waiting.requests]
    assert sent[0][3] == "Bearer key"
    assert json.loads(sent[-1][2])["custom_params"] == {
        "memory": {"owner": "ana"},
        "session": {"id": "s1", "mode": "turn", "owner": "ana"},
    }


def test_both_clients_have_the_same_operations() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(AsyncClient) - {"aclose"} == public(Client) - {"close"}
