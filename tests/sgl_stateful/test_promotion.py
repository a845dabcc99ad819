import asyncio
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_engine import MemoryEngine

from memstore import KVBlobs
from sgl_stateful import promotion
from sgl_stateful.idle import IdleTime
from sgl_stateful.promotion import Event, FactBlock, Promoter, PromotionTable

pytestmark = pytest.mark.anyio


def block(first: int, tokens: int, *, owner: str = "ana", salt: str | None = "salt") -> FactBlock:
    return FactBlock(owner, array("q", range(first, first + tokens)), salt)


def table(budget_tokens: int) -> PromotionTable:
    return PromotionTable(budget_tokens, on_event=lambda event: None)


def use(known: PromotionTable, used: FactBlock, times: int, tier: str = "spliced") -> None:
    for _ in range(times):
        known.see(used, tier)


# ---- what is promoted ----


def test_a_block_is_worth_a_prefill_when_it_comes_again() -> None:
    known = table(1000)
    use(known, block(0, 100), 1)
    assert known.next() is None
    use(known, block(0, 100), 1, "repaired")  # by its tokens and its salt, whoever made it
    assert known.next() == block(0, 100)


@pytest.mark.parametrize(
    "other",
    [block(1, 100), block(0, 99), block(0, 100, salt="other"), block(0, 100, salt=None)],
    ids=["other tokens", "shorter", "another salt", "cached apart"],
)
def test_another_block_is_another_block(other: FactBlock) -> None:
    known = table(1000)
    use(known, block(0, 100), 1)
    use(known, other, 1)
    assert known.next() is None


def test_what_is_expected_need_not_come_first() -> None:
    known = table(1000)
    known.expect(block(0, 100))
    known.expect(block(0, 100))  # once more, as after another append
    assert known.next() == block(0, 100)
    use(known, block(500, 90), 3)
    assert known.next() == block(500, 90), "3 uses of 90 tokens are worth more than 2 of 100"
    for other in (block(0, 1001), block(0, 50, salt=None)):
        known.expect(other)
    assert len(known) == 2


async def test_what_is_expected_is_prefilled(blobs: KVBlobs) -> None:
    engine = MemoryEngine(blobs)
    running = promoter(engine)
    task = asyncio.create_task(running.run())
    await asyncio.sleep(0)
    running.expect(block(0, 200))
    await until(lambda: running.table.promoted_blocks, "promotion")
    task.cancel()
    assert [sent.token_ids for sent in engine.sent] == [tuple(range(200))]


@pytest.mark.parametrize("tier", ["text", "none"])
def test_what_is_not_spliced_needs_no_promotion(tier: str) -> None:
    known = table(1000)
    use(known, block(0, 100), 5, tier)
    assert (known.next(), len(known)) == (None, 0)


def test_the_most_valuable_is_first_by_uses_times_tokens() -> None:
    known = table(1000)
    use(known, block(0, 100), 4)  # 400
    use(known, block(500, 300), 2)  # 600
    use(known, block(900, 50), 5)  # 250
    order = []
    while (found := known.next()) is not None:
        order.append(len(found.token_ids))
        known.promoted(found, tokens_prefilled=1)
    assert order == [300, 100, 50]
    assert (known.promoted_tokens, known.promoted_blocks, known.tokens_prefilled) == (450, 3, 3)


def test_a_promoted_block_makes_room_for_one_that_is_worth_more() -> None:
    known = table(250)
    use(known, block(0, 100), 2)
    use(known, block(500, 120), 3)
    for found in (block(0, 100), block(500, 120)):
        known.promoted(found, tokens_prefilled=0)
    use(known, block(900, 130), 2)  # 260: worth more than the first (200), less than the second (360)
    assert known.next() == block(900, 130)
    known.promoted(block(900, 130), tokens_prefilled=0)
    assert known.promoted_tokens == 250
    use(known, block(0, 100), 2)
    assert known.next() is None  # 200 against 260 and 360: nothing that is worth less would make room


@pytest.mark.parametrize("budget", [0, 99])
def test_what_is_longer_than_the_budget_is_not_even_remembered(budget: int) -> None:
    known = table(budget)
    use(known, block(0, 100), 5)
    assert (known.next(), len(known)) == (None, 0)


def test_hits_and_evictions_are_told_apart() -> None:
    seen: list[Event] = []
    known = PromotionTable(1000, on_event=seen.append)
    use(known, block(0, 100), 2)
    known.promoted(block(0, 100), tokens_prefilled=100)
    assert known.next() is None
    use(known, block(0, 100), 3, "exact")
    use(known, block(0, 100), 1, "spliced")  # SGLang has evicted it, or flushed its cache
    assert known.next() == block(0, 100)
    assert seen == [Event.PROMOTED, Event.HIT, Event.HIT, Event.HIT, Event.EVICTED]
    assert known.counts == Counter(seen)


def test_an_owner_is_forgotten_with_all_blocks() -> None:
    known = table(1000)
    use(known, block(0, 100), 2)
    use(known, block(0, 100, owner="bo", salt="bo"), 2)
    known.promoted(block(0, 100), tokens_prefilled=0)
    known.forget("ana")
    assert (len(known), known.promoted_tokens) == (1, 0)
    assert known.next() == block(0, 100, owner="bo", salt="bo")
    known.promoted(block(0, 100), tokens_prefilled=0)  # was under way as the owner was purged
    assert known.promoted_tokens == 0


def test_the_block_used_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "MOST_BLOCKS", 2)
    known = table(1000)
    for first in (0, 1, 0, 2):
        use(known, block(first, 10), 1)
    assert len(known) == 2
    use(known, block(1, 10), 1)
    assert known.next() is None
    use(known, block(2, 10), 1)
    assert known.next() == block(2, 10)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["spliced", "exact", "promote"])), max_size=60),
    st.integers(0, 250),
)
def test_the_budget_holds_whatever_comes(steps: list[tuple[int, str]], budget: int) -> None:
    blocks = [block(1000 * n, 30 * (n + 1)) for n in range(6)]
    known = table(budget)
    for number, what in steps:
        if what != "promote":
            known.see(blocks[number], what)
        elif (found := known.next()) is not None:
            known.promoted(found, tokens_prefilled=0)
            assert known.next() != found
        assert known.promoted_tokens <= budget


# ---- when ----


def promoter(engine: MemoryEngine, budget_tokens: int = 10_000) -> Promoter:
    idle = IdleTime(engine, idle_s=0.01)
    return Promoter(engine, budget_tokens=budget_tokens, on_event=lambda event: None, idle=idle)


async def until(condition: object, what: str) -> None:
    async with asyncio.timeout(5):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


async def test_a_block_is_prefilled_in_steps_under_its_salt(blobs: KVBlobs) -> None:
    engine = MemoryEngine(blobs)
    running = promoter(engine)
    task = asyncio.create_task(running.run())
    for _ in range(2):
        running.see(block(0, 600), "spliced")
    await until(lambda: running.table.promoted_blocks, "promotion")
    task.cancel()
    assert [(sent.salt, sent.directive) for sent in engine.sent] == [("salt", None)] * 3
    assert [sent.token_ids for sent in engine.sent] == [tuple(range(end)) for end in (256, 512, 600)]
    # The engine finds each step's tokens for the next one, but for the last of a prompt that is wholly cached.
    assert running.as_dict()["tokens_prefilled"] == 600


async def test_callers_come_first(blobs: KVBlobs) -> None:
    engine = MemoryEngine(blobs)
    engine.foreground = 1
    running = promoter(engine)
    task = asyncio.create_task(running.run())
    for _ in range(2):
        running.see(block(0, 600), "spliced")
    await asyncio.sleep(0.1)
    assert engine.sent == []
    engine.foreground = 0
    async with asyncio.timeout(5):
        while not engine.sent:
            await asyncio.sleep(0)  # so that it is seen before the second step begins
    engine.foreground = 1
    await asyncio.sleep(0.1)
    begun = len(engine.sent)
    assert begun < 3
    engine.foreground = 0
    await until(lambda: running.table.promoted_blocks, "promotion")
    assert len(engine.sent) == 3
    task.cancel()


async def test_a_block_that_fails_is_given_up_and_the_next_one_promoted(
    blobs: KVBlobs, caplog: pytest.LogCaptureFixture
) -> None:
    engine = MemoryEngine(blobs)
    engine.failing = 1
    running = promoter(engine)
    for _ in range(2):
        running.see(block(0, 300), "spliced")
        running.see(block(500, 200), "spliced")
    task = asyncio.create_task(running.run())
    await until(lambda: running.table.promoted_blocks, "promotion")
    task.cancel()
    assert running.table.counts[Event.FAILED] == 1
    assert running.table.promoted_tokens == 200
    assert "recurring block of 300 tokens failed" in caplog.text


async def test_a_server_that_shuts_down_promotes_nothing_more(blobs: KVBlobs) -> None:
    engine = MemoryEngine(blobs)
    engine.foreground = 1
    running = promoter(engine)
    for _ in range(2):
        running.see(block(0, 300), "spliced")
    task = asyncio.create_task(running.run())
    await asyncio.sleep(0.05)
    engine.closing, engine.foreground = True, 0
    async with asyncio.timeout(5):
        await task
    assert engine.sent == []
    assert running.table.counts == Counter()
