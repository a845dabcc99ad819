"""What another process does to the store reaches this server's KV."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kv_faults import unwritable
from memory_engine import MemoryEngine
from redis_server import RedisServer
from session_values import header, segment
from small_kv import encoding, kv
from words import WordEmbedder

from memstore import (
    Change,
    ChangeKind,
    Fact,
    FeedGap,
    KVBlobs,
    MemStore,
    MemStoreSettings,
    NewFact,
    OwnerId,
    StoreUnreachable,
)
from memstore.kv.session_files import FOLDER, session_file
from memstore.session_log import LogEntry, SessionId
from sgl_stateful.feed import FeedFollower, OwnChanges
from sgl_stateful.forgetting import Forgetting
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
async def serving(make_service: Make, **settings: Any) -> AsyncIterator[MemoryService]:
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
        forgetting=Forgetting(blobs, strict=False),
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
        await until(lambda: ("sweep", {}) in engine.controls)  # the encoder may have seen it before the feed


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


def session_files(store: MemStore, blobs: KVBlobs, *sessions: tuple[str, str]) -> list[Path]:
    """Sessions of ``(owner, id)`` in the store, and a file of KV for each."""
    folder = blobs.path / FOLDER
    folder.mkdir(exist_ok=True)
    made = []
    for owner, name in sessions:
        store.session_log.create(header(name, owner), LogEntry(1, 0, 0, (segment(1, 2),)))
        made.append(folder / session_file(OwnerId(owner), SessionId(name)))
        made[-1].write_bytes(b"kv")
    return made


async def test_the_kv_of_sessions_goes_with_an_owner_that_another_process_purges(
    store: MemStore, blobs: KVBlobs, elsewhere: MemStore
) -> None:
    files = session_files(store, blobs, ("ana", "a"), ("bob", "b"))
    follows = follower(store, blobs)
    await follows.step()
    elsewhere.purge("ana")  # it has no KV directory, as one on another machine has another one
    assert all(file.exists() for file in files)
    await follows.step()
    assert [file.exists() for file in files] == [False, True]


async def test_session_kv_that_cannot_be_removed_is_removed_later(
    store: MemStore, blobs: KVBlobs, elsewhere: MemStore
) -> None:
    [file] = session_files(store, blobs, ("ana", "a"))
    follows = follower(store, blobs)
    await follows.step()
    before = follows.position
    elsewhere.purge("ana")
    file.unlink()
    file.mkdir()  # which no unlink removes
    await follows.step()
    await follows.step()
    assert follower(store, blobs).position == before, "whoever comes after a crash sees it again"
    file.rmdir()
    file.write_bytes(b"kv")
    await follows.step()
    assert not file.exists()
    assert follower(store, blobs).position == store.records.last_position()


async def test_the_kv_of_sessions_that_went_unnoticed_goes_after_a_gap(
    store: MemStore, blobs: KVBlobs, elsewhere: MemStore
) -> None:
    files = session_files(store, blobs, ("ana", "a"), ("bob", "b"))
    (blobs.path / FOLDER / "notes.txt").touch()
    elsewhere.purge("ana")
    follows = follower(store, blobs)
    assert follows.position is None, "nobody has followed"
    await follows.step()
    assert [file.exists() for file in files] == [False, True]
    assert (blobs.path / FOLDER / "notes.txt").exists()


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
        await until(lambda: service._follower._kept == store.records.last_position())
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


def test_an_own_change_that_the_feed_does_not_show_is_forgotten(store: MemStore) -> None:
    now = 100.0
    own = OwnChanges(clock=lambda: now)
    facts = store.add_many("ana", [NewFact("one"), NewFact("two")])
    own.note(ChangeKind.ADDED, facts[0].id, 1)
    now += 59
    own.note(ChangeKind.ADDED, facts[1].id, 1)
    now += 2
    shown: list[Change] = store.changes(0)
    assert [own.take(change) for change in shown] == [False, True]


async def test_a_change_of_the_expiry_alone_keeps_the_kv(
    make_service: Make, elsewhere: MemStore, store: MemStore, blobs: KVBlobs
) -> None:
    async with serving(make_service) as service:
        facts = elsewhere.add_many("ana", [NewFact(text) for text in TEXTS])
        await until(lambda: encoded(service, blobs, *facts) == 3)
        await until(lambda: service._follower._kept == store.records.last_position())
    elsewhere.update("ana", facts[0].id, expires_at=time.time() + 3600)
    changed = elsewhere.update("ana", facts[1].id, text="blue canoe")
    await follower(store, blobs).step()
    assert encoded(service, blobs, *facts) == 2
    assert encoded(service, blobs, changed) == 0, "and the old one is gone"
    assert blobs.stats().encodings == 2


# ---- what saw a fact that is gone ----


@pytest.mark.parametrize("by", ["this server", "another process"])
@pytest.mark.parametrize("way", ["update", "supersede", "delete"])
@pytest.mark.parametrize("strict", [True, False])
async def test_kv_that_saw_a_fact_goes_at_once_where_forgetting_is_strict(
    make_service: Make,
    elsewhere: MemStore,
    store: MemStore,
    blobs: KVBlobs,
    engine: MemoryEngine,
    strict: bool,
    way: str,
    by: str,
) -> None:
    async with serving(make_service, strict_forgetting=strict) as service:
        facts = [added.fact for added in await service.facts.add("ana", [NewFact(text) for text in TEXTS])]
        await until(lambda: encoded(service, blobs, *facts) == 3)
        await until(lambda: service._follower._kept == store.records.last_position())
        saw = {encoding.fact_id: encoding.id for encoding in blobs.dependents(ANA, facts[0].id)}
        assert saw.keys() == {facts[1].id, facts[2].id}
        service._tasks["encoder"].cancel()  # nothing is made anew
        del engine.controls[:]
        if by == "another process":
            change = {
                "update": lambda: elsewhere.update("ana", facts[0].id, text="blue canoe"),
                "supersede": lambda: elsewhere.supersede("ana", facts[0].id, "blue canoe"),
                "delete": lambda: elsewhere.delete("ana", facts[0].id),
            }[way]
            await asyncio.to_thread(change)
        elif way == "update":
            await service.facts.update("ana", facts[0].id, {"text": "blue canoe"})
        elif way == "supersede":
            await service.facts.supersede("ana", facts[0].id, "blue canoe", {})
        else:
            await service.facts.delete("ana", facts[0].id)
        await until(lambda: bool(engine.controls))
        assert encoded(service, blobs, facts[0]) == 0
        assert encoded(service, blobs, *facts[1:]) == (0 if strict else 2)
        if by == "this server":
            [dropped] = [payload["encoding_ids"] for op, payload in engine.controls if op == "drop"]
            # The feed may have come first: then it was everything that the KV store no longer has.
            assert (set(saw.values()) <= set(dropped) or (strict and ("sweep", {}) in engine.controls)) == strict


async def test_strict_forgetting_keeps_what_saw_a_fact_that_is_still_true(
    make_service: Make, elsewhere: MemStore, store: MemStore, blobs: KVBlobs
) -> None:
    async with serving(make_service, strict_forgetting=True) as service:
        facts = [added.fact for added in await service.facts.add("ana", [NewFact(text) for text in TEXTS])]
        await until(lambda: encoded(service, blobs, *facts) == 3)
        before = {encoding.id for encoding in blobs.dependents(ANA, facts[0].id)}
        elsewhere.update("ana", facts[0].id, expires_at=time.time() + 3600)
        await until(lambda: service._follower._kept == store.records.last_position())
        assert {encoding.id for encoding in blobs.dependents(ANA, facts[0].id)} == before


# ---- what is damaged, or fails ----


def damage(path: Path, fact: Fact) -> None:
    """Change one letter of a record behind the store's back."""
    with sqlite3.connect(path / "records.sqlite3") as db:
        changed = db.execute(
            "UPDATE facts SET record = replace(record, ?, ?) WHERE id = ?", [fact.text, fact.text[::-1], fact.id]
        )
        assert changed.rowcount == 1
    db.close()


async def test_a_damaged_record_is_looked_at_once(
    make_service: Make, store: MemStore, blobs: KVBlobs, tmp_path: Path
) -> None:
    async with serving(make_service) as service:
        added = await service.facts.add("ana", [NewFact(text) for text in TEXTS])
        facts = [addition.fact for addition in added]
        await until(lambda: encoded(service, blobs, *facts) == 3)
    damage(tmp_path / "store", facts[1])
    (blobs.path / "feed.json").unlink(missing_ok=True)
    follows = follower(store, blobs)
    await follows.step()
    assert follows.position == store.records.last_position()
    assert encoded(service, blobs, *facts) == 2, "what cannot be read is not there"
    assert blobs.stats().encodings == 2
    assert follower(store, blobs).position == follows.position, "kept for whoever comes after"


async def test_what_cannot_be_dropped_is_dropped_later(
    make_service: Make, elsewhere: MemStore, store: MemStore, blobs: KVBlobs
) -> None:
    async with serving(make_service) as service:
        facts = elsewhere.add_many("ana", [NewFact(text) for text in TEXTS])
        await until(lambda: encoded(service, blobs, *facts) == 3)
        await until(lambda: service._follower._kept == store.records.last_position())
    sweeps: list[None] = []
    follows, before = follower(store, blobs, sweeps=sweeps), store.records.last_position()
    with unwritable(blobs):
        elsewhere.delete("ana", facts[0].id)
        for _ in range(3):
            await follows.step()
        assert follows.position == store.records.last_position(), "the rest of the feed does not wait"
        assert blobs.stats().encodings == 3
        assert follower(store, blobs).position == before, "whoever comes after a crash sees it again"
    del sweeps[:]
    await follows.step()
    assert blobs.stats().encodings == 2
    assert len(sweeps) == 1
    assert follower(store, blobs).position == follows.position


async def test_more_failures_than_are_remembered_have_everything_looked_through(
    make_service: Make, elsewhere: MemStore, store: MemStore, blobs: KVBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_stateful.forgetting._MOST_OWED", 1)
    async with serving(make_service) as service:
        facts = elsewhere.add_many("ana", [NewFact(text) for text in TEXTS])
        await until(lambda: encoded(service, blobs, *facts) == 3)
        await until(lambda: service._follower._kept == store.records.last_position())
    follows = follower(store, blobs)
    with unwritable(blobs):
        for fact in facts[:2]:
            elsewhere.delete("ana", fact.id)
        await follows.step()
        assert blobs.stats().encodings == 3
    follows._verify_at = 0.0  # the wait is over
    await follows.step()
    assert blobs.stats().encodings == 1
    assert follower(store, blobs).position == store.records.last_position()


async def test_kv_that_the_server_keeps_for_itself_is_looked_through_and_left(store: MemStore, blobs: KVBlobs) -> None:
    own = encoding(1, owner=OwnerId("\0server"))
    blobs.put(own, *kv(1))
    blobs.put(encoding(2), *kv(2))
    follows = follower(store, blobs)  # one that begins looks through everything
    await follows.step()
    assert (blobs.has(own.id), blobs.stats().encodings) == (True, 1)


async def test_an_owner_whose_facts_cannot_be_removed_stops_no_other(
    store: MemStore, blobs: KVBlobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time() - 100
    store._lifecycle._clock = lambda: now
    stuck = store.add("ana", "red kayak", expires_at=now + 5)
    for owner in ("bob", "cleo"):
        store.add(owner, "green bicycle", expires_at=now + 5)
    damage(tmp_path / "store", stuck)
    now += 10
    follows = follower(store, blobs)
    for _ in range(3):
        await follows._expire()
    assert store.records.owners_with_expired(now=now) == ["ana"]
    said = [record for record in caplog.records if "cannot be removed" in record.message]
    assert len(said) == 1


async def test_expiring_that_fails_waits_for_its_next_time(
    store: MemStore, blobs: KVBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def fail(*, now: float) -> list[OwnerId]:
        asked.append(now)
        raise StoreUnreachable("nobody listens")

    monkeypatch.setattr(store.records, "owners_with_expired", fail)
    follows = follower(store, blobs)
    follows._expire_every_s = TIMEOUT_S
    steps = 0
    step = follows.step

    async def counted() -> bool:
        nonlocal steps
        steps += 1
        return await step()

    monkeypatch.setattr(follows, "step", counted)
    task = asyncio.create_task(follows.run())
    await until(lambda: steps >= 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(asked) == 1


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
