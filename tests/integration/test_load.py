"""Two hundred mixed requests on a small pool: nothing leaks, nothing crashes, every reply is right."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from uuid import uuid4

import httpx
import pytest
from engines import RunningServer

_PLAIN = [f"Count from {i} upwards: {i}, {i + 1}, {i + 2}," for i in range(6)]
_QUESTIONS = ["Where is the kiln?", "Who repairs bicycles?", "What did Noor cook?", "When does the ferry leave?"]
_FACTS = [
    f"{name} said that the {thing} is {state} since {month}."
    for name in ("Noor", "Pim", "Rosa", "Sami", "Tess")
    for thing, state in (("kiln", "repaired"), ("ferry", "late"), ("bicycle shed", "locked"))
    for month in ("March", "June")
]


def _plain(text: str, *, stream: bool = False, max_tokens: int = 8) -> dict[str, Any]:
    return {"text": text, "stream": stream, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0}}


def _memory(question: str, owner: str, **memory: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 8, "temperature": 0, "custom_params": {"memory": {"owner": owner, **memory}}}
    return {"text": f"{{{{memory}}}}Question: {question}\nAnswer:", "sampling_params": params}


async def test_two_hundred_mixed_requests(server: RunningServer) -> None:
    owner = f"load-{uuid4().hex}"
    rng = random.Random(7)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
        added = await http.post(
            "/v1/memory/facts", json={"owner": owner, "facts": [{"text": t} for t in _FACTS], "wait": True}
        )
        assert added.json()["kv_pending"] == []
        await http.post("/flush_cache")
        cold = {text: (await http.post("/generate", json=_plain(text))).json()["text"] for text in _PLAIN}

        async def plain() -> None:
            text = rng.choice(_PLAIN)
            assert (await http.post("/generate", json=_plain(text))).json()["text"] == cold[text]

        async def with_memory(mode: str) -> None:
            body = _memory(rng.choice(_QUESTIONS), owner, k=rng.choice([0, 1, 5, 20]), mode=mode)
            reply = await http.post("/generate", json=body)
            assert reply.status_code == 200, reply.text
            report = reply.json()["meta_info"]["memory"]
            tokens = report["tokens"]
            assert tokens["cached"] + tokens["spliced"] + tokens["prefilled"] == tokens["prompt"]
            assert report["tier"] in {"none", "text", "exact", "spliced"}
            assert report["reason"] in {None, "exact_prefix_cached"}, report

        async def aborted() -> None:
            body = _memory(rng.choice(_QUESTIONS), owner, k=20)
            body["stream"] = True
            body["sampling_params"]["max_new_tokens"] = 64
            async with http.stream("POST", "/generate", json=body) as reply:
                async for _ in reply.aiter_lines():
                    return  # closes the connection in the middle of the answer

        async def unknown() -> None:
            reply = await http.post("/generate", json=_memory("Who?", f"nobody-{uuid4().hex}", k=5))
            assert reply.json()["meta_info"]["memory"]["facts"] == []

        kinds = [plain, lambda: with_memory("splice"), lambda: with_memory("text"), aborted, unknown]
        order = [kind for kind in kinds for _ in range(40)]
        rng.shuffle(order)
        gate = asyncio.Semaphore(8)

        async def one(kind: Any) -> None:
            async with gate:
                await kind()

        await asyncio.gather(*(one(kind) for kind in order))

        # The scheduler checks its accounts when idle, and dies on a leak; a flush is refused while anything is held.
        async with asyncio.timeout(60):
            while (flushed := await http.post("/flush_cache")).status_code != 200:
                await asyncio.sleep(0.5)
        assert flushed.status_code == 200
        stats = (await http.get("/v1/memory/status")).json()["scheduler"]
        assert stats["failures"] == 0
        for text in _PLAIN:
            assert (await http.post("/generate", json=_plain(text))).json()["text"] == cold[text]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


pytestmark = [pytest.mark.engine, pytest.mark.anyio]
