"""One request with memory, as its caller sees it: retrieval and everything else included."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from locomo.arms.prompts import PromptIds
from locomo.errors import ServerFailed

_TIMEOUT_S = 600.0
# Less than the 5 s after which the server closes an idle connection, so that none is used as it closes.
_LIMITS = httpx.Limits(max_connections=256, keepalive_expiry=2.0)


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one answer.

    Attributes
    ----------
    ttft_ms
        From before the request is sent to its first token.
    total_ms
        To its last.
    forward_ms
        Of these the scheduler's own, from choosing the request until its first token.
    memory
        The server's report.
    """

    ttft_ms: float
    total_ms: float
    forward_ms: float
    memory: dict[str, Any]


class Client:
    """Asks one server; to be used from one event loop."""

    def __init__(self, url: str, prompts: PromptIds, *, owner: str, policy: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=_LIMITS)
        self._prompts = prompts
        self._owner = owner
        self._policy = policy

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, question: str, *, mode: str, k: int, answer: int) -> Timed:
        """Find ``k`` facts for a question and answer it with exactly ``answer`` tokens.

        Raises
        ------
        ServerFailed
            An error, or a stream that ends early.
        """
        head, tail = self._prompts.split(question, placement="tail")
        memory = {"owner": self._owner, "k": k, "mode": mode, "query": question, "insert_at": len(head)}
        memory |= {"policy": self._policy} if mode == "splice" else {}
        sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
        body = {
            "input_ids": [*head, *tail],
            "stream": True,
            "sampling_params": {**sampling, "custom_params": {"memory": memory}},
        }
        started = time.perf_counter()
        first: float | None = None
        last: dict[str, Any] = {}
        async with self._http.stream("POST", "/generate", json=body) as reply:
            if reply.is_error:
                raise ServerFailed(f"/generate answered {reply.status_code}: {(await reply.aread()).decode()[:500]}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                last = json.loads(line.removeprefix("data: "))
                if "error" in last:
                    raise ServerFailed(f"/generate ended with {last['error']}")
                first = first if first is not None else now
        if first is None or len(last["output_ids"]) != answer:
            raise ServerFailed(f"the stream ended without {answer} tokens")
        meta = last["meta_info"]
        forward_s = float(meta["prefill_finished_time"]) - float(meta["forward_entry_time"])
        ended = time.perf_counter()
        return Timed(1e3 * (first - started), 1e3 * (ended - started), 1e3 * forward_s, meta["memory"])

    async def flush(self) -> None:
        """Empty the radix cache, and prefill the beginning that all prompts share."""
        reply = await self._http.post("/flush_cache", params={"timeout": 60})
        if reply.is_error:
            raise ServerFailed(f"flush_cache answered {reply.status_code}: {reply.text[:500]}")
        await self.ask("Hello?", mode="off", k=0, answer=1)
