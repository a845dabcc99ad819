"""Reaching a Redis server, and what happens where that fails."""

import logging
import socket
import ssl
import struct
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from pydantic import SecretStr, ValidationError
from redis_facts import ANA, BO, EMBEDDER, QUICK, add, drafts, insert, opened, texts_of
from redis_proxy import LossyProxy
from redis_server import Certificates, RedisServer, free_port, wait_until

import memstore.records.redis
from memstore.errors import (
    InvalidLocation,
    StoreClosed,
    StoreReadOnly,
    StoreRefused,
    StoreTLSError,
    StoreUnreachable,
)
from memstore.location import directory_of
from memstore.records import Batch
from memstore.records.redis import RedisOptions, RedisRecords
from memstore.records.redis.options import parse_location
from memstore.settings import MemStoreSettings
from memstore.types import ChangeKind

SECRET = "hunter2-3a:/@?#%ü"
QUOTED = "hunter2-3a%3A%2F%40%3F%23%25%C3%BC"


# ---- locations ----


def test_a_url_says_everything() -> None:
    place = parse_location(f"redis://us%40er:{QUOTED}@db.example:7000/3?prefix=team.a", RedisOptions())
    assert place.addresses == (("db.example", 7000),)
    assert (place.username, place.password, place.db, place.prefix, place.tls) == (
        "us@er",
        SecretStr(SECRET),
        3,
        "team.a",
        False,
    )
    assert place.url == "redis://db.example:7000/3?prefix=team.a"


def test_a_short_url_has_the_usual_port_and_database() -> None:
    place = parse_location("rediss://[::1]", RedisOptions(prefix="p", password=SecretStr("x")))
    assert (place.addresses, place.db, place.tls, place.prefix) == ((("::1", 6379),), 0, True, "p")
    assert place.password == SecretStr("x")
    assert place.url == "rediss://[::1]:6379/0?prefix=p"


def test_a_sentinel_url_has_several_hosts_and_a_service() -> None:
    place = parse_location("redis+sentinel://:pw@a:1,b,c:3/main/2", RedisOptions())
    assert place.addresses == (("a", 1), ("b", 26379), ("c", 3))
    assert (place.service, place.db, place.password) == ("main", 2, SecretStr("pw"))
    assert place.url == "redis+sentinel://a:1,b:26379,c:3/main/2?prefix=memstore"


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "redis://:hunter2/3@h",
        "redis://:hunter2@h:port",
        "redis://:hunter2@h:0",
        "redis://:hunter2@h:99999",
        "redis://:hunter2@a,b",
        "redis://:hunter2@h/one",
        "redis://:hunter2@h/1/2",
        "redis://:hunter2@h?password=hunter2",
        "redis://:hunter2@h?prefix=",
        "redis://:hunter2@h?prefix=a*",
        "redis://:hunter2@h?ca=/etc/passwd",
        "rediss://:hunter2@h?ca=/no/such/file",
        "redis+sentinel://:hunter2@h",
        "redis://:hunter2@[::1",
        "redis://:?hunter2=@host/0",
        "redis://h?hunter2",
        "redis://h?hunter2=a&hunter2=b",
        "redis://ana:1#hunter2@h/0",
        "redis://h/0#",
        "redis://h/0?prefix=hunter2:o",
        "redis://h/0?prefix=hunter2%0A",
        "redis://ana:70000/hunter2@h",
        "rediss://ana:1?ca=hunter2@h/0",
    ],
)
def test_what_cannot_be_understood_is_refused_without_repeating_a_password(url: str) -> None:
    with pytest.raises(InvalidLocation) as refusal:
        parse_location(url, RedisOptions())
    assert "hunter2" not in "".join(traceback.format_exception(refusal.value))


@pytest.mark.parametrize("prefix", ["a:o", "", "x" * 65, "a*", "a\n", "é"])
def test_a_prefix_is_the_same_in_a_url_and_in_the_settings(prefix: str) -> None:
    with pytest.raises(ValidationError):
        MemStoreSettings(redis_prefix=prefix)
    for location, options in ((f"redis://h?prefix={quote(prefix)}", {}), ("redis://h", {"prefix": prefix})):
        with pytest.raises(InvalidLocation, match="prefix"):
            parse_location(location, RedisOptions(**options))
    settings = MemStoreSettings(redis_prefix="a.b_C-9" + "x" * 57)
    assert parse_location("redis://h", RedisOptions.from_settings(settings)).prefix == settings.redis_prefix


@pytest.mark.parametrize(
    "location",
    [
        "redis:/ana:hunter2@host/0",
        "redis:ana:hunter2@host/0",
        "REDISS:hunter2",
        "rediss+sentinel:/ana:hunter2@a,b/main",
        "sqlite:/hunter2",
        "hunter2://h",
        "Redis://:hunter2@h",
        "ana:hunter2@redis://h",
    ],
)
def test_a_location_that_is_nearly_a_url_is_no_directory(location: str) -> None:
    with pytest.raises(InvalidLocation) as refusal:
        directory_of(location)
    assert "hunter2" not in "".join(traceback.format_exception(refusal.value))


def test_a_directory_may_be_named_like_a_scheme() -> None:
    for name in ("redis", "./redis:/x", "sqlite", "a:b"):
        assert directory_of(name) == Path(name)
    assert directory_of(Path("redis:x")) == Path("redis:x")


# ---- TLS ----


def test_tls_with_the_right_authority_alone(certificates: Certificates, tmp_path: Path) -> None:
    stranger = Certificates(tmp_path / "stranger")
    with RedisServer(certificates=certificates) as server:
        records = opened(f"{server.url}?ca={certificates.ca}")
        add(records, ANA, "over TLS")
        assert texts_of(records, ANA) == ["over TLS"]
        assert records.doctor()[-1][:2] == ("ok", "transport")
        records.close()
        with pytest.raises(StoreTLSError):
            RedisRecords(server.url)
        with pytest.raises(StoreTLSError):
            RedisRecords(f"{server.url}?ca={stranger.ca}")
        with pytest.raises(StoreUnreachable, match="rediss://"):
            RedisRecords(f"redis://127.0.0.1:{server.port}", options=QUICK)


def test_a_server_may_ask_for_a_certificate(certificates: Certificates, tmp_path: Path) -> None:
    cert, key = certificates.pair("client")
    with RedisServer(certificates=certificates, client_certificate=True) as server:
        records = opened(server.url, RedisOptions(ca=certificates.ca, cert=cert, key=key))
        add(records, ANA, "known")
        records.close()
        with pytest.raises(StoreTLSError):
            RedisRecords(f"{server.url}?ca={certificates.ca}")
        cert, key = Certificates(tmp_path / "stranger").pair("client")
        with pytest.raises(StoreTLSError):
            RedisRecords(f"{server.url}?ca={certificates.ca}&cert={cert}&key={key}")


def test_a_certificate_is_named_where_the_alert_about_it_is_lost(certificates: Certificates) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.pair("server"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    plain, _ = listener.accept()
                    plain.settimeout(5)
                    with suppress(OSError), context.wrap_socket(plain, server_side=True) as secure:
                        # Closed with a reset, which discards what the other side has not read yet.
                        secure.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with pytest.raises(StoreTLSError, match="client's certificate"):
                RedisRecords(f"rediss://127.0.0.1:{listener.getsockname()[1]}?ca={certificates.ca}", options=QUICK)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_server_without_tls(redis_server: RedisServer, certificates: Certificates) -> None:
    with pytest.raises(StoreTLSError, match="speaks no TLS"):
        RedisRecords(f"rediss://127.0.0.1:{redis_server.port}?ca={certificates.ca}", options=QUICK)


# ---- users ----


def permissions(*, files: bool) -> list[str]:
    """As the package's documentation gives them."""
    documented = str(memstore.records.redis.__doc__)
    needed, optional = documented.split("has to be allowed")[1].split("and, for a purge")
    words = needed.split("prefix:")[1].split() + (optional.split("everything:")[1].split() if files else [])
    assert all(word.startswith(("+", "-", "~", "reset")) for word in words)
    return words


def test_the_documented_permissions_are_enough(redis_server: RedisServer, redis_url: str) -> None:
    with redis_server.client() as admin:
        admin.acl_setuser("full", enabled=True, reset=True, passwords=[f"+{SECRET}"])
        admin.execute_command("ACL", "SETUSER", "full", *permissions(files=True))
        records = opened(f"redis://full:{QUOTED}@127.0.0.1:{redis_server.port}")
        [fact, _] = add(records, ANA, "one", "two")
        assert records.get_many(ANA, [fact.id]) == [fact]
        assert records.get_by_seqs(ANA, [fact.seq]) == {fact.seq: fact}
        assert records.find_identical(ANA, [d.fact for d in drafts("one", "three")]) == [fact, None]
        assert records.check(embedder=EMBEDDER, dimension=4, repair=True) == []
        assert records.apply(ANA, Batch(removals=[fact.id]), embedder=EMBEDDER).removed == [fact]
        assert [c.kind for c in records.changes(0)] == [ChangeKind.ADDED, ChangeKind.ADDED, ChangeKind.DELETED]
        assert (records.owners(), records.stats(ANA).current, records.head(ANA).epoch) == ([ANA], 1, 0)
        assert records.vectors(ANA, embedder=EMBEDDER, dimension=4).rows.shape == (1, 4)
        assert records.adopt_embedder(EMBEDDER)
        assert {finding.level for finding in records.doctor()} == {"ok"}
        records.compact()
        assert records.purge(ANA).remains is None
        records.close()


def test_without_the_optional_permissions_a_purge_says_what_remains(redis_server: RedisServer, redis_url: str) -> None:
    with redis_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "least", "on", f">{SECRET}", *permissions(files=False))
        records = opened(f"redis://least:{QUOTED}@127.0.0.1:{redis_server.port}")
        add(records, ANA, "one")
        records.compact()
        [durability] = [finding for finding in records.doctor() if finding.subject == "durability"]
        assert durability.level == "warning"
        assert "cannot be told" in durability.message
        counts = records.purge(ANA)
        assert counts.facts == 1
        assert "BGREWRITEAOF" in str(counts.remains)
        records.close()


@pytest.mark.parametrize("missing", ["-xtrim", "-hkeys", "-xadd", "-unlink", "-zrem"])
def test_a_user_who_could_write_half_a_change_is_refused_at_the_start(
    redis_server: RedisServer, redis_url: str, missing: str
) -> None:
    with redis_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "half", "reset", "on", ">pw", *permissions(files=False), missing)
        with pytest.raises(StoreRefused):
            RedisRecords(f"redis://half:pw@127.0.0.1:{redis_server.port}")
        assert admin.keys("memstore:probe*") in ([], [b"memstore:probe:1"])


def test_keys_of_others_are_out_of_reach(redis_server: RedisServer, redis_url: str) -> None:
    with redis_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "full", "reset", "on", ">pw", *permissions(files=False))
    with pytest.raises(StoreRefused):
        RedisRecords(f"redis://full:pw@127.0.0.1:{redis_server.port}?prefix=other")


@pytest.mark.parametrize("credentials", [f":{QUOTED}@", f"nobody:{QUOTED}@", ""])
def test_a_wrong_password_is_refused_and_shown_nowhere(credentials: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer(password="right") as server, pytest.raises(StoreRefused) as refusal:
        RedisRecords(f"redis://{credentials}127.0.0.1:{server.port}")
    shown = "".join(traceback.format_exception(refusal.value)) + caplog.text
    assert "hunter2" not in shown


def test_a_password_is_shown_nowhere_while_a_store_works_and_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer("maxmemory 100mb", "maxmemory-policy allkeys-lru", password=SECRET) as server:
        records = opened(f"redis://:{QUOTED}@127.0.0.1:{server.port}", QUICK)
        add(records, ANA, "one")
        shown = [repr(records), repr(vars(records)), repr(vars(records._redis)), repr(records._redis.location)]
        shown += [records.location, repr(records.doctor()), repr(RedisOptions(password=SecretStr(SECRET)))]
        server.kill()
        with pytest.raises(StoreUnreachable) as failure:
            records.count(ANA)
        records.close()
    shown += [caplog.text, *traceback.format_exception(failure.value)]
    assert "allkeys-lru" in caplog.text
    assert "hunter2" not in "".join(shown)


def test_sentinels_that_nobody_reaches_show_no_password() -> None:
    options = RedisOptions(sentinel_password=SecretStr(SECRET), timeout_s=0.3)
    url = f"redis+sentinel://:{QUOTED}@127.0.0.1:{free_port()},127.0.0.1:{free_port()}/main"
    with pytest.raises(StoreUnreachable) as failure:
        RedisRecords(url, options=options)
    assert "hunter2" not in "".join(traceback.format_exception(failure.value))


# ---- a server that goes away ----


def test_nobody_listens() -> None:
    with pytest.raises(StoreUnreachable):
        RedisRecords(f"redis://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnreachable):
        RedisRecords("redis://no.such.host.invalid")


def test_a_closed_store_says_so(redis_url: str) -> None:
    records = opened(redis_url)
    records.close()
    records.close()
    with pytest.raises(StoreClosed):
        records.count(ANA)


def test_acknowledged_facts_survive_a_kill_of_the_server(has_redis: None) -> None:
    with RedisServer("appendonly yes", "appendfsync always", 'save ""') as server:
        records = opened(server.url)
        written = []
        for round_ in range(5):
            written += add(records, ANA, *(f"fact {round_} {i}" for i in range(20)))
            server.restart()
        assert records.page(ANA, stream=None, limit=1000, after_seq=0) == written
        assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []
        [more] = add(records, ANA, "after")
        assert more.seq == written[-1].seq + 1
        assert [change.fact_id for change in records.changes(0)] == [fact.id for fact in [*written, more]]
        records.close()


def test_a_lost_reply_is_asked_for_again(redis_server: RedisServer, redis_url: str) -> None:
    with LossyProxy(redis_server.port) as proxy:
        records = opened(f"redis://127.0.0.1:{proxy.port}")
        [kept, old] = add(records, ANA, "kept", "old")
        proxy.lose_reply()
        twin, new = insert(records, ANA, "kept", "new")
        assert (twin.fact, twin.created, new.created, proxy.lost) == (kept, False, True, 1)
        assert records.get_many(ANA, [new.fact.id]) == [new.fact]
        # The first reply is that of reading what is to be removed.
        proxy.lose_reply(after=1)
        assert records.apply(ANA, Batch(removals=[old.id]), embedder=EMBEDDER).removed == [old]
        records.purge(BO)
        # The first one only says that the server is there; the script is known to it by now.
        proxy.lose_reply(after=1)
        counts = records.purge(ANA)
        assert (counts.facts, counts.changes, counts.epoch, proxy.lost) == (2, 4, 1, 3)
        assert [change.owner for change in records.changes(0)] == [BO, ANA]
        records.close()


def test_a_server_that_is_killed_before_it_replies_has_done_the_write_once(has_redis: None) -> None:
    with RedisServer("appendonly yes", "appendfsync always", 'save ""') as server, LossyProxy(server.port) as proxy:
        records = opened(f"redis://127.0.0.1:{proxy.port}")
        [old] = add(records, ANA, "old")
        proxy.lose_reply(then=server.restart)
        [new] = insert(records, ANA, "new")
        assert (new.created, proxy.lost) == (True, 1)
        proxy.lose_reply(after=1, then=server.restart)
        assert records.apply(ANA, Batch(removals=[old.id]), embedder=EMBEDDER).removed == [old]
        assert records.page(ANA, stream=None, limit=9, after_seq=0) == [new.fact]
        kinds = [ChangeKind.ADDED, ChangeKind.ADDED, ChangeKind.DELETED]
        assert [change.kind for change in records.changes(0)] == kinds
        assert records.check(embedder=EMBEDDER, dimension=4, repair=False) == []
        records.close()


def test_a_server_that_stops_answering_costs_one_timeout_and_then_none(has_redis: None) -> None:
    with RedisServer() as server:
        records = opened(server.url, RedisOptions(timeout_s=0.2, breaker_s=30.0))
        add(records, ANA, "before")
        server.pause()
        with pytest.raises(StoreUnreachable, match="in time"):
            records.count(ANA)
        for _ in range(1000):
            with pytest.raises(StoreUnreachable, match="a moment ago"):
                records.count(ANA)
        server.resume()
        records.close()


def test_a_server_that_answers_again_is_used_again(has_redis: None) -> None:
    with RedisServer() as server:
        records = opened(server.url, QUICK)
        add(records, ANA, "before")
        server.pause()
        with pytest.raises(StoreUnreachable):
            records.count(ANA)
        server.resume()
        wait_until(lambda: counted(records) == 1, "an answer after the pause")
        records.close()


def counted(records: RedisRecords) -> int | None:
    try:
        return records.count(ANA)
    except StoreUnreachable:
        return None


# ---- replicas ----


def test_a_replica_is_read_and_not_written(has_redis: None) -> None:
    with RedisServer() as master, RedisServer(f"replicaof 127.0.0.1 {master.port}") as replica:
        writer = opened(master.url)
        [fact] = add(writer, ANA, "one")
        with replica.client() as client:
            wait_until(lambda: client.hlen("memstore:o:YW5h:records") == 1, "replication")
        reader = RedisRecords(replica.url, options=QUICK)
        assert reader.page(ANA, stream=None, limit=9, after_seq=0) == [fact]
        assert reader.get_by_seqs(ANA, [fact.seq]) == {fact.seq: fact}
        with pytest.raises(StoreReadOnly):
            add(reader, ANA, "two")
        assert [finding.subject for finding in reader.doctor() if finding.level == "error"] == ["role"]
        assert "1 replica" in str(writer.purge(ANA).remains)
        reader.close()
        writer.close()


def test_sentinels_lead_to_the_new_master(has_redis: None) -> None:
    with RedisServer(password="data") as master:
        options = (f"replicaof 127.0.0.1 {master.port}", "masterauth data")
        watch = [
            f"sentinel monitor main 127.0.0.1 {master.port} 1",
            "sentinel auth-pass main data",
            "sentinel down-after-milliseconds main 300",
            "sentinel failover-timeout main 2000",
        ]
        with RedisServer(*options, password="data") as replica, RedisServer(sentinel=watch) as sentinel:
            records = opened(f"redis+sentinel://:data@127.0.0.1:{sentinel.port}/main", QUICK)
            [before] = add(records, ANA, "before")
            with replica.client() as client, sentinel.client() as watcher:
                wait_until(lambda: client.hlen("memstore:o:YW5h:records") == 1, "replication")
                wait_until(lambda: int(watcher.sentinel_master("main")["num-slaves"]) == 1, "the Sentinel's discovery")
            master.kill()
            wait_until(lambda: is_added(records, "after"), "a failover")
            assert texts_of(records, ANA) == ["before", "after"]
            assert records.get_many(ANA, [before.id]) == [before]
            records.close()


def test_sentinels_and_servers_with_tls(certificates: Certificates) -> None:
    with RedisServer("tls-replication yes", certificates=certificates) as master:
        watch = [f"sentinel monitor main 127.0.0.1 {master.port} 1", "tls-replication yes"]
        with RedisServer(sentinel=watch, certificates=certificates) as sentinel:
            url = f"rediss+sentinel://127.0.0.1:{sentinel.port}/main/1?ca={certificates.ca}"
            records = opened(url)
            add(records, ANA, "through both")
            assert texts_of(records, ANA) == ["through both"]
            with master.client() as client:
                assert client.info("keyspace")["db1"]["keys"] > 0
            records.close()


def is_added(records: RedisRecords, text: str) -> bool:
    try:
        add(records, ANA, text)
    except (StoreUnreachable, StoreReadOnly):
        return False
    return True
