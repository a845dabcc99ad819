"""What another process does to the store reaches this server's KV."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from memory_engine import MemoryEngine
from redis_server import RedisServer
from words import WordEmbedder

from memstore import Fact, FeedGap, KVBlobs, MemStore, MemStoreSettings, NewFact, OwnerId, StoreUnreachable
from sgl_stateful.feed import FeedFollower, OwnChanges
from sgl_stateful.service import MemoryService

pytestmark = pytest.mark.anyio

Make = Callable[..., MemoryService]
ANA = OwnerId("ana")
TEXTS = ("red kayak", "red kayak paddle", "green bicycle")
TIMEOUT_S = 60.0


@pytest.fixture
def elsewhere(tmp_path: Path, store: MemStore) -> Iterator[MemStore]:
    """The same store in another process, as far as anybody can tell: it shares no KV."""
    with MemStore(tmp_path / "store", embedder=WordEmbedder(), settings=MemStoreSettings()) as opened:
        yield opened


@asynccontextmanager
async def serving(make_service: Make, **settings: float) -> AsyncIterator[MemoryService]:
    service = make_service(feed_poll_s=0.01, **settings)
    await service.start()
    try:
        yield service
    finally:
        tasks = list(service._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


def encoded(service: MemoryService, blobs: KVBlobs, *facts: Fact) -> int:
    """How many of the facts have KV of this very version."""
    assert service.codec is not None
    versions = [(fact.id, fact.version) for fact in facts]
    return len(blobs.current(facts[0].owner, versions, fingerprint=service.codec.fingerprint, policy="anchor:2"))


def follower(
    store: MemStore,
    blobs: KVBlobs,
    *,
    own: OwnChanges | None = None,
    notified: list[str] | None = None,
    forgotten: list[str] | None = None,
    sweeps: list[None] | None = None,
) -> FeedFollower:
    async def sweep() -> None:
        if sweeps is not None:
            sweeps.append(None)

    return FeedFollower(
        store=store,
        blobs=blobs,
        threads=ThreadPoolExecutor(1),
        own=own or OwnChanges(),
        notify=[].append if notified is None else notified.append,
        forget=[].append if forgotten is None else forgotten.append,
        sweep=sweep,
        poll_s=0.01,
        expire_every_s=0.01,
    )


# ---- one server ----


async def test_facts_that_another_process_adds_get_kv(make_service: Make, elsewhere: MemStore, blobs: KVBlobs) -> None:
    async with serving(make_service) as service:
        facts = elsewhere.add_many("ana", [NewFact(text) for text in TEXTS])
        await until(lambda: encoded(service, blobs, *facts) == 3)


async def test_what_another_process_changes_is_encoded_anew_and_the_old_is_gone(
    make_service: Make, elsewhere: MemStore, blobs: KVBlobs, engine: MemoryEngine
) -> None:
    async with serving(make_service) as service:
        facts = elsewhere.add_many("ana", [NewFact(text) for text in TEXTS])
        await until(lambda: encoded(service, blobs, *facts) == 3)
        changed = elsewhere.update("ana", facts[2].id, text="blue canoe")
        await until(lambda: encoded(service, blobs, *facts[:2], changed) == 3 and ("sweep", {}) in engine.controls)
        assert encoded(service, blobs, facts[2]) == 0


@pytest.mark.parametrize("way", ["delete", "supersede"])
async def test_what_another_process_removes_leaves_no_kv(
    make_service: Make, elsewhere: MemStore, blobs: KVBlobs, engine: MemoryEngine, way: str
) -> None:
    async with serving(make_service) as service:
        facts = elsewhere.add_many("ana", [NewFact(text) for text in TEXTS])
        await until(lambda: encoded(service, blobs, *facts) == 3)
        left = facts[1:]
        if way == "delete":
            elsewhere.delete("ana", facts[0].id)
        else:
            left = [*left, elsewhere.supersede("ana", facts[0].id, "red canoe")]
        await until(lambda: encoded(service, blobs, facts[0]) == 0 and encoded(service, blobs, *left) == len(left))
        await until(lambda: service.encoder is not None and service.encoder.pending() == 0)
        assert blobs.dependents(ANA, facts[0].id) == [], "those that saw it have been encoded again"
        assert blobs.stats().encodings == len(left)
        assert ("sweep", {}) in engine.controls


async def test_an_owner_that_another_process_purges_leaves_nothing(
    make_service: Make, elsewhere: MemStore, blobs: KVBlobs, engine: MemoryEngine
) -> None:
    async with serving(make_service) as service:
        facts = elsewhere.add_many("ana", [NewFact(text) for text in TEXTS])
        of_bob = elsewhere.add("bob", "of bob")
        await until(lambda: encoded(service, blobs, *facts) == 3 and encoded(service, blobs, of_bob) == 1)
        before = service.salt("ana")
        elsewhere.purge("ana")
        assert service.salt("ana") != before, "at once"
        await until(lambda: blobs.stats().encodings == 1 and ("sweep", {}) in engine.controls)
        assert encoded(service, blobs, of_bob) == 1


async def test_facts_expire_without_anybody_asking(make_service: Make, store: MemStore, blobs: KVBlobs) -> None:
    now = 1e9
    store._lifecycle._clock = lambda: now
    async with serving(make_service, expire_every_s=0.02) as service:
        ((fact, *_),) = await service.facts.add("ana", [NewFact("red kayak", expires_at=now + 5)])
        await until(lambda: encoded(service, blobs, fact) == 1)
        now += 10
        await until(lambda: store.records.get_many(ANA, [fact.id]) == [] and blobs.stats().encodings == 0)


# ---- step by step ----


async def test_its_own_changes_are_not_seen_to_twice(make_service: Make, store: MemStore, blobs: KVBlobs) -> None:
    own, notified, sweeps = OwnChanges(), list[str](), list[None]()
    follows = follower(store, blobs, own=own, notified=notified, sweeps=sweeps)
    await follows.step()
    service = make_service()
    service.facts._own = own
    added = await service.facts.add("ana", [NewFact(text) for text in TEXTS])
    await service.facts.update("ana", added[0].fact.id, {"text": "blue canoe"})
    await service.facts.supersede("ana", added[1].fact.id, "a paddle", {})
    await service.facts.delete("ana", added[2].fact.id)
    assert len(store.changes(0)) == 7
    await follows.step()
    assert (notified, sweeps) == ([], [])
    store.add("ana", "by somebody else")
    await follows.step()
    assert (notified, sweeps) == (["ana"], [])


async def test_a_page_notifies_each_owner_once(store: MemStore, blobs: KVBlobs) -> None:
    notified: list[str] = []
    follows = follower(store, blobs, notified=notified)
    assert await follows.step() is False
    store.add_many("ana", [NewFact(text) for text in TEXTS])
    store.add("bob", "one")
    assert await follows.step() is False
    assert notified == ["ana", "bob"]


async def test_more_than_a_page_is_read_at_once(store: MemStore, blobs: KVBlobs) -> None:
    follows = follower(store, blobs)
    await follows.step()
    store.add_many("ana", [NewFact(f"fact {i}") for i in range(1001)])
    assert await follows.step() is True
    assert await follows.step() is False
    assert follows.position == store.records.last_position()


async def test_changes_that_nobody_followed_are_made_up_for(
    make_service: Make, elsewhere: MemStore, store: MemStore, blobs: KVBlobs
) -> None:
    async with serving(make_service) as service:
        facts = elsewhere.add_many("ana", [NewFact(text) for text in TEXTS])
        of_bob = elsewhere.add("bob", "of bob")
        await until(lambda: encoded(service, blobs, *facts) == 3 and encoded(service, blobs, of_bob) == 1)
    elsewhere.purge("ana")
    assert blobs.stats().encodings == 4
    forgotten: list[str] = []
    await follower(store, blobs, forgotten=forgotten).step()
    assert blobs.stats().encodings == 1
    assert forgotten == ["ana"]


@pytest.mark.parametrize("cause", ["trimmed", "emptied", "unknown", "another store"])
async def test_without_a_thread_to_follow_everything_is_looked_at(
    make_service: Make, store: MemStore, blobs: KVBlobs, tmp_path: Path, cause: str
) -> None:
    async with serving(make_service) as service:
        added = await service.facts.add("ana", [NewFact(text) for text in TEXTS])
        await until(lambda: encoded(service, blobs, *[addition.fact for addition in added]) == 3)
        await until(lambda: service._follower.position == store.records.last_position())
    kept = blobs.path / "feed.json"
    with MemStore(
        tmp_path / "store", embedder=WordEmbedder(), settings=MemStoreSettings(feed_retention=2)
    ) as elsewhere:
        elsewhere.delete("ana", added[0].fact.id)
        if cause == "trimmed":
            for i in range(2000):
                elsewhere.delete("bob", elsewhere.add("bob", f"fact {i}").id)
                if _is_trimmed(elsewhere):
                    break
            assert _is_trimmed(elsewhere), "the feed still reaches back to its beginning"
    if cause == "unknown":
        kept.unlink()
    if cause == "another store":
        kept.write_text(kept.read_text().replace("store", "shop"))
    notified, sweeps = list[str](), list[None]()
    follows = follower(store, blobs, notified=notified, sweeps=sweeps)
    if cause == "emptied":
        follows.position = 10**6
        assert await follows.step() is False
        await follows._notice_a_reset()
    await follows.step()
    assert follows.position == store.records.last_position()
    assert "ana" in notified
    assert len(sweeps) == 1
    left = [addition.fact for addition in added[1:]]
    assert blobs.stats().encodings == 2
    assert encoded(service, blobs, *left) == 2


def _is_trimmed(store: MemStore) -> bool:
    try:
        store.changes(0, limit=1)
    except FeedGap:
        return True
    return False


# ---- outages ----


async def test_an_outage_is_said_once_and_survived(
    redis_server: RedisServer, redis_url: str, blobs: KVBlobs, caplog: pytest.LogCaptureFixture
) -> None:
    settings = MemStoreSettings(redis_timeout_s=0.1, blob_map_size_bytes=64 << 20)
    notified: list[str] = []
    with MemStore(redis_url, embedder=WordEmbedder(), settings=settings, blobs=blobs) as store:
        follows = follower(store, blobs, notified=notified)
        task = asyncio.create_task(follows.run())
        await until(lambda: follows.position is not None)
        with caplog.at_level(logging.INFO, "sgl_stateful.feed"):
            redis_server.pause()
            try:
                await until(lambda: follows.outage.error is not None)
                for _ in range(3):
                    with pytest.raises(StoreUnreachable):
                        await follows.step()
            finally:
                redis_server.resume()
            await until(lambda: follows.outage.error is None)
        said = [record.message for record in caplog.records]
        assert len([message for message in said if "cannot be read" in message]) == 2, "when it began and when it ended"
        assert said[-1].endswith("over")
        await asyncio.to_thread(store.add, "ana", "one")
        await until(lambda: notified == ["ana"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
