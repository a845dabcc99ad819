"""What a server answers, or one of two errors: of this request, or of the server."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from locomo.client import MemoryClient
from locomo.connection import ServerConnection
from locomo.errors import LocomoError, RequestRefused, ServerFailed
from locomo.judging.client import Patience
from locomo.oracle.serving import OracleClient

STATUS = {"model": {}, "policies": ["window:0"], "encoder": {"pending": 3}}


def connection(
    answer: Callable[[httpx.Request, int], httpx.Response], *, waits: list[float] | None = None, attempts: int = 3
) -> tuple[ServerConnection, list[httpx.Request]]:
    """A connection to a server that answers the request of each number, from 0; and the requests."""
    requests: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return answer(request, len(requests) - 1)

    return (
        ServerConnection(
            "http://ana:secret@localhost:30000/base?key=hidden",
            patience=Patience(attempts=attempts),
            transport=httpx.MockTransport(handle),
            sleep=[].append if waits is None else waits.append,
        ),
        requests,
    )


def stream(*lines: str) -> httpx.Response:
    return httpx.Response(200, text="".join(f"{line}\n\n" for line in lines))


def test_requests_go_under_the_address_with_its_user_and_query_and_neither_is_shown() -> None:
    server, [*_] = connection(lambda request, number: httpx.Response(400, text="no"))
    assert server.shown_url == "http://localhost:30000/base/"
    with pytest.raises(RequestRefused) as refused:
        server.json("POST", "/generate", json={})
    assert str(refused.value) == "POST http://localhost:30000/base/generate answered 400: no"
    answered, requests = connection(lambda request, number: httpx.Response(200, json=[1]))
    assert answered.json("GET", "/facts", params={"owner": "ana"}) == [1]
    assert requests[0].url.path == "/base/facts"
    assert dict(requests[0].url.params) == {"key": "hidden", "owner": "ana"}
    assert requests[0].headers["Authorization"].startswith("Basic ")


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_what_is_wrong_with_one_request_refuses_it_at_once(status: int) -> None:
    server, requests = connection(lambda request, number: httpx.Response(status, text="too long"))
    with pytest.raises(RequestRefused, match=f"answered {status}: too long"):
        server.json("POST", "/generate", json={})
    with pytest.raises(RequestRefused, match=f"answered {status}: too long"):
        list(server.events("/generate", {}))
    assert len(requests) == 2


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405, 500, 501])
def test_what_every_request_would_meet_is_the_servers_failure_at_once(status: int) -> None:
    server, requests = connection(lambda request, number: httpx.Response(status, text="no key"))
    with pytest.raises(ServerFailed, match=f"answered {status}: no key"):
        server.json("POST", "/generate", json={})
    with pytest.raises(ServerFailed, match=f"answered {status}: no key"):
        list(server.events("/generate", {}))
    assert len(requests) == 2


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
def test_a_busy_server_is_asked_again_with_longer_waits(status: int) -> None:
    waits: list[float] = []

    def busy_twice(request: httpx.Request, number: int) -> httpx.Response:
        if number in (0, 1, 3, 4):
            return httpx.Response(status, headers={"Retry-After": "7"} if number == 1 else {})
        return stream('data: {"n": 1}', "data: [DONE]") if "stream" in request.url.path else httpx.Response(200, json=5)

    server, requests = connection(busy_twice, waits=waits)
    assert server.json("POST", "/generate", json={}) == 5
    assert waits == [1.0, 7.0]  # 1 s, then 2 s or what the server asks for
    assert [event.data for event in server.events("/stream", {"a": 1})] == [{"n": 1}]
    assert waits == [1.0, 7.0, 1.0, 2.0]
    assert [json.loads(request.content) for request in requests[3:]] == [{"a": 1}] * 3


def test_a_server_that_stays_busy_has_failed() -> None:
    waits: list[float] = []
    server, requests = connection(lambda request, number: httpx.Response(429, text="slow down"), waits=waits)
    with pytest.raises(ServerFailed, match="answered 429, after 3 attempts: slow down"):
        list(server.events("/generate", {}))
    assert (len(requests), waits) == (3, [1.0, 2.0])


@pytest.mark.parametrize(
    "error", [httpx.ReadTimeout("slow"), httpx.ConnectError("refused"), httpx.RemoteProtocolError("gone")]
)
def test_a_server_out_of_reach_has_failed(error: httpx.HTTPError) -> None:
    def fail(request: httpx.Request, number: int) -> httpx.Response:
        raise error

    server, _ = connection(fail)
    calls: list[Callable[[], object]] = [
        lambda: server.json("POST", "/generate", json={}),
        lambda: list(server.events("/generate", {})),
        server.status,
        server.flush_cache,
    ]
    for call in calls:
        with pytest.raises(ServerFailed, match=f"{type(error).__name__}: {error}"):
            call()


class Breaking(httpx.SyncByteStream):
    """Half an answer, and then the connection breaks."""

    def __iter__(self) -> Iterator[bytes]:
        yield b'data: {"text": "a"}\n\ndata: {"te'
        raise httpx.RemoteProtocolError("peer closed connection")


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (stream('data: {"text": "a"}', 'data: {"te'), ServerFailed, "no JSON"),
        (stream('data: {"text": "a"}'), ServerFailed, r"broke off before \[DONE\]"),
        (httpx.Response(200, stream=Breaking()), ServerFailed, "peer closed connection"),
        (stream('data: {"text": "a"}', "data: [1]"), ServerFailed, "no object"),
        (stream('data: {"text": "a"}', 'data: {"error": {"code": 400, "message": "long"}}'), RequestRefused, "long"),
        (stream('data: {"text": "a"}', 'data: {"error": {"code": 500, "message": "died"}}'), ServerFailed, "died"),
        (stream('data: {"text": "a"}', 'data: {"error": "died"}'), ServerFailed, "died"),
    ],
)
def test_a_stream_that_ends_badly_is_no_answer(
    response: httpx.Response, error: type[LocomoError], message: str
) -> None:
    server, _ = connection(lambda request, number: response)
    events = server.events("/generate", {})
    assert next(events).data == {"text": "a"}
    with pytest.raises(error, match=message):
        list(events)


def test_events_come_with_the_time_since_their_request_up_to_the_end() -> None:
    lines = ['data: {"n": 1}', ": a comment", 'data:{"n": 2}', "data: [DONE]", 'data: {"n": 3}']
    server, _ = connection(lambda request, number: stream(*lines))
    first, second = server.events("/generate", {})
    assert (first.data, second.data) == ({"n": 1}, {"n": 2})
    assert 0 < first.elapsed_s < second.elapsed_s


def test_what_is_no_json_and_no_status_of_ours_is_a_failure() -> None:
    server, _ = connection(lambda request, number: httpx.Response(200, text="<html>"))
    with pytest.raises(ServerFailed, match="no JSON: <html>"):
        server.json("GET", "/status")
    other, _ = connection(lambda request, number: httpx.Response(200, json={"state": "fine"}))
    with pytest.raises(ServerFailed, match="not that of a server with memory"):
        other.status()
    ours, _ = connection(lambda request, number: httpx.Response(200, json=STATUS))
    assert (ours.status(), ours.pending()) == (STATUS, 3)


def test_flushing_takes_an_answer_that_is_no_json() -> None:
    server, requests = connection(lambda request, number: httpx.Response(200, text="Cache flushed."))
    server.flush_cache()
    assert (requests[0].method, requests[0].url.path) == ("POST", "/base/flush_cache")


def test_an_address_that_is_none_is_said() -> None:
    with pytest.raises(ServerFailed, match="no address of a server"):
        ServerConnection("http://localhost:port")
    with ServerConnection("localhost") as server, pytest.raises(ServerFailed, match="UnsupportedProtocol"):
        server.json("GET", "/status")


@pytest.mark.parametrize("client", [MemoryClient, OracleClient])
def test_every_client_says_that_nobody_listens(client: type[MemoryClient] | type[OracleClient]) -> None:
    asked = client("http://127.0.0.1:9")
    for call in (asked.status, asked.flush_cache):
        with pytest.raises(ServerFailed, match="ConnectError"):
            call()
    asked.close()
