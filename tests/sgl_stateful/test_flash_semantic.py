"""Questions in other words on real sessions: served, guarded, audited, and taken out of service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from flash_engine import said
from flash_http import application
from flash_setup import Setup, starting
from session_values import ANA
from sglang.srt.managers.io_struct import GenerateReqInput
from words import ByteTokenizer

from sgl_stateful.flash.wording import Vector
from sgl_stateful.sessions.content import Content
from sgl_stateful.sessions.params import SessionParams
from sgl_stateful.sessions.session import Session
from sgl_stateful.sglang_adapter import flash_serving
from sgl_stateful.sglang_adapter.session_questions import ask
from sgl_stateful.sglang_adapter.session_start import STARTER

pytestmark = pytest.mark.anyio

GREEDY = {"temperature": 0, "max_new_tokens": 32}
LONGEST = 60  # characters that the embedder reads
TOPICS = {"water": 0.0, "thirsty": 0.3, "sunny": 1.5}


async def embed(text: str) -> Vector | None:
    """Points where the word of a topic does: cosines of 0.955 between "water" and "thirsty", of 0.07 to "sunny"."""
    if len(text) > LONGEST:
        return None
    angle = next((angle for word, angle in TOPICS.items() if word in text), 3.0)
    return np.array([np.cos(angle), np.sin(angle)], np.float32)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with starting(embed=embed, semantic_audit_every=1, audit_every=10**9) as made:
        yield made


@pytest.fixture
async def http(setup: Setup) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application(setup), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as opened:
        yield opened


@pytest.fixture
async def session(setup: Setup) -> Session:
    return await setup.open("data")


async def register(http: httpx.AsyncClient, session: Session, **fields: Any) -> httpx.Response:
    body = {"owner": ANA, "name": "q", "text": "which bed needs water", "semantic": {"threshold": 0.9}, **fields}
    path = f"/v1/sessions/{session.header.id}/flash"
    return await http.post(path, json={name: value for name, value in body.items() if value is not None})


async def shown(http: httpx.AsyncClient, session: Session, name: str = "q") -> dict[str, Any]:
    reply = await http.get(f"/v1/sessions/{session.header.id}/flash/{name}", params={"owner": ANA})
    found: dict[str, Any] = reply.json()
    return found


async def served(setup: Setup, session: Session, text: str, **more: Any) -> dict[str, Any] | None:
    fresh, sampling = more.pop("fresh", False), more.pop("sampling_params", GREEDY)
    params = SessionParams(id=session.header.id, fresh=fresh, max_staleness_s=more.pop("max_staleness_s", 0.0))
    content = Content(**more) if more else Content(text=text)
    asked = await ask(setup.sessions, params, content, None)
    request = GenerateReqInput(input_ids=[*asked.head, *asked.tail], sampling_params=dict(sampling))
    manager = SimpleNamespace(**{STARTER: SimpleNamespace(flash=setup.flash)})
    return await flash_serving.serve(manager, request, asked)


async def settled(setup: Setup) -> None:
    await setup.settled()
    await setup.until(lambda: not setup.flash.table.has_audits and not setup.flash.worker.is_running)


async def test_other_words_are_answered_and_it_says_so(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    assert (await register(http, session)).status_code == 201
    await settled(setup)
    right = said((ByteTokenizer.BOS, *b"datawhich bed needs water"))
    reply = await served(setup, session, "which bed is thirsty")
    assert reply is not None
    assert reply["text"] == right
    meta = reply["meta_info"]
    assert meta["prompt_tokens"] == len("[datawhich bed is thirsty")
    flash = meta["session"]["flash"]
    assert (flash["name"], flash["by"], flash["similarity"]) == ("q", "semantic", pytest.approx(np.cos(0.3)))
    assert meta["session"]["served_from"] == "flash"
    exact = await served(setup, session, "which bed needs water")
    assert exact is not None
    assert exact["meta_info"]["session"]["flash"]["by"] == "decoding"
    assert "similarity" not in exact["meta_info"]["session"]["flash"]
    totals = setup.flash.metrics.totals()
    assert (totals["hits"], totals["semantic"]["hits"]) == (2, 1)
    assert (await shown(http, session))["semantic"]["hits"] == 1


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("which bed is sunny", {}),
        ("which bed is not thirsty", {}),
        ("which bed of 3 is thirsty", {}),
        ("which bed of Bo is thirsty", {}),
        ("which bed is thirsty now", {}),
        ("which bed is thirsty", {"fresh": True}),
        ("which bed is thirsty", {"sampling_params": {**GREEDY, "max_new_tokens": 31}}),
        ("", {"input_ids": tuple(b"which bed is thirsty")}),
        ("which bed is thirsty" + " please" * 9, {}),
    ],
)
async def test_what_is_decoded_all_the_same(
    http: httpx.AsyncClient, setup: Setup, session: Session, text: str, more: dict[str, Any]
) -> None:
    await register(http, session)
    await settled(setup)
    assert await served(setup, session, text, **more) is None
    assert await served(setup, session, "which bed is thirsty") is not None


async def test_off_by_default(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    assert (await register(http, session, semantic=None)).json()["semantic"] is None
    await settled(setup)
    assert await served(setup, session, "which bed is thirsty") is None


async def test_nothing_stale_is_served_to_other_words(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    setup.engine.answers = ["bed 3"] * 30
    await register(http, session)
    await settled(setup)
    setup.engine.foreground.began()
    await setup.append(session, "more")
    assert await served(setup, session, "which bed is thirsty") is None
    stale = await served(setup, session, "which bed is thirsty", max_staleness_s=60.0)
    assert stale is not None
    assert stale["meta_info"]["session"]["data_version"] == 1
    setup.engine.foreground.ended()
    await settled(setup)
    reply = await served(setup, session, "which bed is thirsty")
    assert reply is not None
    assert reply["meta_info"]["session"]["data_version"] == 2
    evaluated = [sent.token_ids for sent in setup.engine.asked if bytes(sent.token_ids[1:]).endswith(b"water")]
    assert evaluated[-1] == (ByteTokenizer.BOS, *b"datamorewhich bed needs water")


async def test_an_audit_decodes_the_words_that_were_asked(
    http: httpx.AsyncClient, setup: Setup, session: Session
) -> None:
    await register(http, session)
    await settled(setup)
    await served(setup, session, "which bed is thirsty")
    await settled(setup)
    assert setup.engine.asked[-1].token_ids == (ByteTokenizer.BOS, *b"datawhich bed is thirsty")
    # The digests of both prompts differ, so that decoding contradicts the answer.
    found = (await shown(http, session))["semantic"]
    assert (found["audited"], found["agreed"], found["false_accepts"]) == (1, 0, 1.0)
    assert found["false_accept_interval"] == [pytest.approx(0.2065, abs=1e-4), pytest.approx(1.0)]
    totals = setup.flash.metrics.totals()
    assert totals["semantic"] == {"hits": 1, "audits": 1, "false_accepts": 1}
    assert (totals["audits"], totals["false_accepts"]) == (0, 0)


async def test_other_words_go_out_of_service_and_the_question_stays(
    http: httpx.AsyncClient, setup: Setup, session: Session
) -> None:
    await register(http, session)
    await settled(setup)
    assert await served(setup, session, "which bed is thirsty") is not None
    await settled(setup)
    assert await served(setup, session, "which bed is thirsty") is None
    assert await served(setup, session, "which bed needs water") is not None
    question = await shown(http, session)
    assert (question["state"], question["retired"]) == ("fresh", None)
    assert question["semantic"]["retired"].startswith("1 of 1 answers")
    told = setup.flash.table.events.of(session.header.id).after(0)
    assert [event.kind for event in told] == ["answer", "semantic_retired"]


async def test_what_decoding_says_too_stays_in_service(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    setup.engine.answers = ["bed 3"] * 30
    await register(http, session)
    await settled(setup)
    for _ in range(5):
        assert await served(setup, session, "which bed is thirsty") is not None
        await settled(setup)
    found = (await shown(http, session))["semantic"]
    assert (found["audited"], found["agreed"], found["false_accepts"], found["retired"]) == (5, 5, 0.0, None)


async def test_new_weights_begin_anew(http: httpx.AsyncClient, setup: Setup, session: Session) -> None:
    await register(http, session)
    await settled(setup)
    await served(setup, session, "which bed is thirsty")
    await settled(setup)
    setup.flash.weights_changed()
    await settled(setup)
    assert (await shown(http, session))["semantic"]["audited"] == 0
    assert await served(setup, session, "which bed is thirsty") is not None


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        ({"semantic": {"threshold": 0}}, "BadFlashRequest", "semantic.threshold"),
        ({"semantic": {"threshold": 1.5}}, "BadFlashRequest", "semantic.threshold"),
        ({"semantic": {"limit": 1}}, "BadSessionRequest", "semantic.limit"),
        ({"text": None, "input_ids": [1, 2]}, "BadFlashRequest", "a question of words"),
        ({"text": "which bed needs water " * 9}, "BadFlashRequest", "longer than the embedder reads"),
        ({"sampling_params": {"temperature": 0.5}}, "BadFlashRequest", "greedy"),
        ({"memory": {"owner": ANA}}, "BadFlashRequest", "memory"),
    ],
)
async def test_what_cannot_be_matched_is_refused(
    http: httpx.AsyncClient, session: Session, fields: dict[str, Any], kind: str, says: str
) -> None:
    reply = await register(http, session, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (422, kind), error
    assert says in error["message"]


async def test_a_server_without_a_memory_says_so() -> None:
    async with starting() as setup:
        session = await setup.open("data")
        transport = httpx.ASGITransport(application(setup), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            reply = await register(http, session)
            assert (reply.status_code, reply.json()["error"]["type"]) == (422, "FlashNeedsMemory")
            assert (await register(http, session, semantic=None)).status_code == 201
