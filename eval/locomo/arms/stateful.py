"""A server of ours: facts by id, as text or spliced, in prompts given as token ids, so that all arms share them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from locomo.arms.base import Answer, OnProgress, Scored, Served
from locomo.arms.prompts import STOP, PromptIds
from locomo.dataset import Conversation
from locomo.errors import ServerFailed
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.units import Unit
from locomo.waiting import wait_for_encodings

_TIMEOUT_S = 600.0
_ADDED_AT_ONCE = 500


class StatefulServer:
    """One server with memory, over HTTP; a `System` and a context manager.

    Parameters
    ----------
    model
        Directory of the tokenizer.
    max_tokens
        Longest answer.
    """

    def __init__(self, url: str, model: Path, *, max_tokens: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self._prompts = PromptIds(model)
        self._max_tokens = max_tokens
        self.owner = ""
        self._fact_ids: dict[str, str] = {}
        self._unit_ids: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # ---- System ----

    def why_not(self, arm: ArmName) -> str | None:
        """None: it serves every arm whose policy it encodes."""
        policies = self._json("GET", "/v1/memory/status")["policies"]
        if arm.policy is not None and arm.policy not in policies:
            return f"the server encodes {', '.join(policies)}; start it with --also-encode {arm.policy}"
        return None

    def describe(self) -> dict[str, Any]:
        """The model with its fingerprint, the policies and what they cost, by the server's own word."""
        status = self._json("GET", "/v1/memory/status")
        return {name: status[name] for name in ("model", "policies", "self_test", "encoder") if name in status}

    def open(self, conversation: Conversation, units: Sequence[Unit], on_progress: OnProgress) -> None:
        """Add the units as facts of an owner named after the conversation, and wait for their KV."""
        kinds = {unit.id[0] for unit in units}
        self.owner = f"{conversation.sample_id} {''.join(sorted(kinds))}"
        self._fact_ids = {}
        for start in range(0, len(units), _ADDED_AT_ONCE):
            part = units[start : start + _ADDED_AT_ONCE]
            facts = [_fact(unit, conversation.sample_id) for unit in part]
            added = self._json("POST", "/v1/memory/facts", json={"owner": self.owner, "facts": facts})["facts"]
            self._fact_ids |= {unit.id: fact["id"] for unit, fact in zip(part, added, strict=True)}
        self._unit_ids = {fact: unit for unit, fact in self._fact_ids.items()}
        wait_for_encodings(self._pending, on_progress)

    def retrieve(self, question: str, k: int) -> list[str]:
        """What the server's own search finds, as any request to it would."""
        if k == 0:
            return []
        hits = self._json("POST", "/v1/memory/search", json={"owner": self.owner, "query": question, "k": k})
        return [self._unit_ids[hit["fact"]["id"]] for hit in hits["hits"]]

    def forget(self) -> None:
        """Empty the radix cache."""
        response = self._http.post("/flush_cache", params={"timeout": 30})
        if response.is_error:
            raise ServerFailed(f"flush_cache answered {response.status_code}: {response.text[:500]}")

    def answer(self, question: str, served: Served) -> Answer:
        """Decode greedily, to the end of the line at most."""
        head, tail = self._prompts.split(question, placement=served.placement)
        sampling = {"temperature": 0, "max_new_tokens": self._max_tokens, "stop": [STOP]}
        body = self._body([*head, *tail], len(head), served, sampling)
        body |= {"stream": True, "return_prompt_token_ids": True}
        last: dict[str, Any] = {}
        first_s: float | None = None
        started = time.perf_counter()
        try:
            with self._http.stream("POST", "/generate", json=body) as response:
                if response.is_error:
                    raise ServerFailed(f"/generate answered {response.status_code}: {response.read().decode()[:500]}")
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first_s = first_s if first_s is not None else time.perf_counter() - started
                    last = json.loads(line.removeprefix("data: "))
                    if "error" in last:
                        raise ServerFailed(f"/generate ended with {last['error']}")
        except httpx.HTTPError as error:
            raise ServerFailed(f"/generate: {type(error).__name__}: {error}") from error
        if first_s is None or "memory" not in last["meta_info"]:
            raise ServerFailed("the stream ended without an answer and its memory report")
        report = last["meta_info"]["memory"]
        return Answer(
            text=last["text"],
            used=tuple(self._unit_ids[fact["id"]] for fact in report["facts"]),
            tier=report["tier"],
            reason=report["reason"],
            tokens={name: report["tokens"][name] for name in ("prompt", "prefilled", "spliced")},
            ttft_ms=1e3 * first_s,
            ms=report["ms"],
            prompt_ids=tuple(last["prompt_token_ids"]),
        )

    def score(
        self, question: str, served: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored] | None:
        """Log probabilities of each continuation, read only from the prompt's last token on."""
        head, tail = self._prompts.split(question, placement=served.placement)
        sampling = {"temperature": 0, "max_new_tokens": 1}
        found = []
        for number, text in enumerate(continuations):
            forced = self._prompts.encode(text)
            body = self._body([*head, *tail, *forced], len(head), served, sampling)
            found.append(self._scored(body, len(prompt.prompt_ids), forced, top=0 if number else top))
        return found

    # ---- more than a System ----

    def score_ids(self, prompt_ids: Sequence[int], continuation: str, *, top: int) -> Scored:
        """Force a continuation behind a prompt that is given whole."""
        forced = self._prompts.encode(continuation)
        body = {"input_ids": [*prompt_ids, *forced], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        return self._scored(body, len(prompt_ids), forced, top=top)

    # ---- requests ----

    def _body(self, ids: list[int], insert_at: int, served: Served, sampling: dict[str, Any]) -> dict[str, Any]:
        memory: dict[str, Any] = {"owner": self.owner, "insert_at": insert_at}
        if served.units:
            memory["facts"] = [self._fact_ids[unit] for unit in served.units]
            memory["mode"] = "text" if served.policy is None else "splice"
            memory |= {"policy": served.policy} if served.policy is not None else {}
        else:
            memory["mode"] = "off"
        return {"input_ids": ids, "sampling_params": {**sampling, "custom_params": {"memory": memory}}}

    def _scored(self, body: dict[str, Any], prompt_tokens: int, forced: Sequence[int], *, top: int) -> Scored:
        # SGLang's entry i of the prompt's log probabilities is of token start + i and its first is empty: starting one
        # token early gives all of them, and the prompt before that may still come from the cache.
        body = body | {"return_logprob": True, "logprob_start_len": prompt_tokens - 1, "top_logprobs_num": top}
        meta = self._json("POST", "/generate", json=body)["meta_info"]
        entries = meta["input_token_logprobs"][1:]
        if [token for _, token, *_ in entries] != list(forced):
            raise ServerFailed(f"log probabilities of {len(entries)} tokens, not of the {len(forced)} forced ones")
        listed = meta["input_top_logprobs"][1:] if top else []
        return Scored(
            tuple(logprob for logprob, *_ in entries),
            tuple({token: logprob for logprob, token, *_ in step} for step in listed),
        )

    def _pending(self) -> int:
        return int(self._json("GET", "/v1/memory/status")["encoder"]["pending"])

    def _json(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise ServerFailed(f"{method} {path}: {type(error).__name__}: {error}") from error
        if response.is_error:
            raise ServerFailed(f"{method} {path} answered {response.status_code}: {response.text[:500]}")
        return response.json()


def _fact(unit: Unit, stream: str) -> dict[str, Any]:
    return {
        "text": unit.text,
        "speaker": unit.speaker,
        "time": unit.date_time or None,
        "stream": stream,
        # Keeps two units of the same words apart, which the store would otherwise take for one fact.
        "metadata": {"unit": unit.id},
    }
