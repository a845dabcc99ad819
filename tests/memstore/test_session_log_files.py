"""A token log in a directory: damage, full disks, kills, and what a purge leaves behind."""

import multiprocessing
import random
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import xxhash
from redis_server import RedisServer
from session_entries import ANA, BO, ONE, SECRET, SECRET_BYTES, TWO, begun, entry, header, segment, tokens

from memstore import MemStoreSettings, StoreBusy, StoreDamaged, StoreError, StoreFull, StoreTooNew
from memstore.errors import SessionMoved
from memstore.session_log import LogEntry, SessionId, SessionLog, SQLiteSessionLog, open_session_log
from memstore.session_log.sqlite import FILE_NAME
from memstore.types import OwnerId

KILLS = 20
FLIPS = 100
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["memstore", "pytest", "redis"])
OPEN = """
from pathlib import Path
from memstore import StoreError
from memstore.session_log import SQLiteSessionLog
from memstore.types import OwnerId
try:
    log = SQLiteSessionLog(Path({!r}))
    {}
except StoreError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SQLiteSessionLog]:
    opened = SQLiteSessionLog(tmp_path)
    yield opened
    opened.close()


def holding(directory: Path, data: bytes) -> list[str]:
    """Names of the files that hold `data`."""
    return [path.name for path in directory.rglob("*") if path.is_file() and data in path.read_bytes()]


def change(path: Path, statement: str, *arguments: object) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement, arguments)


# ---- the file ----


def test_an_entry_is_stored_as_it_is_described(log: SQLiteSessionLog, tmp_path: Path) -> None:
    log.create(header(), entry(1))
    log.append(ANA, ONE, LogEntry(2, 1, 0, (segment(7, 2**31 - 1, kind="prefix"), segment(), segment(5))), used_at=2.5)
    payload = (
        struct.pack("<qqqdq", 2, 1, 0, 2.5, 3)
        + struct.pack("<6I", 0, 2, 1, 0, 1, 1)
        + struct.pack("<3i", 7, 2**31 - 1, 5)
    )
    digest = xxhash.xxh3_64_digest(struct.pack("<q", 4) + b"5c0e" + payload)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        assert db.execute("SELECT entry FROM entries WHERE version = 2").fetchall() == [(digest + payload,)]
        assert db.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with log._db.exclusive() as db:
        assert [db.execute(f"PRAGMA {name}").fetchall() for name in ("synchronous", "secure_delete")] == [
            [(2,)],
            [(1,)],
        ]


def test_a_newer_schema_is_refused(log: SQLiteSessionLog, tmp_path: Path) -> None:
    log.close()
    change(log.path, "UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    with pytest.raises(StoreTooNew, match="schema version 2"):
        SQLiteSessionLog(tmp_path)


@pytest.mark.parametrize(
    "tables",
    [
        "CREATE TABLE bookmarks (url TEXT)",
        "CREATE TABLE meta (key TEXT, value TEXT); INSERT INTO meta VALUES ('schema_version', '1')",
        "CREATE TABLE meta (key TEXT, value TEXT); INSERT INTO meta VALUES ('schema_version', 'x')",
    ],
)
def test_a_database_of_another_program_is_refused_and_left(tmp_path: Path, tables: str) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        db.executescript(tables)
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(StoreDamaged):
        SQLiteSessionLog(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to be one" * 40])
def test_what_is_no_database_is_refused_and_left(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(StoreDamaged):
        SQLiteSessionLog(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == content


def test_no_permission(read_only_directory: Path, run_unprivileged: Callable[[str], str]) -> None:
    for path in (read_only_directory, read_only_directory / "inside"):
        assert run_unprivileged(OPEN.format(str(path), "")) == "StoreReadOnly"
    read_only_directory.chmod(0o777)
    SQLiteSessionLog(read_only_directory).close()
    (read_only_directory / FILE_NAME).chmod(0o444)
    assert run_unprivileged(OPEN.format(str(read_only_directory), "log.purge(OwnerId('ana'))")) == "StoreReadOnly"


def test_a_full_disk_keeps_what_there_is(log: SQLiteSessionLog) -> None:
    begun(log)
    with log._db.exclusive() as db:
        [(pages,)] = db.execute("PRAGMA page_count").fetchall()
        # SQLite's own quota: the same SQLITE_FULL as from a full disk.
        db.execute(f"PRAGMA max_page_count = {pages + 3}").fetchall()
    with pytest.raises(StoreFull, match="free some"):
        log.append(ANA, ONE, entry(2, segment(*range(100_000))), used_at=1001.0)
    with pytest.raises(StoreFull):
        log.create(header(TWO), entry(1, segment(*range(100_000))))
    assert (log.headers(), tokens(log.entries(ANA, ONE))) == ([header()], [[[1, 2, 3]]])
    with log._db.exclusive() as db:
        db.execute("PRAGMA max_page_count = 100000").fetchall()
    log.append(ANA, ONE, entry(2, segment(*range(100_000))), used_at=1001.0)
    assert tokens(log.entries(ANA, ONE))[1] == [list(range(100_000))]


# ---- purge ----


def test_a_purge_leaves_no_byte_of_the_tokens(log: SQLiteSessionLog, tmp_path: Path) -> None:
    names = [SessionId(f"secret-id-{number}") for number in range(20)]
    for number, name in enumerate(names):
        log.create(header(name), entry(1, segment(*SECRET, kind="prefix")))
        log.append(ANA, name, entry(2, segment(*(SECRET * 3000))), used_at=1001.0)
        if number % 2:
            log.compact(ANA, name, LogEntry(2, 0, 0, (segment(*SECRET), segment(*SECRET))))
    begun(log, TWO, BO, *reversed(SECRET))
    # What went before the purge is in the files too.
    assert log.delete(ANA, names[0])
    assert holding(tmp_path, SECRET_BYTES) != []
    assert log.purge(ANA) == 19
    assert holding(tmp_path, SECRET_BYTES) == []
    assert holding(tmp_path, b"secret-id-") == []
    assert (tmp_path / f"{FILE_NAME}-wal").stat().st_size == 0
    kept = b"".join(token.to_bytes(4, "little") for token in reversed(SECRET))
    assert holding(tmp_path, kept) == [FILE_NAME]
    assert tokens(log.entries(BO, TWO)) == [[list(reversed(SECRET))]]


def test_a_purge_says_what_keeps_it_from_the_files(tmp_path: Path) -> None:
    log = SQLiteSessionLog(tmp_path, busy_timeout_s=0.1)
    begun(log, ONE, ANA, *SECRET)
    with closing(sqlite3.connect(log.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sessions").fetchall()
        with pytest.raises(StoreBusy, match="repeat the purge"):
            log.purge(ANA)
        assert log.headers() == []
        assert holding(tmp_path, SECRET_BYTES) != []
    assert log.purge(ANA) == 0
    assert holding(tmp_path, SECRET_BYTES) == []
    log.close()


# ---- damage ----


def filled(log: SessionLog) -> None:
    for name, owner in ((ONE, ANA), (TWO, BO)):
        begun(log, name, owner)
        log.append(owner, name, entry(2, segment(*range(200)), segment()), used_at=1001.0)
        log.append(owner, name, entry(3, segment(7, 8), base=1, keep=1), used_at=1002.0)


def read(log: SessionLog) -> list[object]:
    """All that is read of a log, each part None where it is refused as damaged."""
    found: list[object] = []
    for call in (
        lambda: log.headers(),
        lambda: log.header(ONE),
        lambda: log.entries(ANA, ONE),
        lambda: log.entries(BO, TWO),
    ):
        try:
            found.append(call())
        except StoreDamaged:
            found.append(None)
    return found


def flipped(chance: random.Random, data: bytes) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def test_flipped_bits_are_found_in_sqlite(log: SQLiteSessionLog) -> None:
    filled(log)
    sound, chance = read(log), random.Random(11)
    assert None not in sound
    cells = [("sessions", "number", column) for column in ("header", "used")] + [("entries", "rowid", "entry")] * 3
    for _ in range(FLIPS):
        table, key, column = chance.choice(cells)
        rows = log._db.read(f"SELECT {key}, {column} FROM {table}")
        row, data = chance.choice(rows)
        change(log.path, f"UPDATE {table} SET {column} = ? WHERE {key} = ?", flipped(chance, data), row)
        found = read(log)
        assert None in found
        assert all(part in (None, whole) for part, whole in zip(found, sound, strict=True))
        change(log.path, f"UPDATE {table} SET {column} = ? WHERE {key} = ?", data, row)
    assert read(log) == sound


def test_flipped_bits_are_found_in_redis(redis_server: RedisServer, redis_url: str) -> None:
    log = open_session_log(redis_url, MemStoreSettings())
    filled(log)
    sound, chance = read(log), random.Random(12)
    assert None not in sound
    with redis_server.client() as client:
        keys = sorted([*client.keys("memstore:session:*"), *client.keys("memstore:session-log:*")])
        assert len(keys) == 4
        for _ in range(FLIPS):
            key = chance.choice(keys)
            name, data = chance.choice(sorted(client.hgetall(key).items()))
            client.hset(key, name, flipped(chance, data))
            found = read(log)
            assert None in found
            assert all(part in (None, whole) for part, whole in zip(found, sound, strict=True))
            client.hset(key, name, data)
    assert read(log) == sound
    log.close()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM entries WHERE version = 1",
        "DELETE FROM entries WHERE version = 2",
        "DELETE FROM entries WHERE version = 3",
        "DELETE FROM entries",
        "UPDATE entries SET entry = x'' WHERE version = 2",
        "UPDATE entries SET entry = substr(entry, 1, length(entry) - 4) WHERE version = 2",
        "UPDATE sessions SET last = 2",
        "UPDATE sessions SET last = 9223372036854775807",
        "UPDATE sessions SET first = 3",
        "UPDATE entries SET entry = (SELECT entry FROM entries e WHERE version = 3 AND e.session = entries.session)",
        "UPDATE entries SET session = 3 - session, version = version + 10",
    ],
)
def test_a_log_with_other_entries_than_were_written_is_refused(log: SQLiteSessionLog, statement: str) -> None:
    filled(log)
    change(log.path, statement)
    with pytest.raises(StoreDamaged, match=ONE):
        log.entries(ANA, ONE)
    assert log.header(ONE) == header(used_at=1002.0)
    assert log.delete(ANA, ONE)
    assert log.purge(BO) == 1
    assert log._db.read("SELECT count(*) FROM sessions") == [(0,)]


@pytest.mark.parametrize(
    ("statement", "is_header_lost"),
    [
        ("UPDATE sessions SET owner = 'carl' WHERE owner = 'ana'", True),
        ("UPDATE sessions SET id = '5c0f' WHERE id = '5c0e'", False),
        ("UPDATE sessions SET header = (SELECT s.header FROM sessions s WHERE s.id = '77aa')", True),
        ("UPDATE sessions SET used = x'39393939' WHERE id = '5c0e'", True),
    ],
)
def test_a_header_in_the_place_of_another_is_refused(
    log: SQLiteSessionLog, statement: str, is_header_lost: bool
) -> None:
    filled(log)
    change(log.path, statement)
    with pytest.raises(StoreDamaged):
        log.headers()
    if is_header_lost:
        with pytest.raises(StoreDamaged, match=ONE):
            log.header(ONE)
    # Nobody takes this for a time that another one is later than.
    log.touch({ONE: 5e9})
    with pytest.raises(StoreDamaged):
        log.headers()


# ---- processes ----


def append_without_end(directory: Path, life: int, pipe: Connection) -> None:
    """Append to one session, and compact it now and then; report each version that is acknowledged."""
    log = SQLiteSessionLog(directory)
    version = log.entries(ANA, ONE)[-1].version
    chance = random.Random(life)
    while True:
        version += 1
        log.append(ANA, ONE, LogEntry(version, 0, 0, (segment(*ids_of(version)),)), used_at=1000.0 + version)
        pipe.send(version)
        if chance.random() < 0.1:
            log.compact(ANA, ONE, LogEntry(version, 0, 0, (segment(*ids_of(version)),)))


def ids_of(version: int) -> list[int]:
    return np.random.default_rng(version).integers(0, 2**31, size=50 + version % 3000).tolist()


def test_what_was_acknowledged_survives_the_death_of_its_writer(tmp_path: Path) -> None:
    chance = random.Random(3)
    with closing(SQLiteSessionLog(tmp_path)) as log:
        begun(log, ONE, ANA, *ids_of(1))
    acknowledged = 1
    for life in range(KILLS):
        pipe, theirs = FORKSERVER.Pipe(duplex=False)
        process = FORKSERVER.Process(target=append_without_end, args=(tmp_path, life, theirs))
        process.start()
        theirs.close()
        for _ in range(chance.randint(1, 12)):
            acknowledged = pipe.recv()
        # A moment within the next writes.
        time.sleep(chance.uniform(0, 0.003))
        process.kill()
        while True:
            try:
                acknowledged = pipe.recv()
            except EOFError:
                break
        process.join()
        process.close()
        pipe.close()
        with closing(SQLiteSessionLog(tmp_path)) as log:
            entries = log.entries(ANA, ONE)
            # The one after the last that was reported may be there as well, whole.
            assert entries[-1].version in (acknowledged, acknowledged + 1)
            assert tokens(entries) == [[ids_of(one.version)] for one in entries]
            assert log.headers() == [header(used_at=1000.0 + (entries[-1].version if entries[-1].version > 1 else 0))]
            with log._db.exclusive() as db:
                assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert acknowledged > KILLS


def append_all(location: str, writer: int, pipe: Connection) -> None:
    """Append as often as told, to the version that is the last then; report what became of it."""
    log = open_session_log(location, MemStoreSettings())
    pipe.send("ready")
    while (version := pipe.recv()) is not None:
        try:
            log.append(ANA, ONE, entry(version, segment(writer, version)), used_at=1000.0 + writer)
            pipe.send(True)
        except SessionMoved:
            pipe.send(False)
    log.close()


def test_of_processes_that_append_at_once_exactly_one_wins(location: str) -> None:
    with closing(open_session_log(location, MemStoreSettings())) as log:
        begun(log)
        pipes, processes = [], []
        for writer in range(2):
            ours, theirs = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=append_all, args=(location, writer, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        assert [pipe.recv() for pipe in pipes] == ["ready", "ready"]
        winners = []
        for version in range(2, 52):
            for pipe in pipes:
                pipe.send(version)
            outcomes = [pipe.recv() for pipe in pipes]
            assert sorted(outcomes) == [False, True]
            winners.append(outcomes.index(True))
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()
            process.close()
            pipe.close()
        assert tokens(log.entries(ANA, ONE))[1:] == [[[who, version]] for version, who in enumerate(winners, start=2)]


def test_two_may_begin_the_same_log_at_once(tmp_path: Path) -> None:
    pipes, processes = [], []
    for number in range(4):
        ours, theirs = FORKSERVER.Pipe()
        processes.append(FORKSERVER.Process(target=begin, args=(tmp_path / "new", number, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    assert [pipe.recv() for pipe in pipes] == ["kept"] * 4
    for process, pipe in zip(processes, pipes, strict=True):
        process.join()
        process.close()
        pipe.close()
    with closing(SQLiteSessionLog(tmp_path / "new")) as log:
        assert [one.id for one in log.headers()] == ["0", "1", "2", "3"]


def begin(directory: Path, number: int, pipe: Connection) -> None:
    try:
        with closing(SQLiteSessionLog(directory)) as log:
            begun(log, SessionId(str(number)), OwnerId(f"owner {number}"))
        pipe.send("kept")
    except StoreError as error:
        pipe.send(repr(error))
