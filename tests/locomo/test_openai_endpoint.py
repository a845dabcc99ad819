import json
from pathlib import Path
from typing import Any

import pytest
from bigrams import BigramEmbedder
from judge_endpoint import Answer, completion, serve

from locomo.arms.base import Served
from locomo.arms.openai import OpenAIEndpoint
from locomo.arms.prompts import HEADER, QUESTION, SYSTEM
from locomo.dataset import load
from locomo.errors import LocomoError, RequestRefused, ServerFailed
from locomo.judging.client import Patience
from locomo.reporting.arm_names import parse_arm
from locomo.retrieval.units import UnitKind, UnitText, units_of

DATA = Path(__file__).parent / "data" / "synthetic.json"
CONVERSATION = load(DATA)[0]
UNITS = units_of(CONVERSATION, UnitKind.TURNS, text=UnitText.PLAIN, captions=True)


def chunks(*events: dict[str, Any]) -> Answer:
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return 200, {"Content-Type": "text/event-stream"}, body.encode()


def endpoint(url: str, tmp_path: Path, *, key: str | None = None) -> OpenAIEndpoint:
    return OpenAIEndpoint(
        url,
        "m-1",
        api_key=key,
        store=tmp_path / "s",
        embedder=BigramEmbedder(),
        max_tokens=9,
        patience=Patience(attempts=2, first_wait_s=0.0),
    )


def test_notes_are_sent_as_text_where_the_arm_has_them(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 15}}
    answer = chunks(
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "blue "}}]},
        {"choices": [{"delta": {"content": "bowls"}}]},
        {"choices": [], "usage": usage},
    )
    with serve(lambda body, number: answer) as server, endpoint(server.url, tmp_path, key="secret") as system:
        system.open(CONVERSATION, UNITS, lambda done, total: None)
        used = (UNITS[1].id, UNITS[0].id)
        tail = system.answer("What?", Served(used, "tail", None))
        head = system.answer("What?", Served(used, "head", None))
        none = system.answer("What?", Served((), "tail", None))
    lines = [f"[{u.date_time}] {u.speaker}: {' '.join(u.text.split())}\n" for u in (UNITS[1], UNITS[0])]
    notes, asked = HEADER + "".join(lines), QUESTION.format(question="What?")
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": notes + asked}],
        [{"role": "system", "content": f"{SYSTEM}\n{notes}"}, {"role": "user", "content": asked}],
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}],
    ]
    assert all((b["model"], b["temperature"], b["max_tokens"]) == ("m-1", 0, 9) for b in server.bodies)
    assert server.paths == ["/v1/chat/completions"] * 3
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert (tail.text, tail.used, tail.tier) == ("blue bowls", used, "text")
    assert tail.tokens == {"prompt": 40, "prefilled": 25, "spliced": 0}
    assert (head.used, none.used, none.tier) == (used, (), "none")


def test_units_are_found_by_the_store_and_taken_in_once(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with serve(lambda body, number: None) as server, endpoint(server.url, tmp_path) as system:
        for _ in range(2):
            system.open(CONVERSATION, UNITS, lambda done, total: seen.append((done, total)))
        assert seen == [(len(UNITS), len(UNITS))]
        wanted = UNITS[3]
        assert wanted.id in system.retrieve(wanted.text, 3)
        assert system.retrieve("anything", 0) == []


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((429, {}, b'{"error": "slow down"}'), ServerFailed, "answered 429, after 2 attempts: .*slow down"),
        ((401, {}, b'{"error": "no key"}'), ServerFailed, "answered 401: .*no key"),
        ((400, {}, b'{"error": "too long"}'), RequestRefused, "answered 400: .*too long"),
        (chunks({"error": {"message": "out of memory"}}), ServerFailed, "out of memory"),
        ((200, {}, b"data: {not json}\n\n"), ServerFailed, "no JSON"),
        ((200, {}, b'data: {"choices": []}\n\n'), ServerFailed, "broke off"),
    ],
)
def test_what_goes_wrong_there_is_said(tmp_path: Path, answer: Answer, error: type[LocomoError], message: str) -> None:
    with serve(lambda body, number: answer) as server, endpoint(server.url, tmp_path) as system:
        system.open(CONVERSATION, UNITS, lambda done, total: None)
        with pytest.raises(error, match=message):
            system.answer("What?", Served((), "tail", None))


def test_an_endpoint_that_is_busy_once_answers_all_the_same(tmp_path: Path) -> None:
    answer = chunks({"choices": [{"delta": {"content": "blue"}}]})
    with serve(lambda body, number: answer if number else (429, {}, b"")) as server:
        with endpoint(server.url, tmp_path) as system:
            assert system.answer("What?", Served((), "tail", None)).text == "blue"
        assert len(server.bodies) == 2


def test_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    with serve(lambda body, number: None) as server:
        url = server.url
    with endpoint(url, tmp_path) as system:
        with pytest.raises(ServerFailed, match="ConnectError"):
            system.answer("What?", Served((), "tail", None))
        with pytest.raises(ServerFailed, match="ConnectError"):
            system.check()


def test_an_endpoint_is_checked_with_one_token(tmp_path: Path) -> None:
    answers = [completion("Hi"), (400, {}, b"no such model")]
    with serve(lambda body, number: answers[number]) as server, endpoint(server.url, tmp_path) as system:
        system.check()
        assert (server.bodies[0]["model"], server.bodies[0]["max_tokens"]) == ("m-1", 1)
        with pytest.raises(ServerFailed, match=r"refuses any prompt: .*no such model"):
            system.check()


def test_it_describes_itself_without_what_is_secret(tmp_path: Path) -> None:
    with endpoint("https://ana:secret@host.invalid/v1?key=hidden", tmp_path, key="token") as system:
        assert system.describe() == {
            "model": {"name": "m-1"},
            "endpoint": "https://host.invalid/v1/",
            "embedder": BigramEmbedder().fingerprint,
        }
        assert system.encodings() == {}


def test_what_it_cannot_serve(tmp_path: Path) -> None:
    with endpoint("http://127.0.0.1:9/v1", tmp_path) as system:
        assert system.why_not(parse_arm("text/tail@5")) is None
        assert system.why_not(parse_arm("none")) is None
        assert "no memory to splice from" in str(system.why_not(parse_arm("splice/window:0/tail@5")))
        assert "log probabilities" in str(system.why_not(parse_arm("floor/shuffled@5")))
