"""Sessions over HTTP on the real server: answers against a fresh prefill of the same tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from engines import RunningServer
from sessions_http import GREEDY, KnownSession, fresh, new_owner
from transformers import AutoTokenizer

pytestmark = pytest.mark.engine

POOL_TOKENS, BUDGET = 6000, 3000
MESSAGES = [
    {"role": "system", "content": "You watch the greenhouses of a nursery."},
    {"role": "user", "content": "08:00 bed 3: 31 degrees, soil dry."},
    {"role": "user", "content": "08:05 bed 4: 22 degrees, soil wet."},
]
QUESTION = {"role": "user", "content": "Which bed needs water?"}


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.fixture
def owner(http: httpx.Client) -> Iterator[str]:
    """An owner whose sessions are closed in the end."""
    name = new_owner()
    yield name
    for session in http.get("/v1/sessions", params={"owner": name}).json()["sessions"]:
        assert http.delete(f"/v1/sessions/{session['id']}", params={"owner": name}).status_code == 200


def ids(count: int, seed: int) -> list[int]:
    """Token ids of no meaning, none of them special."""
    return random.Random(seed).choices(range(1000, 40_000), k=count)


def cells(http: httpx.Client) -> dict[str, int]:
    found: dict[str, int] = http.get("/v1/sessions/stats").json()["cells"]
    return found


# ---- answers ----


def test_a_query_answers_as_a_fresh_prefill_does(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(200, 1))
    done = session.append(ids(50, 2))
    assert (done["appended_tokens"], done["prefilled_tokens"], done["cached_tokens"]) == (50, 50, 200)
    question = ids(8, 3)
    more = {"return_logprob": True, "top_logprobs_num": 5}
    answer = session.ask("query", question, **more)
    right = fresh(http, [*session.token_ids, *question], **more)
    assert answer["output_ids"] == right["output_ids"]
    found, wanted = (a["meta_info"]["output_top_logprobs"] for a in (answer, right))
    for ours, theirs in zip(found, wanted, strict=True):
        assert [token for _, token, _ in ours] == [token for _, token, _ in theirs]
        assert [p for p, _, _ in ours] == pytest.approx([p for p, _, _ in theirs], abs=1e-4)
    shown = answer["meta_info"]["session"]
    assert (answer["data_version"], shown["cached_tokens"], shown["prefilled_tokens"]) == (2, 250, 8)
    assert "version" not in answer


def test_turns_add_up_to_what_was_said(http: httpx.Client, owner: str) -> None:
    """Case S4: what was generated is not prefilled again, but for its last token."""
    session = KnownSession.open(http, owner, ids(100, 4))
    first = session.ask("turn", ids(6, 5), max_new_tokens=50)
    assert (first["data_version"], first["version"]) == (1, 2)
    assert session.show()["tokens"] == 156
    second = session.ask("query", ids(50, 6))
    assert second["output_ids"] == fresh(http, [*session.token_ids, *ids(50, 6)])["output_ids"]
    assert second["meta_info"]["session"]["cached_tokens"] == 155


def test_any_number_of_queries_at_once(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(150, 7))
    questions = [ids(5 + n, 100 + n) for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda question: session.ask("query", question), questions))
    for question, answer in zip(questions, answers, strict=True):
        assert answer["output_ids"] == fresh(http, [*session.token_ids, *question])["output_ids"]
        assert answer["meta_info"]["session"]["cached_tokens"] == 150
    assert session.show()["version"] == 1


def test_a_stream_says_the_same_and_ends_with_the_versions(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(60, 8))
    question, whole = ids(7, 9), None
    sampling = {"max_new_tokens": 6, "ignore_eos": True, **GREEDY}
    body = {"owner": owner, "input_ids": question, "sampling_params": sampling, "stream": True}
    with http.stream("POST", f"/v1/sessions/{session.id}/turn", json=body) as reply:
        assert reply.status_code == 200
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    whole = json.loads(events[-2])
    assert whole["output_ids"] == fresh(http, [*session.token_ids, *question])["output_ids"]
    assert (whole["data_version"], whole["version"], whole["meta_info"]["session"]["tokens"]) == (1, 2, 73)


def test_rewinding_and_forking(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(80, 10))
    session.append(ids(20, 11))
    fork = session.post("fork", version=1)
    assert fork.status_code == 201
    other = KnownSession(http, owner, fork.json()["id"], session.token_ids[:80])
    assert fork.json()["parent"] == {"id": session.id, "version": 1}
    other.append(ids(10, 12))
    assert session.post("rewind", version=1, if_version=2).json()["version"] == 3
    del session.token_ids[80:]
    for one in (session, other):
        answer = one.ask("query", ids(4, 13))
        assert answer["output_ids"] == fresh(http, [*one.token_ids, *ids(4, 13)])["output_ids"]
        assert answer["meta_info"]["session"]["cached_tokens"] == len(one.token_ids)
    assert other.ask("query", ids(4, 13))["data_version"] == 2


def test_a_window_answers_as_a_fresh_prefill_of_what_it_holds(http: httpx.Client, owner: str) -> None:
    prefix, parts = ids(30, 14), [ids(20, 200 + n) for n in range(12)]
    session = KnownSession.open(http, owner, prefix, window_tokens=100)
    held: list[list[int]] = []
    for part in parts:
        session.append(part)
        held.append(part)
        if sum(map(len, held)) > 100:
            held = held[-2:]  # half of 100 holds two of 20
        answer = session.ask("query", ids(4, 15))
        now = [*prefix, *(token for one in held for token in one)]
        assert answer["output_ids"] == fresh(http, [*now, *ids(4, 15)])["output_ids"]
    shown = session.show()
    assert shown["tokens"] == 30 + sum(map(len, held))
    assert shown["window"] == {"tokens": 100, "dropped_messages": 8, "dropped_tokens": 160}


# ---- messages ----


def test_messages_are_rendered_as_one_conversation(http: httpx.Client, owner: str, server: RunningServer) -> None:
    reply = http.post("/v1/sessions", json={"owner": owner, "messages": MESSAGES[:1]})
    session = KnownSession(http, owner, reply.json()["id"])
    for message in MESSAGES[1:]:
        assert session.post("append", messages=[message]).status_code == 200
    sampling = {"max_new_tokens": 12, **GREEDY}
    answer = session.post("query", messages=[QUESTION], sampling_params=sampling).json()
    plain = http.post(
        "/v1/chat/completions",
        json={"model": "default", "messages": [*MESSAGES, QUESTION], "max_tokens": 12, **GREEDY},
    ).json()
    assert answer["text"] == plain["choices"][0]["message"]["content"]
    assert answer["meta_info"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_chat_turn_is_closed_as_the_template_closes_it(http: httpx.Client, owner: str, model_dir: Any) -> None:
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")
    reply = http.post("/v1/sessions", json={"owner": owner, "messages": MESSAGES})
    session = reply.json()["id"]

    def say(mode: str, question: str) -> Any:
        return client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question}],
            max_tokens=12,
            temperature=0,
            extra_body={"custom_params": {"session": {"id": session, "mode": mode, "owner": owner}}},
        )

    first = say("turn", "Which bed needs water?")
    said = first.choices[0].message.content
    conversation = [*MESSAGES, QUESTION, {"role": "assistant", "content": said}]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False)
    shown = http.get(f"/v1/sessions/{session}", params={"owner": owner}).json()
    assert (shown["version"], first.session["version"]) == (2, 2)
    assert shown["tokens"] == len(tokenizer.encode(rendered, add_special_tokens=False))
    second = say("query", "And which one is warm?")
    plain = client.chat.completions.create(
        model="default",
        messages=[*conversation, {"role": "user", "content": "And which one is warm?"}],
        max_tokens=12,
        temperature=0,
    )
    assert second.choices[0].message.content == plain.choices[0].message.content
    assert second.usage.prompt_tokens == plain.usage.prompt_tokens
    assert second.session["data_version"] == 2


def test_a_streamed_chat_turn_shows_its_session(http: httpx.Client, owner: str) -> None:
    session = http.post("/v1/sessions", json={"owner": owner, "messages": MESSAGES}).json()["id"]
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default",
        messages=[QUESTION],
        max_tokens=8,
        temperature=0,
        stream=True,
        extra_body={"custom_params": {"session": {"id": session, "mode": "turn"}}},
    )
    told = [chunk.session for chunk in stream if getattr(chunk, "session", None)]
    assert [one["version"] for one in told] == [2]


def test_generate_takes_a_session_too(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(40, 16))
    params = {"session": {"id": session.id}, "mine": {"a": 1}}
    sampling = {"max_new_tokens": 6, "ignore_eos": True, "custom_params": params, **GREEDY}
    reply = http.post("/generate", json={"input_ids": ids(5, 17), "sampling_params": sampling}).json()
    assert reply["output_ids"] == fresh(http, [*session.token_ids, *ids(5, 17)])["output_ids"]
    assert reply["meta_info"]["session"]["data_version"] == 1


def test_text_is_itself(http: httpx.Client, owner: str, model_dir: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    parts = ["The lighthouse keeper wrote: ", "fog at six, ", "clear at nine, "]
    token_ids = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
    session = http.post("/v1/sessions", json={"owner": owner, "text": parts[0]}).json()["id"]
    for part in parts[1:]:
        http.post(f"/v1/sessions/{session}/append", json={"owner": owner, "text": part})
    asked = {"owner": owner, "text": "and at noon", "sampling_params": {"max_new_tokens": 6, **GREEDY}}
    answer = http.post(f"/v1/sessions/{session}/query", json=asked).json()
    question = tokenizer.encode("and at noon", add_special_tokens=False)
    assert answer["output_ids"] == fresh(http, [*token_ids, *question])["output_ids"]


# ---- memory behind a session ----


def test_facts_are_spliced_behind_a_session_that_stays_cached(http: httpx.Client, owner: str) -> None:
    """Case S15: other facts on every turn, and the conversation's prefix is cached on each."""
    facts = [f"The {thing} of {name} is in {place}." for thing, name, place in [
        ("boat", "Mila", "Ghent"), ("bicycle", "Omar", "Porto"), ("piano", "Salma", "Tromso"), ("kiln", "Ines", "Faro")
    ]]  # fmt: skip
    body = {"owner": owner, "facts": [{"text": text, "stream": "notes"} for text in facts], "wait": True}
    assert http.post("/v1/memory/facts", json=body).json()["kv_pending"] == []
    session = http.post("/v1/sessions", json={"owner": owner, "messages": MESSAGES}).json()
    tokens = session["tokens"]
    found = []
    for thing in ("boat of Mila", "piano of Salma", "bicycle of Omar"):
        asked = {
            "owner": owner,
            "messages": [{"role": "user", "content": f"Where is the {thing}?"}],
            "sampling_params": {"max_new_tokens": 6, **GREEDY},
            "memory": {"owner": owner, "k": 2},
        }
        answer = http.post(f"/v1/sessions/{session['id']}/turn", json=asked).json()
        memory, shown = answer["meta_info"]["memory"], answer["meta_info"]["session"]
        assert (memory["tier"], memory["reason"]) == ("spliced", None)
        assert memory["tokens"]["cached"] >= tokens
        assert memory["tokens"]["spliced"] > 0
        found.append(tuple(fact["id"] for fact in memory["facts"]))
        # What becomes part of the session is question and answer, without the facts.
        now = http.get(f"/v1/sessions/{session['id']}", params={"owner": owner}).json()
        assert now["tokens"] == shown["tokens"] < answer["meta_info"]["prompt_tokens"] + 8
        # The turn itself moves to where it stands without the facts: one more prefill, of it alone.
        done = http.post(f"/v1/sessions/{session['id']}/append", json={"owner": owner, "text": "\n"}).json()
        assert done["cached_tokens"] >= tokens
        tokens = done["session"]["tokens"]
    assert len(set(found)) == 3


def test_a_fact_behind_a_session_is_the_same_tokens_as_text_or_spliced(http: httpx.Client, owner: str) -> None:
    body = {"owner": owner, "text": "The boat of Mila is called Heron.", "stream": "notes", "wait": True}
    assert http.post("/v1/memory/facts", json=body).json()["kv_pending"] == []
    session = http.post("/v1/sessions", json={"owner": owner, "messages": MESSAGES[:1]}).json()["id"]
    answers = {}
    for mode in ("splice", "text"):
        asked = {
            "owner": owner,
            "messages": [{"role": "user", "content": "What is the boat of Mila called?"}],
            "sampling_params": {"max_new_tokens": 12, **GREEDY},
            "memory": {"owner": owner, "k": 1, "mode": mode},
        }
        answers[mode] = http.post(f"/v1/sessions/{session}/query", json=asked).json()
        assert "Heron" in answers[mode]["text"]
    tiers = {mode: answer["meta_info"]["memory"]["tier"] for mode, answer in answers.items()}
    assert tiers == {"splice": "spliced", "text": "text"}
    lengths = {answer["meta_info"]["prompt_tokens"] for answer in answers.values()}
    assert len(lengths) == 1


def test_a_session_shows_nobody_elses_facts(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(20, 18))
    refused = session.post("query", text="?", memory={"owner": new_owner(), "k": 1})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "SessionNotFound")


# ---- pins ----


def test_a_pinned_session_survives_a_flood_and_an_unpinned_one_does_not(http: httpx.Client, owner: str) -> None:
    """Case S7."""
    pinned = KnownSession.open(http, owner, ids(300, 19))
    loose = KnownSession.open(http, owner, ids(300, 20), pin=False)
    for n in range(18):
        fresh(http, ids(1000, 300 + n), max_new_tokens=1)
    kept, gone = (one.ask("query", ids(4, 21)) for one in (pinned, loose))
    assert kept["meta_info"]["session"]["cached_tokens"] == 300
    assert gone["meta_info"]["session"]["cached_tokens"] == 0
    for one, answer in ((pinned, kept), (loose, gone)):
        assert answer["output_ids"] == fresh(http, [*one.token_ids, *ids(4, 21)])["output_ids"]


def test_a_flush_loses_pins_and_the_next_query_makes_them_anew(http: httpx.Client, owner: str) -> None:
    """Case S13."""
    session = KnownSession.open(http, owner, ids(120, 22))
    before = session.ask("query", ids(4, 23))
    assert http.post("/flush_cache", params={"timeout": 30}).status_code == 200
    assert session.show()["pin"] == {"state": "lost", "cells": 120, "reason": "flushed"}
    assert cells(http)["pinned"] == 0
    again = session.ask("query", ids(4, 23))
    assert again["output_ids"] == before["output_ids"]
    assert again["meta_info"]["session"]["cached_tokens"] == 0
    assert session.show()["pin"] == {"state": "pinned", "cells": 120, "reason": None}
    assert session.ask("query", ids(4, 23))["meta_info"]["session"]["cached_tokens"] >= 120
    assert cells(http)["pinned"] == 120


def test_pins_beyond_the_budget_are_refused_and_plain_requests_finish(http: httpx.Client, owner: str) -> None:
    """Cases S1 and S2, at three times the budget."""
    refused, opened = [], []
    for n in range(12):
        body = {"owner": owner, "input_ids": ids(750, 400 + n)}
        reply = http.post("/v1/sessions", json=body)
        (opened if reply.status_code == 201 else refused).append(reply)
    assert (len(opened), len(refused)) == (4, 8)
    for reply in refused:
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], reply.headers["Retry-After"]) == (429, "PinRefused", "2")
        assert (error["needed"], error["pinned"], error["budget"]) == (750, 3000, BUDGET)
    assert cells(http)["pinned"] == 3000
    demoted = http.post("/v1/sessions", json={"owner": owner, "input_ids": ids(750, 450), "on_full": "demote"}).json()
    assert (demoted["pin"]["state"], demoted["pin"]["reason"]["needed"]) == ("unpinned", 750)
    assert fresh(http, ids(2500, 451))["meta_info"]["completion_tokens"] == 6
    # Longer than what the pins leave free: they give way, and it finishes.
    assert fresh(http, ids(4000, 452))["meta_info"]["completion_tokens"] == 6
    states = [s["pin"] for s in http.get("/v1/sessions", params={"owner": owner}).json()["sessions"]]
    lost = [pin for pin in states if pin["state"] == "lost"]
    assert lost
    assert {pin["reason"] for pin in lost} == {"reclaimed"}


def test_cells_come_back(http: httpx.Client) -> None:
    owner = new_owner()
    assert http.post("/flush_cache", params={"timeout": 30}).status_code == 200
    before = cells(http)
    one = KnownSession.open(http, owner, ids(200, 24))
    two = KnownSession.open(http, owner, [*one.token_ids, *ids(50, 25)])
    assert cells(http)["pinned"] - before["pinned"] == 250  # shared in the pool, whoever knows
    one.post("unpin")
    assert cells(http)["pinned"] - before["pinned"] == 250
    two.close()
    one.post("pin")
    assert cells(http)["pinned"] - before["pinned"] == 200
    assert one.close().json()["closed"]["state"] == "closed"
    after = cells(http)
    assert after["pinned"] == before["pinned"]
    assert after["free"] + after["evictable"] + after["pinned"] == after["pool"] == POOL_TOKENS


def test_reasoning_that_is_left_out_of_the_history(http: httpx.Client, owner: str) -> None:
    """Case S8: what was cached behind it stands at other positions, and is not used."""
    thought = {"role": "assistant", "content": "<think>Dry soil needs water.</think>Bed 3."}
    told = {"role": "assistant", "content": "Bed 3."}
    more = {"role": "user", "content": "And which one is wet?"}

    def chat(*messages: dict[str, str], **more: Any) -> Any:
        body = {"model": "default", "messages": list(messages), "max_tokens": 8, **GREEDY, **more}
        return http.post("/v1/chat/completions", json=body).json()

    chat(*MESSAGES, QUESTION, thought, more)
    cached = chat(*MESSAGES, QUESTION, told, more)
    right = chat(*MESSAGES, QUESTION, told, more, cache_salt=new_owner())
    assert cached["choices"][0]["message"] == right["choices"][0]["message"]
    # In a session, too: what a turn keeps, and the same without the reasoning, are different sessions.
    sessions = [
        http.post("/v1/sessions", json={"owner": owner, "messages": [*MESSAGES, QUESTION, said]}).json()["id"]
        for said in (thought, told)
    ]
    sampling = {"max_new_tokens": 8, **GREEDY}
    asked = {"owner": owner, "messages": [more], "sampling_params": sampling}
    answers = [http.post(f"/v1/sessions/{one}/query", json=asked).json() for one in sessions]
    assert answers[1]["text"] == right["choices"][0]["message"]["content"]
    assert answers[0]["meta_info"]["prompt_tokens"] > answers[1]["meta_info"]["prompt_tokens"]


# ---- what is refused ----


def test_every_mistake_has_its_name_and_harms_nothing(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(30, 26))
    closed = KnownSession.open(http, owner, ids(30, 27))
    assert closed.close().status_code == 200
    sampling = {"max_new_tokens": 4}
    cases: list[tuple[int, str, httpx.Response]] = [
        (404, "SessionNotFound", KnownSession(http, owner, "nobody").post("append", text="x")),
        (404, "SessionNotFound", KnownSession(http, "other", session.id).post("query", text="x")),
        (404, "SessionNotFound", KnownSession(http, owner, "%2e%2e;'\"%00é").post("query", text="x")),
        (404, "SessionClosed", closed.post("append", text="x")),
        (404, "SessionClosed", closed.close()),
        (409, "SessionVersionConflict", session.post("append", text="x", if_version=2)),
        (409, "SessionVersionConflict", session.post("query", text="x", if_version=9, sampling_params=sampling)),
        (413, "SessionTooLong", session.post("append", input_ids=ids(8000, 28))),
        (413, "SessionTooLong", session.post("turn", text="x", sampling_params={"max_new_tokens": 9000})),
        (422, "BadSessionRequest", session.post("append", text="")),
        (422, "BadSessionRequest", session.post("append", messages=[])),
        (422, "BadSessionRequest", session.post("append", input_ids=[])),
        (422, "BadSessionRequest", session.post("append", input_ids=[10**9])),
        (422, "BadSessionRequest", session.post("append", input_ids=[-1])),
        (422, "BadSessionRequest", session.post("append", text="x", input_ids=[1])),
        (422, "BadSessionRequest", session.post("append")),
        (422, "BadSessionRequest", session.post("append", text="x", colour="red")),
        (422, "BadSessionRequest", session.post("append", messages=[{"role": "user", "content": {"a": 1}}])),
        (422, "BadSessionRequest", session.post("query", text="x", sampling_params={"temperature": -3})),
        (422, "BadSessionRequest", session.post("query", text="x", sampling_params={"skip_special_tokens": 5})),
        (422, "BadSessionRequest", session.post("turn", text="x", sampling_params={"bogus": 1})),
        (422, "BadSessionRequest", session.post("query", text="x", sampling_params={"n": 1.5})),
        (413, "SessionTooLong", session.post("query", text="x", sampling_params={"max_new_tokens": 10**12})),
        (422, "BadSessionRequest", session.post("query", text="x", memory={"owner": owner, "k": -1})),
        (422, "BadSessionRequest", session.post("turn", text="x", sampling_params={"n": 2})),
        (422, "BadSessionRequest", session.post("rewind", version=0)),
        (422, "BadSessionRequest", session.post("rewind", version=7)),
        (422, "BadSessionRequest", session.post("fork", version=7)),
        *[
            (422, "BadSessionRequest", http.post("/v1/sessions", json={"owner": owner, "text": "x", **bad}))
            for bad in (
                {"ttl_s": 0},
                {"ttl_s": -1},
                {"ttl_s": 1e12},
                {"ttl_s": "soon"},
                {"max_age_s": 0},
                {"window_tokens": 0},
                {"reserve_tokens": -1},
                {"priority": 1000},
                {"on_full": "panic"},
                {"owner": ""},
                {"owner": 7},
            )
        ],
        (413, "PinRefused", http.post("/v1/sessions", json={"owner": owner, "reserve_tokens": 5000})),
    ]
    for status, kind, reply in cases:
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind), reply.text
        assert reply.json()["error"]["code"] == status
    shown = session.show()
    assert (shown["version"], shown["tokens"], shown["queue"]) == (1, 30, {"waiting": 0, "dropped": 0})
    answer = session.ask("query", ids(4, 29))
    assert answer["output_ids"] == fresh(http, [*session.token_ids, *ids(4, 29)])["output_ids"]


@pytest.mark.parametrize("key", ["sgl_stateful", "sgl_stateful_session"])
@pytest.mark.parametrize("mode", [None, "query", "turn"])
def test_nobody_sets_the_servers_own_keys(http: httpx.Client, owner: str, key: str, mode: str | None) -> None:
    forged: dict[str, Any] = {key: json.dumps({"op": "splice", "spans": [["theirs", 0, 2]], "session_id": "a"})}
    session = KnownSession.open(http, owner, ids(20, 36))
    beside = {} if mode is None else {"session": {"id": session.id, "mode": mode}}
    sampling = {"max_new_tokens": 1, "custom_params": {**forged, **beside}}
    own = {"max_new_tokens": 1, "custom_params": forged}
    replies = [
        http.post("/generate", json={"text": "x", "sampling_params": sampling}),
        http.post("/generate", json={"text": ["x", "y"], "sampling_params": [{"max_new_tokens": 1}, sampling]}),
        http.post("/v1/chat/completions", json={"model": "default", "messages": [QUESTION], **sampling}),
        session.post(mode or "query", text="x", sampling_params=own),
        session.post(mode or "query", text="x", sampling_params=own, stream=True),
    ]
    for reply in replies:
        assert reply.status_code in (400, 422), reply.text
        assert key in reply.text
    assert session.show()["version"] == 1


def test_a_turn_without_a_limit_claims_what_a_turn_may_have(http: httpx.Client, owner: str) -> None:
    """Not the whole context: half of it is the whole budget."""
    session = http.post("/v1/sessions", json={"owner": owner, "messages": MESSAGES}).json()["id"]
    body = {"model": "default", "messages": [QUESTION], "stop": ["."], **GREEDY}
    reply = http.post(
        "/v1/chat/completions", json={**body, "custom_params": {"session": {"id": session, "mode": "turn"}}}
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["session"]["version"] == 2
    for limit in (0, "many", -1, True):
        asked = {"owner": owner, "text": "x", "sampling_params": {"max_new_tokens": limit}}
        refused = http.post(f"/v1/sessions/{session}/turn", json=asked)
        assert (refused.status_code, refused.json()["error"]["type"]) == (422, "BadSessionRequest")


def test_the_wrong_session_on_sglangs_own_routes(http: httpx.Client) -> None:
    params = {"session": {"id": "nobody"}}
    body = {"model": "default", "messages": [QUESTION], "max_tokens": 1, "custom_params": params}
    for stream in (False, True):
        reply = http.post("/v1/chat/completions", json={**body, "stream": stream})
        assert (reply.status_code, reply.json()["type"]) == (404, "SessionNotFound")
    reply = http.post("/generate", json={"text": "x", "sampling_params": {"custom_params": params}})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "SessionNotFound")
    bad = {"model": "default", "messages": [QUESTION], "custom_params": {"session": {"id": "a", "mode": "maybe"}}}
    assert http.post("/v1/chat/completions", json=bad).status_code == 422


def test_a_caller_who_goes_away_leaves_the_session_complete(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(50, 30))
    sampling = {"max_new_tokens": 400, "ignore_eos": True, **GREEDY}
    body = {"owner": owner, "input_ids": ids(5, 31), "sampling_params": sampling, "stream": True}
    with http.stream("POST", f"/v1/sessions/{session.id}/turn", json=body) as reply:
        next(reply.iter_lines())
    done = session.append(ids(10, 32))  # waits for the turn to be over
    assert (done["version"], done["session"]["tokens"]) == (2, 60)
    answer = session.ask("query", ids(4, 33))
    assert answer["output_ids"] == fresh(http, [*session.token_ids, *ids(4, 33)])["output_ids"]


def test_closing_while_it_decodes(http: httpx.Client, owner: str, server: RunningServer) -> None:
    """Case S3."""
    session = KnownSession.open(http, owner, ids(50, 34))
    sampling = {"max_new_tokens": 2000, "ignore_eos": True, **GREEDY}
    body = {"owner": owner, "input_ids": ids(5, 35), "sampling_params": sampling, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=60) as other,
        other.stream("POST", f"/v1/sessions/{session.id}/turn", json=body) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        assert session.close().status_code == 200
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert rest[-1]["error"]["type"] == "SessionClosed"
    assert session.close().json()["error"]["type"] == "SessionClosed"
    assert cells(http)["pinned"] == 0
