"""No answer of an earlier state on the real engine, in FLASH_ENGINE_INTERLEAVINGS (60) seeded interleavings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from uuid import uuid4

import httpx
import pytest
from engines import RunningServer
from sessions_http import new_owner
from streaming_bench.clients import FlashClient
from streaming_bench.interleavings import TOKENS, Interleavings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

COUNT = int(os.environ.get("FLASH_ENGINE_INTERLEAVINGS", "60"))
BATCH = 32


def decode(http: httpx.Client, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy answers of an engine to whom each prompt is new: nobody has had its cache salt before."""
    answers: list[list[int]] = []
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
    for start in range(0, len(prompts), BATCH):
        part = [list(prompt) for prompt in prompts[start : start + BATCH]]
        salts = [uuid4().hex for _ in part]
        reply = http.post("/generate", json={"input_ids": part, "sampling_params": sampling, "cache_salt": salts})
        assert reply.status_code == 200, reply.text
        assert [one["meta_info"]["cached_tokens"] for one in reply.json()] == [0] * len(part)
        answers += [one["output_ids"] for one in reply.json()]
    return answers


def test_nothing_stale_whatever_the_order(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, timeout=300) as http, FlashClient(server.url) as client:
        before = client.flash_totals()
        interleavings = Interleavings(client, lambda prompts: decode(http, prompts), seed=8, owner=new_owner())
        outcome = interleavings.run(COUNT)
        after = client.flash_totals()
    assert outcome.stale == []
    assert outcome.interleavings == COUNT
    assert COUNT <= outcome.asked <= 2 * COUNT
    # What was stored was served, with facts too, and what was of an earlier state was there to be served.
    assert outcome.stored > COUNT / 10
    assert outcome.with_facts > COUNT / 10  # a fifth of one and a half
    assert after["stale_prevented"] - before["stale_prevented"] > COUNT / 10
    assert after["false_accepts"] == before["false_accepts"]
