import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import httpx
import pytest
from judge_endpoint import Answer, Endpoint, Script, completion, serve

from locomo.errors import JudgeRefused, JudgeUnanswered
from locomo.judging.client import ChatClient, Patience

ASK = [{"role": "user", "content": "Well?"}]
RIGHT = completion("right")


def answers(*script: Answer | None) -> Script:
    """Each in turn, the last again and again."""
    return lambda body, number: script[min(number, len(script) - 1)]


@contextmanager
def client(endpoint: Endpoint, **settings: object) -> Iterator[tuple[ChatClient, list[float]]]:
    waits: list[float] = []
    with closing(ChatClient(endpoint.url, "judge", sleep=waits.append, **settings)) as chat:  # type: ignore[arg-type]
        yield chat, waits


def test_what_is_sent_and_what_comes_back() -> None:
    with serve(answers(RIGHT)) as endpoint, client(endpoint, api_key="k", max_tokens=9) as (chat, waits):
        assert chat.complete(ASK) == ("right", "judge-2026-01-01")
    assert endpoint.bodies == [{"model": "judge", "messages": ASK, "temperature": 0, "max_tokens": 9}]
    assert endpoint.paths == ["/v1/chat/completions"]
    assert endpoint.headers[0]["Authorization"] == "Bearer k"
    assert waits == []


def test_the_model_asked_for_stands_in_where_the_endpoint_names_none() -> None:
    nameless = 200, {}, b'{"choices": [{"message": {"content": null}}]}'
    with serve(answers(nameless)) as endpoint, client(endpoint) as (chat, _):
        assert chat.complete(ASK) == ("", "judge")
    assert "Authorization" not in endpoint.headers[0]


@pytest.mark.parametrize(
    "broken",
    [
        (500, {}, b"oops"),
        (503, {}, b""),
        (408, {}, b""),
        (200, {}, b'{"choices": [{"mess'),
        (200, {}, b"<html>"),
        (200, {}, b'{"choices": []}'),
        (200, {}, b"[]"),
        (200, {"Content-Length": "999", "Connection": "close"}, b"cut short"),
    ],
    ids=lambda answer: f"{answer[0]} {answer[2].decode()}",
)
def test_what_breaks_is_asked_again(broken: Answer) -> None:
    with serve(answers(broken, broken, RIGHT)) as endpoint, client(endpoint) as (chat, waits):
        assert chat.complete(ASK).text == "right"
    assert len(endpoint.bodies) == 3
    assert waits == [1.0, 2.0]


def test_a_hanging_endpoint_times_out_and_is_asked_again() -> None:
    patience = Patience(attempts=30)  # a slow machine may let more than the first time out
    with serve(answers(None, RIGHT)) as endpoint, client(endpoint, timeout_s=0.2, patience=patience) as (chat, waits):
        assert chat.complete(ASK).text == "right"
    assert waits[0] == 1.0
    with (
        serve(answers(None)) as endpoint,
        client(endpoint, timeout_s=0.1, patience=Patience(attempts=2)) as (chat, _),
        pytest.raises(JudgeUnanswered, match="timed out, after 2 attempts"),
    ):
        chat.complete(ASK)


def test_patience_ends_with_what_was_met() -> None:
    patience = Patience(attempts=5, first_wait_s=0.5, longest_wait_s=1.5)
    with (
        serve(answers((502, {}, b""))) as endpoint,
        client(endpoint, patience=patience) as (chat, waits),
        pytest.raises(JudgeUnanswered, match="answered 502, after 5 attempts"),
    ):
        chat.complete(ASK)
    assert len(endpoint.bodies) == 5
    assert waits == [0.5, 1.0, 1.5, 1.5]


def test_an_endpoint_that_is_not_there() -> None:
    with serve(answers(RIGHT)) as endpoint:
        url = endpoint.url
    gone = Endpoint(answers(RIGHT), url=url)
    with (
        client(gone, patience=Patience(attempts=2)) as (chat, waits),
        pytest.raises(JudgeUnanswered, match=r"ConnectError.*after 2 attempts"),
    ):
        chat.complete(ASK)
    assert waits == [1.0]


@pytest.mark.parametrize(
    ("header", "waited_s"),
    [
        ("7", 7.0),
        ("0.25", 1.0),  # never shorter than the wait of its own
        ("100000", 300.0),
        ("Thu, 01 Jan 1970 00:16:52 GMT", 12.0),  # the clock below says 1,000 s after the epoch
        ("Thu, 01 Jan 1970 00:00:00 GMT", 1.0),
        ("soon", 1.0),
        ("", 1.0),
        ("-3", 1.0),
    ],
)
def test_retry_after_of_a_busy_endpoint(header: str, waited_s: float) -> None:
    busy = 429, {"Retry-After": header}, b"slow down"
    with serve(answers(busy, RIGHT)) as endpoint, client(endpoint, now=lambda: 1000.0) as (chat, waits):
        assert chat.complete(ASK).text == "right"
    assert waits == [waited_s]


@pytest.mark.parametrize("status", [401, 403, 404, 307])
def test_a_refusal_of_everything_is_told_at_once(status: int) -> None:
    refused = status, {"Location": "/elsewhere"} if status == 307 else {}, b"no such model"
    with (
        serve(answers(refused)) as endpoint,
        client(endpoint) as (chat, waits),
        pytest.raises(JudgeRefused, match=f"^the judge refused with {status}$"),
    ):
        chat.complete(ASK)
    assert waits == []


def test_a_refusal_of_one_prompt_is_not_asked_again() -> None:
    with (
        serve(answers((400, {}, b"too long"))) as endpoint,
        client(endpoint) as (chat, waits),
        pytest.raises(JudgeUnanswered, match=r"^refused with 400$"),
    ):
        chat.complete(ASK)
    assert (len(endpoint.bodies), waits) == (1, [])


@pytest.mark.parametrize("url", ["localhost:80", "ftp://host/v1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with closing(ChatClient(url, "judge")) as chat, pytest.raises(JudgeRefused, match="no address of a judge"):
        chat.complete(ASK)


def test_waits_end_when_the_work_is_abandoned() -> None:
    asked = threading.Event()

    def busy(request: httpx.Request) -> httpx.Response:
        asked.set()
        return httpx.Response(429, headers={"Retry-After": "299"})

    met: list[str] = []

    def ask(chat: ChatClient) -> None:
        try:
            chat.complete(ASK)
        except JudgeUnanswered as error:
            met.append(str(error))

    with closing(ChatClient("http://host/v1", "judge", transport=httpx.MockTransport(busy))) as chat:
        thread = threading.Thread(target=ask, args=[chat])
        thread.start()
        assert asked.wait(60)
        chat.abandon()
        thread.join(60)
    assert len(met) == 1
    assert "answered 429" in met[0]


def test_the_default_patience_covers_half_a_minute() -> None:
    patience = Patience()
    waits = [patience.wait_s(failures, 0.0) for failures in range(1, patience.attempts)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
