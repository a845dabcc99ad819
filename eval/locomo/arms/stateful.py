"""A server of ours: facts by id, as text or spliced, in prompts given as token ids, so that all arms share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from locomo.arms.base import Answer, OnProgress, Scored, Served
from locomo.arms.prompts import STOP, PromptIds
from locomo.connection import ServerConnection
from locomo.dataset import Conversation
from locomo.errors import ConfigError, RequestRefused, ServerFailed
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.units import Unit
from locomo.waiting import wait_for_encodings

_ADDED_AT_ONCE = 500


class StatefulServer:
    """One server with memory, over HTTP; a `System` and a context manager.

    Parameters
    ----------
    model
        Directory of the tokenizer.
    max_tokens
        Longest answer.
    transport
        In place of the network.
    """

    def __init__(self, url: str, model: Path, *, max_tokens: int, transport: httpx.BaseTransport | None = None) -> None:
        self._server = ServerConnection(url, transport=transport)
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
        self._server.close()

    # ---- System ----

    def why_not(self, arm: ArmName) -> str | None:
        """None: it serves every arm whose policy it encodes."""
        policies = self._server.status()["policies"]
        if arm.policy is not None and arm.policy not in policies:
            return f"the server encodes {', '.join(policies)}; start it with --also-encode {arm.policy}"
        return None

    def describe(self) -> dict[str, Any]:
        """The model with its fingerprint, the embedder and the policies, by the server's own word."""
        status = self._server.status()
        return {name: status[name] for name in ("model", "embedder", "policies", "self_test") if name in status}

    def check(self) -> None:
        """Ask for the status."""
        self._server.status()

    def encodings(self) -> dict[str, dict[str, float]]:
        """By the server's own word."""
        return dict(self._server.status()["encoder"].get("policies", {}))

    def open(self, conversation: Conversation, units: Sequence[Unit], on_progress: OnProgress) -> None:
        """Add the units as facts of an owner named after the conversation, and wait for their KV."""
        kinds = {unit.id[0] for unit in units}
        self.owner = f"{conversation.sample_id} {''.join(sorted(kinds))}"
        self._fact_ids = {}
        for start in range(0, len(units), _ADDED_AT_ONCE):
            part = units[start : start + _ADDED_AT_ONCE]
            facts = [_fact(unit, conversation.sample_id) for unit in part]
            added = self._server.json("POST", "/v1/memory/facts", json={"owner": self.owner, "facts": facts})["facts"]
            self._fact_ids |= {unit.id: fact["id"] for unit, fact in zip(part, added, strict=True)}
        self._unit_ids = {fact: unit for unit, fact in self._fact_ids.items()}
        wait_for_encodings(self._server.pending, on_progress)

    def retrieve(self, question: str, k: int) -> list[str]:
        """What the server's own search finds, as any request to it would."""
        return [unit for unit, _ in self.search(question, k)]

    def forget(self) -> None:
        """Empty the radix cache and the arena."""
        self._server.flush_cache()

    def answer(self, question: str, served: Served) -> Answer:
        """Decode greedily, to the end of the line at most."""
        head, tail = self._prompts.split(question, placement=served.placement)
        sampling = {"temperature": 0, "max_new_tokens": self._max_tokens, "stop": [STOP]}
        body = self._body([*head, *tail], len(head), served, sampling)
        body |= {"stream": True, "return_prompt_token_ids": True}
        last: dict[str, Any] = {}
        first_s: float | None = None
        for event in self._server.events("/generate", body):
            first_s = first_s if first_s is not None else event.elapsed_s
            last = event.data
        _refuse_aborted(last)
        if first_s is None or "memory" not in last["meta_info"]:
            raise ServerFailed("the stream ended without an answer and its memory report")
        report = last["meta_info"]["memory"]
        return Answer(
            text=last["text"],
            used=tuple(self._unit_of(fact["id"]) for fact in report["facts"]),
            tier=_tier_of(report),
            reason=report["reason"],
            tokens=_tokens_of(report),
            ttft_ms=1e3 * first_s,
            ms=report["ms"],
            prompt_ids=tuple(last["prompt_token_ids"]),
            dropped=int(report["dropped_for_length"]),
        )

    def score(
        self, question: str, served: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored] | None:
        """Log probabilities of each continuation, read only from the prompt's last token on.

        Of the first one alone, where another does not fit behind the units that the answer had.

        Raises
        ------
        RequestRefused
            The first one does not fit.
        """
        head, tail = self._prompts.split(question, placement=served.placement)
        sampling = {"temperature": 0, "max_new_tokens": 1}
        # Room is left for the answer: for another one than it was there for, other units would be dropped.
        kept = replace(served, units=prompt.used)
        found = []
        for number, text in enumerate(continuations):
            forced = self._prompts.encode(text)
            body = self._body([*head, *tail, *forced], len(head), kept, sampling)
            try:
                found.append(self._scored(body, len(prompt.prompt_ids), forced, top=0 if number else top))
            except RequestRefused:
                if not found:
                    raise
                return found[:1]
        return found

    # ---- more than a System ----

    @property
    def units(self) -> list[str]:
        """Ids of the open conversation's units, in its order."""
        return list(self._fact_ids)

    def search(self, question: str, k: int) -> list[tuple[str, float]]:
        """What the server's own search finds, the best first, each with the score that ``min_score`` is a floor of."""
        if k == 0:
            return []
        hits = self._server.json("POST", "/v1/memory/search", json={"owner": self.owner, "query": question, "k": k})
        return [(self._unit_of(hit["fact"]["id"]), hit["unboosted"]) for hit in hits["hits"]]

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
            if served.policy is not None:
                memory |= {"policy": served.policy} | ({} if served.repair is None else {"repair": served.repair})
        else:
            memory["mode"] = "off"
        return {"input_ids": ids, "sampling_params": {**sampling, "custom_params": {"memory": memory}}}

    def _scored(self, body: dict[str, Any], prompt_tokens: int, forced: Sequence[int], *, top: int) -> Scored:
        # SGLang's entry i of the prompt's log probabilities is of token start + i and its first is empty: starting one
        # token early gives all of them, and the prompt before that may still come from the cache.
        body = body | {"return_logprob": True, "logprob_start_len": prompt_tokens - 1, "top_logprobs_num": top}
        meta = self._server.json("POST", "/generate", json=body)["meta_info"]
        report = meta.get("memory")
        if report is not None and report["dropped_for_length"]:
            raise RequestRefused(f"{len(forced)} tokens do not fit behind the prompt of {prompt_tokens} tokens")
        entries = meta["input_token_logprobs"][1:]
        if [token for _, token, *_ in entries] != list(forced):
            raise ServerFailed(f"log probabilities of {len(entries)} tokens, not of the {len(forced)} forced ones")
        listed = meta["input_top_logprobs"][1:] if top else []
        return Scored(
            tuple(logprob for logprob, *_ in entries),
            tuple({token: logprob for logprob, token, *_ in step} for step in listed),
            tier="text" if report is None else _tier_of(report),
            reason=None if report is None else report["reason"],
            tokens={"prompt": prompt_tokens + len(forced)} if report is None else _tokens_of(report),
        )

    def _unit_of(self, fact_id: str) -> str:
        try:
            return self._unit_ids[fact_id]
        except KeyError:
            raise ConfigError(
                f"the server's store has other facts of the owner {self.owner!r} than this run's: use another store"
            ) from None


def _tier_of(report: dict[str, Any]) -> str:
    """The server's tier, and ``partial`` where it spliced a prompt some of whose facts had no encoding."""
    tier: str = report["tier"]
    return "partial" if tier in ("spliced", "repaired") and report["not_encoded"] else tier


def _tokens_of(report: dict[str, Any]) -> dict[str, int]:
    return {name: report["tokens"][name] for name in ("prompt", "prefilled", "spliced")}


def _refuse_aborted(last: dict[str, Any]) -> None:
    """A stream that the scheduler aborts ends like any other one, and says so in its last object alone."""
    ended = last.get("meta_info", {}).get("finish_reason") or {}
    if ended.get("type") == "abort":
        is_of_this_prompt = ended.get("status_code") == 400
        raise (RequestRefused if is_of_this_prompt else ServerFailed)(f"/generate was aborted: {ended.get('message')}")


def _fact(unit: Unit, stream: str) -> dict[str, Any]:
    return {
        "text": unit.text,
        "speaker": unit.speaker,
        "time": unit.date_time or None,
        "stream": stream,
        # Keeps two units of the same words apart, which the store would otherwise take for one fact.
        "metadata": {"unit": unit.id},
    }
