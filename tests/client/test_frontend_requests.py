"""What the frontend language's endpoint sends, and what a program's session does after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sglang as sgl
from frontend_server import BOS, FrontendServer, ids, refused
from sglang import function, gen, select

from sgl_stateful.client import BadRequest, ClientError, InvalidCall, SessionVersionConflict
from sgl_stateful.frontend import MEMORY_HERE, StatefulEndpoint, session

TEXT = "Which?"


@pytest.fixture
def server() -> Iterator[FrontendServer]:
    server = FrontendServer()
    yield server
    server.close()


@pytest.fixture
def endpoint(server: FrontendServer) -> Iterator[Callable[..., StatefulEndpoint]]:
    """Makes endpoints of Ana's."""
    made: list[StatefulEndpoint] = []

    def make(**options: Any) -> StatefulEndpoint:
        made.append(StatefulEndpoint(server.url, owner="ana", **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@function
def choose(s: Any, text: str, choices: list[str]) -> None:
    s += text + select("choice", choices=choices, choices_method=sgl.token_length_normalized)


def chosen(backend: StatefulEndpoint, choices: list[str], text: str = TEXT) -> Any:
    return choose.run(text, choices, backend=backend, use_thread=False)


def sent(server: FrontendServer, name: str) -> list[Any]:
    """That part of ``custom_params`` of each request that was answered."""
    return [body["sampling_params"]["custom_params"].get(name) for body in server.generated]


def prompts(server: FrontendServer) -> list[tuple[int, ...]]:
    return sorted(tuple(body["input_ids"]) for body in server.generated)


# ---- select: what is sent ----


@pytest.mark.parametrize(
    ("with_session", "text", "head"),
    [
        (False, TEXT, [BOS]),
        (True, TEXT, []),
        (False, f"In short:{MEMORY_HERE}{TEXT}", [BOS, *ids("In short:")]),
        (True, f"In short:{MEMORY_HERE}{TEXT}", ids("In short:")),
    ],
)
def test_select_sends_the_prompt_once_with_the_place_of_facts(
    server: FrontendServer, endpoint: Any, with_session: bool, text: str, head: list[int]
) -> None:
    backend = endpoint(memory={"k": 2}, session="s1" if with_session else None)
    chosen(backend, ["ax", "bx"], text)
    expected = [head + ids(TEXT + rest) for rest in ("", "a", "b")]
    assert prompts(server) == sorted(tuple(prompt) for prompt in expected)
    assert [memory["insert_at"] for memory in sent(server, "memory")] == [len(head)] * 3


def test_select_behind_a_session_sends_the_text_alone(server: FrontendServer, endpoint: Any) -> None:
    chosen(endpoint(session="s1"), ["ax", "bx"])
    assert prompts(server) == sorted(tuple(ids(TEXT + rest)) for rest in ("", "a", "b"))


@pytest.mark.parametrize(("known", "actual"), [(0, 40), (40, 0)])
def test_special_tokens_come_first_in_a_session_that_is_empty_now(
    server: FrontendServer, endpoint: Any, known: int, actual: int
) -> None:
    """Whatever the handle knows: it may have been filled, or rewound, elsewhere."""
    server.tokens = known
    backend = endpoint(session="s1")
    assert backend.session.info.tokens == known
    server.tokens, server.version = actual, 3
    chosen(backend, ["a", "b"])
    assert prompts(server) == [tuple([] if actual else [BOS]) + tuple(ids(TEXT))]


@pytest.mark.parametrize("options", [{}, {"session": "s1"}, {"memory": {}}])
@pytest.mark.parametrize("choices", [["~"], ["a", "~"], ["a", "~~", "b"]])
def test_a_choice_that_adds_no_token_is_said(
    server: FrontendServer, endpoint: Any, options: dict[str, Any], choices: list[str]
) -> None:
    with pytest.raises(InvalidCall, match="adds no token"):
        chosen(endpoint(**options), choices)
    assert server.generated == []


# ---- select: what is compared ----


def by_version(version: int, prompt: list[int], token: int) -> float:
    """Means of ("ax", "bx"): (-1, -1.5) at version 2, (-5, -10.5) at 3; (-5, -1.5) with beginnings at 2, ends at 3."""
    last = chr(prompt[-1])
    table = {
        2: {"?a": -1.0, "?b": -2.0, "ax": -1.0, "bx": -1.0},
        3: {"?a": -1.0, "?b": -20.0, "ax": -9.0, "bx": -1.0},
    }
    return table[min(version, 3)][last + chr(token)]


@pytest.mark.parametrize("changed_after", [1, 2])
def test_select_compares_scores_of_one_version(server: FrontendServer, endpoint: Any, changed_after: int) -> None:
    def change(count: int) -> None:
        server.version += count == changed_after

    server.logprob, server.afterwards = by_version, change
    state = chosen(endpoint(session="s1"), ["ax", "bx"])
    assert state.get_meta_info("choice")["normalized_prompt_logprobs"] == [-5.0, -10.5]
    assert state["choice"] == "ax"
    assert [one["if_version"] for one in sent(server, "session")] == [2] * changed_after + [3] * 3


def test_a_session_that_changes_all_the_time_ends_select(server: FrontendServer, endpoint: Any) -> None:
    def change(count: int) -> None:
        server.version += 1

    server.afterwards = change
    with pytest.raises(SessionVersionConflict):
        chosen(endpoint(session="s1"), ["ax", "bx"])
    assert 1 < len(server.generated) < 10


@pytest.mark.parametrize("with_session", [False, True])
def test_select_searches_once_and_names_what_was_found(
    server: FrontendServer, endpoint: Any, with_session: bool
) -> None:
    def change(count: int) -> None:
        server.facts = ["f9"]

    server.afterwards = change
    chosen(endpoint(memory={"k": 2}, session="s1" if with_session else None), ["axyz", "bx"])
    first, *others = [memory.get("facts") for memory in sent(server, "memory")]
    assert (first, others) == (None, [["f1", "f2"]] * 4)
    # What fits beside the longest beginning fits beside each.
    assert server.generated[0]["input_ids"][-3:] == ids("axy")


def test_select_begins_anew_where_a_fact_goes(server: FrontendServer, endpoint: Any) -> None:
    def change(count: int) -> None:
        server.facts, server.deleted = ["f1"], {"f2"}

    server.afterwards = change
    chosen(endpoint(memory={}), ["ax", "bx"])
    named = [memory.get("facts") for memory in sent(server, "memory")]
    assert named == [None, ["f1", "f2"], ["f1", "f2"], None, ["f1"], ["f1"]]


def test_facts_that_change_all_the_time_end_select(server: FrontendServer, endpoint: Any) -> None:
    def change(count: int) -> None:
        server.facts, server.deleted = [f"f{count}"], set(server.facts)

    server.afterwards = change
    with pytest.raises(ClientError, match="facts"):
        chosen(endpoint(memory={}), ["ax", "bx"])


# ---- waiting ----


def test_requests_are_waited_for_as_long_as_they_take_unless_said_otherwise(endpoint: Any) -> None:
    assert endpoint().client._sender.http.timeout.read is None
    assert endpoint(timeout=7).client._sender.http.timeout.read == 7


# ---- a program's session after a failure ----

failing = pytest.mark.filterwarnings("ignore:Error in stream_executor")
Use = Callable[[Any], Any]
USES: list[Use] = [
    lambda s: session(s).append("x"),
    lambda s: session(s).query("x"),
    lambda s: session(s).turn("x", name="said"),
    lambda s: session(s, "s1").append("x"),
]


@failing
@pytest.mark.timeout(60)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("lines", ["no more", "one more", "one more later"])
def test_a_program_that_has_failed_changes_its_session_no_more(
    server: FrontendServer, endpoint: Any, use: Use, lines: str
) -> None:
    server.refusal = refused(400, "", "too hot")

    @function
    def program(s: Any) -> None:
        s += TEXT + gen("end", max_tokens=1)
        if lines == "one more later":
            s.stream_executor.worker.join()
        if lines != "no more":
            s += "More."  # which nobody comes to
        use(s)

    with pytest.raises(BadRequest, match="too hot"):
        program.run(backend=endpoint(session="s1"))
    assert server.changed == []


@failing
@pytest.mark.timeout(60)
def test_a_program_that_fails_says_so_after_its_end_too(server: FrontendServer, endpoint: Any) -> None:
    server.refusal = refused(400, "", "too hot")

    @function
    def program(s: Any) -> None:
        s += TEXT + gen("end", max_tokens=1)

    state = program.run(backend=endpoint(session="s1"))
    for _ in range(2):
        with pytest.raises(BadRequest, match="too hot"):
            session(state).append("x")
    assert server.changed == []
    assert str(state.error()) == "too hot (HTTP 400)"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{}, {"use_thread": False}])
def test_a_program_that_goes_well_goes_in_order(server: FrontendServer, endpoint: Any, options: Any) -> None:
    def note(count: int) -> None:
        server.changed.append("/generate")

    server.afterwards = note

    @function
    def program(s: Any) -> None:
        s += TEXT + gen("first", max_tokens=1)
        session(s).append("x")
        s += gen("second", max_tokens=1)
        session(s).turn("x", name="said")

    state = program.run(backend=endpoint(session="s1"), **options)
    session(state).append("y")  # after its end
    assert (state.text(), state["said"]) == (TEXT + "yesyes", "yes")
    changes = [path.rpartition("/")[2] for path in server.changed]
    assert changes == ["generate", "append", "generate", "turn", "append"]
