"""Sessions as a part of a store: opened when needed, purged with their owner, left out of an export."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bigrams import BigramEmbedder
from cli_runs import CommandLine
from redis_server import RedisServer
from session_entries import ANA, BO, ONE, SECRET, SECRET_BYTES, TWO, begun, entry, header, segment, tokens

from memstore import MemStore, MemStoreSettings, NewFact, StoreBusy, StoreClosed, StoreDamaged
from memstore.session_log import SessionLog, open_session_log
from memstore.types import ChangeKind


@pytest.fixture
def cli(location: str) -> CommandLine:
    return CommandLine(location, embedder=BigramEmbedder())


@pytest.fixture
def log(location: str) -> Iterator[SessionLog]:
    """As another process has it open."""
    opened = open_session_log(location, MemStoreSettings())
    yield opened
    opened.close()


# ---- the store ----


def test_a_store_opens_its_token_log_once_and_closes_it(location: str) -> None:
    store, start, found = MemStore(location, embedder=BigramEmbedder()), threading.Barrier(8), list[SessionLog]()

    def ask() -> None:
        start.wait()
        found.append(store.session_log)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(one) for one in found}) == 1
    begun(store.session_log)
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        found[0].headers()
    with pytest.raises(StoreClosed):
        _ = store.session_log
    with MemStore(location, embedder=BigramEmbedder()) as again:
        assert again.session_log.headers() == [header()]


def test_a_store_without_sessions_begins_no_log(tmp_path: Path) -> None:
    with MemStore(tmp_path, embedder=BigramEmbedder()) as store:
        store.add("ana", "a fact")
        assert store.purge("ana").sessions == 0
        assert not list(tmp_path.glob("sessions*"))
        assert store.session_log.headers() == []
        assert list(tmp_path.glob("sessions.sqlite3"))


def test_a_purge_removes_the_sessions_of_its_owner(store: MemStore, log: SessionLog) -> None:
    store.add_many("ana", [NewFact("one"), NewFact("two")])
    theirs = store.add("bo", "theirs")
    begun(log, ONE, ANA, *SECRET)
    log.append(ANA, ONE, entry(2, segment(*SECRET)), used_at=1001.0)
    begun(log, TWO, BO)
    receipt = store.purge("ana")
    assert (receipt.sessions, receipt.records.facts, receipt.records.remains) == (1, 2, None)
    assert (log.headers(), log.count(ANA)) == ([header(TWO, BO)], 0)
    assert store.list("bo") == [theirs]
    again = store.purge("ana")
    assert (again.sessions, again.records.epoch) == (0, 2)
    assert store.purge("bo").sessions == 1


def test_a_purge_removes_sessions_where_there_are_no_facts(store: MemStore, log: SessionLog) -> None:
    begun(log)
    receipt = store.purge("ana")
    assert (receipt.sessions, receipt.records.facts, receipt.records.epoch) == (1, 0, 1)
    assert log.headers() == []
    # By this other processes know of it.
    assert [change.kind for change in store.changes(0)] == [ChangeKind.PURGED]


def test_a_purge_leaves_no_byte_in_the_directory(tmp_path: Path) -> None:
    with MemStore(tmp_path, embedder=BigramEmbedder()) as store:
        store.add("ana", "a fact")
        begun(store.session_log, ONE, ANA, *SECRET)
        assert [path.name for path in tmp_path.iterdir() if SECRET_BYTES in path.read_bytes()] != []
        assert store.purge("ana").sessions == 1
        assert [path.name for path in tmp_path.iterdir() if SECRET_BYTES in path.read_bytes()] == []


def test_a_purge_whose_sessions_cannot_be_removed_removes_nothing(tmp_path: Path) -> None:
    import sqlite3

    settings = MemStoreSettings(busy_timeout_s=0.1)
    with MemStore(tmp_path, embedder=BigramEmbedder(), settings=settings) as store:
        fact = store.add("ana", "a fact")
        begun(store.session_log)
        other = sqlite3.connect(tmp_path / "sessions.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy):
            store.purge("ana")
        assert (store.list("ana"), store.session_log.headers()) == ([fact], [header()])
        other.close()
        assert store.purge("ana").sessions == 1
    (tmp_path / "sessions.sqlite3").write_bytes(b"")
    for name in ("sessions.sqlite3-wal", "sessions.sqlite3-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with MemStore(tmp_path, embedder=BigramEmbedder(), settings=settings) as store:
        store.add("ana", "another fact")
        with pytest.raises(StoreDamaged, match=r"sessions\.sqlite3"):
            store.purge("ana")
        assert store.count("ana") == 1, "the facts do not need the sessions"


def test_a_store_shows_no_password_of_its_location(has_redis: None) -> None:
    with RedisServer(password="hunter2") as server:
        with MemStore(f"redis://:hunter2@127.0.0.1:{server.port}", embedder=BigramEmbedder()) as store:
            begun(store.session_log)
            shown = [repr(part) for part in (store, vars(store), vars(store._sessions), vars(store.session_log))]
        assert "hunter2" not in "".join(shown)


# ---- the command line ----


def test_the_command_line_counts_the_sessions_that_a_purge_removes(
    cli: CommandLine, store: MemStore, log: SessionLog
) -> None:
    store.add("ana", "a fact")
    for name in (ONE, TWO):
        begun(log, name)
    would = cli("owners", "purge", "ana", "--dry-run", "--json").json
    assert (would["purged"], would["current"], would["sessions"], log.count(ANA)) == (False, 1, 2, 2)
    said = cli("owners", "purge", "ana", "--dry-run").stdout
    assert said == "would remove 1 facts, 0 superseded ones, 0 former versions, 2 sessions and all KV of ana\n"
    receipt = cli("owners", "purge", "ana", "--yes", "--json").json
    assert (receipt["sessions"], receipt["records"]["facts"]) == (2, 1)
    begun(log)
    said = cli("owners", "purge", "ana", "--yes").stdout
    assert said == (
        "removed 0 facts, 0 former versions, 0 vectors, 1 entries of the feed, 0 KV encodings and 1 sessions of ana\n"
    )
    assert log.headers() == []


def test_an_owner_with_sessions_alone_can_be_purged(cli: CommandLine, store: MemStore, log: SessionLog) -> None:
    begun(log, TWO, BO)
    for options in (["--yes"], ["--dry-run"]):
        nobody = cli("owners", "purge", "ana", *options)
        assert (nobody.code, nobody.stdout) == (3, "")
    begun(log)
    assert cli("owners", "list", "--json").json == []
    assert cli("owners", "stats", "ana").code == 3
    assert cli("owners", "purge", "ana", "--yes", "--json").json["sessions"] == 1
    assert log.headers() == [header(TWO, BO)]


def test_a_store_with_sessions_is_sound_and_exports_facts_alone(
    cli: CommandLine, store: MemStore, log: SessionLog, tmp_path: Path
) -> None:
    store.add("ana", "a fact")
    begun(log)
    assert cli("verify", "--json").json["is_sound"]
    assert cli("export", "--output", str(tmp_path / "facts.jsonl")).code == 0
    exported = (tmp_path / "facts.jsonl").read_text()
    assert "a fact" in exported
    assert "model-a" not in exported
    assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]]]
