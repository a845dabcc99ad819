"""What a server answers for a spliced prompt: its ids, where each fact stands, and its distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from locomo.connection import ServerConnection
from locomo.errors import OracleError
from memstore import FactId

from .comparison import Distribution
from .encodings import FactVersion

Placement = Literal["tail", "system"]


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt's tokens around the facts: ``head``, then the header and the facts, then ``tail``."""

    head: tuple[int, ...]
    header: tuple[int, ...]
    tail: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt as it was served.

    Attributes
    ----------
    prompt_ids
        Head, header, facts, tail, and all forced tokens but the last.
    starts
        Where each fact begins, in the order of the prompt; the last fact ends at ``block_end``.
    distributions
        Of the token behind every token of the tail and of the forced answer; those of the answer's tokens twice, as
        they were decoded and as they were prefilled.
    report
        The server's, of the request that spliced the facts.
    """

    prompt_ids: tuple[int, ...]
    starts: tuple[int, ...]
    block_end: int
    distributions: tuple[Distribution, ...]
    report: dict[str, Any]


class OracleClient:
    """The calls that the oracle makes.

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

    def flush_cache(self) -> None:
        """Empty the radix cache and the arena, once the server has nothing to do."""
        self._server.flush_cache()

    def status(self) -> dict[str, Any]:
        """``/v1/memory/status``."""
        return self._server.status()

    def versions(self, owner: str, fact_ids: Sequence[str]) -> list[FactVersion]:
        """The versions that facts have now."""
        facts = [
            self._server.json("GET", f"/v1/memory/facts/{fact_id}", params={"owner": owner}) for fact_id in fact_ids
        ]
        return [FactVersion(FactId(fact["id"]), int(fact["version"])) for fact in facts]

    def template(self, question: str, fact: tuple[str, Sequence[int]], *, owner: str, placement: Placement) -> Template:
        """The prompt of a fresh conversation around its facts, as the chat route makes it.

        Read from two prompts, with one fact (id and tokens) and with none: what is behind the fact is the tail, what
        the prompt without facts has before that is the head, and the rest is the header.

        Raises
        ------
        OracleError
            The prompts do not come apart like that.
        """
        fact_id, fact_ids = fact
        memory = {"owner": owner, "mode": "text", "placement": placement}
        bare = self._chat_ids(question, {**memory, "facts": []})
        full = self._chat_ids(question, {**memory, "facts": [fact_id]})
        at = _find(full, fact_ids)
        tail = full[at + len(fact_ids) :]
        head = bare[: len(bare) - len(tail)]
        if bare != [*head, *tail] or full[: len(head)] != head:
            raise OracleError("the chat route's prompts with and without facts have no head and tail in common")
        return Template(tuple(head), tuple(full[len(head) : at]), tuple(tail))

    def serve(
        self,
        template: Template,
        facts: Sequence[tuple[str, Sequence[int]]],
        *,
        owner: str,
        policy: str,
        repair: str,
        steps: int,
        top: int,
        vocab: int,
    ) -> Served:
        """Have facts (ids and tokens, in the order of the prompt) spliced, and read every distribution.

        Two requests: one decodes ``steps`` tokens and lists the ``vocab`` tokens of each; the other gets them as its
        prompt and lists the ``top`` likeliest behind every token of the tail and of the answer. Without steps, the
        second alone.

        Raises
        ------
        OracleError
            The server did not splice, not the same facts both times, or the prompt is not the one that it was to be.
        """
        memory = {"owner": owner, "policy": policy, "facts": [fact_id for fact_id, _ in facts], "query": ""}
        memory["repair"] = repair
        starts, block_end = [], len(template.head) + len(template.header)
        for _, ids in facts:
            starts.append(block_end)
            block_end += len(ids)
        block = [*template.header, *(i for _, ids in facts for i in ids)]
        answers = []
        forced: list[int] = []
        listed: list[tuple[int, Any]] = []
        if steps:
            answers.append(self._generate(template, block, (), memory, steps=steps, top=vocab))
            forced = answers[0]["output_ids"][:-1]
            last = block_end + len(template.tail) - 1
            listed += enumerate(answers[0]["meta_info"]["output_top_logprobs"], start=last)
        answers.append(self._generate(template, block, forced, memory, steps=1, top=top, logprob_start_len=block_end))
        meta = answers[-1]["meta_info"]
        # Entry i is the distribution of token block_end + i; that of the tail's first token is none of the tail's.
        behind = [*meta["input_top_logprobs"][1:], meta["output_top_logprobs"][0]]
        if len(behind) != len(template.tail) + len(forced):
            raise OracleError(f"{len(behind)} distributions for {len(template.tail)} + {len(forced)} tokens")
        listed += enumerate(behind, start=block_end)
        reports = [answer["meta_info"]["memory"] for answer in answers]
        for report in reports:
            if report["tier"] not in ("spliced", "repaired"):
                raise OracleError(f"served as {report['tier']} and not spliced: {report['reason']}")
            if report["facts"] != reports[0]["facts"]:
                raise OracleError("facts were encoded between two requests: ask once more")
        prompt = (*template.head, *block, *template.tail, *forced)
        distributions = tuple(_distribution(position, entry) for position, entry in listed)
        return Served(prompt, tuple(starts), block_end, distributions, reports[0])

    def _chat_ids(self, question: str, memory: dict[str, Any]) -> list[int]:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 1,
            "temperature": 0,
            "return_prompt_token_ids": True,
            "custom_params": {"memory": memory},
        }
        ids: list[int] = self._server.json("POST", "/v1/chat/completions", json=body)["choices"][0]["prompt_token_ids"]
        return ids

    def _generate(
        self,
        template: Template,
        block: Sequence[int],
        forced: Sequence[int],
        memory: dict[str, Any],
        *,
        steps: int,
        top: int,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """One answer to head, ``block``, tail and ``forced``, of which the server puts in the block itself."""
        custom = {"memory": {**memory, "insert_at": len(template.head)}}
        sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True, "custom_params": custom}
        body = {
            "input_ids": [*template.head, *template.tail, *forced],
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": top,
            "return_prompt_token_ids": True,
            **kwargs,
        }
        answer: dict[str, Any] = self._server.json("POST", "/generate", json=body)
        if answer["prompt_token_ids"] != [*template.head, *block, *template.tail, *forced]:
            raise OracleError("the server's prompt is not head, header, facts and tail as they were asked for")
        return answer


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where the only occurrence of ``part`` begins."""
    found = [at for at in range(len(ids) - len(part) + 1) if list(ids[at : at + len(part)]) == list(part)]
    if len(found) != 1:
        raise OracleError(f"the prompt shows the fact {len(found)} times, not once")
    return found[0]


def _distribution(position: int, entry: Sequence[Sequence[Any]]) -> Distribution:
    token_ids = np.array([token for _, token, _ in entry], dtype=np.int64)
    return Distribution(position, token_ids, np.array([value for value, _, _ in entry], dtype=np.float64))
