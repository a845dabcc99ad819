"""What the Redis backend does beyond the contract of `test_records.py`."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis
from redis_facts import ANA, BO, EMBEDDER, QUICK, Clock, add, drafts, insert, opened, texts_of, vector
from redis_server import RedisServer, wait_until

from memstore.errors import (
    FeedGap,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreTooNew,
    VersionConflict,
)
from memstore.records import Batch, IdempotencyKey, Replacement, VectorUpdate
from memstore.records.redis import RedisOptions, RedisRecords
from memstore.records.redis.connection import RedisConnections
from memstore.types import ChangeKind, NewFact, OwnerId

TEXT = "the piano key is kept under a flower pot"


@pytest.fixture
def records(redis_url: str) -> Iterator[RedisRecords]:
    store = opened(redis_url)
    yield store
    store.close()


# ---- purge ----


def test_a_purged_text_is_in_no_file_of_the_server(has_redis: None) -> None:
    # Uncompressed, lest the search of the files finds nothing in any case.
    with RedisServer("appendonly yes", "save 1 1", "rdbcompression no") as server:
        records = opened(server.url)
        [fact, _] = add(records, ANA, TEXT, f"{TEXT}, the left one", stream=TEXT)
        [kept] = add(records, BO, "something else")
        with server.client() as client:
            client.save()
        assert server.on_disk(TEXT.encode())
        removed = records.apply(ANA, Batch(removals=[fact.id]), embedder=EMBEDDER).removed
        assert [former.text for former in removed] == [TEXT]
        counts = records.purge(ANA)
        assert (counts.facts, counts.vectors, counts.changes, counts.remains) == (1, 1, 3, None)
        # The old files are removed in the background.
        wait_until(lambda: server.on_disk(TEXT.encode()) == [], "the removal of the old files")
        wait_until(lambda: server.on_disk(b"something else") != [], "a file with what was kept")
        server.restart()
        assert records.owners() == [BO]
        assert records.page(BO, stream=None, limit=9, after_seq=0) == [kept]
        records.close()


def test_a_purge_leaves_an_epoch_and_one_change(records: RedisRecords, redis_server: RedisServer) -> None:
    idempotency = IdempotencyKey("once", "d")
    records.apply(ANA, Batch(drafts=drafts("one", "two"), idempotency=idempotency), embedder=EMBEDDER)
    add(records, BO, "theirs")
    assert records.purge(ANA)[:6] == (2, 0, 2, 2, 1, 1)
    with redis_server.client() as client:
        names = {name.decode() for name in client.keys("memstore:o:YW5h:*")}
        assert names == {"memstore:o:YW5h:head", "memstore:o:YW5h:changes"}
    assert [(c.kind, c.owner) for c in records.changes(0)] == [(ChangeKind.ADDED, BO), (ChangeKind.PURGED, ANA)]
    assert [c.kind for c in records.changes(0, owner=ANA)] == [ChangeKind.PURGED]
    assert records.purge(ANA)[:6] == (0, 0, 0, 1, 0, 2)
    assert records.head(ANA)[:2] == (2, 5)


# ---- owners ----


def test_no_owner_is_a_part_or_a_pattern_of_another(records: RedisRecords) -> None:
    names = ["a", "a:", ":a", "a:b", "a*", "*", "?", "[a-z]", "a\\", "o", "o:a", "ü" * 256, "YQ", "a b", "A", "鍵 🔑"]
    names += ["a" * 512, "records", "memstore:o:YQ:", "\x01", "a/..", "é", "e\u0301"]
    owners = [OwnerId(name) for name in names]
    for owner in owners:
        add(records, owner, f"of {owner[:20]!r}", "the same text", stream="s")
    assert records.owners() == sorted(owners)
    for owner in owners:
        assert texts_of(records, owner) == [f"of {owner[:20]!r}", "the same text"]
    purged, kept = owners[:10], owners[10:]
    for owner in purged:
        assert records.purge(owner).facts == 2
    assert records.owners() == sorted(kept)
    assert [change.owner for change in records.changes(0)][-10:] == purged
    assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []


def test_two_prefixes_are_two_stores(redis_url: str) -> None:
    one, other = opened(f"{redis_url}?prefix=a"), opened(f"{redis_url}?prefix=a.o")
    add(one, ANA, "one")
    assert other.owners() == []
    assert other.purge(ANA).facts == 0
    assert texts_of(one, ANA) == ["one"]
    one.close()
    other.close()


# ---- a full server ----


def test_removing_makes_room_on_a_full_server(has_redis: None) -> None:
    with RedisServer("maxmemory-policy noeviction") as server:
        records = opened(server.url)
        one, two = add(records, ANA, "one", "two")
        add(records, BO, "theirs")
        with server.client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)
        assert records.apply(ANA, Batch(removals=[one.id]), embedder=EMBEDDER).removed == [one]
        assert records.purge(BO).facts == 1
        assert records.page(ANA, stream=None, limit=9, after_seq=0) == [two]
        assert records.owners() == [ANA]
        assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []
        records.close()


def test_a_full_server_changes_nothing_and_can_still_be_read(has_redis: None) -> None:
    with RedisServer("maxmemory-policy noeviction") as server:
        records = opened(server.url)
        [fact] = add(records, ANA, "before")
        with server.client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)
            keys = sorted(client.keys())
        with pytest.raises(StoreFull):
            add(records, ANA, "one", "two")
        assert texts_of(records, ANA) == ["before"]
        assert [change.fact_id for change in records.changes(0)] == [fact.id]
        assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []
        late = RedisRecords(server.url)
        assert texts_of(late, ANA) == ["before"]
        assert [f.level for f in late.doctor() if f.subject == "memory"] == ["warning"]
        late.close()
        with server.client() as client:
            assert sorted(client.keys()) == keys
            client.config_set("maxmemory", 0)
        [after] = add(records, ANA, "after")
        assert after.seq == fact.seq + 1
        records.close()


# ---- a server that is not well ----


def test_a_server_that_cannot_save_takes_no_writes_and_says_so(has_redis: None) -> None:
    with RedisServer("save 3600 1000000", "enable-protected-configs local") as server:
        records = opened(server.url)
        [fact] = add(records, ANA, "before")
        folder = server.directory / "gone"
        folder.mkdir()
        with server.client() as client:
            client.config_set("dir", str(folder))
            folder.rmdir()
            assert "BGSAVE" in str(records.purge(BO).remains)
            with pytest.raises(StoreError, match="cannot save"):
                add(records, ANA, "after")
            assert records.page(ANA, stream=None, limit=9, after_seq=0) == [fact]
            client.config_set("dir", str(server.directory))
            assert client.bgsave()
            wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "ok", "a dump")
        assert records.purge(BO).remains is None
        records.close()


def test_a_server_without_enough_replicas_is_busy(redis_server: RedisServer, redis_url: str) -> None:
    records = opened(redis_url)
    with redis_server.client() as client:
        client.config_set("min-replicas-to-write", 1)
        try:
            with pytest.raises(StoreBusy, match="replicas"):
                add(records, ANA, "one")
        finally:
            client.config_set("min-replicas-to-write", 0)
    assert records.owners() == []
    records.close()


def test_a_server_that_runs_a_script_for_too_long_is_busy(has_redis: None) -> None:
    with RedisServer("busy-reply-threshold 10") as server:
        records = opened(server.url)

        def run_forever() -> None:
            with server.client() as client, pytest.raises(redis.ResponseError):
                client.eval("while true do end", 0)

        endless = threading.Thread(target=run_forever)
        endless.start()
        with server.client() as client:
            wait_until(lambda: is_busy(records), "the server's answer that it is busy")
            client.script_kill()
        endless.join()
        add(records, ANA, "after")
        records.close()


def is_busy(records: RedisRecords) -> bool:
    try:
        records.count(ANA)
    except StoreBusy:
        return True
    return False


# ---- what an operator is told ----


def levels(records: RedisRecords) -> dict[str, str]:
    return {finding.subject: finding.level for finding in records.doctor()}


def test_durability_is_what_the_server_promises(has_redis: None) -> None:
    with RedisServer("appendonly yes", "appendfsync always") as server:
        records = opened(server.url)
        found: dict[str, tuple[str, str]] = {}
        with server.client() as client:
            for name, value in [("appendfsync", "always"), ("appendfsync", "everysec"), ("appendfsync", "no")]:
                client.config_set(name, value)
                [finding] = [f for f in records.doctor() if f.subject == "durability"]
                found[value] = (finding.level, finding.message)
            client.config_set("appendonly", "no")
        assert [level for level, _ in found.values()] == ["ok", "ok", "warning"]
        assert "survives a loss of power" in found["always"][1]
        assert "within a second" in found["everysec"][1].replace("\n", " ")
        assert levels(records)["durability"] == "warning"
        records.close()


def test_eviction_is_an_error_and_warned_about_when_opened(has_redis: None, caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer("maxmemory 100mb", "maxmemory-policy allkeys-lru") as server:
        records = opened(server.url)
        assert "allkeys-lru" in caplog.text
        assert levels(records) == {
            "server": "ok",
            "role": "ok",
            "durability": "warning",
            "eviction": "error",
            "memory": "ok",
            "transport": "ok",
        }
        records.close()


def test_a_server_that_is_gone_is_a_finding(has_redis: None) -> None:
    with RedisServer() as server:
        records = opened(server.url, QUICK)
        server.kill()
        assert [finding.level for finding in records.doctor()] == ["error"]
        records.close()


# ---- what is there already ----


def test_a_newer_schema_is_refused(redis_server: RedisServer, redis_url: str) -> None:
    opened(redis_url).close()
    with redis_server.client() as client:
        client.hset("memstore:meta", "schema_version", 2)
    with pytest.raises(StoreTooNew):
        RedisRecords(redis_url)


def test_a_store_that_another_process_makes_at_the_same_moment_is_not_another_programs(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    looked = RedisConnections.together

    def late(connections: RedisConnections, *commands: tuple[object, ...]) -> list[object]:
        # Between the first look, which found nothing, and the second.
        if not looks:
            looks.append(commands)
            other = opened(redis_url)
            add(other, ANA, "theirs")
            other.close()
        return looked(connections, *commands)

    monkeypatch.setattr(RedisConnections, "together", late)
    records = RedisRecords(redis_url)
    assert looks
    assert texts_of(records, ANA) == ["theirs"]
    records.close()


@pytest.mark.parametrize("command", [("SET", "memstore:meta", "x"), ("HSET", "memstore:meta", "a", "b")])
def test_keys_of_another_program_are_refused(
    redis_server: RedisServer, redis_url: str, command: tuple[str, ...]
) -> None:
    with redis_server.client() as client:
        client.execute_command(*command)
    with pytest.raises(StoreDamaged):
        RedisRecords(redis_url)


@pytest.mark.parametrize("name", ["o:YW5h:expiry", "o:YW5h:streams", "o:YW5h:history", "owners", "feed"])
def test_a_key_of_another_type_stops_a_write_before_it_begins(
    records: RedisRecords, redis_server: RedisServer, name: str
) -> None:
    with redis_server.client() as client:
        client.rpush(f"memstore:{name}", "x")
        before = {key: client.dump(key) for key in client.scan_iter()}
        with pytest.raises(StoreDamaged):
            records.apply(ANA, Batch(drafts=drafts("one", expires_at=5000.0)), embedder=EMBEDDER)
        with pytest.raises(StoreDamaged):
            records.purge(ANA)
        assert {key: client.dump(key) for key in client.scan_iter()} == before


# ---- the feed ----


def test_the_feed_of_an_owner_is_trimmed_with_the_feed(redis_url: str, redis_server: RedisServer) -> None:
    records = opened(redis_url, RedisOptions(feed_retention=20))
    add(records, ANA, "first")
    for i in range(30):
        add(records, BO, f"fact {i}")
    positions = [change.position for change in records.changes(records.last_position() - 20)]
    assert positions == list(range(12, 32))
    with pytest.raises(FeedGap) as gap:
        records.changes(0, owner=ANA)
    assert records.changes(gap.value.floor, owner=ANA) == []
    assert records.head(ANA).position == 1
    with redis_server.client() as client:
        assert client.exists("memstore:o:YW5h:changes") == 0
        assert client.xlen("memstore:o:Ym8:changes") == client.xlen("memstore:feed") <= 22
    assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []
    records.close()


def test_the_feed_never_says_what_a_fact_says(records: RedisRecords, redis_server: RedisServer) -> None:
    add(records, ANA, TEXT, stream="a stream of ana")
    with redis_server.client() as client:
        told = repr(client.xrange("memstore:feed")) + repr(client.xrange("memstore:o:YW5h:changes"))
    assert TEXT not in told
    assert "a stream of ana" not in told


# ---- vectors ----


def test_the_vectors_of_facts_that_are_gone_are_gone_for_every_embedder(
    records: RedisRecords, redis_server: RedisServer
) -> None:
    one, two = add(records, ANA, "one", "two")
    updates = [VectorUpdate(fact.seq, 1, vector(fact.text)) for fact in (one, two)]
    assert records.put_vectors(ANA, updates, embedder="new:d4", is_reindex=True) == 2
    records.apply(ANA, Batch(removals=[one.id]), embedder=EMBEDDER)
    for embedder in (EMBEDDER, "new:d4"):
        assert records.vectors(ANA, embedder=embedder, dimension=4).seqs.tolist() == [two.seq]
    assert records.adopt_embedder("new:d4")
    with redis_server.client() as client:
        assert len(client.keys("memstore:o:YW5h:vectors:*")) == 1
        assert list(client.hvals("memstore:embedders")) == [b"new:d4"]


# ---- several writers ----


def test_writers_in_several_threads_lose_nothing(redis_url: str) -> None:
    stores = [opened(redis_url) for _ in range(3)]
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            records = stores[number % 3]
            for i in range(20):
                [fact, _] = add(records, ANA, f"{number}: {i}", f"shared {i}")
                if i % 4 == 0:
                    records.apply(ANA, Batch(removals=[fact.id]), embedder=EMBEDDER)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    wanted = {f"{number}: {i}" for number in range(6) for i in range(20) if i % 4} | {f"shared {i}" for i in range(20)}
    assert set(texts_of(stores[0], ANA)) == wanted
    assert stores[0].count(ANA) == len(wanted)
    changes = stores[0].changes(0)
    assert [change.position for change in changes] == list(range(1, len(changes) + 1))
    assert len(changes) == 6 * 20 + 20 + 6 * 5
    assert stores[0].check(embedder=EMBEDDER, dimension=4, repair=False) == []
    for store in stores:
        store.close()


def test_a_fact_that_changes_before_it_is_removed_is_returned_as_it_was_then(
    records: RedisRecords, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [fact] = add(records, ANA, "old words")
    other = opened(redis_url)
    read = records._records
    changed = replace(fact, text="new words", version=2)
    waiting = [Replacement(changed, fact, vector("new words"))]

    def read_then_change(*arguments: object) -> Iterator[object]:
        found = list(read(*arguments))  # type: ignore[arg-type]
        if waiting:
            other.apply(ANA, Batch(replacements=[waiting.pop()]), embedder=EMBEDDER)
        yield from found

    monkeypatch.setattr(records, "_records", read_then_change)
    assert records.apply(ANA, Batch(removals=[fact.id]), embedder=EMBEDDER).removed == [changed]
    other.close()


def test_more_callers_than_connections_wait_and_are_told(redis_server: RedisServer, redis_url: str) -> None:
    records = opened(redis_url, RedisOptions(max_connections=1, timeout_s=0.2))
    assert records._redis._slots.acquire()
    with pytest.raises(StoreBusy, match="connections"):
        records.count(ANA)
    records._redis._slots.release()
    assert records.count(ANA) == 0
    records.close()


# ---- upkeep ----


def test_compact_forgets_old_keys_alone(redis_url: str) -> None:
    clock = Clock(1000.0)
    records = opened(redis_url, RedisOptions(idempotency_ttl_s=100.0), clock=clock)
    records.apply(ANA, Batch(drafts=drafts("old"), idempotency=IdempotencyKey("old", "d")), embedder=EMBEDDER)
    clock.now = 1080.0
    new = Batch(drafts=drafts("new"), idempotency=IdempotencyKey("new", "d"))
    records.apply(ANA, new, embedder=EMBEDDER)
    clock.now = 1120.0
    before, after = records.compact()
    assert min(before, after) > 0
    assert not records.apply(ANA, new, embedder=EMBEDDER).insertions[0].created
    assert records.purge(ANA).idempotency_keys == 1
    records.close()


def test_twins_in_one_batch_and_an_expired_one(redis_url: str) -> None:
    clock = Clock(1000.0)
    records = opened(redis_url, clock=clock)
    [first] = records.apply(ANA, Batch(drafts=drafts("x", expires_at=1500.0)), embedder=EMBEDDER).insertions
    assert records.find_identical(ANA, [NewFact("x")]) == [first.fact]
    clock.now = 1500.0
    again = insert(records, ANA, "x", "x")
    assert [insertion.created for insertion in again] == [True, False]
    assert again[0].fact == again[1].fact != first.fact
    assert [c.kind for c in records.changes(0)] == [ChangeKind.ADDED, ChangeKind.DELETED, ChangeKind.ADDED]
    with pytest.raises(VersionConflict):
        records.apply(ANA, Batch(drafts=[drafts("x")[0]._replace(supersedes=first.fact.id)]), embedder=EMBEDDER)
    records.close()
