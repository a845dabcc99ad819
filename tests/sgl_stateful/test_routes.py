import json
from typing import Any

import httpx
import pytest
from memory_engine import MemoryEngine
from memory_routes import FACTS, add, refusal

from memstore import (
    BlobStoreError,
    BlobStoreFull,
    BlobStoreInUse,
    DuplicateFact,
    EmbedderMismatch,
    EmbeddingError,
    FactNotFound,
    FactSuperseded,
    FeedGap,
    IdempotencyConflict,
    InvalidFact,
    StoreBusy,
    StoreClosed,
    StoreFull,
    StoreRefused,
    StoreTLSError,
    StoreUnreachable,
    VersionConflict,
)
from sgl_stateful.errors import BadMemoryRequest
from sgl_stateful.service import MemoryService
from sgl_stateful.sglang_adapter.replies import error_response

pytestmark = pytest.mark.anyio


async def test_one_fact_with_every_field(client: httpx.AsyncClient) -> None:
    sent = {
        "text": "I moved to Porto.",
        "stream": "chat",
        "speaker": "Ana",
        "time": "8 May, 2023",
        "metadata": {"tags": ["home", None], "weight": 0.5},
    }
    reply = await client.post(FACTS, json={"owner": "ana", **sent, "wait": True})
    (fact,) = reply.json()["facts"]
    assert {name: fact[name] for name in sent} == sent
    assert (fact["owner"], fact["version"]) == ("ana", 1)
    assert reply.json()["kv_pending"] == []
    shown = await client.get(f"{FACTS}/{fact['id']}", params={"owner": "ana"})
    assert shown.json() == {name: fact[name] for name in shown.json()}


async def test_many_facts_keep_their_order(client: httpx.AsyncClient) -> None:
    facts = await add(client, "one", "two", "three", stream="chat")
    assert [fact["text"] for fact in facts] == ["one", "two", "three"]
    assert {fact["stream"] for fact in facts} == {"chat"}


async def test_facts_that_wait_for_nothing_name_their_kv_as_pending(client: httpx.AsyncClient) -> None:
    reply = await client.post(FACTS, json={"owner": "ana", "text": "one"})
    assert reply.json()["kv_pending"] == [reply.json()["facts"][0]["id"]]


async def test_waiting_on_an_engine_that_fails_names_what_is_pending(
    client: httpx.AsyncClient, engine: MemoryEngine
) -> None:
    engine.failing = 10**9
    reply = await client.post(FACTS, json={"owner": "ana", "text": "one", "wait": True})
    assert reply.status_code == 200
    assert reply.json()["kv_pending"] == [reply.json()["facts"][0]["id"]]


@pytest.mark.parametrize("form", [{}, {"text": "one", "facts": [{"text": "two"}]}])
async def test_one_form_and_not_both(client: httpx.AsyncClient, form: dict[str, Any]) -> None:
    assert "either 'text' or 'facts'" in refusal(await client.post(FACTS, json={"owner": "ana", **form}), 400)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": " \n\t"}, "text is empty"),
        ({"text": ""}, "text is empty"),
        ({"text": "a\0b"}, "NUL"),
        ({"text": "a", "speaker": "a\0b"}, "NUL"),
        ({"text": "x" * 101}, "fact 0 has 102 tokens; the limit of this server is 100"),
        ({"text": "a", "owner": ""}, "owner is empty"),
        ({"text": "a", "owner": "a\0b"}, "NUL"),
        ({"text": "a", "owner": "x" * 513}, "owner has 513 bytes"),
        ({"facts": [{"text": "fine"}, {"text": "y" * 101}]}, "fact 1 has 102 tokens"),
    ],
)
async def test_facts_that_cannot_be_stored(
    client: httpx.AsyncClient, service: MemoryService, fields: dict[str, Any], message: str
) -> None:
    assert message in refusal(await client.post(FACTS, json={"owner": "ana", **fields}), 400)
    assert service.store.owners() == [], "all or none"


@pytest.mark.parametrize("field", ["text", "owner", "stream", "speaker", "time"])
async def test_half_a_character_is_refused(client: httpx.AsyncClient, service: MemoryService, field: str) -> None:
    body = json.dumps({"owner": "ana", "text": "one", field: "a\ud800"})
    refusal(await client.post(FACTS, content=body, headers={"content-type": "application/json"}), 400)
    assert service.store.owners() == []


async def test_half_a_character_in_metadata_is_refused(client: httpx.AsyncClient, service: MemoryService) -> None:
    body = json.dumps({"owner": "ana", "text": "one", "metadata": {"a": "\ud800"}})
    refusal(await client.post(FACTS, content=body, headers={"content-type": "application/json"}), 400)
    assert service.store.owners() == []


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"owner": "ana", "text": "a", "metadata": [1]}, "metadata"),
        ({"owner": "ana", "text": "a", "metadata": "words"}, "metadata"),
        ({"owner": "ana", "facts": []}, "facts"),
        ({"owner": "ana", "facts": [{"text": "a", "colour": "red"}]}, "colour"),
        ({"owner": "ana", "facts": [{"stream": "a"}]}, "text"),
        ({"owner": "ana", "text": "a", "colour": "red"}, "colour"),
        ({"text": "a"}, "owner"),
        ({"owner": "ana", "text": 5}, "text"),
    ],
)
async def test_bodies_of_another_shape(client: httpx.AsyncClient, body: dict[str, Any], where: str) -> None:
    assert f"{where}: " in refusal(await client.post(FACTS, json=body), 400)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"", b'"text"'])
async def test_bodies_that_are_none(client: httpx.AsyncClient, content: bytes) -> None:
    reply = await client.post(FACTS, content=content, headers={"content-type": "application/json"})
    assert refusal(reply, 400)


async def test_pages_of_facts(client: httpx.AsyncClient) -> None:
    texts = [f"fact {i}" for i in range(7)]
    await add(client, *texts)
    await add(client, "of bob", owner="bob")
    seen: list[str] = []
    params: dict[str, Any] = {"owner": "ana", "limit": 3}
    pages = []
    while True:
        page = (await client.get(FACTS, params=params)).json()
        pages.append(len(page["facts"]))
        seen += [fact["text"] for fact in page["facts"]]
        if page["next"] is None:
            break
        params["after"] = page["next"]
    assert seen == texts
    assert pages == [3, 3, 1]


async def test_a_list_can_be_of_one_stream(client: httpx.AsyncClient) -> None:
    await add(client, "a", stream="x")
    await add(client, "b", stream="y")
    page = (await client.get(FACTS, params={"owner": "ana", "stream": "y"})).json()
    assert [fact["text"] for fact in page["facts"]] == ["b"]
    assert (await client.get(FACTS, params={"owner": "nobody"})).json() == {"facts": [], "next": None}


@pytest.mark.parametrize("limit", ["0", "1001", "many"])
async def test_a_page_has_bounds(client: httpx.AsyncClient, limit: str) -> None:
    assert "limit: " in refusal(await client.get(FACTS, params={"owner": "ana", "limit": limit}), 400)


async def test_facts_of_another_owner_are_unknown(client: httpx.AsyncClient) -> None:
    (fact,) = await add(client, "of ana")
    at = f"{FACTS}/{fact['id']}"
    for reply in (
        await client.get(at, params={"owner": "bob"}),
        await client.delete(at, params={"owner": "bob"}),
    ):
        assert refusal(reply, 404) == f"this owner has no fact {fact['id']!r}"
    unknown = refusal(await client.get(f"{FACTS}/unknown", params={"owner": "bob"}), 404)
    assert unknown == "this owner has no fact 'unknown'", "the same words as for a fact of another owner"
    assert (await client.get(at, params={"owner": "ana"})).status_code == 200


async def test_a_deleted_fact_is_gone(client: httpx.AsyncClient) -> None:
    (fact,) = await add(client, "red kayak")
    at = f"{FACTS}/{fact['id']}"
    assert (await client.delete(at, params={"owner": "ana"})).json()["deleted"]["text"] == "red kayak"
    refusal(await client.get(at, params={"owner": "ana"}), 404)
    refusal(await client.delete(at, params={"owner": "ana"}), 404)
    found = await client.post("/v1/memory/search", json={"owner": "ana", "query": "red kayak"})
    assert found.json() == {"hits": []}


async def test_min_score_is_of_the_score_before_boosts(client: httpx.AsyncClient) -> None:
    body = {"owner": "ana", "facts": [{"text": text, "stream": "chat"} for text in ("green bicycle", "red kayak")]}
    await client.post(FACTS, json=body)
    body = {"owner": "ana", "query": "red kayak", "min_score": 0.75}
    [hit] = (await client.post("/v1/memory/search", json=body)).json()["hits"]
    assert hit["fact"]["text"] == "red kayak"
    # 0.8 * cosine; words that one fact of two has count next to nothing. Beside it is a fact with about 0.
    assert hit["unboosted"] == pytest.approx(0.8, abs=1e-3)
    assert hit["score"] == pytest.approx(0.8 / 1.2, abs=1e-3)


async def test_a_search(client: httpx.AsyncClient) -> None:
    near, middle, _ = await add(client, "red kayak", "red kayak paddle", "green bicycle")
    found = await client.post(
        "/v1/memory/search", json={"owner": "ana", "query": "red kayak", "k": 2, "mode": "vector"}
    )
    assert [hit["fact"]["id"] for hit in found.json()["hits"]] == [near["id"], middle["id"]]
    assert [hit["score"] for hit in found.json()["hits"]] == pytest.approx([1.0, (2 / 3) ** 0.5], abs=1e-3)
    body = {"owner": "ana", "query": "red kayak", "min_score": 0.9, "mode": "vector"}
    assert len((await client.post("/v1/memory/search", json=body)).json()["hits"]) == 1
    assert [hit["unboosted"] for hit in found.json()["hits"]] == [hit["score"] for hit in found.json()["hits"]]
    assert "query is empty" in refusal(await client.post("/v1/memory/search", json=body | {"query": " "}), 400)


async def test_a_store_that_is_closed_answers_in_json(client: httpx.AsyncClient, service: MemoryService) -> None:
    (fact,) = await add(client, "one")
    service.store.close()
    at = f"{FACTS}/{fact['id']}"
    for reply in (
        await client.post(FACTS, json={"owner": "ana", "text": "two"}),
        await client.get(FACTS, params={"owner": "ana"}),
        await client.get(at, params={"owner": "ana"}),
        await client.delete(at, params={"owner": "ana"}),
        await client.post("/v1/memory/search", json={"owner": "ana", "query": "one"}),
    ):
        assert refusal(reply, 500)
        assert reply.json()["error"]["type"] == "StoreClosed"
    status = (await client.get("/v1/memory/status")).json()
    assert "has been closed" in status["store"]["error"], "the status is for just that"
    assert status["owners"] is None


async def test_status_is_json(client: httpx.AsyncClient) -> None:
    await add(client, "one")
    status = (await client.get("/v1/memory/status")).json()
    assert (status["owners"], status["policies"]) == (1, ["anchor:2"])


async def test_an_engine_that_fails_a_delete_answers_in_json(client: httpx.AsyncClient, engine: MemoryEngine) -> None:
    reply = await client.post(FACTS, json={"owner": "ana", "text": "one", "wait": True})
    engine.failing_controls = 1
    at = f"{FACTS}/{reply.json()['facts'][0]['id']}"
    assert (await client.delete(at, params={"owner": "ana"})).json()["deleted"]["text"] == "one"
    refusal(await client.get(at, params={"owner": "ana"}), 404)


async def test_fields_of_one_fact_beside_many_are_refused(client: httpx.AsyncClient) -> None:
    body = {"owner": "ana", "facts": [{"text": "one"}], "stream": "chat"}
    assert (await client.post(FACTS, json=body)).status_code in {400, 422}


async def test_a_page_goes_on_behind_a_fact_that_was_deleted_meanwhile(client: httpx.AsyncClient) -> None:
    facts = await add(client, "one", "two", "three")
    first = (await client.get(FACTS, params={"owner": "ana", "limit": 2})).json()
    await client.delete(f"{FACTS}/{facts[1]['id']}", params={"owner": "ana"})
    page = await client.get(FACTS, params={"owner": "ana", "after": first["next"]})
    assert [fact["text"] for fact in page.json()["facts"]] == ["three"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FactNotFound("x"), 404),
        (InvalidFact("x"), 400),
        (BadMemoryRequest("x"), 400),
        (DuplicateFact("x"), 409),
        (FactSuperseded("x"), 409),
        (IdempotencyConflict("x"), 409),
        (VersionConflict("x"), 409),
        (FeedGap(since=1, floor=2), 410),
        (StoreBusy("x"), 503),
        (StoreUnreachable("x"), 503),
        (StoreRefused("x"), 503),
        (StoreTLSError("x"), 503),
        (EmbedderMismatch(stored="x", offered="y"), 503),
        (StoreFull("x"), 507),
        (BlobStoreFull("x"), 507),
        (BlobStoreError("x"), 503),
        (BlobStoreInUse("x"), 503),
        (EmbeddingError("x", position=3), 400),
        (EmbeddingError("x"), 500),
        (StoreClosed("x"), 500),
        (BadMemoryRequest("half \ud800"), 400),
    ],
)
async def test_each_error_has_its_status(error: Exception, status: int) -> None:
    reply = error_response(error)
    body = json.loads(bytes(reply.body))["error"]
    assert (reply.status_code, body["code"], body["type"]) == (status, status, type(error).__name__)
    is_passing = status == 503 and not isinstance(error, EmbedderMismatch)
    assert ("retry-after" in reply.headers) == is_passing
