"""The routes of registered questions, and stored answers on SGLang's own door, without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flash_engine import said
from flash_http import application
from flash_setup import Setup, starting
from session_values import ANA, BO
from sglang.srt.managers.io_struct import GenerateReqInput
from words import ByteTokenizer

from sgl_stateful.sessions.content import Content
from sgl_stateful.sessions.params import SessionParams
from sgl_stateful.sessions.session import Session
from sgl_stateful.sglang_adapter import flash_serving
from sgl_stateful.sglang_adapter.flash_stream import FlashStream
from sgl_stateful.sglang_adapter.session_questions import ask
from sgl_stateful.sglang_adapter.session_start import STARTER

pytestmark = pytest.mark.anyio

GREEDY = {"temperature": 0, "max_new_tokens": 32}


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with starting(owner_limit=3) as made:
        yield made


@pytest.fixture
async def http(setup: Setup) -> AsyncIterator[httpx.AsyncClient]:
    app = application(setup, reader_s=0.05)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as opened:
        yield opened


@pytest.fixture
async def session(setup: Setup) -> Session:
    return await setup.open("data")


def at(session: Session, *more: str) -> str:
    return "/".join(["/v1/sessions", session.header.id, "flash", *more])


async def post(http: httpx.AsyncClient, session: Session, **fields: Any) -> httpx.Response:
    return await http.post(at(session), json={"owner": ANA, "name": "q", "text": "what", **fields})


def refused(reply: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert (error["code"], error["type"]) == (status, kind), error
    return error


# ---- the life of a registration ----


async def test_a_question_from_its_registration_to_its_end(
    http: httpx.AsyncClient, setup: Setup, session: Session
) -> None:
    reply = await post(http, session, text="Is bed {{bed}} dry?", data={"bed": 3}, max_tokens=8, priority=2)
    assert reply.status_code == 201, reply.text
    made = reply.json()
    assert (made["name"], made["text"], made["data"], made["state"]) == (
        "q",
        "Is bed {{bed}} dry?",
        {"bed": 3},
        "pending",
    )
    assert (made["max_tokens"], made["sampling_params"]) == (8, {"temperature": 0.0, "max_new_tokens": 8})
    await setup.settled()
    assert setup.engine.asked[0].token_ids == (ByteTokenizer.BOS, *b"data", *b"Is bed 3 dry?")
    shown = (await http.get(at(session, "q"), params={"owner": ANA})).json()
    assert (shown["state"], shown["answer"]["text"]) == ("fresh", said(setup.engine.asked[0].token_ids))
    [listed] = (await http.get(at(session), params={"owner": ANA})).json()["questions"]
    assert listed["answer"].pop("age_s") >= shown["answer"].pop("age_s")
    assert listed == shown
    answer = (await http.get(at(session, "q", "answer"), params={"owner": ANA})).json()
    assert (answer["text"], answer["served_from"]) == (shown["answer"]["text"], "flash")
    body = {"owner": ANA, "text": "Is bed {{bed}} dry?", "data": {"bed": 4}}
    updated = (await http.put(at(session, "q"), json=body)).json()
    assert (updated["data"], updated["answer"], updated["max_tokens"]) == ({"bed": 4}, None, 32)
    await setup.settled()
    assert setup.engine.asked[-1].token_ids[-13:] == (*b"Is bed 4 dry?",)
    gone = await http.delete(at(session, "q"), params={"owner": ANA})
    assert gone.json()["deleted"]["name"] == "q"
    refused(await http.get(at(session, "q"), params={"owner": ANA}), 404, "FlashNotFound")
    refused(await http.delete(at(session, "q"), params={"owner": ANA}), 404, "FlashNotFound")


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"text": ""}, 422, "EmptyFlashQuestion"),
        ({"text": None}, 422, "BadSessionRequest"),
        ({"text": "{{bed}}"}, 422, "FlashSlotMissing"),
        ({"data": {"bed": 3}}, 422, "FlashSlotMissing"),
        ({"choices": ["down", "double"]}, 422, "FlashChoicesAlike"),
        ({"choices": ["down"]}, 422, "BadFlashRequest"),
        ({"gate": {}}, 422, "BadFlashRequest"),
        ({"max_tokens": 0}, 422, "BadFlashRequest"),
        ({"max_tokens": 257}, 422, "BadFlashRequest"),
        ({"name": "a/b"}, 422, "BadFlashRequest"),
        ({"name": "events"}, 422, "BadFlashRequest"),
        ({"sampling_params": {"n": 2}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"max_new_tokens": 4}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"no_such": 1}}, 422, "BadSessionRequest"),
        ({"memory": {"owner": BO}}, 422, "BadFlashRequest"),
        ({"unknown": 1}, 422, "BadSessionRequest"),
        ({"owner": BO}, 404, "SessionNotFound"),
        ({"text": "x" * 600}, 413, "SessionTooLong"),
    ],
)
async def test_what_cannot_be_registered(
    http: httpx.AsyncClient, setup: Setup, session: Session, fields: dict[str, Any], status: int, kind: str
) -> None:
    refused(await post(http, session, **fields), status, kind)
    assert setup.flash.table.registrations.everyone() == []
    assert (session.state, session.version) == ("open", 1)


async def test_what_is_registered_already_and_what_does_not_fit(
    http: httpx.AsyncClient, setup: Setup, session: Session
) -> None:
    assert (await post(http, session)).status_code == 201
    refused(await post(http, session, text="else"), 409, "FlashExists")
    refused(await post(http, session, name="other"), 409, "FlashExists")
    for n in range(2):
        assert (await post(http, session, name=f"q{n}", text=f"word {n}")).status_code == 201
    error = refused(await post(http, session, name="more", text="more"), 429, "FlashLimitReached")
    numbers = [error[name] for name in ("registered", "limit", "owner_registered", "owner_limit")]
    assert numbers == [3, 100, 3, 3]
    missing = SimpleNamespace(header=SimpleNamespace(id="nowhere"))
    refused(await post(http, missing, name="more"), 404, "SessionNotFound")  # type: ignore[arg-type]
    refused(await http.put(at(session, "none"), json={"owner": ANA, "text": "a"}), 404, "FlashNotFound")
    refused(await http.put(at(session, "q0"), json={"owner": ANA, "text": "word 1"}), 409, "FlashExists")


async def test_stats_over_http(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    await post(http, session)
    await setup.settled()
    stats = (await http.get("/v1/flash/stats", params={"rows": 3})).json()
    assert (stats["registered"], [row["name"] for row in stats["rows"]]) == (1, ["q"])


# ---- the stream of changes ----


def events_of(text: str) -> list[dict[str, str]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]


async def test_the_stream_ends_with_its_session(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    setup.engine.foreground.began()
    await post(http, session)
    reading = asyncio.create_task(http.get(at(session, "events"), params={"owner": ANA}))
    await setup.until(lambda: setup.flash.followers.count(session.header.id) == 1)
    setup.engine.foreground.ended()
    await setup.settled()
    await setup.sessions.close(session.header.id, ANA)
    reply = await reading
    assert reply.headers["content-type"].startswith("text/event-stream")
    answer, ended = events_of(reply.text)
    assert (answer["event"], ended["event"]) == ("answer", "ended")
    assert json.loads(answer["data"])["data_version"] == 1
    assert setup.flash.followers.count(session.header.id) == 0


async def test_a_reader_comes_back_where_it_was(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    await post(http, session)
    await setup.settled()
    [first] = setup.flash.table.events.of(session.header.id).after(0)
    await setup.append(session, "more")
    await setup.settled()

    async def read(last: str) -> list[dict[str, str]]:
        return events_of(
            (await http.get(at(session, "events"), params={"owner": ANA}, headers={"Last-Event-ID": last})).text
        )

    readings = [asyncio.create_task(read(last)) for last in (first.id, "of-another-server")]
    await setup.until(lambda: setup.flash.followers.count(session.header.id) == 2)
    await setup.sessions.close(session.header.id, ANA)
    behind, anew = [await reading for reading in readings]
    assert [event["event"] for event in behind] == ["answer", "ended"]
    assert json.loads(behind[0]["data"])["data_version"] == 2
    assert [event["event"] for event in anew] == ["gap", "answer", "answer", "ended"]


async def test_a_reader_that_never_reads_is_let_go(setup: Setup, session: Session) -> None:
    follower = await setup.flash.follow(session.header.id, ANA, last_event_id=None)
    stream = FlashStream(setup.flash, follower, patience_s=0.01)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 2:
            await asyncio.Event().wait()  # its buffers are full

    async def receive() -> Any:
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert setup.flash.followers.count(session.header.id) == 0
    assert setup.flash.metrics.totals()["dropped_readers"] == 1
    assert session.state == "open"


async def test_a_reader_that_is_too_slow_is_told_so(setup: Setup, session: Session) -> None:
    follower = await setup.flash.follow(session.header.id, ANA, last_event_id=None)
    stream = FlashStream(setup.flash, follower, patience_s=5.0)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 2:  # meanwhile more happens than is kept
            for _ in range(10):
                setup.flash.table.events.tell(session.header.id, "error", name="q", message="x")

    async def receive() -> Any:
        await asyncio.Event().wait()

    async with asyncio.timeout(5):
        await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    [dropped] = events_of(b"".join(message.get("body", b"") for message in sent).decode())
    assert dropped["event"] == "dropped"
    assert json.loads(dropped["data"])["error"]["type"] == "FlashReaderTooSlow"


# ---- on SGLang's own door ----


async def served(setup: Setup, session: Session, text: str = "what", **more: Any) -> dict[str, Any] | None:
    """What `generate_request` would answer by itself."""
    fields = {
        name: more.pop(name) for name in ("fresh", "max_staleness_s", "if_version", "mode", "owner") if name in more
    }
    params = SessionParams(id=session.header.id, **fields)
    asked = await ask(setup.sessions, params, Content(text=text), None)
    sampling = more.pop("sampling_params", GREEDY)
    request = GenerateReqInput(input_ids=[*asked.head, *asked.tail], sampling_params=dict(sampling), **more)
    manager = SimpleNamespace(**{STARTER: SimpleNamespace(flash=setup.flash)})
    return await flash_serving.serve(manager, request, asked)


async def test_a_registered_question_is_answered_in_the_usual_shape(
    http: httpx.AsyncClient, setup: Setup, session: Session
) -> None:
    await post(http, session)
    await setup.settled()
    reply = await served(setup, session, rid="mine")
    assert reply is not None
    text = said(setup.engine.asked[0].token_ids)
    assert (reply["text"], bytes(reply["output_ids"]).decode()) == (text, text)
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("mine", 9, 8, 9)
    assert not any("logprobs" in name for name in meta)
    shown = meta["session"]
    assert (shown["id"], shown["data_version"], shown["version"]) == (session.header.id, 1, None)
    assert (shown["served_from"], shown["flash"]["name"], shown["flash"]["staleness_s"]) == ("flash", "q", 0.0)
    assert shown["flash"]["age_s"] >= 0
    assert len(setup.engine.asked) == 1
    assert setup.flash.metrics.totals()["hits"] == 1


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"fresh": True}, "fresh"),
        ({"return_logprob": True}, "unsupported"),
        ({"sampling_params": {**GREEDY, "custom_params": {"mine": 1}}}, "unsupported"),
        ({"image_data": ["x"]}, "unsupported"),
        ({"sampling_params": {**GREEDY, "max_new_tokens": 31}}, "sampling"),
        ({"sampling_params": {}}, "sampling"),
        ({"mode": "turn"}, None),
        ({"if_version": 2}, None),
        ({"text": "something else"}, None),
    ],
)
async def test_what_is_decoded_all_the_same(
    http: httpx.AsyncClient, setup: Setup, session: Session, more: dict[str, Any], cause: str | None
) -> None:
    await post(http, session)
    await setup.settled()
    assert await served(setup, session, **more) is None
    misses = {name for name, count in setup.flash.metrics.totals()["misses"].items() if count}
    assert misses == ({cause} if cause else set())
    assert await served(setup, session) is not None


async def test_staleness_is_the_callers_to_allow(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    await post(http, session)
    await setup.settled()
    setup.engine.foreground.began()
    await setup.append(session, "more")
    assert await served(setup, session) is None
    reply = await served(setup, session, max_staleness_s=60.0)
    assert reply is not None
    assert reply["meta_info"]["session"]["data_version"] == 1
    assert reply["meta_info"]["session"]["flash"]["staleness_s"] > 0


async def test_sampling_parameters_in_other_words(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    await post(http, session, max_tokens=128, sampling_params={"temperature": 0.5, "stop": "x"})
    await setup.settled()
    # As SGLang's chat route spells them out.
    sampling = {
        "temperature": 0.5,
        "max_new_tokens": 128,
        "stop": ["x"],
        "stop_token_ids": None,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "n": 1,
        "skip_special_tokens": True,
        "repetition_penalty": 1.0,
        "custom_params": {"session": {"id": session.header.id}},
    }
    assert await served(setup, session, sampling_params=sampling) is not None
