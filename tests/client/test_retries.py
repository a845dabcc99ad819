"""What is sent again, how often, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
from wire import SESSION, Step, refusal, script

from sgl_stateful import Client
from sgl_stateful.client import (
    OutcomeUnknown,
    PinRefused,
    SessionNotFound,
    SessionVersionConflict,
    TooMany,
    TurnInProgress,
    Unavailable,
    Unreachable,
)
from sgl_stateful.client.call import Call
from sgl_stateful.client.retry import RetryPolicy
from sgl_stateful.client.senders import AsyncSender, Sender

FACT = {"id": "f1", "owner": "ana", "text": "x"}
ANSWER = {"text": "Bed 3.", "output_ids": [1], "meta_info": {}, "data_version": 2}
CHAT = {"choices": [{"message": {"content": "Hi"}}]}

Use = Callable[[Client], Any]


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


def session_of(client: Client) -> Any:
    return client.sessions.get("s1")


SAFE: list[tuple[Use, Any]] = [
    (lambda c: c.facts.get("f1"), FACT),
    (lambda c: c.facts.search("x"), {"hits": []}),
    (lambda c: c.facts.add("x", idempotency_key="k"), {"facts": [FACT | {"created": True}], "kv_pending": []}),
    (lambda c: list(c.facts.list()), {"facts": [], "next": None}),
    (lambda c: c.chat("x"), CHAT),
    (lambda c: c.chat("x", session="s1"), CHAT),
]
UNSAFE: list[Use] = [
    lambda c: c.facts.add("x"),
    lambda c: c.facts.update("f1", text="y"),
    lambda c: c.facts.supersede("f1", "y"),
    lambda c: c.facts.delete("f1"),
    lambda c: c.facts.purge("ana"),
    lambda c: c.chat("x", session="s1", mode="turn"),
    lambda c: c.chat("x", stream=True).read(),
    lambda c: c.sessions.create(),
    lambda c: c.sessions.close("s1"),
]
UNSAFE_IN_SESSION: list[Callable[[Any], Any]] = [
    lambda s: s.append("x"),
    lambda s: s.enqueue("x"),
    lambda s: s.turn("x"),
    lambda s: s.turn("x", if_version=2),
    lambda s: s.stream("x").read(),
    lambda s: s.stream_turn("x").read(),
    lambda s: s.fork(),
    lambda s: s.rewind(1),
]
LOST = [httpx.ReadError("reset"), httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("closed")]


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("use", "reply"), SAFE)
def test_what_changes_nothing_is_sent_again(use: Use, reply: Any, lost: Exception) -> None:
    wire = script(lost, refusal(503, "StoreUnreachable", retry_after="0"), httpx.Response(200, json=reply))
    with wire.client(owner="ana") as client:
        use(client)
    assert len(wire.requests) == 3
    assert len({(r.method, str(r.url), r.content) for r in wire.requests}) == 1


def test_a_query_is_sent_again_and_so_is_what_lists() -> None:
    wire = script(
        httpx.Response(200, json=SESSION), LOST[0], httpx.Response(502, text="bad"), httpx.Response(200, json=ANSWER)
    )
    with wire.client(owner="ana") as client:
        assert session_of(client).query("x").text == "Bed 3."
    assert len(wire.requests) == 4


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("use", UNSAFE)
def test_what_may_have_been_done_is_not(use: Use, lost: Exception) -> None:
    wire = script(lost)
    with wire.client(owner="ana") as client, pytest.raises(Unreachable) as caught:
        use(client)
    assert caught.value.was_sent
    assert caught.value.__cause__ is lost
    assert len(wire.requests) == 1


@pytest.mark.parametrize("use", UNSAFE_IN_SESSION)
def test_what_a_session_may_have_done_is_not(use: Callable[[Any], Any]) -> None:
    wire = script(httpx.Response(200, json=SESSION), LOST[2])
    with wire.client(owner="ana") as client, pytest.raises(Unreachable):
        use(session_of(client))
    assert len(wire.requests) == 2


@pytest.mark.parametrize("error", [refusal(502, ""), refusal(504, ""), refusal(500, "KeyError"), refusal(503, "")])
def test_nor_is_it_after_a_reply_that_leaves_it_open(error: httpx.Response) -> None:
    wire = script(error)
    with wire.client(owner="ana", retries=5) as client, pytest.raises(Exception, match="no"):
        client.facts.add("x")
    assert len(wire.requests) == 1


@pytest.mark.parametrize("kind", ["StoreUnreachable", "SessionNotSaved"])
def test_a_write_may_have_reached_a_store_that_was_lost(kind: str) -> None:
    wire = script(refusal(503, kind, retry_after="0"))
    with wire.client(owner="ana") as client, pytest.raises(Unavailable):
        client.facts.add("x")
    assert len(wire.requests) == 1


@pytest.mark.parametrize("use", UNSAFE)
def test_without_a_connection_nothing_was_sent(use: Use) -> None:
    wire = script(*[httpx.ConnectError("refused")] * 3)
    with wire.client(owner="ana", retries=2) as client, pytest.raises(Unreachable, match="refused") as caught:
        use(client)
    assert not caught.value.was_sent
    assert len(wire.requests) == 3


def test_what_was_refused_for_now_is_sent_again() -> None:
    done = httpx.Response(200, json={"session": SESSION, "version": 2, "appended_tokens": 1})
    busy, store = refusal(429, "AppendQueueFull", retry_after="0"), refusal(503, "StoreBusy", retry_after="0")
    wire = script(httpx.Response(200, json=SESSION), busy, store, done)
    with wire.client(owner="ana") as client:
        assert session_of(client).append("x").appended_tokens == 1


def test_what_waiting_does_not_mend_is_not() -> None:
    wire = script(httpx.Response(200, json=SESSION), refusal(409, "TurnInProgress", retry_after="1"))
    with wire.client(owner="ana") as client, pytest.raises(TurnInProgress):
        session_of(client).turn("x")
    assert len(wire.requests) == 2


def get(path: str) -> Call[Any]:
    return Call("GET", path, lambda reply: reply, is_repeatable=True)


def test_retry_after_is_honoured_until_the_deadline() -> None:
    wire = script(*[refusal(429, "TooMany", retry_after="4")] * 9)
    clock = Clock()
    http = wire.client()._sender.http
    sender = Sender(http, RetryPolicy(retries=9, deadline_s=10), clock=clock, sleep=clock.sleep)
    with pytest.raises(TooMany) as caught:
        sender.send(get("/x"))
    assert caught.value.retry_after_s == 4
    assert clock.slept == [4, 4]  # a third would begin after 12 s
    http.close()


def test_retry_after_may_be_a_date() -> None:
    wire = script(refusal(503, "x", retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), httpx.Response(200, json="done"))
    clock = Clock()
    with wire.client() as client:
        sender = Sender(client._sender.http, RetryPolicy(), clock=clock, sleep=clock.sleep)
        assert sender.send(get("/x")) == "done"
    assert clock.slept == [0]


def test_waits_grow_where_the_server_does_not_say() -> None:
    wire = script(*[httpx.ConnectError("refused")] * 6)
    clock = Clock()
    with wire.client() as client, pytest.raises(Unreachable):
        Sender(client._sender.http, RetryPolicy(5), clock=clock, sleep=clock.sleep).send(get("/x"))
    assert len(clock.slept) == 5
    for waited, most in zip(clock.slept, [0.2, 0.4, 0.8, 1.6, 3.2], strict=True):
        assert most / 2 <= waited <= most


def test_the_other_sender_waits_alike() -> None:
    async def main() -> None:
        clock = Clock()
        async with script(*[refusal(429, "TooMany", retry_after="4")] * 9).async_client() as client:
            policy = RetryPolicy(retries=9, deadline_s=10)
            sender = AsyncSender(client._sender.http, policy, clock=clock, sleep=clock.sleep_async)
            with pytest.raises(TooMany):
                await sender.send(get("/x"))
        assert clock.slept == [4, 4]
        async with script(httpx.ConnectError("no"), httpx.Response(200, json=FACT)).async_client() as client:
            assert (await client.facts.get("f1", owner="ana")).id == "f1"

    anyio.run(main)


def test_a_refused_pin_has_its_numbers() -> None:
    numbers = {"needed": 90, "pinned": 2950, "budget": 3000, "quota": 3000, "owner_pinned": 400}
    wire = script(refusal(429, "PinRefused", retry_after="2", **numbers))
    with wire.client(owner="ana", retries=0) as client, pytest.raises(PinRefused) as caught:
        client.sessions.create(reserve_tokens=90)
    error = caught.value
    assert (error.needed, error.pinned, error.budget, error.quota, error.owner_pinned) == (90, 2950, 3000, 3000, 400)
    assert error.retry_after_s == 2


APPENDED = httpx.Response(200, json={"session": SESSION | {"version": 3}, "version": 3, "appended_tokens": 24})
CONFLICT = refusal(409, "SessionVersionConflict")


def at_version(version: int) -> httpx.Response:
    return httpx.Response(200, json=SESSION | {"version": version})


def test_a_lost_append_is_looked_for_and_sent_again_where_it_has_not_happened() -> None:
    wire = script(at_version(2), LOST[0], at_version(2), APPENDED)
    with wire.client(owner="ana") as client:
        assert session_of(client).append("x", if_version=2).version == 3
    assert [r.method for r in wire.requests] == ["GET", "POST", "GET", "POST"]
    assert wire.requests[1].content == wire.requests[3].content


@pytest.mark.parametrize("after", [(at_version(3),), (at_version(2), CONFLICT, at_version(3))])
def test_a_lost_append_that_may_have_happened_is_neither_repeated_nor_claimed(after: tuple[Step, ...]) -> None:
    """Also where it lands between the look and the repetition, which the version then stops."""
    wire = script(at_version(2), LOST[2], *after)
    with wire.client(owner="ana") as client:
        session = session_of(client)
        with pytest.raises(OutcomeUnknown, match="version 2 to 3") as caught:
            session.append("x", if_version=2)
        assert session.version == 3
    assert caught.value.session.version == 3
    assert isinstance(caught.value.__cause__, Unreachable)


def test_an_append_that_is_lost_again_and_again_ends() -> None:
    wire = script(at_version(2), *[LOST[0], at_version(2)] * 3)
    with wire.client(owner="ana") as client, pytest.raises(Unreachable) as caught:
        session_of(client).append("x", if_version=2)
    assert type(caught.value) is Unreachable
    assert len(wire.requests) == 7


def test_a_conflict_without_a_loss_is_the_conflict() -> None:
    wire = script(at_version(2), CONFLICT)
    with wire.client(owner="ana") as client, pytest.raises(SessionVersionConflict):
        session_of(client).append("x", if_version=1)


def test_a_lost_append_to_a_session_that_is_gone_says_so() -> None:
    wire = script(at_version(2), LOST[0], refusal(404, "SessionExpired"))
    with wire.client(owner="ana") as client, pytest.raises(SessionNotFound):
        session_of(client).append("x", if_version=2)
