"""One request with memory, as its caller sees it: retrieval and everything else included."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import httpx

from locomo.errors import ServerFailed

from .gate import require_served

_TIMEOUT_S = 600.0
_FLUSH_TIMEOUT_S = 60.0
_SHOWN_CHARACTERS = 500
_OTHER_BEGINNING = "Once more.\n"
# Less than the 5 s after which the server closes an idle connection, so that none is used as it closes.
_LIMITS = httpx.Limits(max_connections=256, keepalive_expiry=2.0)


class Prompts(Protocol):
    """Prompts as token ids; `locomo.arms.prompts.PromptIds` is one."""

    def split(self, question: str, *, placement: str) -> tuple[list[int], list[int]]:
        """Ids before and after the facts."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ...


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
    """Asks one server; an asynchronous context manager, to be used from one event loop.

    Parameters
    ----------
    owner, policy
        Whose facts are asked about, and which of the server's policies is spliced.
    transport
        In place of the network.
    """

    def __init__(
        self, url: str, prompts: Prompts, *, owner: str, policy: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=_LIMITS, transport=transport)
        self._prompts = prompts
        self._owner = owner
        self._policy = policy

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def ask(self, question: str, *, mode: str, k: int, answer: int, other_beginning: bool = False) -> Timed:
        """Find ``k`` facts for a question and answer it with exactly ``answer`` tokens.

        Parameters
        ----------
        other_beginning
            Put one more line before the facts, so that no block of the same facts is found in the radix cache.

        Raises
        ------
        ServerFailed
            The server cannot be reached, answers with an error, or its stream ends early.
        RedGate
            The facts were not all served as asked.
        """
        head, tail = self._prompts.split(question, placement="tail")
        head = [*head, *(self._prompts.encode(_OTHER_BEGINNING) if other_beginning else ())]
        memory = {"owner": self._owner, "k": k, "mode": mode, "query": question, "insert_at": len(head)}
        memory |= {"policy": self._policy} if mode == "splice" else {}
        sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
        body = {
            "input_ids": [*head, *tail],
            "stream": True,
            "sampling_params": {**sampling, "custom_params": {"memory": memory}},
        }
        first: float | None = None
        last: dict[str, Any] = {}
        started = time.perf_counter()
        async for arrived, last in self._events(body):  # noqa: B007
            first = first if first is not None else arrived
        ended = time.perf_counter()
        if first is None or len(last["output_ids"]) != answer:
            raise ServerFailed(f"/generate: the stream ended without {answer} tokens")
        meta = last["meta_info"]
        require_served(question, meta["memory"], mode=mode, k=k)
        forward_s = float(meta["prefill_finished_time"]) - float(meta["forward_entry_time"])
        return Timed(1e3 * (first - started), 1e3 * (ended - started), 1e3 * forward_s, meta["memory"])

    async def flush(self) -> None:
        """Empty the radix cache and the arena, and prefill the two beginnings that all prompts share.

        Each with the memory's header behind it, which an owner's earlier requests leave there as well. The fact that
        has to stand behind the header does so as text: no KV gets into the arena.
        """
        try:
            reply = await self._http.post("/flush_cache", params={"timeout": _FLUSH_TIMEOUT_S})
        except httpx.HTTPError as error:
            raise _unreachable("/flush_cache", error) from error
        if reply.is_error:
            raise ServerFailed(f"/flush_cache answered {reply.status_code}: {reply.text[:_SHOWN_CHARACTERS]}")
        await self.ask("Hello?", mode="text", k=1, answer=1)
        await self.ask("Hello?", mode="text", k=1, answer=1, other_beginning=True)

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[tuple[float, dict[str, Any]]]:
        """The objects of the stream that answers a request, and when each came."""
        try:
            async with self._http.stream("POST", "/generate", json=body) as reply:
                if reply.is_error:
                    said = (await reply.aread()).decode(errors="replace")[:_SHOWN_CHARACTERS]
                    raise ServerFailed(f"/generate answered {reply.status_code}: {said}")
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        yield time.perf_counter(), _parsed(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise _unreachable("/generate", error) from error


def _parsed(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise ServerFailed(f"/generate: the stream broke off in {line[:_SHOWN_CHARACTERS]!r}") from error
    if "error" in found:
        raise ServerFailed(f"/generate ended with {found['error']}")
    return found


def _unreachable(path: str, error: httpx.HTTPError) -> ServerFailed:
    return ServerFailed(f"{path}: {type(error).__name__}: {error or 'no more is known'}")
