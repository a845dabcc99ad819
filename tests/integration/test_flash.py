"""Registered questions on the real server: stored answers against a fresh prefill of the same tokens."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from engines import RunningServer
from redis_server import wait_until
from sessions_http import GREEDY, KnownSession, fresh, new_owner

pytestmark = pytest.mark.engine

STEPS = int(os.environ.get("FLASH_ENGINE_STEPS", "30"))
TOKENS = 6
SAMPLING = {"ignore_eos": True, **GREEDY}


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.fixture
def owner(http: httpx.Client) -> Iterator[str]:
    """An owner whose sessions are closed in the end, and with them their questions."""
    name = new_owner()
    yield name
    for session in http.get("/v1/sessions", params={"owner": name}).json()["sessions"]:
        assert http.delete(f"/v1/sessions/{session['id']}", params={"owner": name}).status_code == 200
    assert stats(http)["registered"] == 0


def ids(count: int, seed: int) -> list[int]:
    """Token ids of no meaning, none of them special."""
    return random.Random(seed).choices(range(1000, 40_000), k=count)


def stats(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/v1/flash/stats").json()
    return found


def register(session: KnownSession, name: str, **fields: Any) -> dict[str, Any]:
    body = {"owner": session.owner, "name": name, "max_tokens": TOKENS, "sampling_params": SAMPLING, **fields}
    reply = session.http.post(f"/v1/sessions/{session.id}/flash", json=body)
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


def show(session: KnownSession, name: str) -> dict[str, Any]:
    reply = session.http.get(f"/v1/sessions/{session.id}/flash/{name}", params={"owner": session.owner})
    assert reply.status_code == 200, reply.text
    shown: dict[str, Any] = reply.json()
    return shown


def wait_fresh(session: KnownSession, *names: str) -> list[dict[str, Any]]:
    wait_until(
        lambda: all(show(session, name)["state"] in ("fresh", "failed") for name in names),
        "answers to registered questions",
        deadline_s=120,
    )
    shown = [show(session, name) for name in names]
    assert [one["error"] for one in shown] == [None] * len(names)
    return shown


def served_from(answer: dict[str, Any]) -> str:
    return str(answer.get("served_from", "engine"))


def test_what_is_served_is_what_a_fresh_prefill_decodes(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(150, 1))
    questions = {f"q{n}": ids(5 + n, 10 + n) for n in range(4)}
    for name, question in questions.items():
        register(session, name, input_ids=question)
    for version in (1, 2):
        wait_fresh(session, *questions)
        for question in questions.values():
            answer = session.ask("query", question)
            right = fresh(http, [*session.token_ids, *question])
            assert (served_from(answer), answer["data_version"]) == ("flash", version)
            assert (answer["output_ids"], answer["text"]) == (right["output_ids"], right["text"])
            assert answer["meta_info"]["finish_reason"] == right["meta_info"]["finish_reason"]
            assert answer["meta_info"]["prompt_tokens"] == right["meta_info"]["prompt_tokens"]
            assert answer["meta_info"]["completion_tokens"] == TOKENS
        session.append(ids(20, 30 + version))


def test_a_question_is_decoded_for_real_where_the_caller_wants_that(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(100, 2))
    question = ids(6, 20)
    register(session, "q", input_ids=question)
    wait_fresh(session, "q")
    stored = session.ask("query", question)
    assert served_from(stored) == "flash"
    for more in ({"fresh": True}, {"return_logprob": True}, {"max_new_tokens": TOKENS + 1}):
        answer = session.ask("query", question, **more)  # type: ignore[arg-type]
        assert served_from(answer) == "engine"
        assert answer["output_ids"][:TOKENS] == stored["output_ids"]
    turn = session.ask("turn", question)
    assert served_from(turn) == "engine"
    assert turn["output_ids"] == stored["output_ids"]


def test_a_stream_of_a_stored_answer(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(100, 3))
    question = ids(6, 21)
    register(session, "q", input_ids=question)
    [shown] = wait_fresh(session, "q")
    body = {"owner": owner, "input_ids": question, "sampling_params": {"max_new_tokens": TOKENS, **SAMPLING}}
    with http.stream("POST", f"/v1/sessions/{session.id}/query", json={**body, "stream": True}) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert (last["text"], served_from(last)) == (shown["answer"]["text"], "flash")


def test_the_chat_route_serves_what_is_registered(http: httpx.Client, owner: str) -> None:
    messages = [{"role": "system", "content": "You watch a greenhouse."}, {"role": "user", "content": "Bed 3 is dry."}]
    reply = http.post("/v1/sessions", json={"owner": owner, "messages": messages})
    session = KnownSession(http, owner, reply.json()["id"])
    question = {"role": "user", "content": "Which bed is dry?"}
    template = {"role": "user", "content": "Which bed is {{state}}?"}
    register(session, "q", messages=[template], data={"state": "dry"}, max_tokens=12, sampling_params=GREEDY)
    [shown] = wait_fresh(session, "q")
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")

    def say(stream: bool, **more: Any) -> Any:
        return client.chat.completions.create(
            model="default",
            messages=[question],  # type: ignore[list-item]
            max_tokens=12,
            temperature=0,
            stream=stream,
            extra_body={"custom_params": {"session": {"id": session.id, "owner": owner, **more}}},
        )

    real = say(stream=False, fresh=True)
    assert "served_from" not in real.session
    stored = say(stream=False)
    assert stored.choices[0].message.content == real.choices[0].message.content == shown["answer"]["text"]
    assert stored.choices[0].finish_reason == real.choices[0].finish_reason
    assert stored.usage.prompt_tokens == real.usage.prompt_tokens
    assert (stored.session["served_from"], stored.session["flash"]["name"]) == ("flash", "q")
    chunks = list(say(stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == real.choices[0].message.content
    [told] = [chunk.session for chunk in chunks if getattr(chunk, "session", None)]
    assert told["served_from"] == "flash"


def test_callers_go_first_and_what_was_broken_off_is_done_later(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(100, 4))
    before = stats(http)["totals"]["evaluations"]["preempted"]
    names = [f"q{n}" for n in range(4)]
    for n, name in enumerate(names):
        register(session, name, input_ids=ids(6, 40 + n), max_tokens=100)

    def has_given_way() -> bool:
        session.ask("query", ids(5, random.randrange(10**6)), max_new_tokens=3)
        return int(stats(http)["totals"]["evaluations"]["preempted"]) > before

    wait_until(has_given_way, "an evaluation that gave way", deadline_s=120)
    shown = wait_fresh(session, *names)
    assert [len(one["answer"]["output_ids"]) for one in shown] == [100] * 4


def test_a_flush_forgets_and_does_not_fail_for_what_is_evaluated(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(100, 5))
    question = ids(6, 22)
    register(session, "q", input_ids=question)
    register(session, "long", input_ids=ids(6, 23), max_tokens=100)
    [before] = wait_fresh(session, "q")
    assert http.post("/flush_cache").status_code == 200
    after, _ = wait_fresh(session, "q", "long")
    assert after["evaluations"] == before["evaluations"] + 1
    assert after["answer"]["output_ids"] == before["answer"]["output_ids"]
    answer = session.ask("query", question)
    assert served_from(answer) == "flash"
    assert answer["output_ids"] == fresh(http, [*session.token_ids, *question])["output_ids"]


def test_choices_are_weighed_by_the_engines_own_distribution(http: httpx.Client, owner: str) -> None:
    reply = http.post("/v1/sessions", json={"owner": owner, "text": "Bed 3 is dry. Bed 4 is wet."})
    session = KnownSession(http, owner, reply.json()["id"])
    asked = {"text": " Is bed 3 dry? Answer:", "choices": [" yes", " no"]}
    register(session, "q", **asked, gate={"target": 0.9}, sampling_params=GREEDY)
    [shown] = wait_fresh(session, "q")
    sampling = {"max_new_tokens": 1, **GREEDY}
    labels = {"return_logprob": True, "top_logprobs_num": 50, "return_text_in_logprobs": True}
    real = session.post("query", text=asked["text"], sampling_params=sampling, **labels).json()
    top = {text: p for p, _, text in real["meta_info"]["output_top_logprobs"][0]}
    found = {choice: top[choice] for choice in asked["choices"] if choice in top}
    assert shown["answer"]["choice"] == max(found, key=lambda choice: found[choice])
    if len(found) == 2:
        assert shown["answer"]["gap"] == pytest.approx(abs(found[" yes"] - found[" no"]), abs=1e-3)
    assert shown["gate"]["observed"] == 1
    assert shown["answer"]["by"] == "decoding"


def test_followers_and_their_return(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(60, 6))
    path = f"/v1/sessions/{session.id}/flash/events"
    with http.stream("GET", path, params={"owner": owner}) as reply:
        lines = reply.iter_lines()
        assert next(lines) == ": following"
        with httpx.Client(base_url=http.base_url, timeout=300) as other:
            register(KnownSession(other, owner, session.id), "q", input_ids=ids(6, 24))
        event = _event(lines)
    assert (event["event"], json.loads(event["data"])["name"]) == ("answer", "q")
    session.append(ids(10, 60))
    wait_fresh(session, "q")
    with http.stream("GET", path, params={"owner": owner}, headers={"Last-Event-ID": event["id"]}) as reply:
        later = _event(reply.iter_lines())
    assert (later["event"], json.loads(later["data"])["data_version"]) == ("answer", 2)


def _event(lines: Iterator[str]) -> dict[str, str]:
    """The next event of a stream, comments left out."""
    found: dict[str, str] = {}
    for line in lines:
        if not line and found:
            break
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            found[name] = value
    return found


def test_facts_that_change_are_in_no_answer_any_more(http: httpx.Client, owner: str) -> None:
    added = http.post(
        "/v1/memory/facts", json={"owner": owner, "text": "The office of Ana is in Porto.", "wait": True}
    ).json()["facts"][0]
    session = KnownSession.open(http, owner, ids(60, 7))
    memory = {"owner": owner, "mode": "text", "k": 3}
    question = {"text": "Where is the office of Ana? It is in", "memory": memory}
    register(session, "q", **question, max_tokens=4)
    sampling = {"max_new_tokens": 4, **SAMPLING}

    def ask(**more: Any) -> dict[str, Any]:
        reply = session.post("query", **question, sampling_params=sampling, **more)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    for text in ("The office of Ana is in Faro.", "The office of Ana is in Braga."):
        wait_fresh(session, "q")
        stored, real = ask(), ask(fresh=True)
        assert (served_from(stored), served_from(real)) == ("flash", "engine")
        assert stored["output_ids"] == real["output_ids"]
        http.patch(f"/v1/memory/facts/{added['id']}", json={"owner": owner, "text": text}).raise_for_status()
        now = ask()
        assert now["output_ids"] == ask(fresh=True)["output_ids"]
    wait_fresh(session, "q")
    http.delete(f"/v1/memory/facts/{added['id']}", params={"owner": owner}).raise_for_status()
    assert ask()["output_ids"] == ask(fresh=True)["output_ids"]


def test_nothing_stale_in_seeded_interleavings(http: httpx.Client, owner: str) -> None:
    """Append, rewind and ask in any order, with evaluations in between: each answer is that of a fresh prefill."""
    rng, seed = random.Random(8), 8
    session = KnownSession.open(http, owner, ids(40, seed))
    contents = {1: list(session.token_ids)}
    questions = [ids(4, 80), ids(5, 81)]
    for n, question in enumerate(questions):
        register(session, f"q{n}", input_ids=question, max_tokens=3)
    stored = 0
    for step in range(STEPS):
        version = max(contents)
        match rng.randrange(5):
            case 0:
                session.append(ids(6, 1000 + step))
                contents[version + 1] = list(session.token_ids)
            case 1:
                back = rng.choice(sorted(contents))
                assert session.post("rewind", version=back).status_code == 200
                session.token_ids[:] = contents[back]
                contents[version + 1] = list(session.token_ids)
            case 2:
                wait_fresh(session, "q0", "q1")
            case _:
                question = rng.choice(questions)
                answer = session.ask("query", question, max_new_tokens=3)
                stored += served_from(answer) == "flash"
                assert answer["data_version"] == version
                right = fresh(http, [*session.token_ids, *question], max_new_tokens=3)
                assert answer["output_ids"] == right["output_ids"], step
    assert stored > STEPS / 20
    assert stats(http)["totals"]["false_accepts"] == 0


def test_metrics_are_in_the_servers_own(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(40, 9))
    register(session, "q", input_ids=ids(6, 25))
    wait_fresh(session, "q")
    session.ask("query", ids(6, 25))
    text = http.get("/metrics", follow_redirects=True).text
    assert "sgl_stateful_flash_hits_total" in text
    assert 'sgl_stateful_flash_evaluations_total{outcome="stored"' in text


def test_other_words_are_answered_where_they_mean_the_same(http: httpx.Client, owner: str) -> None:
    reply = http.post("/v1/sessions", json={"owner": owner, "text": "Bed 3 is dry. Bed 4 is wet. Bed 5 is dry."})
    session = KnownSession(http, owner, reply.json()["id"])
    register(session, "thirsty", text=" Which bed needs water?", semantic={"threshold": 0.9}, max_tokens=4)
    [shown] = wait_fresh(session, "thirsty")
    sampling = {"max_new_tokens": 4, **SAMPLING}

    def ask(text: str, **more: Any) -> dict[str, Any]:
        reply = session.post("query", text=text, sampling_params=sampling, **more)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    answer = ask(" What bed needs water?")
    assert (served_from(answer), answer["text"]) == ("flash", shown["answer"]["text"])
    told = answer["meta_info"]["session"]["flash"]
    assert (told["by"], told["name"]) == ("semantic", "thirsty")
    assert 0.9 <= told["similarity"] <= 1.0
    real = ask(" What bed needs water?", fresh=True)
    assert answer["meta_info"]["prompt_tokens"] == real["meta_info"]["prompt_tokens"]
    for other in (" Which bed needs no water?", " Which bed needs water 3?", " Who sells beds?"):
        assert served_from(ask(other)) == "engine"
    found = show(session, "thirsty")["semantic"]
    assert (found["threshold"], found["hits"]) == (0.9, 1)


def test_a_chat_may_ask_in_other_words(http: httpx.Client, owner: str) -> None:
    reply = http.post("/v1/sessions", json={"owner": owner, "messages": [{"role": "user", "content": "Bed 3 is dry."}]})
    session = KnownSession(http, owner, reply.json()["id"])
    asked = {"messages": [{"role": "user", "content": "Which bed needs water?"}], "semantic": {"threshold": 0.9}}
    register(session, "thirsty", **asked, max_tokens=4, sampling_params=GREEDY)
    [shown] = wait_fresh(session, "thirsty")
    reply = http.post(
        "/v1/chat/completions",
        json={
            "model": "default",
            "messages": [{"role": "user", "content": "What bed needs water?"}],
            "max_tokens": 4,
            "temperature": 0,
            "custom_params": {"session": {"id": session.id, "owner": owner}},
        },
    )
    said = reply.json()
    assert said["choices"][0]["message"]["content"] == shown["answer"]["text"]
    assert (said["session"]["flash"]["by"], said["session"]["flash"]["name"]) == ("semantic", "thirsty")
