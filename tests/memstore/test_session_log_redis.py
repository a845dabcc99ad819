"""What the token log on Redis does beyond the contract of `test_session_log.py`."""

import logging
from collections.abc import Iterator

import pytest
import redis
from redis_facts import EMBEDDER, add, opened
from redis_proxy import LossyProxy
from redis_server import RedisServer, wait_until
from session_entries import ANA, BO, ONE, SECRET, SECRET_BYTES, TWO, begun, entry, header, segment, tokens
from test_redis_connection import permissions

from memstore import (
    MemStoreSettings,
    StoreDamaged,
    StoreFull,
    StoreReadOnly,
    StoreRefused,
    StoreTooNew,
    StoreUnreachable,
)
from memstore.errors import SessionExists, SessionMoved
from memstore.records.redis import RedisOptions
from memstore.session_log import LogEntry, SessionId, SessionLog, open_session_log
from memstore.session_log.redis import RedisSessionLog

QUICK = RedisOptions(timeout_s=0.3, breaker_s=0.1)
# "5c0e" and "ana", as they are in the names of keys.
SESSION_KEY, LOG_KEY, OWNED_KEY = (
    "memstore:session:35633065",
    "memstore:session-log:35633065",
    "memstore:o:YW5h:sessions",
)


@pytest.fixture
def log(redis_url: str) -> Iterator[RedisSessionLog]:
    made = RedisSessionLog(redis_url)
    yield made
    made.close()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as made:
        yield made


# ---- keys ----


def test_the_keys_are_those_that_are_documented(log: RedisSessionLog, client: redis.Redis) -> None:
    begun(log)
    log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
    names = {"memstore:meta", "memstore:sessions", SESSION_KEY, LOG_KEY, OWNED_KEY}
    assert {name.decode() for name in client.keys("*")} == names
    assert client.zrange("memstore:sessions", 0, -1, withscores=True) == [(b"35633065", 0.0)]
    assert client.zrange(OWNED_KEY, 0, -1) == [b"35633065"]
    assert client.hmget(SESSION_KEY, "owner", "first", "last") == [b"YW5h", b"1", b"2"]
    assert set(client.hkeys(LOG_KEY)) == {b"1", b"2"}
    assert all(client.ttl(name) == -1 for name in names)
    log.delete(ANA, ONE)
    assert {name.decode().partition(":request:")[0] for name in client.keys("*")} == {"memstore:meta", "memstore"}


def test_a_check_of_the_facts_knows_the_keys_of_sessions(log: RedisSessionLog, redis_url: str) -> None:
    records = opened(redis_url)
    add(records, ANA, "a fact")
    begun(log)
    begun(log, TWO, BO)
    log.delete(BO, TWO)
    for repair in (False, True):
        assert records.check(embedder=EMBEDDER, dimension=4, repair=repair) == []
    begun(log, TWO, BO)
    assert records.purge(BO).facts == 0
    assert (records.check(embedder=EMBEDDER, dimension=4, repair=True), records.owners()) == ([], [ANA])
    assert [one.id for one in log.headers()] == [ONE, TWO]
    records.close()


@pytest.mark.parametrize("key", [SESSION_KEY, LOG_KEY, OWNED_KEY, "memstore:sessions"])
def test_a_key_of_another_program_is_left_alone(
    log: RedisSessionLog, client: redis.Redis, redis_url: str, key: str
) -> None:
    client.rpush(key, "theirs")
    before = set(client.keys("*"))
    with pytest.raises(StoreDamaged, match="another program"):
        begun(log)
    assert (set(client.keys("*")), client.lrange(key, 0, -1)) == (before, [b"theirs"])
    records = opened(redis_url)
    assert [problem.kind for problem in records.check(embedder=EMBEDDER, dimension=4, repair=True)] == ["foreign-key"]
    records.close()


def test_two_prefixes_are_two_logs(redis_url: str) -> None:
    one, other = RedisSessionLog(f"{redis_url}?prefix=a"), RedisSessionLog(f"{redis_url}?prefix=a.o")
    begun(one)
    assert (other.headers(), other.header(ONE), other.purge(ANA)) == ([], None, 0)
    begun(other, ONE, BO, 9)
    assert tokens(one.entries(ANA, ONE)) == [[[1, 2, 3]]]
    one.close()
    other.close()


def test_what_the_server_has_lost_is_not_made_up(log: RedisSessionLog, client: redis.Redis) -> None:
    begun(log)
    begun(log, TWO)
    client.delete(LOG_KEY)
    with pytest.raises(StoreDamaged, match=ONE):
        log.entries(ANA, ONE)
    client.hdel(SESSION_KEY, "header")
    with pytest.raises(StoreDamaged, match=ONE):
        log.headers()
    client.delete(SESSION_KEY)
    assert log.headers() == [header(TWO)]
    assert log.purge(ANA) == 2
    client.zadd("memstore:sessions", {"no hex": 0})
    with pytest.raises(StoreDamaged, match="no session's id"):
        log.headers()


def test_a_newer_store_is_refused(redis_url: str, client: redis.Redis) -> None:
    client.hset("memstore:meta", "schema_version", "99")
    with pytest.raises(StoreTooNew):
        RedisSessionLog(redis_url)


# ---- users ----


@pytest.mark.parametrize("files", [True, False])
def test_the_documented_permissions_are_enough(
    redis_server: RedisServer, redis_url: str, client: redis.Redis, caplog: pytest.LogCaptureFixture, files: bool
) -> None:
    client.execute_command("ACL", "SETUSER", "sessions", "reset", "on", ">pw", *permissions(files=files))
    log = RedisSessionLog(f"redis://sessions:pw@127.0.0.1:{redis_server.port}")
    begun(log)
    log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
    log.update(header(used_at=1002.0))
    log.touch({ONE: 1003.0})
    log.compact(ANA, ONE, LogEntry(2, 0, 0, (segment(4),)))
    assert (log.header(ONE), log.count(ANA)) == (header(used_at=1003.0), 1)
    assert (log.headers(), tokens(log.entries(ANA, ONE))) == ([header(used_at=1003.0)], [[[4]]])
    assert log.delete(ANA, ONE)
    begun(log, TWO)
    assert log.purge(ANA) == 1
    assert ("BGREWRITEAOF" in caplog.text) == (not files)
    log.close()


@pytest.mark.parametrize("missing", ["-zadd", "-unlink", "-hset", "-zrem"])
def test_a_user_who_could_write_half_a_session_is_refused(
    redis_server: RedisServer, redis_url: str, client: redis.Redis, missing: str
) -> None:
    client.execute_command("ACL", "SETUSER", "half", "reset", "on", ">pw", *permissions(files=False), missing)
    with pytest.raises(StoreRefused):
        RedisSessionLog(f"redis://half:pw@127.0.0.1:{redis_server.port}")


# ---- replies that are lost ----


def test_a_lost_reply_is_asked_for_again(redis_server: RedisServer, redis_url: str) -> None:
    with LossyProxy(redis_server.port) as proxy:
        log = RedisSessionLog(f"redis://127.0.0.1:{proxy.port}")
        # The scripts are known to the server by then.
        begun(log, SessionId("first"), BO)
        log.append(BO, SessionId("first"), entry(2), used_at=1000.0)
        log.compact(BO, SessionId("first"), LogEntry(2, 0, 0, ()))
        log.delete(BO, SessionId("first"))
        log.purge(BO)
        proxy.lose_reply()
        begun(log)
        proxy.lose_reply()
        log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
        assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]], [[4]]]
        proxy.lose_reply()
        log.compact(ANA, ONE, LogEntry(2, 0, 0, (segment(4),)))
        proxy.lose_reply()
        assert log.delete(ANA, ONE), "the reply is that of the first time"
        assert not log.delete(ANA, ONE)
        assert proxy.lost == 4
        begun(log)
        begun(log, TWO)
        # The first one only says that the server is there.
        proxy.lose_reply(after=1)
        assert log.purge(ANA) == 2
        assert (log.headers(), proxy.lost) == ([], 5)
        log.close()


def test_an_append_is_not_lost_on_one_who_was_overtaken(redis_server: RedisServer, redis_url: str) -> None:
    other = RedisSessionLog(redis_url)
    with LossyProxy(redis_server.port) as proxy:
        log = RedisSessionLog(f"redis://127.0.0.1:{proxy.port}")
        begun(log)
        log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
        proxy.lose_reply(then=lambda: other.append(ANA, ONE, entry(4, segment(6)), used_at=1003.0))
        log.append(ANA, ONE, entry(3, segment(5)), used_at=1002.0)
        assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]], [[4]], [[5]], [[6]]]
        with pytest.raises(SessionMoved, match="version 4"):
            log.append(ANA, ONE, entry(4, segment(7)), used_at=1004.0)
        log.close()
    other.close()


def test_a_server_that_is_killed_before_it_replies_has_done_the_write_once(has_redis: None) -> None:
    with RedisServer("appendonly yes", "appendfsync always", 'save ""') as server, LossyProxy(server.port) as proxy:
        log = RedisSessionLog(f"redis://127.0.0.1:{proxy.port}")
        begun(log)
        for version in range(2, 6):
            proxy.lose_reply(then=server.restart)
            log.append(ANA, ONE, entry(version, segment(version)), used_at=1000.0 + version)
        assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]], [[2]], [[3]], [[4]], [[5]]]
        assert log.header(ONE) == header(used_at=1005.0)
        assert proxy.lost == 4
        log.close()


# ---- a server that is full, away, or a replica ----


def test_a_full_server_keeps_what_there_is_and_lets_go(has_redis: None) -> None:
    with RedisServer("maxmemory-policy noeviction") as server, server.client() as client:
        log = RedisSessionLog(server.url)
        begun(log)
        log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
        for name, owner in ((TWO, ANA), (SessionId("b"), BO), (SessionId("c"), BO)):
            begun(log, name, owner)
        assert log.delete(ANA, TWO)
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 1)
        before = sorted(client.keys("*"))
        for write in (
            lambda: begun(log, TWO),
            lambda: log.append(ANA, ONE, entry(3), used_at=1002.0),
            lambda: log.update(header(used_at=1002.0)),
        ):
            with pytest.raises(StoreFull):
                write()
        assert sorted(client.keys("*")) == before
        assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]], [[4]]]
        assert log.header(ONE) == header(used_at=1001.0)
        log.compact(ANA, ONE, LogEntry(2, 0, 0, (segment(4),)))
        assert tokens(log.entries(ANA, ONE)) == [[[4]]]
        assert log.delete(BO, SessionId("b"))
        assert (log.purge(BO), log.purge(ANA)) == (1, 1)
        log.close()


def test_a_server_that_is_away_is_told(has_redis: None) -> None:
    with RedisServer() as server:
        log = RedisSessionLog(server.url, QUICK)
        begun(log)
        server.kill()
        with pytest.raises(StoreUnreachable):
            log.entries(ANA, ONE)
        with pytest.raises(StoreUnreachable):
            RedisSessionLog(server.url, QUICK)
        log.close()


def test_a_replica_is_read_and_not_written(has_redis: None) -> None:
    with RedisServer() as master, RedisServer(f"replicaof 127.0.0.1 {master.port}") as replica:
        writer = RedisSessionLog(master.url)
        begun(writer)
        with replica.client() as client:
            wait_until(lambda: client.exists(SESSION_KEY) == 1, "replication")
        reader = RedisSessionLog(replica.url, QUICK)
        assert reader.headers() == [header()]
        assert tokens(reader.entries(ANA, ONE)) == [[[1, 2, 3]]]
        for write in (lambda: begun(reader, TWO), lambda: reader.purge(ANA)):
            with pytest.raises(StoreReadOnly):
                write()
        with pytest.raises(SessionExists):
            reader.create(header(owner=BO), entry(1))
        reader.close()
        writer.close()


# ---- purge ----


def in_memory(client: redis.Redis, data: bytes) -> list[bytes]:
    """Names of the keys that hold `data`, or have it in their name."""
    return [name for name in client.scan_iter() if data in name + (client.dump(name) or b"")]


def test_a_purge_leaves_no_byte_of_the_tokens(has_redis: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    # Uncompressed, lest the search of the files finds nothing in any case.
    with RedisServer("appendonly yes", "save 1 1", "rdbcompression no") as server, server.client() as client:
        log: SessionLog = open_session_log(server.url, MemStoreSettings())
        for number in range(10):
            name = SessionId(f"secret-{number}")
            log.create(header(name), entry(1, segment(*SECRET, kind="prefix")))
            log.append(ANA, name, entry(2, segment(*SECRET, *SECRET)), used_at=1001.0)
        kept = b"".join(token.to_bytes(4, "little") for token in reversed(SECRET))
        begun(log, TWO, BO, *reversed(SECRET))
        log.delete(ANA, SessionId("secret-0"))
        client.save()
        assert len(in_memory(client, SECRET_BYTES)) == 9
        assert server.on_disk(SECRET_BYTES)
        assert log.purge(ANA) == 9
        assert in_memory(client, SECRET_BYTES) == in_memory(client, b"secret-".hex().encode()) == []
        # The old files are removed in the background.
        wait_until(lambda: server.on_disk(SECRET_BYTES) == [], "the removal of the old files")
        wait_until(lambda: server.on_disk(kept) != [], "a file with what was kept")
        assert caplog.text == ""
        server.restart()
        assert log.headers() == [header(TWO, BO)]
        assert tokens(log.entries(BO, TWO)) == [[list(reversed(SECRET))]]
        log.close()
