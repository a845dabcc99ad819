"""Our server's client with registered questions, and what a reply says of the server's own time."""

import time
from dataclasses import dataclass
from typing import Any

import httpx
from sessions_bench.clients import Reply, SessionClient, Unexpected

OWNER = "bench"
_POLL_S = 0.02
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer that was timed.

    Attributes
    ----------
    part, arm
        Of the benchmark.
    context
        Nominal length of the stream, tokens; 0 where it does not matter.
    ttft_ms
        The client's: from before the request is written until its first token has been received.
    server_ms
        Of that the server's own: see ``server_ms``.
    """

    part: str
    arm: str
    context: int
    ttft_ms: float
    server_ms: float
    cached_tokens: int
    prompt_tokens: int


def sample_of(part: str, arm: str, context: int, reply: Reply) -> Sample:
    """What a reply took."""
    meta = reply.meta
    return Sample(
        part, arm, context, reply.ttft_ms, server_ms(reply), int(meta["cached_tokens"]), int(meta["prompt_tokens"])
    )


def is_stored(reply: Reply) -> bool:
    """Whether the answer is that of a registered question."""
    return bool((reply.meta.get("session") or {}).get("served_from") == "flash")


def entry_use(reply: Reply) -> str | None:
    """How an entry was of use: ``prefix``, ``ahead``, ``whole`` or ``gate``; None: it was not."""
    entry = (reply.meta.get("session") or {}).get("entry")
    return None if entry is None else str(entry["by"])


def server_ms(reply: Reply) -> float:
    """The server's own time to the first token, from the rendered question on.

    Of what needs no engine until the whole reply has been made. Of the rest until the scheduler has its first token,
    which is less than until the reply: the way back to the HTTP process is not in it.
    """
    needs_no_engine = is_stored(reply) or entry_use(reply) in ("whole", "gate")
    return 1e3 * float(reply.meta["e2e_latency" if needs_no_engine else "first_token_latency"])


class FlashClient(SessionClient):
    """A client of sessions and of their registered questions; all of them greedy and of a fixed length."""

    def register(self, session: str, name: str, ids: list[int], *, answer: int, **fields: Any) -> None:
        """Register a question; ``answer`` tokens are decoded."""
        body = {
            "owner": OWNER,
            "name": name,
            "input_ids": ids,
            "max_tokens": answer,
            "sampling_params": {"temperature": 0, "ignore_eos": True},
            **fields,
        }
        self.call("POST", f"/v1/sessions/{session}/flash", httpx.codes.CREATED, json=body)

    def unregister(self, session: str, name: str) -> None:
        """End a registration."""
        self.call("DELETE", f"/v1/sessions/{session}/flash/{name}", params={"owner": OWNER})

    def question(self, session: str, name: str) -> dict[str, Any]:
        """What the server says of a question."""
        return self.call("GET", f"/v1/sessions/{session}/flash/{name}", params={"owner": OWNER})

    def enter(self, session: str, name: str, ids: list[int], *, ahead: int) -> None:
        """Register an entry, of which so many tokens of the answer are decoded ahead; 0: it is prefilled alone."""
        body = {
            "owner": OWNER,
            "name": name,
            "input_ids": ids,
            "max_tokens": ahead,
            "sampling_params": {"temperature": 0, "ignore_eos": True},
        }
        self.call("POST", f"/v1/sessions/{session}/entries", httpx.codes.CREATED, json=body)

    def wait_answered(self, session: str, *, owner: str = OWNER) -> dict[str, dict[str, Any]]:
        """Wait until every question in service has an answer on the session's newest version; all of them by name.

        Raises
        ------
        Unexpected
            One has failed, or it takes too long.
        """
        return self._wait(session, "flash", "questions", owner)

    def wait_entered(self, session: str) -> None:
        """The same of entries: until each is prefilled, and decoded ahead, on the newest version."""
        self._wait(session, "entries", "entries", OWNER)

    def _wait(self, session: str, path: str, part: str, owner: str) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            found = self.call("GET", f"/v1/sessions/{session}/{path}", params={"owner": owner})[part]
            if broken := [one for one in found if one["error"]]:
                raise Unexpected(f"{broken[0]['name']} of {part}: {broken[0]['error']}")
            if all(one["state"] in ("fresh", "retired") and not one["waiting"] for one in found):
                return {one["name"]: one for one in found}
            time.sleep(_POLL_S)
        raise Unexpected(f"{part} of session {session} are not of its newest version after {_PATIENCE_S:.0f} s")

    def ask_session(self, session: str, ids: list[int], *, answer: int, fresh: bool = False) -> Reply:
        """Ask as ``query`` does, where a gate's answer is as long as its choice; ``fresh``: decoded in any case."""
        body = {"owner": OWNER, "input_ids": ids, "fresh": fresh}
        return self._stream(f"/v1/sessions/{session}/query", body, answer, may_be_shorter=True)

    def stored(self, session: str, ids: list[int], *, answer: int) -> Reply:
        """The stored answer to a question; raises ``Unexpected`` where it was decoded."""
        reply = self.ask_session(session, ids, answer=answer)
        if not is_stored(reply):
            raise Unexpected(f"a question that had been answered was decoded: {reply.meta['session']}")
        return reply

    def flash_totals(self) -> dict[str, Any]:
        """Counts of the server."""
        totals: dict[str, Any] = self.call("GET", "/v1/flash/stats")["totals"]
        return totals

    def call(self, method: str, path: str, status: int = httpx.codes.OK, **more: Any) -> dict[str, Any]:
        """Send a request that has to be answered with that status; the reply."""
        answer = self._http.request(method, path, **more)
        if answer.status_code != status:
            raise Unexpected(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        found: dict[str, Any] = answer.json()
        return found
