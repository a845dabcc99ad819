"""The calls that measurements make to a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from locomo.connection import ServerConnection
from locomo.dataset import Conversation
from locomo.errors import ServerFailed
from locomo.waiting import wait_for_encodings


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed chat answer.

    ``ttft_ms`` runs from sending the request to the first text; ``memory`` is the server's report.
    """

    text: str
    ttft_ms: float
    memory: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Steps:
    """Next-token distributions at consecutive steps: token id to log probability, as far as the server lists them."""

    token_ids: tuple[int, ...]
    distributions: tuple[dict[int, float], ...]
    memory: dict[str, Any]


class MemoryClient:
    """A server with memory, seen through HTTP.

    Raises
    ------
    RequestRefused, ServerFailed
        From every call: the request is refused, or the server cannot answer it; the message repeats what it says.
    """

    def __init__(self, url: str) -> None:
        self._server = ServerConnection(url)

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def status(self) -> dict[str, Any]:
        """``/v1/memory/status``."""
        return self._server.status()

    def flush_cache(self) -> None:
        """Empty the radix cache and the arena."""
        self._server.flush_cache()

    def ingest(self, conversation: Conversation, *, owner: str, on_progress: Callable[[int, int], None]) -> list[str]:
        """Add every turn as a fact and wait for its KV; returns the fact ids in turn order."""
        facts = [
            {
                "text": turn.text,
                "speaker": turn.speaker,
                "time": turn.date_time,
                "stream": conversation.sample_id,
                "metadata": {"dia_id": turn.dia_id},
            }
            for turn in conversation.turns
        ]
        body = {"owner": owner, "facts": facts}
        ids = [fact["id"] for fact in self._server.json("POST", "/v1/memory/facts", json=body)["facts"]]
        wait_for_encodings(self._server.pending, on_progress)
        return ids

    def ask(self, question: str, *, max_tokens: int, **memory: Any) -> Answer:
        """Ask one question over the streaming chat route, with greedy decoding."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "custom_params": {"memory": memory},
        }
        text: list[str] = []
        report: dict[str, Any] | None = None
        first_s = elapsed_s = 0.0
        for elapsed_s, chunk in self._server.events("/v1/chat/completions", body):
            report = chunk.get("memory", report)
            for choice in chunk.get("choices", []):
                if content := choice["delta"].get("content"):
                    first_s = first_s or elapsed_s
                    text.append(content)
        if report is None:
            raise ServerFailed("the stream ended without a memory report")
        return Answer("".join(text), 1e3 * (first_s or elapsed_s), report)

    def _generate(self, prompt: Sequence[int], insert_at: int, **kwargs: Any) -> dict[str, Any]:
        memory = {"insert_at": insert_at, **kwargs.pop("memory")}
        sampling = {"temperature": 0, "max_new_tokens": kwargs.pop("max_new_tokens"), "ignore_eos": True}
        body = {
            "input_ids": list(prompt),
            "sampling_params": {**sampling, "custom_params": {"memory": memory}},
            "return_logprob": True,
            **kwargs,
        }
        answer: dict[str, Any] = self._server.json("POST", "/generate", json=body)
        return answer

    def continue_greedily(
        self, head: Sequence[int], tail: Sequence[int], *, steps: int, top: int, memory: dict[str, Any]
    ) -> Steps:
        """Decode ``steps`` tokens behind ``head + facts + tail`` and keep the distribution of each."""
        answer = self._generate([*head, *tail], len(head), memory=memory, max_new_tokens=steps, top_logprobs_num=top)
        meta = answer["meta_info"]
        return Steps(
            tuple(answer["output_ids"]),
            tuple({token: logprob for logprob, token, _ in step} for step in meta["output_top_logprobs"]),
            meta["memory"],
        )

    def teacher_force(
        self, head: Sequence[int], tail: Sequence[int], forced: Sequence[int], *, top: int, memory: dict[str, Any]
    ) -> Steps:
        """Distributions at each token of ``forced``, which follows ``head + facts + tail``; one request.

        The first comes from decoding one token behind the prompt; the others from the prompt's own log probabilities,
        read only from the first forced token on, so that the facts before it may still be spliced.
        """
        prompt_tokens = self.continue_greedily(head, tail, steps=1, top=top, memory=memory)
        start = prompt_tokens.memory["tokens"]["prompt"]
        answer = self._generate(
            [*head, *tail, *forced[:-1]],
            len(head),
            memory=memory,
            max_new_tokens=1,
            top_logprobs_num=top,
            logprob_start_len=start,
        )
        meta = answer["meta_info"]
        # Entry i is the distribution that predicts token start + i; the first was decoded above, the last just now.
        read = [step for step in meta["input_top_logprobs"][1:] if step is not None]
        steps = [
            prompt_tokens.distributions[0],
            *({token: logprob for logprob, token, _ in step} for step in read),
            {token: logprob for logprob, token, _ in meta["output_top_logprobs"][0]},
        ]
        if len(steps) != len(forced):
            raise ServerFailed(f"{len(steps)} distributions for {len(forced)} forced tokens")
        return Steps(tuple(forced), tuple(steps), meta["memory"])
