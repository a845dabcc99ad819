"""SGLang's frontend language on the real server, with and without memory and a session."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import sglang as sgl
from engines import RunningServer
from redis_server import wait_until
from sglang import function, gen, select

from sgl_stateful import Client
from sgl_stateful.client import BadRequest, FlashNotFound, InvalidCall, Session
from sgl_stateful.frontend import MEMORY_HERE, StatefulEndpoint, session
from sgl_stateful.sglang_adapter.prepared import MARKER

pytestmark = pytest.mark.engine

GREEDY = {"max_new_tokens": 8, "temperature": 0}
LOG = "Bed 1 is moist. Bed 2 is moist. Bed 3 is dry. Bed 4 is moist."
START = " The bed that needs water is"


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url, owner=uuid4().hex) as client:
        yield client


@pytest.fixture
def garden(client: Client) -> Iterator[Session]:
    """A session that holds ``LOG``."""
    with client.sessions.create(text=LOG) as opened:
        yield opened


@pytest.fixture
def endpoint(server: RunningServer, client: Client) -> Iterator[Callable[..., StatefulEndpoint]]:
    """Makes endpoints of the client's owner."""
    made = []

    def make(**options: Any) -> StatefulEndpoint:
        made.append(StatefulEndpoint(server.url, owner=client.owner, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def generate(server: RunningServer, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids_of(server: RunningServer, text: str) -> list[int]:
    body = {"model": "default", "prompt": text, "add_special_tokens": False}
    ids: list[int] = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    return ids


def mean_logprob(server: RunningServer, prompt: list[int], choice: list[int]) -> float:
    """Of the choice's tokens behind the prompt, from the log probabilities of the whole."""
    body = {"input_ids": prompt + choice, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    rows = generate(server, **body, logprob_start_len=0)["meta_info"]["input_token_logprobs"][len(prompt) :]
    assert [row[1] for row in rows] == choice
    return sum(row[0] for row in rows) / len(rows)


@function
def finish(s: Any, text: str) -> None:
    s += text + gen("end", max_tokens=8, temperature=0)


@function
def choose(s: Any, text: str, choices: list[str], method: Any) -> None:
    s += text + select("choice", choices=choices, choices_method=method)


def test_the_place_of_facts_is_the_servers() -> None:
    assert MEMORY_HERE == MARKER


def test_text_is_what_generate_says(server: RunningServer, endpoint: Any) -> None:
    expected = generate(server, text=LOG + START, sampling_params=GREEDY)["text"]
    state = finish.run(LOG + START, backend=endpoint())
    assert state["end"] == expected
    assert state.text() == LOG + START + expected


def test_behind_a_session_it_is_what_generate_says_of_both(server: RunningServer, endpoint: Any, garden: Any) -> None:
    ids = ids_of(server, LOG) + ids_of(server, START)
    expected = generate(server, input_ids=ids, sampling_params=GREEDY)["text"]
    for given in (garden, garden.id):
        state = finish.run(START, backend=endpoint(session=given))
        assert state["end"] == expected
        told = state.get_meta_info("end")["session"]
        assert (told["data_version"], told["version"]) == (1, None)
        assert told["cached_tokens"] >= len(ids_of(server, LOG))


def test_pieces_join_to_the_same_text(endpoint: Any, garden: Any) -> None:
    for backend in (endpoint(), endpoint(session=garden)):
        whole = finish.run(START, backend=backend)
        streamed = finish.run(START, backend=backend, stream=True)
        pieces = list(streamed.text_iter())
        streamed.sync()
        assert len(pieces) > 1
        assert "".join(pieces) == whole.text()
        assert streamed.get_meta_info("end")["finish_reason"]["type"] == "length"


def test_sampling_parameters_arrive(endpoint: Any, garden: Any) -> None:
    schema = {"type": "object", "properties": {"bed": {"type": "integer"}}, "required": ["bed"]}

    @function
    def program(s: Any) -> None:
        s += " Bed 1, bed 2," + gen("stopped", max_tokens=40, temperature=0, stop=[" 4"])
        s += " In digits: " + gen("digits", max_tokens=8, temperature=0, regex=r"[0-9]{3}-[0-9]{2}")
        s += " " + gen("number", max_tokens=8, temperature=0, dtype=int)
        s += " " + gen("json", max_tokens=40, temperature=0, json_schema=json.dumps(schema))
        s += " " + gen("two", max_tokens=4, n=2, temperature=1.0)
        s += " " + gen("logprobs", max_tokens=2, temperature=0, return_logprob=True, top_logprobs_num=3)

    for backend in (endpoint(), endpoint(session=garden)):
        state = program.run(backend=backend, use_thread=False)
        assert " 4" not in state["stopped"]
        assert re.fullmatch(r"[0-9]{3}-[0-9]{2}", state["digits"])
        assert int(state["number"]) is not None
        assert isinstance(json.loads(state["json"])["bed"], int)
        assert len(state["two"]) == 2
        assert len(state.get_meta_info("two")) == 2
        assert [len(top) for top in state.get_meta_info("logprobs")["output_top_logprobs"]] == [3, 3]


CHOICES = [" green", " bed 3", " a wonderful thing", " bed 1"]


@pytest.mark.parametrize("with_session", [False, True])
def test_select_takes_what_the_logprobs_rank_first(
    server: RunningServer, endpoint: Any, garden: Any, with_session: bool
) -> None:
    before = ids_of(server, LOG) if with_session else []
    backend = endpoint(session=garden if with_session else None)
    prompt = before + ids_of(server, START)
    means = [mean_logprob(server, prompt, ids_of(server, choice)) for choice in CHOICES]
    state = choose.run(START, CHOICES, sgl.token_length_normalized, backend=backend, use_thread=False)
    assert state.get_meta_info("choice")["normalized_prompt_logprobs"] == pytest.approx(means, abs=1e-3)
    assert state["choice"] == CHOICES[means.index(max(means))]
    assert state.text() == START + state["choice"]

    firsts = [mean_logprob(server, prompt, ids_of(server, choice)[:1]) for choice in CHOICES]
    greedy = choose.run(START, CHOICES, sgl.greedy_token_selection, backend=backend, use_thread=False)
    best = [choice for choice, first in zip(CHOICES, firsts, strict=True) if first > max(firsts) - 1e-4]
    assert greedy["choice"] in best

    alone = choose.run(START, CHOICES, sgl.unconditional_likelihood_normalized, backend=backend, use_thread=False)
    gains = []
    for choice, mean in zip(CHOICES, means, strict=True):
        ids = ids_of(server, choice)
        rest = mean_logprob(server, ids[:1], ids[1:]) * (len(ids) - 1) if len(ids) > 1 else 0.0
        gains.append(mean - rest / len(ids))
    assert alone["choice"] == CHOICES[gains.index(max(gains))]


def test_a_choice_that_begins_inside_a_token_is_scored_with_it(server: RunningServer, endpoint: Any) -> None:
    text, choices = "The colour of the sky is bl", ["ue", "ack"]
    whole = [ids_of(server, text + choice) for choice in choices]
    start = next(i for i, pair in enumerate(zip(*whole, ids_of(server, text), strict=False)) if len(set(pair)) > 1)
    means = [mean_logprob(server, ids[:start], ids[start:]) for ids in whole]
    state = choose.run(text, choices, sgl.token_length_normalized, backend=endpoint(), use_thread=False)
    assert state.get_meta_info("choice")["normalized_prompt_logprobs"] == pytest.approx(means, abs=1e-3)


def test_forks_read_the_session_and_join_as_text(server: RunningServer, endpoint: Any, garden: Any) -> None:
    ends = [" First:", " Second:"]

    @function
    def program(s: Any, mode: str) -> None:
        s += START
        forks = s.fork(2)
        forks += lambda i: ends[i] + gen("end", max_tokens=4, temperature=0)
        forks.join(mode)

    short = {"max_new_tokens": 4, "temperature": 0}
    base = ids_of(server, LOG)
    expected = [
        generate(server, input_ids=base + ids_of(server, START + end), sampling_params=short)["text"] for end in ends
    ]
    backend = endpoint(session=garden)
    assert program.run("gather_variable", backend=backend)["end"] == expected
    joined = program.run("concate_and_append", backend=backend)
    assert joined.text() == START + "".join(end + text for end, text in zip(ends, expected, strict=True))


def test_a_batch_is_its_programs(endpoint: Any, garden: Any) -> None:
    start = "Of all of the beds that this log speaks about, and there are four of them, the one that"
    for backend in (endpoint(), endpoint(session=garden)):
        texts = [f"{start} is number {i}" for i in range(4)]
        states = finish.run_batch([{"text": text} for text in texts], backend=backend)
        assert [state.text() for state in states] == [finish.run(text, backend=backend).text() for text in texts]


def test_a_program_changes_its_session(server: RunningServer, endpoint: Any, garden: Any) -> None:
    news = " Bed 5 is very dry."

    @function
    def program(s: Any) -> None:
        s += START + gen("before", max_tokens=8, temperature=0)
        appended = session(s).append(text=news)
        assert appended.version == 2
        session(s).query(text=START, name="asked", sampling_params=GREEDY)
        turn = session(s).turn(text=START, name="said", sampling_params=GREEDY)
        assert (turn.data_version, turn.version) == (2, 3)

    state = program.run(backend=endpoint(session=garden), use_thread=False)
    old = generate(server, input_ids=ids_of(server, LOG) + ids_of(server, START), sampling_params=GREEDY)["text"]
    ids = ids_of(server, LOG) + ids_of(server, news) + ids_of(server, START)
    new = generate(server, input_ids=ids, sampling_params=GREEDY)["text"]
    assert (state["before"], state["asked"], state["said"]) == (old, new, new)
    assert state.get_meta_info("asked")["session"]["data_version"] == 2
    assert garden.reload().version == 3


def test_a_program_asks_what_is_registered(server: RunningServer, endpoint: Any, client: Client, garden: Any) -> None:
    client.facts.add("The spare hose is in the shed.", wait=True)
    template = " The bed that needs {{what}} is"
    memory = {"mode": "text", "k": 1}

    @function
    def program(s: Any) -> None:
        questions = session(s).flash
        made = questions.register("dry", text=template, data={"what": "water"}, max_tokens=8)
        assert (made.name, made.state) == ("dry", "pending")
        questions.register("hose", text=" The spare hose is in", max_tokens=4, memory=memory)
        wait_until(lambda: {one.state for one in garden.flash.list()} == {"fresh"}, "answers", deadline_s=120)
        s += START + gen("said", max_tokens=8, temperature=0)
        asked = [questions.ask("dry"), questions.ask("dry", into="real", fresh=True), questions.ask("hose")]
        assert [answer.served_from for answer in asked] == ["flash", "engine", "flash"]

    state = program.run(backend=endpoint(session=garden), use_thread=False)
    right = generate(server, input_ids=ids_of(server, LOG) + ids_of(server, START), sampling_params=GREEDY)["text"]
    assert (state["said"], state["dry"], state["real"]) == (right, right, right)
    # The generation of the program's own text is the registered question in all but its name.
    assert state.get_meta_info("said")["session"]["served_from"] == "flash"
    assert state.get_meta_info("dry")["session"]["flash"]["name"] == "dry"
    assert state["hose"] == garden.flash.answer("hose").text

    @function
    def unknown(s: Any) -> None:
        session(s).flash.ask("cold")

    with pytest.raises(FlashNotFound, match="cold"):
        unknown.run(backend=endpoint(session=garden), use_thread=False)


def test_one_program_runs_over_many_sessions(server: RunningServer, endpoint: Any, client: Client) -> None:
    logs = [LOG, "Bed 1 is dry. Bed 2 is moist.", "All beds are under water."]

    @function
    def program(s: Any, about: Any) -> None:
        session(s, about)
        s += START
        with s.copy() as copied:
            copied += gen("end", max_tokens=8, temperature=0)

    opened = [client.sessions.create(text=log) for log in logs]
    rows = [{"about": one if i else one.id} for i, one in enumerate(opened)]
    ends = [state["end"] for state in program.run_batch(rows, backend=endpoint())]
    for log, [end] in zip(logs, ends, strict=True):
        ids = ids_of(server, log) + ids_of(server, START)
        assert end == generate(server, input_ids=ids, sampling_params=GREEDY)["text"]
    for one in opened:
        one.close()


def test_facts_stand_where_the_program_says(endpoint: Any, client: Client, server: RunningServer) -> None:
    added = client.facts.add_many(["The spare key is under the blue pot.", "Lunch is at one."], wait=True)

    @function
    def program(s: Any) -> None:
        s += sgl.system("You know the house.")
        s += sgl.user(MEMORY_HERE + "Where is the spare key?")
        s += sgl.assistant(gen("answer", max_tokens=8, temperature=0))
        s += sgl.user("In one word?")
        s += sgl.assistant(select("word", choices=["pot", "lunch"]))

    memory = {"k": 1, "mode": "text"}
    state = program.run(backend=endpoint(memory=memory, chat_template_name="chatml"), use_thread=False)
    report = state.get_meta_info("answer")["memory"]
    assert [fact["id"] for fact in report["facts"]] == [added[0].fact.id]
    prompt = state.text().partition(state["answer"])[0]
    custom = {"memory": {"owner": client.owner, "query": "Where is the spare key?", **memory}}
    expected = generate(server, text=prompt, sampling_params={**GREEDY, "custom_params": custom})
    assert state["answer"] == expected["text"]
    assert state["word"] in ("pot", "lunch")
    with Client(server.url, owner="somebody else") as other:
        assert list(other.facts.list()) == []


def test_memory_and_a_session_stand_together(endpoint: Any, client: Client, garden: Any) -> None:
    added = client.facts.add("The spare key is under the blue pot.", wait=True)
    backend = endpoint(session=garden, memory={"k": 1})
    state = finish.run("The spare key is", backend=backend)
    meta = state.get_meta_info("end")
    assert [fact["id"] for fact in meta["memory"]["facts"]] == [added.fact.id]
    assert meta["session"]["data_version"] == 1
    chosen = choose.run("The key is under the", [" pot", " roof"], sgl.token_length_normalized, backend=backend)
    assert chosen["choice"] in (" pot", " roof")


def test_what_the_server_refuses_reaches_the_program(endpoint: Any, garden: Any, server: RunningServer) -> None:
    with pytest.raises(BadRequest, match="no tokens") as caught:
        finish.run("", backend=endpoint(session=garden), use_thread=False)
    assert caught.value.status == 422
    with pytest.raises(InvalidCall, match="before the choices"):
        choose.run("", CHOICES, sgl.token_length_normalized, backend=endpoint(session=garden), use_thread=False)

    @function
    def program(s: Any) -> None:
        session(s).append("x")

    with pytest.raises(InvalidCall, match="which session"):
        program.run(backend=endpoint(), use_thread=False)
    with pytest.raises(InvalidCall, match="RuntimeEndpoint"):
        program.run(backend=sgl.RuntimeEndpoint(server.url), use_thread=False)
