"""Replies as a server of ours gives them, to requests that httpx hands over in place of the network."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from memory_bench.client import Client

HEAD, TAIL, OTHER = [1, 2], [9], [7, 7]
TIERS = {"splice": "spliced", "text": "text", "off": "none"}


class Ids:
    """Prompts whose ids say what they are."""

    def split(self, question: str, *, placement: str) -> tuple[list[int], list[int]]:
        assert placement == "tail"
        return list(HEAD), list(TAIL)

    def encode(self, text: str) -> list[int]:
        return list(OTHER)


def report(mode: str, k: int, **other: Any) -> dict[str, Any]:
    """What is said of a request that was served as it asked."""
    return {
        "tier": TIERS[mode],
        "reason": None,
        "facts": [{"id": f"f{number}"} for number in range(k)],
        "tokens": {"prompt": 100, "prefilled": 3, "spliced": 90},
        "ms": {"retrieve": 1.0, "assemble": 2.0, "splice": 4.0},
    } | other


def stream(*events: dict[str, Any] | str) -> httpx.Response:
    lines = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))


def answered(body: dict[str, Any], **other: Any) -> httpx.Response:
    """The stream of an answer, token by token, with `other` in its report."""
    sampling = body["sampling_params"]
    memory = sampling["custom_params"]["memory"]
    told = report(memory["mode"], memory["k"], **other)
    meta = {"forward_entry_time": 10.0, "prefill_finished_time": 10.25, "memory": told}
    tokens = [5] * sampling["max_new_tokens"]
    return stream(*({"output_ids": tokens[: n + 1], "meta_info": meta} for n in range(len(tokens))), "[DONE]")


@dataclass
class Server:
    """Answers requests by `reply(body, number of the question)`, and keeps what it was asked, in order.

    ``asked`` holds ``"flush"``, and of questions ``(mode, k, question, whether behind the other beginning)``.
    """

    reply: Callable[[dict[str, Any], int], httpx.Response] = lambda body, number: answered(body)
    asked: list[Any] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def questions(self) -> list[Any]:
        """What was asked but for the requests that follow a flush."""
        return [entry for entry in self.asked if entry == "flush" or entry[2] != "Hello?"]

    def client(self) -> Client:
        transport = httpx.MockTransport(self._handle)
        return Client("http://server", Ids(), owner="ana", policy="ladder:live+4+32", transport=transport)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/flush_cache":
            self.asked.append("flush")
            return httpx.Response(200, text="flushed")
        body = json.loads(request.content)
        memory = body["sampling_params"]["custom_params"]["memory"]
        question = memory["query"]
        number = sum(entry != "flush" and entry[2] != "Hello?" for entry in self.asked)
        self.asked.append((memory["mode"], memory["k"], question, body["input_ids"] == [*HEAD, *OTHER, *TAIL]))
        self.bodies.append(body)
        return answered(body) if question == "Hello?" else self.reply(body, number)


class Status(BaseHTTPRequestHandler):
    """Answers every GET with what its server says of itself."""

    def do_GET(self) -> None:
        content = json.dumps(self.server.status).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@contextmanager
def telling(status: dict[str, Any]) -> Iterator[str]:
    """The address of a server with this status."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Status) as server:
        server.status = status
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
