"""What an arm makes of the answers of a server of ours; the answers have the shapes that such a server gives."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from locomo.arms.base import Served
from locomo.arms.prompts import PromptIds
from locomo.arms.stateful import StatefulServer
from locomo.dataset import Conversation
from locomo.errors import ConfigError, LocomoError, RequestRefused, ServerFailed
from locomo.retrieval.units import Unit
from sgl_stateful.model_files import default_model_dir

MODEL = default_model_dir(os.environ)
UNITS = [Unit(f"O{number}", f"Ana likes {what}.", "Ana", "", (), "1") for number, what in enumerate(("tea", "figs"))]
CONVERSATION = Conversation("conv-1", ("Ana", "Bo"), (), (), ())
SPLICED = Served(("O1", "O0"), "tail", "anchor:4")
STATUS = {
    "model": {"fingerprint": "abc"},
    "embedder": "st:12",
    "policies": ["anchor:4"],
    "fingerprint": "abc-0",
    "encoder": {"pending": 0, "error": None, "policies": {"anchor:4": {"facts": 2, "bytes": 640}}},
}


def report(tier: str = "spliced", *, facts: tuple[str, ...] = ("f1", "f0"), **more: Any) -> dict[str, Any]:
    return {
        "tier": tier,
        "reason": None,
        "facts": [{"id": fact, "score": None, "encoded": True} for fact in facts],
        "not_encoded": 0,
        "dropped_for_length": 0,
        "tokens": {"prompt": 40, "cached": 8, "prefilled": 12, "spliced": 20},
        "ms": {"retrieve": 0.0, "assemble": 1.0, "splice": 2.0},
    } | more


def streamed(memory: dict[str, Any], **meta: Any) -> httpx.Response:
    """An answer of two tokens behind a prompt of 40."""
    end = {"finish_reason": {"type": "stop"}, **meta}
    chunks = [
        {"text": "fi", "meta_info": {"finish_reason": None}, "prompt_token_ids": list(range(40))},
        {"text": "figs", "meta_info": {"memory": memory, **end}, "prompt_token_ids": list(range(40))},
    ]
    return httpx.Response(200, text="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")


def forced(ids: list[int], memory: dict[str, Any] | None) -> httpx.Response:
    """Log probabilities of `ids`: -1, -2, ..., behind an entry for the token before, which has none."""
    logprobs = [[None, 5, None], *([-1.0 - at, token, None] for at, token in enumerate(ids))]
    listed = [None, *([[-0.5, 7, None], [-1.5, 8, None]] for _ in ids)]
    meta = {"input_token_logprobs": logprobs, "input_top_logprobs": listed}
    return httpx.Response(200, json={"meta_info": meta | ({} if memory is None else {"memory": memory})})


class Script:
    """Answers `/generate` as it is told, and everything else as a server does that knows two facts, f0 and f1."""

    def __init__(self) -> None:
        self.generate: Callable[[dict[str, Any]], httpx.Response] = lambda body: streamed(report())
        self.found = ["f1", "f0"]
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/v1/memory/status":
                return httpx.Response(200, json=STATUS)
            case "/v1/memory/facts":
                facts = json.loads(request.content)["facts"]
                return httpx.Response(200, json={"facts": [{"id": f"f{at}"} for at, _ in enumerate(facts)]})
            case "/v1/memory/search":
                return httpx.Response(
                    200, json={"hits": [{"fact": {"id": fact}, "unboosted": 0.5} for fact in self.found]}
                )
            case "/flush_cache":
                return httpx.Response(200, text="Cache flushed.")
        self.bodies.append(json.loads(request.content))
        return self.generate(self.bodies[-1])


@pytest.fixture(scope="module")
def prompts() -> PromptIds:
    return PromptIds(MODEL)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[StatefulServer]:
    transport = httpx.MockTransport(script)
    with StatefulServer("http://localhost", MODEL, max_tokens=9, transport=transport) as found:
        found.open(CONVERSATION, UNITS, lambda done, total: None)
        yield found


def test_an_answer_has_its_units_tier_and_what_was_left_out(server: StatefulServer, script: Script) -> None:
    server.forget()
    assert server.retrieve("What?", 2) == ["O1", "O0"]
    script.generate = lambda body: streamed(report(facts=("f1",), dropped_for_length=1))
    answer = server.answer("What?", SPLICED)
    assert (answer.text, answer.used, answer.tier, answer.dropped) == ("figs", ("O1",), "spliced", 1)
    assert answer.tokens == {"prompt": 40, "prefilled": 12, "spliced": 20}
    assert answer.prompt_ids == tuple(range(40))
    assert answer.ttft_ms > 0
    memory = script.bodies[0]["sampling_params"]["custom_params"]["memory"]
    assert (memory["owner"], memory["facts"], memory["mode"], memory["policy"]) == (
        "conv-1 O",
        ["f1", "f0"],
        "splice",
        "anchor:4",
    )


@pytest.mark.parametrize(
    ("memory", "tier"),
    [
        (report(), "spliced"),
        (report(not_encoded=1, reason="not_encoded:1"), "partial"),
        (report("text", not_encoded=2, reason="not_encoded:2"), "text"),
        (report("exact", reason="exact_prefix_cached"), "exact"),
    ],
)
def test_what_was_spliced_in_part_has_a_tier_of_its_own_when_answering_and_when_scoring(
    server: StatefulServer, script: Script, prompts: PromptIds, memory: dict[str, Any], tier: str
) -> None:
    script.generate = lambda body: streamed(memory)
    answer = server.answer("What?", SPLICED)
    assert (answer.tier, answer.reason) == (tier, memory["reason"])
    ids = prompts.encode("figs and tea")
    script.generate = lambda body: forced(ids, memory)
    [scored] = server.score("What?", SPLICED, ["figs and tea"], prompt=answer, top=2) or []
    assert (scored.tier, scored.reason) == (tier, memory["reason"])
    assert scored.tokens == {"prompt": 40, "prefilled": 12, "spliced": 20}
    assert scored.logprobs == tuple(-1.0 - at for at in range(len(ids)))
    assert scored.distributions == ({7: -0.5, 8: -1.5},) * len(ids)


def test_a_score_keeps_to_the_units_that_the_answer_had(
    server: StatefulServer, script: Script, prompts: PromptIds
) -> None:
    script.generate = lambda body: streamed(report(facts=("f1",), dropped_for_length=1))
    answer = server.answer("What?", SPLICED)
    ids = prompts.encode("figs")
    script.generate = lambda body: forced(ids, report(facts=("f1",)))
    server.score("What?", SPLICED, ["figs"], prompt=answer, top=2)
    body = script.bodies[-1]
    assert body["sampling_params"]["custom_params"]["memory"]["facts"] == ["f1"]
    assert body["logprob_start_len"] == 39
    assert body["input_ids"][-len(ids) :] == ids
    script.generate = lambda body: forced(ids, report(facts=(), dropped_for_length=1))
    with pytest.raises(RequestRefused, match="do not fit behind the prompt of 40 tokens"):
        server.score("What?", SPLICED, ["figs"], prompt=answer, top=2)


def test_a_choice_that_does_not_fit_costs_the_choices_and_not_the_gold(
    server: StatefulServer, script: Script, prompts: PromptIds
) -> None:
    answer = server.answer("What?", SPLICED)
    gold, long = prompts.encode("figs"), prompts.encode("figs and tea and bread")

    def fits(body: dict[str, Any]) -> httpx.Response:
        ids = long if body["input_ids"][-len(long) :] == long else gold
        return forced(ids, report(dropped_for_length=int(ids == long)))

    script.generate = fits
    whole = server.score("What?", SPLICED, ["figs", "figs"], prompt=answer, top=2) or []
    cut = server.score("What?", SPLICED, ["figs", "figs", "figs and tea and bread", "figs"], prompt=answer, top=2)
    assert len(whole) == 2
    assert cut == whole[:1]


def test_a_whole_prompt_is_scored_without_memory(server: StatefulServer, script: Script, prompts: PromptIds) -> None:
    ids = prompts.encode("figs")
    script.generate = lambda body: forced(ids, None)
    scored = server.score_ids([1, 2, 3], "figs", top=2)
    assert script.bodies[-1]["input_ids"] == [1, 2, 3, *ids]
    assert (scored.tier, scored.reason, scored.nll) == ("text", None, sum(range(1, len(ids) + 1)) / len(ids))


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (httpx.Response(200, text='data: {"text": "fi'), ServerFailed, "no JSON"),
        (httpx.Response(200, text="data: [DONE]\n\n"), ServerFailed, "without an answer"),
        (
            streamed(report(), finish_reason={"type": "abort", "status_code": 400, "message": "long"}),
            RequestRefused,
            "long",
        ),
        (
            streamed(report(), finish_reason={"type": "abort", "status_code": 500, "message": "died"}),
            ServerFailed,
            "died",
        ),
        (streamed(report(), finish_reason={"type": "abort", "message": "aborted"}), ServerFailed, "aborted"),
        (streamed(report(facts=("f7",))), ConfigError, "other facts of the owner 'conv-1 O'"),
    ],
)
def test_an_answer_that_is_none_is_said(
    server: StatefulServer, script: Script, response: httpx.Response, error: type[LocomoError], message: str
) -> None:
    script.generate = lambda body: response
    with pytest.raises(error, match=message):
        server.answer("What?", SPLICED)


def test_facts_of_somebody_else_in_the_store_are_said(server: StatefulServer, script: Script) -> None:
    script.found = ["f1", "f9"]
    with pytest.raises(ConfigError, match=r"other facts of the owner 'conv-1 O'.*use another store"):
        server.retrieve("What?", 2)


def test_it_describes_itself_without_counts_of_its_start(server: StatefulServer) -> None:
    server.check()
    assert server.describe() == {"model": {"fingerprint": "abc"}, "embedder": "st:12", "policies": ["anchor:4"]}
    assert server.encodings() == {"anchor:4": {"facts": 2, "bytes": 640}}


def test_a_model_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        PromptIds(tmp_path)
