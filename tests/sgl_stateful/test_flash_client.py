"""The client's helpers and the commands of registered questions, on the routes themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from flash_engine import said
from flash_http import application
from flash_setup import Setup, starting
from redis_server import free_port
from session_values import ANA
from typer.testing import CliRunner, Result
from words import ByteTokenizer

from sgl_stateful import AsyncClient, Client, cli
from sgl_stateful.client import (
    FlashChoicesAlike,
    FlashExists,
    FlashNotFound,
    FlashNotReady,
    FlashReaderTooSlow,
    FlashSlotMissing,
    StreamCut,
)
from sgl_stateful.client.flash import Flash
from sgl_stateful.client.named_events import NamedEvent, NamedEventReader

pytestmark = pytest.mark.anyio


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with starting() as made:
        yield made


@pytest.fixture
async def client(setup: Setup) -> AsyncIterator[AsyncClient]:
    transport = httpx.ASGITransport(application(setup))
    async with AsyncClient("http://server", owner=ANA, transport=transport) as opened:
        yield opened


async def test_a_question_by_the_client(setup: Setup, client: AsyncClient) -> None:
    async with await client.sessions.create(text="data") as session:
        made = await session.flash.register("q", text="Is bed {{bed}} dry?", data={"bed": 3}, max_tokens=8)
        assert (made.name, made.state, made.owner, made.max_tokens) == ("q", "pending", ANA, 8)
        await setup.settled()
        shown = await session.flash.get("q")
        assert (shown.state, shown.evaluations) == ("fresh", 1)
        answer = await session.flash.answer("q")
        assert shown.answer is not None
        assert answer.text == shown.answer.text == said((ByteTokenizer.BOS, *b"data", *b"Is bed 3 dry?"))
        assert (answer.data_version, answer.by, answer.staleness_s) == (1, "decoding", 0.0)
        await session.flash.update("q", text="Is bed {{bed}} dry?", data={"bed": 4})
        await setup.settled()
        assert (await session.flash.answer("q")).text == said((ByteTokenizer.BOS, *b"data", *b"Is bed 4 dry?"))
        setup.engine.foreground.began()
        await session.append(text="more")
        with pytest.raises(FlashNotReady):
            await session.flash.answer("q")
        assert (await session.flash.answer("q", max_staleness_s=60)).data_version == 1
        assert [question.name for question in await session.flash.list()] == ["q"]
        assert (await session.flash.delete("q")).name == "q"
        assert await session.flash.list() == ()


async def test_refusals_have_names_of_their_own(client: AsyncClient) -> None:
    async with await client.sessions.create(text="data") as session:
        await session.flash.register("q", text="what")
        with pytest.raises(FlashExists):
            await session.flash.register("q", text="else")
        with pytest.raises(FlashNotFound):
            await session.flash.get("none")
        with pytest.raises(FlashSlotMissing):
            await session.flash.register("r", text="{{bed}}")
        with pytest.raises(FlashChoicesAlike):
            await session.flash.register("r", text="r", choices=["down", "double"])


async def test_following_ends_with_the_session(setup: Setup, client: AsyncClient) -> None:
    session = await client.sessions.create(text="data")

    async def read() -> list[str]:
        return [event.kind async for event in session.flash.follow()]

    reading = asyncio.create_task(read())
    await setup.until(lambda: setup.flash.followers.count(session.id))
    await session.flash.register("q", text="what")
    await setup.settled()
    await session.close()
    assert await reading == ["answer", "ended"]


def test_events_are_cut_from_pieces_of_any_size() -> None:
    body = b': following\n\nid: a-1\nevent: answer\ndata: {"text": "\xc3\xa9"}\n\n: \n\nevent: gap\ndata: {}\n\n'
    right = [NamedEvent("a-1", "answer", b'{"text": "\xc3\xa9"}'), NamedEvent("", "gap", b"{}")]
    for size in range(1, len(body) + 1):
        reader = NamedEventReader()
        pieces = [body[start : start + size] for start in range(0, len(body), size)]
        assert [event for piece in pieces for event in reader.feed(piece)] == right


def stream(body: bytes) -> Client:
    return Client(
        "http://server", owner=ANA, transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    )


def test_a_reader_that_is_let_go_is_told_by_name() -> None:
    error = {"message": "too slow", "type": "FlashReaderTooSlow", "code": 429}
    body = f"event: dropped\ndata: {json.dumps({'error': error})}\n\n".encode()
    with stream(body) as client, pytest.raises(FlashReaderTooSlow):
        list(Flash(client._sender, "s1", ANA).follow())


def test_a_stream_that_breaks_off() -> None:
    class Broken(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield b"id: a-1\nevent: answer\ndata: {}\n\n"
            raise httpx.ReadError("gone")

    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Broken()))
    with Client("http://server", owner=ANA, transport=transport) as client:
        events = Flash(client._sender, "s1", ANA).follow(last_event_id="a-0")
        assert next(events).id == "a-1"
        with pytest.raises(StreamCut):
            next(events)


# ---- commands ----


@asynccontextmanager
async def listening(setup: Setup) -> AsyncIterator[str]:
    """The application on a port of its own, in this loop."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(application(setup), port=port, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await setup.until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def run(url: str, *arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli.app, ["flash", *arguments, "--url", url])


async def test_questions_are_listed_and_shown(setup: Setup) -> None:
    session, other = await setup.open(), await setup.open("else", owner="bo")
    asked = await setup.register(session)
    await setup.register(other, name="r")
    await setup.settled()
    setup.found(session, asked)
    text = said((ByteTokenizer.BOS, *b"data", *b"what"))
    async with listening(setup) as url:
        listed = await run(url, "list")
        names, *rows = [line.split("\t") for line in listed.stdout.splitlines()]
        assert [row[names.index("name")] for row in rows] == ["q", "r"]
        assert [row[names.index("hits")] for row in rows] == ["1", "0"]
        assert rows[0][names.index("answer.text")] == text
        assert json.loads((await run(url, "list", "--owner", "bo", "--json")).stdout)[0]["name"] == "r"
        of_one = await run(url, "list", session.header.id)
        assert [line.split("\t")[1] for line in of_one.stdout.splitlines()[1:]] == ["q"]
        shown = json.loads((await run(url, "show", session.header.id, "q", "--json")).stdout)
        assert (shown["name"], shown["answer"]["text"]) == ("q", text)
        plain = await run(url, "show", session.header.id, "q", "--owner", ANA)
        assert text in plain.stdout
        top = await run(url, "top", "--once")
        assert "hits 1" in top.stdout
        assert "stored 2" in top.stdout
        counted = json.loads((await run(url, "top", "--once", "--json")).stdout)
        assert (counted["registered"], counted["totals"]["hits"]) == (2, 1)


async def test_what_goes_wrong_is_one_line_and_a_code(setup: Setup) -> None:
    session = await setup.open()
    async with listening(setup) as url:
        unknown = await run(url, "show", session.header.id, "none", "--owner", ANA)
        assert (unknown.exit_code, unknown.stderr.count("\n")) == (1, 1)
        assert "FlashNotFound" in unknown.stderr
        for owner in ([], ["--owner", ANA]):  # it would name another route than a session's
            assert (await run(url, "show", "..", "q", *owner)).exit_code == 2
            assert (await run(url, "list", "..", *owner)).exit_code == 2
    assert (await run("http://127.0.0.1:1", "list")).exit_code == 3
