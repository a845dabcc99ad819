"""The routes that change facts, and those that tell what changed."""

import asyncio
import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from kv_faults import unwritable
from memory_engine import MemoryEngine
from memory_routes import FACTS, add, refusal
from sglang.srt.utils.auth import add_api_key_middleware

from memstore import KVBlobs, MemStore
from sgl_stateful.service import MemoryService

pytestmark = pytest.mark.anyio

SEARCH = "/v1/memory/search"
CHANGES = "/v1/memory/changes"


async def found(client: httpx.AsyncClient, query: str, **more: Any) -> list[str]:
    reply = await client.post(SEARCH, json={"owner": "ana", "query": query, "min_score": 0.3, **more})
    assert reply.status_code == 200, reply.text
    return [hit["fact"]["text"] for hit in reply.json()["hits"]]


# ---- adding ----


async def test_an_add_says_what_became_of_each_fact(client: httpx.AsyncClient) -> None:
    (first,) = await add(client, "red kayak paddle")
    assert (first["created"], first["near_duplicates"], first["chunks"]) == (True, [], 1)
    same, near = await add(client, "red kayak paddle", "Red kayak paddle")
    assert (same["id"], same["created"]) == (first["id"], False)
    assert near["created"] is True
    assert near["near_duplicates"] == [
        {"id": first["id"], "score": pytest.approx(1.0, abs=1e-6), "text": "red kayak paddle"}
    ]


@pytest.mark.parametrize("place", ["header", "body", "both"])
async def test_an_idempotency_key_adds_once(client: httpx.AsyncClient, place: str) -> None:
    body: dict[str, Any] = {"owner": "ana", "text": "one"} | ({} if place == "header" else {"idempotency_key": "k"})
    headers = {} if place == "body" else {"Idempotency-Key": "k"}
    first = (await client.post(FACTS, json=body, headers=headers)).json()["facts"][0]
    again = (await client.post(FACTS, json=body, headers=headers)).json()["facts"][0]
    assert (again["id"], first["created"], again["created"]) == (first["id"], True, False)
    other = await client.post(FACTS, json=body | {"text": "two"}, headers=headers)
    assert "used for other content" in refusal(other, 409)


async def test_two_idempotency_keys_are_refused(client: httpx.AsyncClient) -> None:
    body = {"owner": "ana", "text": "one", "idempotency_key": "a"}
    assert "differ" in refusal(await client.post(FACTS, json=body, headers={"Idempotency-Key": "b"}), 400)


async def test_a_fact_that_expires(client: httpx.AsyncClient) -> None:
    at = time.time() + 3600
    (fact,) = await add(client, "one", expires_at=at)
    assert fact["expires_at"] == at
    body = {"owner": "ana", "text": "two", "expires_at": 1.0}
    assert "has passed" in refusal(await client.post(FACTS, json=body), 400)


async def test_an_event_time_is_shown(client: httpx.AsyncClient) -> None:
    (fact,) = await add(client, "one", time="8 May 2023")
    assert fact["event_at"] == 1683504000.0  # date -u -d 2023-05-08 +%s
    assert (fact["state"], fact["supersedes"]) == ("current", None)


# ---- updating ----


async def test_an_update_changes_what_it_names_and_has_the_kv_made_anew(
    client: httpx.AsyncClient, blobs: KVBlobs, engine: MemoryEngine
) -> None:
    (fact,) = await add(client, "red kayak", speaker="Ana", time="8 May 2023", metadata={"tags": ["boat"]}, stream="x")
    at = f"{FACTS}/{fact['id']}"
    await client.post(FACTS, json={"owner": "ana", "text": "green bicycle", "wait": True})
    reply = await client.patch(at, json={"owner": "ana", "text": "blue canoe", "wait": True})
    assert reply.status_code == 200, reply.text
    assert reply.json()["kv_pending"] == []
    changed = reply.json()["fact"]
    kept = ("id", "speaker", "time", "metadata", "stream", "created_at", "event_at")
    assert {name: changed[name] for name in kept} == {name: fact[name] for name in kept}
    assert (changed["text"], changed["version"]) == ("blue canoe", 2)
    assert await found(client, "red kayak") == []
    assert await found(client, "blue canoe") == ["blue canoe"]
    encoded = [bytes(sent.token_ids).decode() for sent in engine.captures]
    assert "blue canoe" in encoded[-1]
    (dropped,) = [payload["encoding_ids"] for op, payload in engine.controls if op == "drop"]
    assert not any(map(blobs.has, dropped))


@pytest.mark.parametrize("mode", ["vector", "keyword"])
@pytest.mark.parametrize(("field", "query"), [("speaker", "{}:"), ("time", "({})")])
async def test_a_fact_is_found_by_its_new_speaker_or_time(
    client: httpx.AsyncClient, mode: str, field: str, query: str
) -> None:
    (fact,) = await add(client, "red kayak", **{field: "Ana"})
    assert await found(client, query.format("Ana"), mode=mode, min_score=1e-9) == ["red kayak"]
    reply = await client.patch(f"{FACTS}/{fact['id']}", json={"owner": "ana", field: "Eva"})
    assert reply.status_code == 200, reply.text
    assert await found(client, query.format("Eva"), mode=mode, min_score=1e-9) == ["red kayak"]
    # No word is shared but the one part of every vector of this embedder.
    assert await found(client, query.format("Ana"), mode=mode, min_score=0.01) == []


@pytest.mark.parametrize("field", ["speaker", "time", "expires_at"])
async def test_null_clears_a_field_and_no_other(client: httpx.AsyncClient, field: str) -> None:
    at = time.time() + 3600
    (fact,) = await add(client, "one", speaker="Ana", time="8 May 2023", expires_at=at)
    reply = await client.patch(f"{FACTS}/{fact['id']}", json={"owner": "ana", field: None})
    left = {name: reply.json()["fact"][name] for name in ("speaker", "time", "expires_at")}
    assert left == {"speaker": "Ana", "time": "8 May 2023", "expires_at": at} | {field: None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "at least one field"),
        ({"text": None}, "text: "),
        ({"stream": None}, "stream: "),
        ({"metadata": None}, "metadata: "),
        ({"text": ""}, "text is empty"),
        ({"text": "x" * 101}, "the limit of this server is 100"),
        ({"time": "x" * 101}, "the limit of this server is 100"),
        ({"expires_at": 1.0}, "has passed"),
        ({"colour": "red"}, "colour: "),
        ({"id": "another"}, "id: "),
    ],
)
async def test_updates_that_are_refused_change_nothing(
    client: httpx.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    (fact,) = await add(client, "one")
    at = f"{FACTS}/{fact['id']}"
    assert message in refusal(await client.patch(at, json={"owner": "ana", **fields}), 400)
    assert (await client.get(at, params={"owner": "ana"})).json()["version"] == 1


async def test_an_update_into_another_fact_is_a_conflict(client: httpx.AsyncClient) -> None:
    one, two = await add(client, "one", "two")
    reply = await client.patch(f"{FACTS}/{two['id']}", json={"owner": "ana", "text": "one"})
    assert one["id"] in refusal(reply, 409)


async def test_a_fact_of_another_owner_is_unknown_to_every_change(client: httpx.AsyncClient) -> None:
    (fact,) = await add(client, "of ana")
    at = f"{FACTS}/{fact['id']}"
    before = (await client.get(at, params={"owner": "ana"})).json()

    async def attempts(where: str) -> list[httpx.Response]:
        return [
            await client.patch(where, json={"owner": "bob", "text": "of bob"}),
            await client.post(f"{where}/supersede", json={"owner": "bob", "text": "of bob"}),
            await client.get(f"{where}/history", params={"owner": "bob"}),
            await client.delete(where, params={"owner": "bob"}),
        ]

    theirs = [refusal(reply, 404).replace(fact["id"], "unknown") for reply in await attempts(at)]
    assert theirs == [refusal(reply, 404) for reply in await attempts(f"{FACTS}/unknown")]
    assert (await client.get(at, params={"owner": "ana"})).json() == before
    assert (await client.get(FACTS, params={"owner": "bob"})).json()["facts"] == []


# ---- superseding ----


async def test_a_superseded_fact_is_history(client: httpx.AsyncClient) -> None:
    (old,) = await add(client, "Office is on floor 2", speaker="Ana", metadata={"tags": ["office"]})
    reply = await client.post(
        f"{FACTS}/{old['id']}/supersede", json={"owner": "ana", "text": "Office is on floor 5", "wait": True}
    )
    assert reply.status_code == 200, reply.text
    new = reply.json()["fact"]
    assert reply.json()["kv_pending"] == []
    assert (new["supersedes"], new["speaker"], new["metadata"]) == (old["id"], "Ana", {"tags": ["office"]})
    assert await found(client, "Office is on floor") == ["Office is on floor 5"]
    shown = (await client.get(f"{FACTS}/{new['id']}/history", params={"owner": "ana"})).json()["versions"]
    assert [fact["text"] for fact in shown] == ["Office is on floor 2", "Office is on floor 2", "Office is on floor 5"]
    assert [fact["state"] for fact in shown] == ["current", "superseded", "current"]

    async def listed(**params: Any) -> list[str]:
        page = (await client.get(FACTS, params={"owner": "ana", **params})).json()
        return [fact["text"] for fact in page["facts"]]

    assert await listed() == ["Office is on floor 5"]
    assert await listed(superseded=True) == ["Office is on floor 2", "Office is on floor 5"]
    again = await client.patch(f"{FACTS}/{old['id']}", json={"owner": "ana", "text": "Office is on floor 3"})
    assert "has been superseded" in refusal(again, 409)


# ---- purging ----


async def test_a_purge_needs_the_owner_twice(client: httpx.AsyncClient) -> None:
    await add(client, "one")
    for params in ({"confirm": "bob"}, {"confirm": ""}, {}):
        refusal(await client.delete("/v1/memory/owners/ana", params=params), 400)
    assert len((await client.get(FACTS, params={"owner": "ana"})).json()["facts"]) == 1


@pytest.mark.parametrize("owner", ["ana", "a/b", "a:b", "a b", "a*", "a%2Fb", "né"])
async def test_a_purge_removes_one_owner_and_counts(
    client: httpx.AsyncClient, service: MemoryService, blobs: KVBlobs, engine: MemoryEngine, owner: str
) -> None:
    one, two = await add(client, "one", "two", owner=owner)
    await client.patch(f"{FACTS}/{one['id']}", json={"owner": owner, "text": "three", "wait": True})
    await client.delete(f"{FACTS}/{two['id']}", params={"owner": owner})
    await client.post(FACTS, json={"owner": "bob", "text": "of bob", "wait": True})
    await service.wait_for_kv(owner, [one["id"]])
    salts = service.salt(owner), service.salt("bob")
    reply = await client.delete(httpx.URL(f"/v1/memory/owners/{_quoted(owner)}"), params={"confirm": owner})
    assert reply.status_code == 200, reply.text
    receipt = reply.json()
    assert (receipt["owner"], receipt["facts"], receipt["history"]) == (owner, 1, 1)
    assert (receipt["epoch"], receipt["encodings"]) == (1, 1)
    assert (await client.get(FACTS, params={"owner": owner})).json()["facts"] == []
    assert service.salt(owner) != salts[0]
    assert service.salt("bob") == salts[1]
    assert blobs.stats().encodings == 1, "of bob"
    assert ("sweep", {}) in engine.controls


def _quoted(owner: str) -> str:
    return "".join(f"%{byte:02X}" for byte in owner.encode())


async def test_purging_takes_the_admin_key(app: FastAPI, client: httpx.AsyncClient) -> None:
    """As SGLang reads the marks of its own routes."""
    add_api_key_middleware(app, api_key="caller", admin_api_key="admin")
    caller, admin = ({"Authorization": f"Bearer {key}"} for key in ("caller", "admin"))
    body = {"owner": "a/b", "text": "one"}
    assert (await client.post(FACTS, json=body)).status_code == 401
    assert (await client.post(FACTS, json=body, headers=caller)).status_code == 200
    for method, path in (("DELETE", "/v1/memory/owners/a/b?confirm=a/b"), ("GET", CHANGES)):
        assert (await client.request(method, path)).status_code == 401
        assert (await client.request(method, path, headers=caller)).status_code == 401
        assert (await client.request(method, path, headers=admin)).status_code == 200


# ---- searching and following ----


async def test_a_search_with_a_filter(client: httpx.AsyncClient) -> None:
    await add(client, "red kayak", stream="a", metadata={"rating": 5})
    await add(client, "red kayak paddle", stream="b", metadata={"rating": 2})
    assert await found(client, "red kayak", where={"stream": "b"}) == ["red kayak paddle"]
    assert await found(client, "red kayak", where={"metadata.rating": {"gt": 3}}) == ["red kayak"]
    reply = await client.post(SEARCH, json={"owner": "ana", "query": "red", "where": {"colour": "red"}})
    assert "metadata.colour" in refusal(reply, 400)


async def test_a_search_by_keywords(client: httpx.AsyncClient) -> None:
    await add(client, "the ferry leaves at nine", "a red kayak")
    assert await found(client, "ferries leaving", mode="keyword", min_score=None) == ["the ferry leaves at nine"]
    both = await found(client, "ferry", mode="hybrid", min_score=None)
    assert both[0] == "the ferry leaves at nine"
    assert "mode: " in refusal(await client.post(SEARCH, json={"owner": "ana", "query": "x", "mode": "regex"}), 400)


async def test_changes_in_pages(client: httpx.AsyncClient, store: MemStore) -> None:
    (fact,) = await add(client, "one")
    await add(client, "of bob", owner="bob")
    await client.patch(f"{FACTS}/{fact['id']}", json={"owner": "ana", "text": "two"})
    await client.delete(f"{FACTS}/{fact['id']}", params={"owner": "ana"})
    kinds: list[tuple[str, str]] = []
    since = 0
    while page := (await client.get(CHANGES, params={"since": since, "limit": 3})).json()["changes"]:
        kinds += [(change["kind"], change["owner"]) for change in page]
        since = page[-1]["position"]
    assert kinds == [("added", "ana"), ("added", "bob"), ("updated", "ana"), ("deleted", "ana")]
    of_bob = (await client.get(CHANGES, params={"owner": "bob"})).json()
    assert [change["kind"] for change in of_bob["changes"]] == ["added"]
    assert of_bob["next"] == of_bob["changes"][0]["position"]
    assert (await client.get(CHANGES, params={"since": since})).json() == {"changes": [], "next": since}
    assert "text" not in of_bob["changes"][0]


# ---- a KV store that fails ----


async def test_a_change_is_answered_whatever_becomes_of_its_kv(
    client: httpx.AsyncClient,
    service: MemoryService,
    blobs: KVBlobs,
    engine: MemoryEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sgl_stateful.encoding.encoder._KV_REST_S", 0.01)
    assert service.encoder is not None
    service.encoder._kv_rest_s = 0.01
    fact, other = await add(client, "red kayak", "green bicycle")
    assert await service.wait_for_kv("ana", [fact["id"], other["id"]]) == []
    with unwritable(blobs, readable=False):
        reply = await client.patch(f"{FACTS}/{fact['id']}", json={"owner": "ana", "text": "blue canoe"})
        assert reply.status_code == 200, reply.text
        assert (await client.delete(f"{FACTS}/{other['id']}", params={"owner": "ana"})).status_code == 200
        assert [op for op, _ in engine.controls if op != "describe"][-1] == "sweep", "it may be in the arena"
    assert [f.text for f in service.store.list("ana")] == ["blue canoe"]
    async with asyncio.timeout(60):
        while service._forgetting.owes or await service.wait_for_kv("ana", [fact["id"]]):
            await asyncio.sleep(0.01)
    assert blobs.stats().encodings == 1
