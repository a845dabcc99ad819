"""The client's helpers and the commands of entries, on the routes themselves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from flash_engine import said
from flash_http import application
from flash_setup import Setup, starting
from redis_server import free_port
from session_values import ANA, BO
from typer.testing import CliRunner, Result
from words import ByteTokenizer

from sgl_stateful import AsyncClient, cli
from sgl_stateful.client import FlashExists, FlashNotFound

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


async def test_an_entry_by_the_client(setup: Setup, client: AsyncClient) -> None:
    async with await client.sessions.create(text="data") as session:
        made = await session.entries.register("next", text="and", max_tokens=6, until=["<end>", 7], priority=3)
        assert (made.name, made.state, made.owner, made.max_tokens, made.priority) == ("next", "pending", ANA, 6, 3)
        assert (made.ahead, made.raw["until"]) == (None, ["<end>", 7])
        with pytest.raises(FlashExists):
            await session.entries.register("next", text="else")
        await setup.settled()
        shown = await session.entries.get("next")
        assert (shown.state, shown.evaluations, shown.cells) == ("fresh", 1, 3 + 6)
        assert shown.ahead is not None
        text = said((ByteTokenizer.BOS, *b"data", *b"and"))[:6]
        assert (shown.ahead.text, shown.ahead.output_ids, shown.ahead.tokens) == (text, tuple(text.encode()), 6)
        assert (shown.ahead.data_version, shown.ahead.ends, shown.ahead.by) == (1, None, "decoding")
        await session.entries.update("next", text="but", max_tokens=2)
        await setup.settled()
        [listed] = await session.entries.list()
        assert listed.ahead is not None
        assert listed.ahead.text == said((ByteTokenizer.BOS, *b"data", *b"but"))[:2]
        assert listed.ahead.ends == "length"
        assert (await session.entries.delete("next")).name == "next"
        assert await session.entries.list() == ()
        with pytest.raises(FlashNotFound):
            await session.entries.get("next")


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


async def test_entries_are_listed_and_shown(setup: Setup) -> None:
    session, other = await setup.open(), await setup.open("else", owner=BO)
    await setup.enter(session)
    await setup.enter(other, name="f")
    await setup.settled()
    text = said((ByteTokenizer.BOS, *b"data", *b"next"))[:4]
    async with listening(setup) as url:
        names, *rows = [line.split("\t") for line in (await run(url, "entries")).stdout.splitlines()]
        assert sorted(row[names.index("name")] for row in rows) == ["e", "f"]
        assert {row[names.index("cells")] for row in rows} == {"8"}
        [mine] = [row for row in rows if row[names.index("name")] == "e"]
        assert (mine[names.index("ahead.text")], mine[names.index("ahead.tokens")]) == (text, "4")
        assert json.loads((await run(url, "entries", "--owner", BO, "--json")).stdout)[0]["name"] == "f"
        of_one = json.loads((await run(url, "entries", session.header.id, "--json")).stdout)
        assert [one["name"] for one in of_one] == ["e"]
        shown = await run(url, "show", session.header.id, "e", "--entry", "--json")
        assert json.loads(shown.stdout)["ahead"]["text"] == text
        assert text in (await run(url, "show", session.header.id, "e", "--entry")).stdout
        unknown = await run(url, "show", session.header.id, "e", "--owner", ANA)
        assert (unknown.exit_code, "FlashNotFound" in unknown.stderr) == (1, True)
        top = (await run(url, "top", "--once")).stdout
        assert "registered 2" in top
        assert "held 16" in top
        counted = json.loads((await run(url, "top", "--once", "--json")).stdout)
        assert counted["entries"]["cells"] == {"held": 16, "budget": 1000}
