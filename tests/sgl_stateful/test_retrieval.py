"""What a request gets from a store that does not answer, and how long it waits for that."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from memory_engine import MemoryEngine
from prometheus_client import CollectorRegistry
from redis_server import RedisServer
from words import ByteTokenizer, WordEmbedder

from memstore import KVBlobs, MemStore, MemStoreSettings, NewFact, SearchHit
from sgl_stateful.errors import BadMemoryRequest
from sgl_stateful.faithfulness.choice import Target
from sgl_stateful.metrics import MemoryMetrics
from sgl_stateful.params import MemoryParams
from sgl_stateful.retrieval import Retrieved, Retriever
from sgl_stateful.salts import Salts
from sgl_stateful.service import MemoryService
from sgl_stateful.settings import StatefulSettings

pytestmark = pytest.mark.anyio

TIMEOUT_S = 60.0
PARAMS = MemoryParams(owner="ana", k=3)


@pytest.fixture
def redis_store(redis_url: str, tmp_path: Path) -> Iterator[Callable[[float], MemStore]]:
    """Opens a store on Redis that waits for an answer as long as it is told."""
    opened: list[MemStore] = []

    def open_store(timeout_s: float) -> MemStore:
        settings = MemStoreSettings(redis_timeout_s=timeout_s)
        opened.append(MemStore(redis_url, embedder=WordEmbedder(), settings=settings))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


@contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


def texts(found: Retrieved) -> list[str]:
    return [hit.fact.text for hit in found.hits]


async def test_facts_are_found_by_filter_and_by_mode(store: MemStore) -> None:
    store.add("ana", "red kayak", stream="a")
    store.add("ana", "red kayak paddle", stream="b")
    retriever = Retriever(store, Salts(), threads=2, timeout_s=TIMEOUT_S)
    where = {"stream": "b"}
    assert texts(await retriever.find(MemoryParams(owner="ana", where=where), "red kayak")) == ["red kayak paddle"]
    keyword = MemoryParams(owner="ana", search="keyword")
    assert texts(await retriever.find(keyword, "paddles")) == ["red kayak paddle"]
    store.add("ana", "green bicycle", stream="b")
    # Its boosted score is (0.8 + 0.2 * 0) / 1.2, beside a fact that has nothing of the query.
    strict = MemoryParams(owner="ana", where=where, min_score=0.75)
    assert texts(await retriever.find(strict, "red kayak paddle")) == ["red kayak paddle"]
    with pytest.raises(BadMemoryRequest, match=r"custom_params\.memory: there is no field 'colour'"):
        await retriever.find(MemoryParams(owner="ana", where={"colour": "red"}), "red kayak")
    retriever.close()


async def test_a_store_that_answers_errors_costs_the_facts(
    redis_store: Callable[[float], MemStore], redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = redis_store(0.1)
    store.add("ana", "red kayak")
    retriever = Retriever(store, Salts(), threads=2, timeout_s=TIMEOUT_S)
    before = await retriever.find(PARAMS, "red kayak")
    with paused(redis_server):
        failed = [await retriever.find(PARAMS, "red kayak") for _ in range(20)]
        stranger = await retriever.find(MemoryParams(owner="bob"), "red kayak")
    assert {(found.failure, len(found.hits)) for found in failed} == {("StoreUnreachable", 0)}
    assert {found.salt for found in failed} == {before.salt}, "what is cached of the conversation still serves it"
    assert stranger.salt != before.salt
    async with asyncio.timeout(TIMEOUT_S):
        while (found := await retriever.find(PARAMS, "red kayak")).failure is not None:
            await asyncio.sleep(0.01)
    assert texts(found) == ["red kayak"]
    said = [record for record in caplog.records if record.name == "sgl_stateful.retrieval"]
    assert [record.levelno for record in said] == [logging.WARNING] * 2, "one line when it began, one when it ended"
    retriever.close()


async def test_a_store_that_hangs_holds_nobody_up_for_longer_than_agreed(
    redis_store: Callable[[float], MemStore], redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_stateful.retrieval._REST_S", 0.05)
    store = redis_store(2 * TIMEOUT_S)  # the store itself would wait for ever
    store.add("ana", "red kayak")
    retriever = Retriever(store, Salts(), threads=2, timeout_s=0.2)
    async with asyncio.timeout(TIMEOUT_S):
        with paused(redis_server):
            found = await asyncio.gather(*(retriever.find(PARAMS, "red kayak") for _ in range(50)))
            assert {one.failure for one in found} == {"timeout"}
        while (one := await retriever.find(PARAMS, "red kayak")).failure is not None:
            await asyncio.sleep(0.01)
    assert texts(one) == ["red kayak"]
    retriever.close()


async def test_a_caller_that_goes_away_leaves_its_turn(store: MemStore) -> None:
    store.add("ana", "red kayak")
    retriever = Retriever(store, Salts(), threads=1, timeout_s=TIMEOUT_S)
    tasks = [asyncio.create_task(retriever.find(PARAMS, "red kayak")) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert texts(await retriever.find(PARAMS, "red kayak")) == ["red kayak"]
    retriever.close()


class Slow:
    """Makes searches of a store wait until it is let go."""

    def __init__(self, store: MemStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.let_go = threading.Event()
        search = store.search

        def slow(*args: Any, **kwargs: Any) -> list[SearchHit]:
            self.asked += 1
            assert self.let_go.wait(TIMEOUT_S)
            return search(*args, **kwargs)

        monkeypatch.setattr(store, "search", slow)

    async def has_been_asked(self, times: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.asked < times:
                await asyncio.sleep(0.001)


async def test_waiting_for_a_turn_counts_and_blames_nobody(store: MemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("ana", "red kayak")
    slow = Slow(store, monkeypatch)
    retriever = Retriever(store, Salts(), threads=1, timeout_s=TIMEOUT_S)
    first = asyncio.create_task(retriever.find(PARAMS, "red kayak"))
    await slow.has_been_asked(1)
    retriever._timeout_s = 0.05
    queued = await asyncio.gather(*(retriever.find(PARAMS, "red kayak") for _ in range(5)))
    assert {found.failure for found in queued} == {"timeout"}
    assert slow.asked == 1
    assert retriever._breaker.may_call(), "the store has not been asked, so it was not slow"
    assert retriever._outage.error is None
    slow.let_go.set()
    assert texts(await first) == ["red kayak"]
    retriever.close()


async def test_an_answer_that_comes_too_late_is_none(store: MemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("ana", "red kayak")
    slow = Slow(store, monkeypatch)
    retriever = Retriever(store, Salts(), threads=1, timeout_s=0.05)
    assert (await retriever.find(PARAMS, "red kayak")).failure == "timeout"
    assert retriever._outage.error is not None
    slow.let_go.set()
    await asyncio.to_thread(retriever._threads.shutdown)  # the late answer is there
    await asyncio.sleep(0)
    assert retriever._outage.error is not None
    assert not retriever._breaker.may_call()


@pytest.mark.parametrize("end", ["cancelled", "refused"])
async def test_a_call_that_shows_nothing_closes_no_open_breaker(
    store: MemStore, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    store.add("ana", "red kayak")
    retriever = Retriever(store, Salts(), threads=4, timeout_s=TIMEOUT_S)
    slow = Slow(store, monkeypatch)
    task = asyncio.create_task(retriever.find(PARAMS, "red kayak" if end == "cancelled" else " "))
    await slow.has_been_asked(1)
    retriever._breaker.failed()  # as another call has found meanwhile
    if end == "cancelled":
        task.cancel()
    slow.let_go.set()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else BadMemoryRequest):
        await task
    assert not retriever._breaker.may_call()
    retriever.close()


# ---- the whole service ----


@asynccontextmanager
async def serving(store: MemStore, blobs: KVBlobs) -> AsyncIterator[MemoryService]:
    service = MemoryService(
        settings=StatefulSettings(policy="anchor:2", self_test=False, faithfulness=Target.OFF, feed_poll_s=0.01),
        store=store,
        blobs=blobs,
        tokenizer=ByteTokenizer(),
        engine=MemoryEngine(blobs),
        context="<user>\n",
        context_len=4096,
        metrics=MemoryMetrics(CollectorRegistry()),
    )
    await service.start()
    yield service
    tasks = list(service._tasks.values())
    service.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_service_outlives_an_outage(
    redis_server: RedisServer,
    redis_url: str,
    blobs: KVBlobs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = MemStoreSettings(redis_timeout_s=0.1)
    with MemStore(redis_url, embedder=WordEmbedder(), settings=settings, blobs=blobs) as store:
        store.add("ana", "red kayak")
        with paused(redis_server):
            async with serving(store, blobs) as service:
                await _outlives(service, redis_server)
    assert not [record for record in caplog.records if record.exc_info], "an outage is no bug"


async def _outlives(service: MemoryService, redis_server: RedisServer) -> None:
    status = await service.status()
    assert status["store"]["error"]
    assert status["owners"] is None
    prepared = service.prepare_ids(PARAMS, head=[1], tail=[2], query="red kayak", reserve_tokens=1)
    assert prepared.token_ids == [1, 2]
    shown = service.finish(prepared.report, None, prompt_tokens=2, cached_tokens=0)
    assert (shown["degraded"], shown["reason"]) == (True, "retrieval_failed: StoreUnreachable")
    redis_server.resume()
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            retrieved = await service.retrieve(PARAMS, "red kayak")
            prepared = service.prepare_ids(PARAMS, head=[1], tail=[2], query="", reserve_tokens=1, retrieved=retrieved)
            if prepared.report.facts and prepared.report.not_encoded == 0:
                return  # the encoder has come back by itself
            await asyncio.sleep(0.01)


async def test_facts_can_be_added_again_after_an_outage(
    redis_server: RedisServer, redis_url: str, blobs: KVBlobs
) -> None:
    settings = MemStoreSettings(redis_timeout_s=0.1)
    with MemStore(redis_url, embedder=WordEmbedder(), settings=settings, blobs=blobs) as store:
        async with serving(store, blobs) as service:
            (first, *_) = await service.facts.add("ana", [NewFact("one")])
            assert await service.wait_for_kv("ana", [first.fact.id]) == []
            with paused(redis_server):
                service.notify("ana")
                async with asyncio.timeout(TIMEOUT_S):
                    while service._follower.outage.error is None:
                        await asyncio.sleep(0.01)
            async with asyncio.timeout(TIMEOUT_S):
                while service._follower.outage.error is not None:
                    await asyncio.sleep(0.01)
            (second, *_) = await service.facts.add("ana", [NewFact("two")])
            assert await service.wait_for_kv("ana", [first.fact.id, second.fact.id]) == []
