"""A server that keeps facts in int8, beside the shared one that keeps them as they are, and full prefill of both."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import RunningServer

from locomo.client import MemoryClient
from locomo.fidelity import kl_divergence
from locomo.server import ServerProcess

pytestmark = pytest.mark.engine

OWNER = "int8"
TOP = 1000
TURNS = [
    ("Noor", "I finally adopted a tortoise. His name is Admiral."),
    ("Ivo", "Admiral is a great name! How old is he?"),
    ("Noor", "He is forty, and he sleeps from November to March."),
    ("Ivo", "My cousin Petra moved to Bergen for a job at the aquarium."),
    ("Noor", "Bergen! Does she mind the rain?"),
    ("Ivo", "She does not, and she has started to draw the harbour."),
    ("Noor", "I am learning the cello, and practise before breakfast."),
    ("Ivo", "I tried to repair the boiler yesterday and flooded the kitchen."),
]
QUESTIONS = ("What is Noor's tortoise called?", "Where does Petra live?", "What did Ivo flood?", "How old is Admiral?")


@pytest.fixture(scope="module")
def int8_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("int8-server")
    flags = ["--policy", "ladder:0+4", "--also-encode", "ladder:live+4", "--kv-storage", "int8", "--dtype", "float32"]
    flags += ["--max-total-tokens", "3000", "--arena-mib", "64", "--chunked-prefill-size", "128"]
    with pytest.MonkeyPatch.context() as patch:
        # SGLang's own way to test it: of several requests one is retracted every so many forwards.
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "25")
        yield from _serving(model_dir, folder, flags)


def _serving(model_dir: Path, folder: Path, flags: list[str]) -> Iterator[RunningServer]:
    with ServerProcess(model_dir, folder / "memory", flags=flags, log=folder / "server.log") as process:
        client = MemoryClient(process.url)
        yield RunningServer(process.url, folder / "memory", client, process)
        client.close()


def add_turns(url: str) -> None:
    facts = [{"text": text, "speaker": speaker, "time": "3 May, 2024", "stream": "chat"} for speaker, text in TURNS]
    body = {"owner": OWNER, "facts": facts, "wait": True}
    reply = httpx.post(f"{url}/v1/memory/facts", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    assert reply.json()["kv_pending"] == []


@pytest.fixture(scope="module")
def both(server: RunningServer, int8_server: RunningServer) -> tuple[RunningServer, RunningServer]:
    """The native server and the one in int8, with the same facts encoded."""
    for one in (server, int8_server):
        add_turns(one.url)
    return server, int8_server


def ids_of(server: RunningServer, text: str) -> list[int]:
    body = {"model": "default", "prompt": text, "add_special_tokens": False}
    ids: list[int] = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    return ids


def first_token(server: RunningServer, question: str, mode: str) -> dict[int, float]:
    """Log probabilities of the answer's first token behind all facts and a question."""
    head = ids_of(server, "<|im_start|>user\n")
    tail = ids_of(server, f"{question}<|im_end|>\n<|im_start|>assistant\n")
    memory: dict[str, Any] = {"owner": OWNER, "k": len(TURNS), "query": question, "order": "chronological"}
    steps = server.client.continue_greedily(head, tail, steps=1, top=TOP, memory={**memory, "mode": mode})
    assert steps.memory["tier"] == {"splice": "spliced", "text": "text"}[mode], steps.memory
    return steps.distributions[0]


def test_the_self_test_passes_and_the_status_says_how_facts_are_kept(
    server: RunningServer, int8_server: RunningServer
) -> None:
    native, int8 = server.client.status(), int8_server.client.status()
    assert native["verified"]
    assert int8["verified"]
    assert (native["model"]["kv_storage"], int8["model"]["kv_storage"]) == ("native", "int8")
    assert native["model"]["fingerprint"] == int8["model"]["fingerprint"], "sessions' KV is as it was"
    assert native["fingerprint"] != int8["fingerprint"]


def test_the_first_token_is_as_far_from_full_prefill_as_with_native_kv(
    both: tuple[RunningServer, RunningServer],
) -> None:
    """In transformers, eight facts in int8 changed this model's next token by 3e-5 to 7e-5 nats."""
    native, int8 = both
    # Spliced first, all of them: where full prefill of the facts is cached, it is used instead.
    spliced = {(one, question): first_token(one, question, "splice") for question in QUESTIONS for one in both}
    exact = {(one, question): first_token(one, question, "text") for question in QUESTIONS for one in both}
    to_native, native_off, int8_off = [], [], []
    for asked in QUESTIONS:
        of_native, of_int8 = (native, asked), (int8, asked)
        assert kl_divergence(exact[of_native], exact[of_int8]) <= 1e-5, "full prefill does not depend on the storage"
        to_native.append(kl_divergence(spliced[of_native], spliced[of_int8]))
        native_off.append(kl_divergence(exact[of_native], spliced[of_native]))
        int8_off.append(kl_divergence(exact[of_int8], spliced[of_int8]))
    assert 0 < max(to_native) <= 1e-3
    assert abs(statistics.mean(int8_off) - statistics.mean(native_off)) <= 0.01


def test_an_encoding_takes_about_a_quarter_of_fp32(both: tuple[RunningServer, RunningServer]) -> None:
    per_token = []
    for one in both:
        policies = one.client.status()["encoder"]["policies"].values()
        per_token.append(sum(p["bytes"] for p in policies) / sum(p["fact_tokens"] for p in policies))
    assert per_token[0] == 2 * 30 * 3 * 64 * 4  # K and V of 30 layers, 3 heads of 64 channels
    assert per_token[1] <= 0.55 / 2 * per_token[0]


_ANSWER = 100  # tokens


async def answers_of(http: httpx.AsyncClient, question: str, policy: str, repair: str) -> dict[str, Any]:
    memory = {"owner": OWNER, "k": len(TURNS), "policy": policy, "repair": repair}
    prompt = f"You are told things.\n{{{{memory}}}}Question: {question}\nAnswer:"
    sampling = {"temperature": 0, "max_new_tokens": _ANSWER, "ignore_eos": True, "custom_params": {"memory": memory}}
    body = {"text": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    reply = await http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["meta_info"]
    return found


def require_same_answer(found: dict[str, Any], alone: dict[str, Any]) -> int:
    """Token for token, up to where the two best are as good as equal; how many tokens that is."""
    for step, (mine, other, top) in enumerate(
        zip(
            found["output_token_logprobs"],
            alone["output_token_logprobs"],
            alone["output_top_logprobs"],
            strict=True,
        )
    ):
        if mine[1] != other[1]:
            assert top[0][0] - top[1][0] < 1e-3, f"token {step}: {mine} and {other}, of {top}"
            return step
        assert abs(mine[0] - other[0]) < 1e-3, f"token {step}: {mine} and {other}"
    return len(alone["output_token_logprobs"])


@pytest.mark.anyio
async def test_repaired_answers_in_chunks_and_retracted_are_those_asked_alone(int8_server: RunningServer) -> None:
    add_turns(int8_server.url)
    ways = list(product(QUESTIONS[:2], ("ladder:0+4", "ladder:live+4"), ("first:3", "share:20%+last:20")))
    async with httpx.AsyncClient(base_url=int8_server.url, timeout=300) as http:
        await http.post("/flush_cache")
        alone = {way: await answers_of(http, *way) for way in ways}
        await http.post("/flush_cache")
        together = await asyncio.gather(*(answers_of(http, *way) for way in ways))
        assert sum(found["num_retractions"] for found in alone.values()) == 0
        assert sum(found["num_retractions"] for found in together) > 2
        compared = 0
        for way, found in zip(ways, together, strict=True):
            assert found["memory"]["tier"] == "repaired", (way, found["memory"])
            compared += require_same_answer(found, alone[way])
        assert compared > 0.5 * _ANSWER * len(ways), "answers parted at ties too early to say anything"
        async with asyncio.timeout(60):
            while (await http.post("/flush_cache")).status_code != 200:
                await asyncio.sleep(0.5)
        assert (await http.get("/v1/memory/status")).json()["scheduler"]["failures"] == 0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
