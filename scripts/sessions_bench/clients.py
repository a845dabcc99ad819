"""What a client sees of either server: answers with the time to their first token, and sessions."""

import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

_OWNER = "bench"
# Less than the 5 s after which the servers close an idle connection, so that none is used as it closes.
_LIMITS = httpx.Limits(keepalive_expiry=2.0)


class Unexpected(RuntimeError):
    """A server answered something that a benchmark cannot go on from."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer.

    Attributes
    ----------
    ttft_ms
        From before the request is written, its ids into JSON included, until the first token has been received.
    """

    ttft_ms: float
    output_ids: list[int]
    meta: dict[str, Any]
    text: str = ""

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that had to be prefilled."""
        return int(self.meta["prompt_tokens"]) - int(self.meta["cached_tokens"])

    @property
    def forward_ms(self) -> float:
        """What the scheduler itself took, from choosing the request until its first token."""
        return 1e3 * (float(self.meta["prefill_finished_time"]) - float(self.meta["forward_entry_time"]))


class Opened(NamedTuple):
    """What opening a session came to."""

    status: int
    ms: float
    body: dict[str, Any]


class PromptClient:
    """Sends whole prompts: all that a stock server offers, and all that its client can do."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300.0, limits=_LIMITS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def ask(self, ids: list[int], *, answer: int) -> Reply:
        """Answer a prompt of token ids greedily, with exactly `answer` tokens."""
        return self._stream("/generate", {"input_ids": ids}, answer)

    def counters(self) -> dict[str, float]:
        """What SGLang's scheduler counts: tokens that it prefilled (`computed`), and found in its cache (`found`)."""
        answer = self._http.get("/metrics", follow_redirects=True)
        _expect(answer, httpx.codes.OK)
        counted = {"prefill_compute": 0.0, "prefill_cache": 0.0}
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name == "sglang:realtime_tokens_total" and sample.labels["mode"] in counted:
                    counted[sample.labels["mode"]] += sample.value
        return {"computed": counted["prefill_compute"], "found": counted["prefill_cache"]}

    def _stream(self, path: str, what: dict[str, Any], answer: int, *, may_be_shorter: bool = False) -> Reply:
        sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
        started = time.perf_counter()
        first: float | None = None
        last: dict[str, Any] = {}
        body = {**what, "stream": True, "sampling_params": sampling}
        with self._http.stream("POST", path, json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                reply.read()
                _expect(reply, httpx.codes.OK)
            for line in reply.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                now = time.perf_counter()
                last = json.loads(line.removeprefix("data:"))
                if "error" in last:
                    raise Unexpected(f"POST {path}: {last['error']}")
                if first is None and last.get("output_ids"):
                    first = now
        if first is None or (len(last["output_ids"]) != answer and not may_be_shorter):
            raise Unexpected(f"POST {path}: the stream ended with {last}, without {answer} tokens")
        return Reply(1e3 * (first - started), last["output_ids"], last["meta_info"], last["text"])


class SessionClient(PromptClient):
    """Our server's client: sessions, and whole prompts beside them."""

    def open(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        """Open a session, which must succeed."""
        opened = self.try_open(ids, **fields)
        if opened.status != httpx.codes.CREATED:
            raise Unexpected(f"POST /v1/sessions: {opened.status} {opened.body}")
        return opened.body

    def try_open(self, ids: list[int], **fields: Any) -> Opened:
        """Open a session, if the server will."""
        started = time.perf_counter()
        answer = self._http.post("/v1/sessions", json={"owner": _OWNER, "input_ids": ids, **fields})
        return Opened(answer.status_code, 1e3 * (time.perf_counter() - started), answer.json())

    def append(self, session: str, ids: list[int]) -> dict[str, Any]:
        """Add tokens; the reply with `client_ms`, the time that it took."""
        started = time.perf_counter()
        answer = self._http.post(f"/v1/sessions/{session}/append", json={"owner": _OWNER, "input_ids": ids})
        _expect(answer, httpx.codes.OK)
        return {**answer.json(), "client_ms": 1e3 * (time.perf_counter() - started)}

    def query(self, session: str, ids: list[int], *, answer: int) -> Reply:
        """Ask the session."""
        return self._stream(f"/v1/sessions/{session}/query", {"owner": _OWNER, "input_ids": ids}, answer)

    def turn(self, session: str, ids: list[int], *, answer: int) -> Reply:
        """Ask the session, and make the exchange part of it."""
        return self._stream(f"/v1/sessions/{session}/turn", {"owner": _OWNER, "input_ids": ids}, answer)

    def session(self, session: str) -> dict[str, Any]:
        """Return what the server says of it."""
        answer = self._http.get(f"/v1/sessions/{session}", params={"owner": _OWNER})
        _expect(answer, httpx.codes.OK)
        found: dict[str, Any] = answer.json()
        return found

    def close(self, session: str) -> None:
        """Close the session."""
        _expect(self._http.delete(f"/v1/sessions/{session}", params={"owner": _OWNER}), httpx.codes.OK)


def _expect(answer: httpx.Response, status: int) -> None:
    if answer.status_code != status:
        raise Unexpected(f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text[:500]}")
