"""Entries on the real server: what was decoded ahead against a fresh prefill, and pins that keep and let go."""

from __future__ import annotations

import json
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

AHEAD = 8
SAMPLING = {"ignore_eos": True, **GREEDY}


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.fixture
def owner(http: httpx.Client) -> Iterator[str]:
    """An owner whose sessions are closed in the end, and nothing is pinned then that was not before."""
    before = cells(http)
    name = new_owner()
    yield name
    for session in http.get("/v1/sessions", params={"owner": name}).json()["sessions"]:
        assert http.delete(f"/v1/sessions/{session['id']}", params={"owner": name}).status_code == 200
    assert entries(http)["registered"] == 0
    wait_until(lambda: cells(http) <= before, "pins to be let go", deadline_s=20)
    assert entries(http)["cells"]["held"] == 0


def ids(count: int, seed: int) -> list[int]:
    """Token ids of no meaning, none of them special."""
    return random.Random(seed).choices(range(1000, 40_000), k=count)


def cells(http: httpx.Client) -> int:
    return int(http.get("/v1/sessions/stats").json()["cells"]["pinned"])


def entries(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/v1/flash/stats").json()["entries"]
    return found


def register(session: KnownSession, name: str, **fields: Any) -> dict[str, Any]:
    body = {"owner": session.owner, "name": name, "max_tokens": AHEAD, "sampling_params": SAMPLING, **fields}
    reply = session.http.post(f"/v1/sessions/{session.id}/entries", json=body)
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


def show(session: KnownSession, name: str) -> dict[str, Any]:
    reply = session.http.get(f"/v1/sessions/{session.id}/entries/{name}", params={"owner": session.owner})
    assert reply.status_code == 200, reply.text
    shown: dict[str, Any] = reply.json()
    return shown


def wait_fresh(session: KnownSession, *names: str) -> list[dict[str, Any]]:
    wait_until(
        lambda: all(show(session, name)["state"] in ("fresh", "failed") for name in names),
        "entries to be decoded ahead",
        deadline_s=120,
    )
    shown = [show(session, name) for name in names]
    assert [one["error"] for one in shown] == [None] * len(names)
    return shown


def said_of(answer: dict[str, Any]) -> dict[str, Any]:
    """What an answer says of the entry that it was served from; empty where it says none."""
    if "served_from" not in answer:
        return {}
    assert answer["served_from"] == "entry"
    found: dict[str, Any] = answer["meta_info"]["session"]["entry"]
    return found


def flood(http: httpx.Client) -> None:
    """The whole pool, in prompts that nobody asks for again."""
    for _ in range(5):
        fresh(http, ids(1200, random.randrange(10**6)), max_new_tokens=1)


def test_an_answer_goes_on_from_what_was_decoded_ahead(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(150, 1))
    question = ids(7, 2)
    register(session, "next", input_ids=question)
    for version in (1, 2):
        [shown] = wait_fresh(session, "next")
        answer = session.ask("query", question, max_new_tokens=24)
        right = fresh(http, [*session.token_ids, *question], max_new_tokens=24)
        assert (answer["output_ids"], answer["text"]) == (right["output_ids"], right["text"])
        assert shown["ahead"]["output_ids"] == right["output_ids"][:AHEAD]
        of_entry = said_of(answer)
        assert of_entry.pop("age_s") > 0
        assert of_entry == {
            "name": "next",
            "by": "ahead",
            "tokens_ahead": AHEAD,
            "data_version": version,
            "confidence": None,
        }
        meta, real = answer["meta_info"], right["meta_info"]
        assert (meta["finish_reason"], meta["prompt_tokens"]) == (real["finish_reason"], real["prompt_tokens"])
        assert meta["completion_tokens"] == 24
        assert meta["cached_tokens"] == meta["prompt_tokens"]
        session.append(ids(20, 3 + version))


def test_a_pinned_entry_is_a_full_hit_after_everything_else_was_evicted(http: httpx.Client, owner: str) -> None:
    """The session is not pinned: what the pool keeps of it, it keeps for its entry."""
    contents = ids(300, 10)
    session = KnownSession.open(http, owner, contents, pin=False)
    plain = KnownSession.open(http, owner, ids(300, 11), pin=False)
    question, more = ids(9, 12), ids(4, 13)
    register(session, "next", input_ids=question)
    [shown] = wait_fresh(session, "next")
    assert shown["cells"] == 300 + 9 + AHEAD - 1  # the last token's KV does not exist
    flood(http)
    longer = session.ask("query", [*question, *more])
    assert longer["meta_info"]["cached_tokens"] == 300 + 9
    assert (said_of(longer)["by"], said_of(longer)["tokens_ahead"]) == ("prefix", 0)
    assert longer["output_ids"] == fresh(http, [*contents, *question, *more])["output_ids"]
    exact = session.ask("query", question, max_new_tokens=12)
    assert exact["meta_info"]["cached_tokens"] == 300 + 9
    assert exact["output_ids"] == fresh(http, [*contents, *question], max_new_tokens=12)["output_ids"]
    assert plain.ask("query", question)["meta_info"]["cached_tokens"] == 0


def test_a_stream_begins_with_what_is_known(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(100, 20))
    question = ids(6, 21)
    register(session, "next", input_ids=question)
    wait_fresh(session, "next")
    right = fresh(http, [*session.token_ids, *question], max_new_tokens=16)
    events = stream(session, question, max_new_tokens=16)
    assert events[0]["output_ids"] == right["output_ids"][:AHEAD]
    assert events[0]["meta_info"]["completion_tokens"] == AHEAD
    assert right["text"].startswith(events[0]["text"])
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1]["output_ids"], events[-1]["text"]) == (right["output_ids"], right["text"])
    assert said_of(events[-1])["tokens_ahead"] == AHEAD


def stream(session: KnownSession, question: list[int], **sampling: Any) -> list[dict[str, Any]]:
    """The events of a query's stream."""
    body = {"owner": session.owner, "input_ids": question, "sampling_params": {**SAMPLING, **sampling}, "stream": True}
    with session.http.stream("POST", f"/v1/sessions/{session.id}/query", json=body) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_the_chat_route_goes_on_from_an_entry(http: httpx.Client, owner: str) -> None:
    reply = http.post("/v1/sessions", json={"owner": owner, "messages": [{"role": "user", "content": "Bed 3 is dry."}]})
    session = KnownSession(http, owner, reply.json()["id"])
    question = {"role": "user", "content": "Which bed is dry?"}
    register(session, "next", messages=[question], max_tokens=5, sampling_params=GREEDY)
    wait_fresh(session, "next")
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")

    def say(stream: bool, **more: Any) -> Any:
        return client.chat.completions.create(
            model="default",
            messages=[question],  # type: ignore[list-item]
            max_tokens=14,
            temperature=0,
            stream=stream,
            stream_options={"include_usage": True} if stream else openai.omit,
            extra_body={"custom_params": {"session": {"id": session.id, "owner": owner, **more}}},
        )

    real, ahead = say(stream=False, fresh=True), say(stream=False)
    assert ahead.session["entry"]["tokens_ahead"] == 5
    assert ahead.choices[0].message.content == real.choices[0].message.content
    assert ahead.usage.completion_tokens == real.usage.completion_tokens
    chunks = list(say(stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == real.choices[0].message.content
    [told] = [chunk.session for chunk in chunks if getattr(chunk, "session", None)]
    assert (told["served_from"], told["entry"]["by"]) == ("entry", "ahead")
    assert chunks[-1].usage.completion_tokens == real.usage.completion_tokens


@pytest.mark.parametrize("length", [1, 2, AHEAD - 1, AHEAD, AHEAD + 1])
def test_an_answer_is_as_long_as_it_is_asked_for(http: httpx.Client, owner: str, length: int) -> None:
    session = KnownSession.open(http, owner, ids(60, 30))
    question = ids(6, 31)
    register(session, "next", input_ids=question)
    wait_fresh(session, "next")
    answer = session.ask("query", question, max_new_tokens=length)
    right = fresh(http, [*session.token_ids, *question], max_new_tokens=length)
    assert (answer["output_ids"], answer["text"]) == (right["output_ids"], right["text"])
    assert answer["meta_info"]["finish_reason"] == right["meta_info"]["finish_reason"]
    by, ahead = ("whole", AHEAD) if length == AHEAD else ("ahead", min(length - 1, AHEAD))
    assert (said_of(answer)["by"], said_of(answer)["tokens_ahead"]) == (by if ahead else "prefix", ahead)


def test_stops_hold_wherever_they_are(http: httpx.Client, owner: str) -> None:
    """In what was decoded ahead, across its end, and behind it: as text, and as token ids."""
    reply = http.post("/v1/sessions", json={"owner": owner, "text": "One, two, three, four, five, six,"})
    session = KnownSession(http, owner, reply.json()["id"])
    question = {"text": " seven,"}
    register(session, "next", **question)
    wait_fresh(session, "next")

    def ask(**more: Any) -> dict[str, Any]:
        sampling = {**SAMPLING, "max_new_tokens": 20, **more.pop("sampling", {})}
        answer = session.post("query", **question, sampling_params=sampling, **more)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    whole = ask(fresh=True)
    text, tokens = whole["text"], whole["output_ids"]
    boundary = len(ask(fresh=True, sampling={"max_new_tokens": AHEAD})["text"])
    assert 4 < boundary < len(text) - 4
    stops = [text[1:4], text[boundary - 2 : boundary + 2], text[boundary + 2 : boundary + 5]]
    for sampling in [{"stop": stop} for stop in stops] + [
        {"stop": [stops[2], stops[1]]},
        {"stop": stops[0], "no_stop_trim": True},
        {"ignore_eos": False, "stop_token_ids": [tokens[3]]},
        {"ignore_eos": False, "stop_token_ids": [tokens[AHEAD + 1]]},
    ]:
        answer, right = ask(sampling=sampling), ask(sampling=sampling, fresh=True)
        for one in (answer, right):
            assert one["meta_info"]["completion_tokens"] < 20, sampling
        assert (answer["output_ids"], answer["text"]) == (right["output_ids"], right["text"]), sampling
        assert answer["meta_info"]["finish_reason"] == right["meta_info"]["finish_reason"]
        is_of_entry = "ignore_eos" not in sampling  # which decides the tokens, too
        assert ("served_from" in answer) == is_of_entry, sampling


def test_an_end_of_the_answer_that_is_known(http: httpx.Client, owner: str, model_dir: Any) -> None:
    messages = [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": "Bed 3 is dry."}]
    reply = http.post("/v1/sessions", json={"owner": owner, "messages": messages})
    session = KnownSession(http, owner, reply.json()["id"])
    question = {"role": "user", "content": "Say yes."}
    register(session, "next", messages=[question], max_tokens=128, sampling_params=GREEDY)
    [shown] = wait_fresh(session, "next")
    assert shown["ahead"]["ends"] == "stop"
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")

    def say(stream: bool, **more: Any) -> Any:
        return client.chat.completions.create(
            model="default",
            messages=[question],  # type: ignore[list-item]
            max_tokens=200,
            temperature=0,
            stream=stream,
            extra_body={"custom_params": {"session": {"id": session.id, "owner": owner, **more}}},
        )

    real = say(stream=False, fresh=True)
    assert real.choices[0].finish_reason == "stop"
    known = say(stream=False)
    assert known.session["entry"]["by"] == "whole"
    assert known.choices[0].message.content == real.choices[0].message.content
    assert known.choices[0].finish_reason == "stop"
    assert (known.usage.prompt_tokens, known.usage.completion_tokens) == (
        real.usage.prompt_tokens,
        real.usage.completion_tokens,
    )
    chunks = list(say(stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == real.choices[0].message.content


def test_what_cannot_use_an_entry_is_decoded_for_real(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(100, 40))
    question = ids(6, 41)
    register(session, "next", input_ids=question)
    wait_fresh(session, "next")
    right = fresh(http, [*session.token_ids, *question], max_new_tokens=10)["output_ids"]
    before = entries(http)["totals"]["misses"]
    assert session.ask("query", question, max_new_tokens=10, return_logprob=True)["output_ids"] == right
    assert session.ask("query", question, max_new_tokens=10, fresh=True)["output_ids"] == right
    for sampling in ({"temperature": 0.8}, {"repetition_penalty": 1.2}, {"n": 2}):
        params = {**SAMPLING, "max_new_tokens": 4, **sampling}
        reply = session.post("query", input_ids=question, sampling_params=params)
        assert reply.status_code == 200, reply.text
        assert "served_from" not in json.dumps(reply.json())
    after = entries(http)["totals"]["misses"]
    found = {cause: after[cause] - before[cause] for cause in after if after[cause] != before[cause]}
    assert found == {"unsupported": 1, "fresh": 1, "sampling": 3}


def test_nothing_stale_while_data_comes_in(http: httpx.Client, owner: str) -> None:
    """Append, rewind and ask in any order, with entries on their way in between."""
    rng = random.Random(50)
    session = KnownSession.open(http, owner, ids(40, 50))
    contents = {1: list(session.token_ids)}
    question = ids(5, 51)
    register(session, "next", input_ids=question)
    served = 0
    for step in range(16):
        version = max(contents)
        match rng.randrange(5):
            case 0:
                session.append(ids(6, 500 + step))
                contents[version + 1] = list(session.token_ids)
            case 1:
                back = rng.choice(sorted(contents))
                assert session.post("rewind", version=back).status_code == 200
                session.token_ids[:] = contents[back]
                contents[version + 1] = list(session.token_ids)
            case 2:
                wait_fresh(session, "next")
            case _:
                asked = [*question, *ids(2, step)] if rng.random() < 0.3 else question
                answer = session.ask("query", asked, max_new_tokens=12)
                served += bool(said_of(answer))
                assert answer["data_version"] == version
                right = fresh(http, [*session.token_ids, *asked], max_new_tokens=12)
                assert answer["output_ids"] == right["output_ids"], step
    assert served > 0


@pytest.mark.parametrize("how", ["rewind", "delete", "update", "flush", "unpin", "purge", "close"])
def test_a_pin_is_gone_with_what_it_was_for(http: httpx.Client, owner: str, how: str) -> None:
    before = cells(http)
    session = KnownSession.open(http, owner, ids(50, 60))
    session.append(ids(20, 61))
    register(session, "next", input_ids=ids(6, 62))
    [shown] = wait_fresh(session, "next")
    held = 6 + AHEAD - 1
    assert shown["cells"] == entries(http)["cells"]["held"] == held
    assert cells(http) == before + 70 + held
    path, of_owner = f"/v1/sessions/{session.id}", {"owner": owner}
    left = 70 + held
    match how:
        case "rewind":
            assert session.post("rewind", version=1).status_code == 200
            left = 50 + held
        case "delete":
            assert http.delete(f"{path}/entries/next", params=of_owner).status_code == 200
            left = 70
        case "update":
            body = {**of_owner, "input_ids": ids(3, 63), "max_tokens": 0}
            assert http.put(f"{path}/entries/next", json=body).status_code == 200
            left = 70 + 3
        case "flush":
            assert http.post("/flush_cache").status_code == 200
            session.ask("query", ids(3, 64))  # which pins the session again
        case "unpin":
            assert session.post("unpin").status_code == 200
            left = 0
        case "purge":
            assert http.delete(f"/v1/memory/owners/{owner}", params={"confirm": owner}).status_code == 200
            left = 0
        case _:
            assert session.close().status_code == 200
            left = 0
    wait_until(lambda: cells(http) == before + left, f"{left} cells after {how}", deadline_s=60)


def test_the_least_valuable_gives_way(http: httpx.Client, owner: str) -> None:
    budget = entries(http)["cells"]["budget"]
    assert budget == 6000 // 8
    session = KnownSession.open(http, owner, ids(60, 70))
    for name, priority in (("a", 1), ("b", 0), ("c", 2)):
        register(session, name, input_ids=ids(300, 71 + priority), max_tokens=0, priority=priority)
        wait_fresh(session, name)
    assert {name: show(session, name)["cells"] for name in "abc"} == {"a": 300, "b": 0, "c": 300}
    answer = session.ask("query", [*ids(300, 73), 5])
    assert (said_of(answer)["by"], answer["meta_info"]["cached_tokens"]) == ("prefix", 360)


def test_entries_are_the_first_to_give_way_to_a_request(http: httpx.Client, owner: str) -> None:
    """A request that may become as long as what is left of the pool without the entry, and then does not."""
    session = KnownSession.open(http, owner, ids(700, 80))
    register(session, "next", input_ids=ids(300, 81), max_tokens=0)
    [shown] = wait_fresh(session, "next")
    assert shown["cells"] == 300
    large = ids(1000, 82)
    [first] = fresh(http, large, max_new_tokens=1)["output_ids"]
    sampling = {"max_new_tokens": 4096, "stop_token_ids": [first], **GREEDY}
    reply = http.post("/generate", json={"input_ids": large, "sampling_params": sampling})
    assert reply.json()["output_ids"] == [first]
    assert entries(http)["cells"]["held"] == 0
    assert session.show()["pin"]["state"] == "pinned"
    question = [*ids(300, 81), 7]
    assert session.ask("query", question)["output_ids"] == fresh(http, [*session.token_ids, *question])["output_ids"]


def test_choices_answer_at_the_decision_point(http: httpx.Client, owner: str) -> None:
    """Seen to agree with decoding, the set answers by itself: what was decoded up to it, and the best of the set."""
    text = "Bed 1 is dry. Bed 2 is wet. Bed 3 is dry. Bed 4"
    reply = http.post("/v1/sessions", json={"owner": owner, "text": "A list of beds.\n"})
    session = KnownSession(http, owner, reply.json()["id"])
    sampling = {"max_new_tokens": 6, **SAMPLING}
    real = session.post("query", text=text, sampling_params=sampling).json()
    assert real["text"].startswith(" is wet")
    asked = {"text": text, "until": [" is"], "choices": [" dry", " wet"], "max_tokens": 6}
    register(session, "next", **asked, gate={"target": 0.6})  # one that agrees is enough: 2/3
    for seen in range(1, 7):
        [shown] = wait_fresh(session, "next")
        answer = session.post("query", text=text, sampling_params=sampling).json()
        if said_of(answer)["by"] == "gate":
            break
        assert (said_of(answer)["by"], answer["output_ids"]) == ("ahead", real["output_ids"])
        assert (shown["gate"]["observed"], shown["ahead"]["agreed"]) == (seen, True)
        # The same content again: the gap is the same but for rounding, and the least one seen is the threshold.
        assert session.post("rewind", version=1).status_code == 200
    assert (answer["text"], said_of(answer)["by"]) == (" is wet", "gate")
    assert real["output_ids"][: len(answer["output_ids"])] == answer["output_ids"]
    assert answer["meta_info"]["prompt_tokens"] == real["meta_info"]["prompt_tokens"]
    assert said_of(answer)["confidence"] >= 0.6
    assert shown["ahead"]["by"] == "gate"
    assert shown["ahead"]["gap"] >= shown["gate"]["threshold"]
    assert sum(one["n"] for one in shown["gate"]["curve"]) == shown["gate"]["observed"] == seen - 1
    short = session.post("query", text=text, sampling_params={**sampling, "max_new_tokens": 1}).json()
    assert short["output_ids"] == real["output_ids"][:1]


def test_a_client_that_goes_away_in_the_middle_leaves_nothing(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(100, 95))
    question = ids(6, 96)
    register(session, "next", input_ids=question)
    wait_fresh(session, "next")
    held = cells(http)
    body = {"owner": owner, "input_ids": question, "sampling_params": {**SAMPLING, "max_new_tokens": 400}}
    for read in (1, 3):
        with http.stream("POST", f"/v1/sessions/{session.id}/query", json={**body, "stream": True}) as reply:
            lines = (line for line in reply.iter_lines() if line)
            for _ in range(read):
                assert json.loads(next(lines).removeprefix("data: "))["output_ids"]
    wait_until(lambda: cells(http) == held, "the request to end", deadline_s=60)
    answer = session.ask("query", question, max_new_tokens=12)
    assert answer["output_ids"] == fresh(http, [*session.token_ids, *question], max_new_tokens=12)["output_ids"]
    assert said_of(answer)["by"] == "ahead"


def test_entries_have_metrics_of_their_own(http: httpx.Client, owner: str) -> None:
    session = KnownSession.open(http, owner, ids(40, 98))
    register(session, "next", input_ids=ids(6, 99))
    wait_fresh(session, "next")
    session.ask("query", ids(6, 99), max_new_tokens=10)
    text = http.get("/metrics", follow_redirects=True).text
    for name in ("hits_total", 'uses_total{by="ahead"', "tokens_ahead_total", "cells", 'misses_total{cause="evicted"'):
        assert f"sgl_stateful_entry_{name}" in text, name
