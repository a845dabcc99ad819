"""The routes of entries, without an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from flash_engine import said
from flash_http import application
from flash_setup import LONGEST, Setup, starting
from session_values import ANA, BO
from words import ByteTokenizer

from sgl_stateful.sessions.session import Session

pytestmark = pytest.mark.anyio


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with starting(entry_owner_limit=3) as made:
        yield made


@pytest.fixture
async def http(setup: Setup) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application(setup), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as opened:
        yield opened


@pytest.fixture
async def session(setup: Setup) -> Session:
    return await setup.open("data")


def at(session: Session, *more: str) -> str:
    return "/".join(["/v1/sessions", session.header.id, "entries", *more])


async def post(http: httpx.AsyncClient, session: Session, **fields: Any) -> httpx.Response:
    return await http.post(at(session), json={"owner": ANA, "name": "next", "text": "and", **fields})


def refused(reply: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert (error["code"], error["type"]) == (status, kind), error
    return error


async def test_an_entry_from_its_registration_to_its_end(
    http: httpx.AsyncClient, setup: Setup, session: Session
) -> None:
    reply = await post(http, session, max_tokens=6, priority=2, until=["x", 7], sampling_params={"ignore_eos": True})
    assert reply.status_code == 201, reply.text
    made = reply.json()
    assert (made["name"], made["text"], made["state"], made["until"]) == ("next", "and", "pending", ["x", 7])
    assert (made["max_tokens"], made["cells"], made["ahead"]) == (6, 0, None)
    assert made["sampling_params"] == {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 6}
    await setup.settled()
    prompt = (ByteTokenizer.BOS, *b"data", *b"and")
    assert setup.engine.asked[0].token_ids == prompt
    shown = (await http.get(at(session, "next"), params={"owner": ANA})).json()
    assert (shown["state"], shown["cells"], shown["evaluations"]) == ("fresh", 3 + 6, 1)
    assert (shown["ahead"]["text"], shown["ahead"]["tokens"]) == (said(prompt)[:6], 6)
    [listed] = (await http.get(at(session), params={"owner": ANA})).json()["entries"]
    assert listed["ahead"].pop("age_s") >= shown["ahead"].pop("age_s")
    assert listed == shown
    updated = (await http.put(at(session, "next"), json={"owner": ANA, "text": "but", "max_tokens": 0})).json()
    assert (updated["ahead"], updated["max_tokens"], updated["until"]) == (None, 0, [])
    await setup.settled()
    assert setup.engine.asked[-1].token_ids == (*prompt[:-3], *b"but")
    gone = await http.delete(at(session, "next"), params={"owner": ANA})
    assert gone.json()["deleted"]["name"] == "next"
    refused(await http.get(at(session, "next"), params={"owner": ANA}), 404, "FlashNotFound")
    refused(await http.delete(at(session, "next"), params={"owner": ANA}), 404, "FlashNotFound")
    refused(await http.put(at(session, "next"), json={"owner": ANA, "text": "but"}), 404, "FlashNotFound")


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"text": ""}, 422, "EmptyFlashQuestion"),
        ({"input_ids": [], "text": None}, 422, "EmptyFlashQuestion"),
        ({"text": None}, 422, "BadSessionRequest"),
        ({"input_ids": [1]}, 422, "BadSessionRequest"),
        ({"input_ids": [10**6], "text": None}, 422, "BadSessionRequest"),
        ({"data": {"bed": 3}}, 422, "BadSessionRequest"),
        ({"max_tokens": 257}, 422, "BadFlashRequest"),
        ({"max_tokens": -1}, 422, "BadFlashRequest"),
        ({"max_tokens": 256.5}, 422, "BadSessionRequest"),
        ({"choices": ["down", "double"]}, 422, "FlashChoicesAlike"),
        ({"choices": ["down"]}, 422, "BadFlashRequest"),
        ({"choices": ["up", "down"], "max_tokens": 0}, 422, "BadFlashRequest"),
        ({"gate": {}}, 422, "BadFlashRequest"),
        ({"until": [""]}, 422, "BadFlashRequest"),
        ({"until": [1.5]}, 422, "BadSessionRequest"),
        ({"until": list(range(17))}, 422, "BadSessionRequest"),
        ({"name": "a/b"}, 422, "BadFlashRequest"),
        ({"priority": 101}, 422, "BadFlashRequest"),
        ({"sampling_params": {"temperature": 0.5}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"repetition_penalty": 1.5}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"regex": "a"}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"stop_regex": "a"}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"min_new_tokens": 2}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"max_new_tokens": 4}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"n": 2}}, 422, "BadFlashRequest"),
        ({"sampling_params": {"no_such": 1}}, 422, "BadSessionRequest"),
        ({"text": "x" * LONGEST}, 413, "SessionTooLong"),
        ({"owner": BO}, 404, "SessionNotFound"),
    ],
)
async def test_every_mistake_has_its_name_and_harms_nothing(
    http: httpx.AsyncClient, setup: Setup, session: Session, fields: dict[str, Any], status: int, kind: str
) -> None:
    refused(await post(http, session, **fields), status, kind)
    assert (await http.get(at(session), params={"owner": ANA})).json() == {"entries": []}
    assert session.state == "open"
    assert (await post(http, session)).status_code == 201


async def test_what_is_taken_and_what_is_too_much(http: httpx.AsyncClient, session: Session) -> None:
    assert (await post(http, session)).status_code == 201
    refused(await post(http, session, text="else"), 409, "FlashExists")
    refused(await post(http, session, name="other"), 409, "FlashExists")
    assert (await post(http, session, name="longer", max_tokens=33)).status_code == 409  # the same tokens, greedy too
    for word in ("two", "three"):
        assert (await post(http, session, name=word, text=word)).status_code == 201
    error = refused(await post(http, session, name="four", text="four"), 429, "FlashLimitReached")
    numbers = ("registered", "limit", "owner_registered", "owner_limit")
    assert [error[name] for name in numbers] == [3, 100, 3, 3]
    refused(
        await http.post(at(session).replace(session.header.id, "no-such"), json={"owner": ANA}),
        422,
        "BadSessionRequest",
    )


async def test_entries_in_the_stats(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    await post(http, session)
    await setup.settled()
    stats = (await http.get("/v1/flash/stats", params={"rows": 5})).json()
    assert (stats["registered"], stats["rows"]) == (0, [])
    entries = stats["entries"]
    assert (entries["registered"], entries["retired"]) == (1, 0)
    assert entries["cells"] == {"held": 3 + 8, "budget": 1000}
    assert [row["name"] for row in entries["rows"]] == ["next"]
    totals = entries["totals"]
    assert totals["evaluations"]["stored"] == 1
    assert totals["uses"] == {"ahead": 0, "prefix": 0, "whole": 0, "gate": 0}
    assert "facts" not in totals["misses"]
    assert totals["misses"]["evicted"] == totals["tokens_ahead"] == 0
