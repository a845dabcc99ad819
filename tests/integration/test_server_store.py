"""The real server on a real Redis that other processes use too, and that is away for a while."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest
from conftest import REDIS_PASSWORD
from engines import StoreServer

pytestmark = pytest.mark.engine

FACTS = "/v1/memory/facts"
TIMEOUT_S = 120.0
_TURNS = (
    "Mila adopted a greyhound called Pepper.",
    "Salma moved to Tromso for a job at the observatory.",
    "Omar burned a cardamom cake.",
    "The ferry to Brannoy leaves at nine.",
)


@pytest.fixture
def http(store_server: StoreServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=store_server.url, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture
def owner() -> str:
    return f"owner-{uuid4().hex}"


def add(http: httpx.Client, owner: str, *facts: dict[str, Any] | str) -> list[str]:
    """Ids of facts that have KV."""
    bodies = [{"text": fact} if isinstance(fact, str) else fact for fact in facts]
    reply = http.post(FACTS, json={"owner": owner, "facts": bodies, "wait": True})
    assert reply.status_code == 200, reply.text
    assert reply.json()["kv_pending"] == []
    return [fact["id"] for fact in reply.json()["facts"]]


def body_of(question: str, **memory: Any) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "custom_params": {"memory": memory} if memory else None,
    }


def chat(http: httpx.Client, question: str, **memory: Any) -> dict[str, Any]:
    reply = http.post("/v1/chat/completions", json=body_of(question, **memory))
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def report_of(http: httpx.Client, question: str, **memory: Any) -> dict[str, Any]:
    report: dict[str, Any] = chat(http, question, **memory)["memory"]
    return report


def logprobs(answer: dict[str, Any]) -> list[tuple[str, float]]:
    return [(token["token"], token["logprob"]) for token in answer["choices"][0]["logprobs"]["content"]]


def search(http: httpx.Client, owner: str, query: str, **more: Any) -> list[str]:
    reply = http.post("/v1/memory/search", json={"owner": owner, "query": query, **more})
    assert reply.status_code == 200, reply.text
    return [hit["fact"]["text"] for hit in reply.json()["hits"]]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


def assert_spliced_as_prefilled(http: httpx.Client, owner: str, question: str) -> None:
    """What is spliced is the KV of the text that is served: at its original place a fact answers as if prefilled."""
    http.post("/flush_cache")
    memory = {"owner": owner, "k": 4, "order": "chronological", "policy": "window:16"}
    spliced, text = (chat(http, question, **memory, mode=mode) for mode in ("splice", "text"))
    assert (spliced["memory"]["tier"], text["memory"]["tier"]) == ("spliced", "text")
    for mine, theirs in zip(logprobs(spliced), logprobs(text), strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], abs=1e-4)


# ---- the store through the server ----


def test_a_password_is_shown_nowhere(store_server: StoreServer, http: httpx.Client, owner: str) -> None:
    add(http, owner, *_TURNS)
    status = http.get("/v1/memory/status").json()
    assert status["store"]["location"] == f"redis://127.0.0.1:{store_server.redis.port}/0?prefix=memstore"
    assert status["store"]["error"] is None
    assert REDIS_PASSWORD not in str(status)
    for route in ("/get_server_info", "/server_info", "/get_model_info"):
        assert REDIS_PASSWORD not in http.get(route).text
    assert REDIS_PASSWORD not in store_server.log.read_text(errors="replace")


def test_facts_on_redis_are_found_and_spliced(store_server: StoreServer, http: httpx.Client, owner: str) -> None:
    ids = add(http, owner, *_TURNS)
    http.post("/flush_cache")  # what encoding has left in the radix cache is exact, which comes first
    assert search(http, owner, "Where does Salma live?", k=1) == [_TURNS[1]]
    report = report_of(http, "Where does Salma live?", owner=owner, k=2)
    assert (report["tier"], report["degraded"], report["facts"][-1]["id"]) == ("spliced", False, ids[1])
    assert_spliced_as_prefilled(http, owner, "When does the ferry leave?")
    assert [fact.id for fact in store_server.elsewhere.list(owner)] == ids
    assert (store_server.kv / "data.mdb").exists()


@pytest.mark.parametrize("door", ["chat", "generate", "openai"])
def test_a_filter_and_a_mode_of_search_reach_the_store(
    store_server: StoreServer, http: httpx.Client, owner: str, door: str
) -> None:
    ids = add(
        http,
        owner,
        {"text": "The ferry leaves at nine.", "stream": "a", "metadata": {"rating": 5}},
        {"text": "The ferry leaves at ten.", "stream": "b", "metadata": {"rating": 2}},
        {"text": "The ferry leaves at noon.", "stream": "b", "metadata": {"rating": 4}, "speaker": "Mila"},
    )
    where = {"stream": "b", "metadata.rating": {"gt": 3, "lte": 4.5}, "speaker": {"in": ["Mila", None]}}
    memory = {"owner": owner, "k": 3, "where": where, "search": "hybrid"}
    if door == "chat":
        report = report_of(http, "When does it leave?", **memory)
    elif door == "generate":
        sampling = {"max_new_tokens": 1, "custom_params": {"memory": memory}}
        reply = http.post("/generate", json={"text": "{{memory}}When?", "sampling_params": sampling})
        report = reply.json()["meta_info"]["memory"]
    else:
        with openai.OpenAI(base_url=f"{store_server.url}/v1", api_key="none") as client:
            report = client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "When does it leave?"}],
                max_tokens=1,
                extra_body={"custom_params": {"memory": memory}},
            ).memory  # type: ignore[attr-defined]
    assert [fact["id"] for fact in report["facts"]] == [ids[2]]
    words = report_of(http, "nine", owner=owner, k=3, search="keyword")
    assert [fact["id"] for fact in words["facts"]] == [ids[0]]


def test_a_filter_that_makes_no_sense_is_refused(http: httpx.Client, owner: str) -> None:
    reply = http.post("/v1/chat/completions", json=body_of("When?", owner=owner, where={"colour": "red"}))
    assert reply.status_code == 400
    assert "metadata.colour" in reply.text


def test_a_broken_body_is_answered_in_our_shape(http: httpx.Client) -> None:
    for reply in (http.post(FACTS, json={"text": "no owner"}), http.post(FACTS, content=b"{")):
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == 400


# ---- other processes ----


def test_what_another_process_adds_is_found_at_once_and_gets_kv(
    store_server: StoreServer, http: httpx.Client, owner: str
) -> None:
    add(http, owner, _TURNS[0])
    added = store_server.elsewhere.add(owner, _TURNS[1])
    assert search(http, owner, "Tromso observatory", k=1) == [_TURNS[1]]
    until(lambda: report_of(http, "Where is Salma?", owner=owner, k=2)["not_encoded"] == 0)
    http.post("/flush_cache")
    report = report_of(http, "And where is Salma now?", owner=owner, k=2)
    assert (report["tier"], report["facts"][-1]["id"]) == ("spliced", added.id)


@pytest.mark.parametrize("by", ["this server", "another process"])
def test_an_updated_fact_is_served_as_it_is_now(
    store_server: StoreServer, http: httpx.Client, owner: str, by: str
) -> None:
    (fact_id,) = add(http, owner, {"text": "The ferry leaves at nine.", "metadata": {"tags": ["ferry"]}})
    chat(http, "When does the ferry leave?", owner=owner, k=4)
    if by == "this server":
        body = {"owner": owner, "text": "The bicycle shed opens at noon.", "wait": True}
        reply = http.patch(f"{FACTS}/{fact_id}", json=body).json()
        assert (reply["kv_pending"], reply["fact"]["metadata"]) == ([], {"tags": ["ferry"]})
    else:
        store_server.elsewhere.update(owner, fact_id, text="The bicycle shed opens at noon.")
    assert search(http, owner, "ferry", mode="keyword") == []
    assert search(http, owner, "bicycle shed") == ["The bicycle shed opens at noon."]
    until(lambda: report_of(http, "When does it open?", owner=owner, k=4)["not_encoded"] == 0)
    assert_spliced_as_prefilled(http, owner, "When does the bicycle shed open?")


@pytest.mark.parametrize("by", ["this server", "another process"])
def test_a_superseded_fact_is_not_served(store_server: StoreServer, http: httpx.Client, owner: str, by: str) -> None:
    (old,) = add(http, owner, "Office is on floor 2")
    chat(http, "Where is the office?", owner=owner, k=4)
    if by == "this server":
        body = {"owner": owner, "text": "Office is on floor 5", "wait": True}
        new = http.post(f"{FACTS}/{old}/supersede", json=body).json()["fact"]["id"]
    else:
        new = store_server.elsewhere.supersede(owner, old, "Office is on floor 5").id
    assert search(http, owner, "Office is on floor") == ["Office is on floor 5"]
    report = report_of(http, "Where is the office?", owner=owner, k=4)
    assert [fact["id"] for fact in report["facts"]] == [new]
    versions = http.get(f"{FACTS}/{new}/history", params={"owner": owner}).json()["versions"]
    assert list(dict.fromkeys(fact["text"] for fact in versions)) == ["Office is on floor 2", "Office is on floor 5"]
    until(lambda: report_of(http, "Where is it?", owner=owner, k=4)["not_encoded"] == 0)
    assert_spliced_as_prefilled(http, owner, "On which floor is the office?")


@pytest.mark.parametrize("by", ["this server", "another process"])
def test_nothing_of_a_purged_owner_is_reachable(
    store_server: StoreServer, http: httpx.Client, owner: str, by: str
) -> None:
    bystander = f"bystander-{owner}"
    add(http, bystander, *_TURNS)
    before = http.get("/v1/memory/status").json()
    add(http, owner, *_TURNS)
    question = "Where does Salma live, and who is Pepper?"
    for mode in ("splice", "text", "off"):
        for _ in range(2):
            seen = report_of(http, question, owner=owner, k=4, mode=mode)
        assert seen["tokens"]["cached"] > seen["tokens"]["prompt"] // 2 or seen["tier"] == "spliced", "it was cached"
    if by == "this server":
        reply = http.delete(f"/v1/memory/owners/{owner}", params={"confirm": owner})
        assert reply.status_code == 200, reply.text
        receipt = reply.json()
        assert (receipt["facts"], receipt["epoch"]) == (4, 1)
        assert receipt["encodings"] == 3 * 4, "of three policies"
    else:
        store_server.elsewhere.purge(owner)
    for mode in ("splice", "text", "off"):
        after = report_of(http, question, owner=owner, k=4, mode=mode)
        assert (after["facts"], after["degraded"]) == ([], False)
        if mode == "splice":
            assert after["tokens"]["cached"] == 0

    def is_clean() -> bool:
        now = http.get("/v1/memory/status").json()
        in_memory = now["scheduler"]["arena"]["facts"] <= before["scheduler"]["arena"]["facts"]
        return bool(in_memory and now["kv_store"]["encodings"] == before["kv_store"]["encodings"])

    until(is_clean)
    # The very same facts once more: what was cached of the former ones does not serve them.
    add(http, owner, *_TURNS)
    again = report_of(http, question, owner=owner, k=4, mode="text")
    assert len(again["facts"]) == 4
    assert report_of(http, question, owner=bystander, k=4)["tier"] in {"spliced", "exact"}
    with store_server.redis.client() as client:
        assert client.hlen(f"memstore:o:{_key_of(bystander)}:records") == 4


def _key_of(owner: str) -> str:
    from base64 import urlsafe_b64encode

    return urlsafe_b64encode(owner.encode()).rstrip(b"=").decode()


# ---- a Redis that is away ----


@pytest.mark.anyio
async def test_requests_are_answered_while_redis_is_away(store_server: StoreServer, owner: str) -> None:
    async with httpx.AsyncClient(base_url=store_server.url, timeout=TIMEOUT_S) as http:
        body = {"owner": owner, "facts": [{"text": text} for text in _TURNS], "wait": True}
        assert (await http.post(FACTS, json=body)).json()["kv_pending"] == []
        reports: list[dict[str, Any]] = []
        numbers = itertools.count()
        running = asyncio.Event()
        running.set()

        async def ask_on(*, with_memory: bool) -> None:
            memory = {"owner": owner, "k": 3} if with_memory else {}
            while running.is_set():
                body = body_of(f"Question {next(numbers)}: where does Salma live?", **memory)
                reply = await http.post("/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                if with_memory:
                    reports.append(reply.json()["memory"])

        async def reports_until(is_enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
            first = len(reports)
            async with asyncio.timeout(TIMEOUT_S):
                while not is_enough(reports[first:]):
                    await asyncio.sleep(0.05)
            return reports[first:]

        async with asyncio.TaskGroup() as group:
            for i in range(16):
                group.create_task(ask_on(with_memory=i % 4 != 0))
            try:
                before = await reports_until(lambda seen: len(seen) >= 16)
                assert not any(report["degraded"] for report in before)
                store_server.redis.pause()
                try:
                    during = await reports_until(lambda seen: sum(r["degraded"] for r in seen) >= 40)
                    refused = [
                        await http.post(FACTS, json={"owner": owner, "text": "One more."}),
                        await http.get(FACTS, params={"owner": owner}),
                        await http.post("/v1/memory/search", json={"owner": owner, "query": "Salma"}),
                        await http.delete(f"/v1/memory/owners/{owner}", params={"confirm": owner}),
                    ]
                    status = (await http.get("/v1/memory/status")).json()
                    assert (await http.get("/health")).status_code == 200
                finally:
                    store_server.redis.resume()
                await reports_until(lambda seen: sum(not r["degraded"] for r in seen) >= 16)
            finally:
                running.clear()
    degraded = [report for report in during if report["degraded"]]
    assert {report["reason"] for report in degraded} == {"retrieval_failed: StoreUnreachable"}
    assert all(report["facts"] == [] and report["tier"] == "none" for report in degraded)
    assert [(reply.status_code, "retry-after" in reply.headers) for reply in refused] == [(503, True)] * 4
    assert "127.0.0.1" in status["store"]["error"]
    assert REDIS_PASSWORD not in str(status) + "".join(reply.text for reply in refused)
    log = store_server.log.read_text(errors="replace")
    assert log.count("retrieval fails, requests are served without facts: redis") <= 3, "one line an outage"
    assert REDIS_PASSWORD not in log


def test_everything_works_again_without_a_restart(store_server: StoreServer, http: httpx.Client, owner: str) -> None:
    until(lambda: http.get("/v1/memory/status").json()["store"]["feed"]["error"] is None)
    add(http, owner, *_TURNS)
    store_server.elsewhere.add(owner, "Noor repairs bicycles.")
    until(lambda: report_of(http, "Who repairs bicycles?", owner=owner, k=5)["not_encoded"] == 0)
    until(lambda: http.post("/flush_cache").status_code == 200)
    report = report_of(http, "Who repairs bicycles now?", owner=owner, k=5)
    assert (report["tier"], report["degraded"], len(report["facts"])) == ("spliced", False, 5)
    until(lambda: http.post("/flush_cache").status_code == 200)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
