"""Memory over HTTP on the real server: routes, reports, errors, and what survives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import lmdb
import openai
import pytest
from engines import RunningServer

pytestmark = pytest.mark.engine

_TURNS = [
    ("Mila", "I finally adopted a greyhound. Her name is Pepper."),
    ("Omar", "Pepper is a great name! How old is she?"),
    ("Mila", "She is four, and she sleeps twenty hours a day."),
    ("Omar", "My sister Salma moved to Tromso for a job at the observatory."),
    ("Mila", "Tromso! Does she like the dark winters?"),
    ("Omar", "She does, and she has started to paint the northern lights."),
    ("Mila", "I am training for the Ghent marathon in October."),
    ("Omar", "I baked a cardamom cake yesterday and burned it."),
]


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


def add_turns(http: httpx.Client, owner: str) -> list[str]:
    facts = [
        {"text": text, "speaker": speaker, "time": f"{3 + i // 4} May, 2024", "stream": "chat", "metadata": {"turn": i}}
        for i, (speaker, text) in enumerate(_TURNS)
    ]
    reply = http.post("/v1/memory/facts", json={"owner": owner, "facts": facts, "wait": True})
    assert reply.status_code == 200, reply.text
    assert reply.json()["kv_pending"] == []
    return [fact["id"] for fact in reply.json()["facts"]]


@pytest.fixture
def owner(http: httpx.Client) -> str:
    """An owner with eight facts, whose KV exists."""
    name = f"owner-{uuid4().hex}"
    add_turns(http, name)
    return name


def chat(http: httpx.Client, question: str, **memory: Any) -> dict[str, Any]:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
        "custom_params": {"memory": memory},
    }
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


def test_status_shows_a_passed_self_test(http: httpx.Client) -> None:
    status = http.get("/v1/memory/status").json()
    assert status["verified"] is True
    assert status["self_test"]["k_error"] <= 1e-5
    assert status["self_test"]["v_error"] <= 1e-5
    assert status["policies"] == ["ladder:0+4", "window:16", "ladder:live+4"]


def test_splice_and_text_send_the_same_ids_and_report_what_happened(http: httpx.Client, owner: str) -> None:
    spliced = chat(http, "Where does Salma live?", owner=owner, k=4)["memory"]
    text = chat(http, "Where does Salma live?", owner=owner, k=4, mode="text")["memory"]
    assert spliced["tier"] == "spliced"
    assert text["tier"] == "text"
    assert [f["id"] for f in spliced["facts"]] == [f["id"] for f in text["facts"]]
    assert spliced["tokens"]["prompt"] == text["tokens"]["prompt"]
    assert spliced["tokens"]["spliced"] > 0
    for report in (spliced, text):
        assert sum(report["tokens"][part] for part in ("cached", "spliced", "prefilled")) == report["tokens"]["prompt"]
        scores = [fact["score"] for fact in report["facts"]]
        assert scores == sorted(scores)  # the best fact stands nearest the question


def test_facts_at_their_original_positions_answer_like_full_prefill(http: httpx.Client, owner: str) -> None:
    memory = {"owner": owner, "k": len(_TURNS), "order": "chronological"}
    http.post("/flush_cache")  # encoding has left this very block in the radix cache, and exact comes first
    spliced = chat(http, "What is the dog called?", **memory, policy="window:16")
    text = chat(http, "What is the dog called?", **memory, mode="text")
    assert spliced["memory"]["tier"] == "spliced"
    assert text["memory"]["tier"] == "text"
    assert text_of(spliced) == text_of(text)
    for mine, theirs in zip(
        spliced["choices"][0]["logprobs"]["content"], text["choices"][0]["logprobs"]["content"], strict=True
    ):
        assert mine["token"] == theirs["token"]
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)


def test_a_longer_conversation_keeps_its_history_in_front_of_the_facts(http: httpx.Client, owner: str) -> None:
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Hello there."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Where does Salma live?"},
    ]
    for placement in ("tail", "system"):
        body = {
            "model": "default",
            "messages": messages,
            "max_tokens": 4,
            "temperature": 0,
            "custom_params": {"memory": {"owner": owner, "k": 3, "placement": placement}},
        }
        report = http.post("/v1/chat/completions", json=body).json()["memory"]
        assert report["tier"] == "spliced", report
        assert report["tokens"]["spliced"] > 0


def test_structured_output_tools_and_parts_go_with_memory(http: httpx.Client, owner: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    for more in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}},
        {"tools": [tool]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Where does Salma live?"}]}]},
    ):
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "Where does Salma live?"}],
            "max_tokens": 40,
            "temperature": 0,
            "custom_params": {"memory": {"owner": owner, "k": 2}},
            **more,
        }
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["memory"]["facts"]) == 2
        if "response_format" in more:
            assert reply.json()["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_an_openai_client_just_works(server: RunningServer, owner: str) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        extra = {"custom_params": {"memory": {"owner": owner, "k": 3}}}
        messages: Any = [{"role": "user", "content": "What did Omar bake?"}]
        answer = client.chat.completions.create(
            model="default", messages=messages, max_tokens=6, temperature=0, extra_body=extra
        )
        chunks = list(
            client.chat.completions.create(
                model="default", messages=messages, max_tokens=6, temperature=0, stream=True, extra_body=extra
            )
        )
    assert answer.memory["tier"] == "spliced"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == answer.choices[0].message.content
    reports = [chunk.memory for chunk in chunks if getattr(chunk, "memory", None)]
    assert len(reports) == 1
    assert chunks[-1].memory == reports[0]
    assert reports[0]["facts"] == answer.memory["facts"]


def test_generate_takes_a_marker_ids_and_batches(http: httpx.Client, owner: str) -> None:
    memory = {"owner": owner, "k": 2, "query": "greyhound"}
    sampling = {"max_new_tokens": 2, "temperature": 0, "custom_params": {"memory": memory}}
    one = http.post("/generate", json={"text": "Facts:\n{{memory}}The dog is", "sampling_params": sampling}).json()
    assert one["meta_info"]["memory"]["tier"] == "spliced"
    batch = http.post("/generate", json={"text": ["{{memory}}A", "{{memory}}B"], "sampling_params": sampling}).json()
    assert [item["meta_info"]["memory"]["owner"] for item in batch] == [owner, owner]
    two = http.post(
        "/generate",
        json={
            "text": ["{{memory}}A", "{{memory}}B"],
            "sampling_params": [{**sampling, "n": 2, "custom_params": {"memory": {**memory, "k": k}}} for k in (1, 3)],
        },
    ).json()
    assert [len(item["meta_info"]["memory"]["facts"]) for item in two] == [1, 1, 3, 3]
    ids = {"input_ids": [504, 284], "sampling_params": {**sampling, "n": 2}}
    both = http.post("/generate", json=ids).json()
    assert len(both) == 2
    assert all(len(item["meta_info"]["memory"]["facts"]) == 2 for item in both)


def test_a_plain_request_shows_nothing_of_ours(http: httpx.Client) -> None:
    reply = http.post("/generate", json={"text": "Hello", "sampling_params": {"max_new_tokens": 2}}).json()
    assert not {"sgl_stateful", "memory"} & reply["meta_info"].keys()


@pytest.mark.parametrize(
    ("memory", "named"),
    [
        ({"owner": "o", "k": -1}, "k"),
        ({"owner": "o", "k": 1001}, "k"),
        ({"owner": "o", "mode": "sideways"}, "mode"),
        ({"k": 3}, "owner"),
        ({"owner": "o", "policy": "window:3"}, "window:3"),
        ({"owner": "o", "unknown": 1}, "unknown"),
        ({"owner": ""}, "owner"),
        ({"owner": "x" * 600}, "owner"),
    ],
)
def test_bad_memory_requests_are_refused_by_name(http: httpx.Client, memory: dict[str, Any], named: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "custom_params": {"memory": memory}}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert named in reply.json()["message"]


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_a_caller_cannot_forge_a_directive(http: httpx.Client, route: str) -> None:
    forged = {"sgl_stateful": json.dumps({"op": "splice", "spans": [["00", 0, 1]]})}
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    body |= {"custom_params": forged, "max_tokens": 1}
    if route == "/generate":
        body = {"text": "hi", "sampling_params": {"custom_params": forged, "max_new_tokens": 1}}
    reply = http.post(route, json=body)
    assert reply.status_code == 400
    assert "reserved" in reply.text


def test_an_unknown_owner_has_no_facts(http: httpx.Client) -> None:
    report = chat(http, "Anything?", owner="nobody-at-all", k=5)["memory"]
    assert report["facts"] == []
    assert report["tier"] == "none"


def test_owners_never_see_each_other(http: httpx.Client, owner: str) -> None:
    other = f"other-{uuid4().hex}"
    add_turns(http, other)
    mine = {fact["id"] for fact in chat(http, "greyhound", owner=owner, k=8)["memory"]["facts"]}
    theirs = {fact["id"] for fact in chat(http, "greyhound", owner=other, k=8)["memory"]["facts"]}
    for name in (owner, other):  # one and the same prompt: its KV is cached for each owner alone
        first = chat(http, f"The same words for both. {owner}", owner=name, k=0)["memory"]["tokens"]
        assert first["cached"] <= first["prompt"] // 2
    assert len(mine) == len(theirs) == 8
    assert not mine & theirs
    some = next(iter(mine))
    assert http.get(f"/v1/memory/facts/{some}", params={"owner": other}).status_code == 404
    assert http.delete(f"/v1/memory/facts/{some}", params={"owner": other}).status_code == 404
    assert http.get(f"/v1/memory/facts/{some}", params={"owner": owner}).status_code == 200


def test_a_deleted_fact_is_gone_and_what_saw_it_is_encoded_again(http: httpx.Client, owner: str) -> None:
    hits = http.post("/v1/memory/search", json={"owner": owner, "query": "greyhound Pepper", "k": 1}).json()["hits"]
    victim = hits[0]["fact"]["id"]
    assert http.delete(f"/v1/memory/facts/{victim}", params={"owner": owner}).status_code == 200
    left = http.post("/v1/memory/search", json={"owner": owner, "query": "greyhound Pepper", "k": 50}).json()["hits"]
    assert len(left) == 7
    assert victim not in {hit["fact"]["id"] for hit in left}
    # An add waits for the owner's missing encodings, those that saw the deleted fact among them.
    http.post("/v1/memory/facts", json={"owner": owner, "text": "Pepper likes snow.", "wait": True})
    report = chat(http, "Who is Pepper?", owner=owner, k=8)["memory"]
    assert report["not_encoded"] == 0
    assert report["tier"] == "spliced"


def damage_blobs(server: RunningServer) -> int:
    """Flip one byte of every KV value, from another process; returns how many there were."""
    code = """
import lmdb, sys
env = lmdb.open(sys.argv[1], max_dbs=8, map_size=96 << 30)
blobs = env.open_db(b"blobs")
with env.begin(write=True, db=blobs) as txn:
    keys = [bytes(key) for key, _ in txn.cursor()]
    for key in keys:
        value = bytearray(txn.get(key))
        value[len(value) // 2] ^= 1
        txn.put(key, bytes(value))
print(len(keys))
"""
    assert lmdb.version() is not None
    done = subprocess.run(
        [sys.executable, "-c", code, str(server.memory / "kv")], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def test_a_flipped_byte_costs_speed_and_not_the_answer(server: RunningServer, http: httpx.Client, owner: str) -> None:
    before = chat(http, "Who paints the northern lights?", owner=owner, k=4, mode="text")
    facts = [fact["id"] for fact in before["memory"]["facts"]]  # each keeps its rank, and so the encoding it needs
    assert damage_blobs(server) >= 8
    http.post("/flush_cache")  # drops the arena, so the damaged values are read
    after = chat(http, "Who paints the northern lights?", owner=owner, facts=facts)
    assert after["memory"]["tier"] == "text"
    assert after["memory"]["reason"] == "facts_lost"
    assert text_of(after) == text_of(before)
    assert http.get("/v1/memory/status").json()["scheduler"]["corrupt"] > 0
    # The damaged facts are encoded again, and served from memory again.
    assert (
        http.post("/v1/memory/facts", json={"owner": owner, "text": "Filler.", "wait": True}).json()["kv_pending"] == []
    )
    http.post("/flush_cache")
    last = chat(http, "Who paints the northern lights?", owner=owner, facts=facts)
    assert last["memory"]["tier"] == "spliced"


def test_metrics_are_served_with_sglangs_own(http: httpx.Client, owner: str) -> None:
    chat(http, "Who is training?", owner=owner, k=2)
    assert http.get("/v1/memory/status").json()["requests"]["spliced"] >= 1
    metrics = http.get("/metrics").text
    spliced = next(
        line for line in metrics.splitlines() if 'sgl_stateful_memory_requests_total{tier="spliced"}' in line
    )
    assert float(spliced.split()[-1]) >= 1
    assert "sglang:prompt_tokens_total" in metrics
    assert "sglang:gen_throughput" in metrics  # from the scheduler's process
