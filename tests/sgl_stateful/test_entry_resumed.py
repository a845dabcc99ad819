"""What the replies of a request that goes on from an entry say, and what of them is counted."""

from __future__ import annotations

from typing import Any

import pytest
from flash_setup import Setup, starting

from sgl_stateful.flash.outcomes import Hit
from sgl_stateful.sglang_adapter.resumed import Resumed

pytestmark = pytest.mark.anyio


async def hit(setup: Setup) -> Hit:
    session = await setup.open("data")  # five tokens
    await setup.enter(session)
    await setup.settled()
    entries = setup.flash.entries
    entry = entries.asked(session, tuple(b"next and more"))
    assert entry is not None
    found = entries.look(session, entry)
    assert isinstance(found, Hit)
    return found


def reply(text: str, ids: list[int], *, prompt: int = 18, cached: int = 0) -> dict[str, Any]:
    return {"text": text, "output_ids": ids, "meta_info": {"prompt_tokens": prompt, "cached_tokens": cached}}


async def test_what_was_known_is_sent_once_and_counts_as_cached() -> None:
    async with starting() as setup:
        found = await hit(setup)
        for incremental, texts in ((True, [" five", " six"]), (False, ["one two five", "one two five six"])):
            resumed = Resumed(
                setup.flash.entries, found, session_tokens=5, tokens_ahead=2, early=reply("one two", [1, 2])
            )
            whole = [reply("one two five", [1, 2, 5], cached=19), reply("one two five six", [1, 2, 5, 6], cached=19)]
            apart = [reply("one two five", [1, 2, 5], cached=19), reply(" six", [6], cached=19)]
            sent = apart if incremental else whole
            for item in sent:
                resumed.see(item, incremental=incremental)
            assert [item["text"] for item in sent] == texts
            assert [item["output_ids"] for item in sent] == ([[5], [6]] if incremental else [[1, 2, 5], [1, 2, 5, 6]])
            assert [item["meta_info"]["cached_tokens"] for item in sent] == [18, 18]


async def test_a_prompt_whose_beginning_was_cached_is_a_hit_and_one_that_was_let_go_of_is_none() -> None:
    async with starting() as setup:
        found = await hit(setup)
        entries = setup.flash.entries
        resumed = Resumed(entries, found, session_tokens=5, tokens_ahead=0)
        assert resumed.told({"prompt_tokens": 18, "cached_tokens": 8}) == {}
        told = resumed.told({"prompt_tokens": 18, "cached_tokens": 9})
        assert told["served_from"] == "entry"
        assert told["entry"].pop("age_s") >= 0
        assert told["entry"] == {
            "name": "e",
            "by": "prefix",
            "tokens_ahead": 0,
            "data_version": 1,
            "confidence": None,
        }
        # The entry alone: its last token is computed in any case.
        assert resumed.told({"prompt_tokens": 9, "cached_tokens": 8})["served_from"] == "entry"
        totals = entries.metrics.totals()
        assert (totals["hits"], totals["uses"]["prefix"], totals["misses"]["evicted"]) == (2, 2, 1)
        assert found.entry.hits == 2
