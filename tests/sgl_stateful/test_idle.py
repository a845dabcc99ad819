import asyncio

import pytest
from memory_engine import MemoryEngine

from memstore import KVBlobs
from sgl_stateful.idle import IdleTime, ServerClosing

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine(blobs: KVBlobs) -> MemoryEngine:
    return MemoryEngine(blobs)


async def is_over(task: asyncio.Task[None]) -> bool:
    """Whether a task has ended 0.1 s from now."""
    done, _ = await asyncio.wait([task], timeout=0.1)
    return bool(done)


async def test_a_caller_in_flight_is_waited_for(engine: MemoryEngine) -> None:
    engine.foreground = 1
    task = asyncio.create_task(IdleTime(engine, idle_s=0.01).wait())
    assert not await is_over(task)
    engine.foreground = 0
    async with asyncio.timeout(5):
        await task


async def test_one_that_came_and_went_counts_too(engine: MemoryEngine) -> None:
    idle = IdleTime(engine, idle_s=0.15)
    await idle.wait()
    async with asyncio.timeout(0.05):
        await idle.wait()  # it is idle still
    idle.interrupt()
    task = asyncio.create_task(idle.wait())
    assert not await is_over(task)
    async with asyncio.timeout(5):
        await task


async def test_a_prompt_is_prefilled_in_steps_and_asked_for_its_next_token_once(engine: MemoryEngine) -> None:
    found = await IdleTime(engine, idle_s=0.01).prefill(range(600), salt="salt", top_logprobs=3)
    assert [sent.token_ids for sent in engine.sent] == [tuple(range(end)) for end in (256, 512, 600)]
    assert {(sent.salt, sent.directive) for sent in engine.sent} == {("salt", None)}
    assert found.computed_tokens == 600
    assert (found.result.prompt_tokens, found.result.cached_tokens) == (600, 512)


async def test_tokens_that_the_cache_has_are_not_computed(engine: MemoryEngine) -> None:
    idle = IdleTime(engine, idle_s=0.01)
    assert (await idle.prefill(range(300), salt="salt")).computed_tokens == 300
    assert (await idle.prefill(range(300), salt="salt")).computed_tokens == 2  # the last one of each step
    assert (await idle.prefill(range(300), salt="other")).computed_tokens == 300


async def test_nothing_begins_any_more_where_the_server_shuts_down(engine: MemoryEngine) -> None:
    engine.closing = True
    with pytest.raises(ServerClosing):
        await IdleTime(engine, idle_s=0.01).prefill(range(3), salt="salt")
    assert engine.sent == []
