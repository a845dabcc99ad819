"""An HTTP server that answers what the frontend's endpoint asks, as docs/sessions.md says and SGLang does.

A character is a token, but for ``~``, which is none; the special one before a prompt is ``BOS``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from wire import SESSION

BOS = 1


def ids(text: str) -> list[int]:
    """The tokens of a text."""
    return [ord(letter) for letter in text if letter != "~"]


class Reply(NamedTuple):
    status: int
    body: Any


def refused(status: int, kind: str, message: str) -> Reply:
    return Reply(status, {"error": {"message": message, "type": kind, "code": status}})


class FrontendServer:
    """One session, ``s1``, and facts that a search finds.

    Attributes
    ----------
    version, tokens
        The session's.
    facts
        What a search finds now.
    logprob
        Of a token behind a prompt, on a version of the session.
    afterwards
        Called once a ``/generate`` has been answered, with how many there have been.
    generated
        The bodies that ``/generate`` has answered.
    changed
        Paths of the calls that changed the session.
    """

    def __init__(self) -> None:
        self.version, self.tokens = 2, 5
        self.facts = ["f1", "f2"]
        self.deleted: set[str] = set()
        self.logprob: Callable[[int, list[int], int], float] = lambda version, prompt, token: -1.0
        self.afterwards: Callable[[int], None] = lambda count: None
        self.refusal: Reply | None = None
        self.generated: list[dict[str, Any]] = []
        self.changed: list[str] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                with server._lock:
                    reply = server._answer(self.command, self.path.split("?")[0], body)
                content = json.dumps(reply.body).encode()
                self.send_response(reply.status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _answer(self, method: str, path: str, body: Any) -> Reply:
        match (method, path):
            case ("GET", "/get_model_info"):
                return Reply(200, {"model_path": "some-model"})
            case ("GET", "/v1/sessions/s1"):
                return Reply(200, self._session())
            case ("POST", "/tokenize"):
                special = [BOS] if body["add_special_tokens"] else []
                return Reply(200, {"tokens": special + ids(body["prompt"])})
            case ("POST", "/generate"):
                return self._generate(body)
            case ("POST", _):
                self.changed.append(path)
                self.version += 1
                if path.endswith("/append"):
                    return Reply(200, {"session": self._session(), "version": self.version, "appended_tokens": 1})
                return Reply(200, {"text": "yes", "meta_info": {}, "version": self.version})
        return refused(404, "", f"{method} {path}")

    def _session(self) -> dict[str, Any]:
        return SESSION | {"version": self.version, "tokens": self.tokens}

    def _generate(self, body: dict[str, Any]) -> Reply:
        if self.refusal is not None:
            return self.refusal
        custom = body["sampling_params"].get("custom_params") or {}
        session, memory = custom.get("session"), custom.get("memory")
        if session is not None and session.get("if_version") not in (None, self.version):
            return refused(409, "SessionVersionConflict", f"the session has version {self.version}")
        self.generated.append(body)
        prompt = body.get("input_ids") or ids(body["text"])
        step = [[self.logprob(self.version, prompt, token), token, None] for token in body.get("token_ids_logprob", [])]
        meta: dict[str, Any] = {"output_token_ids_logprobs": [step]}
        if memory is not None:
            named = memory.get("facts", self.facts)
            meta["memory"] = {"facts": [{"id": fact} for fact in named if fact not in self.deleted]}
        if session is not None:
            meta["session"] = {"id": "s1", "data_version": self.version, "version": None, "tokens": self.tokens}
        self.afterwards(len(self.generated))
        return Reply(200, {"text": "yes", "output_ids": [7], "meta_info": meta})
