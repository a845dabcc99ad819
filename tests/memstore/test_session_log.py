"""The contract of a token log, on every backend."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from session_entries import ANA, BO, ONE, TWO, begun, entry, header, segment, tokens

from memstore import MemStoreSettings, StoreClosed
from memstore.errors import SessionExists, SessionGone, SessionMoved
from memstore.session_log import (
    LogEntry,
    Segment,
    SessionHeader,
    SessionId,
    SessionLog,
    SQLiteSessionLog,
    VolatileSessionLog,
    open_session_log,
)
from memstore.types import OwnerId

OWNERS = ["a-b", "a:b", "a/b", "a|b", "a*", "*", "a", "a b", " a", "A", "é", "e\u0301", "🔑", "x" * 512, "sessions"]
FULL = SessionHeader(
    id=SessionId("9f-full"),
    owner=OwnerId("Zoë 🔑"),
    model="fingerprint:of:a model",
    created_at=1_790_000_000.125,
    used_at=1_790_000_012.0000002,
    ttl_s=3600.5,
    max_age_s=86_400.0,
    reserve_tokens=4096,
    priority=-100,
    window_tokens=2048,
    on_full="demote",
    is_pinned=False,
    parent=SessionId("77aa"),
    parent_version=17,
)


@pytest.fixture(params=["volatile", "sqlite", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Where a token log may be."""
    if request.param == "volatile":
        return None
    return str(tmp_path / "store") if request.param == "sqlite" else request.getfixturevalue("redis_url")


@pytest.fixture
def log(place: str | None) -> Iterator[SessionLog]:
    opened = open_session_log(place, MemStoreSettings())
    yield opened
    opened.close()


# ---- what goes in comes out ----


@pytest.mark.parametrize("kept", [FULL, header()], ids=["all", "fewest"])
def test_every_field_of_a_header_is_kept(log: SessionLog, kept: SessionHeader) -> None:
    log.create(kept, entry(1))
    found = log.header(kept.id)
    assert found is not None
    for spec in fields(SessionHeader):
        assert getattr(found, spec.name) == getattr(kept, spec.name), spec.name
    assert (log.headers(), log.count(kept.owner)) == ([kept], 1)


def test_a_new_header_takes_the_place_of_the_old_one(log: SessionLog) -> None:
    begun(log)
    later = replace(FULL, id=ONE, owner=ANA, created_at=1000.0)
    log.update(later)
    assert log.header(ONE) == later
    log.update(replace(later, used_at=5.0, priority=7))
    assert log.header(ONE) == replace(later, priority=7), "used_at goes back for nobody"
    assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]]]


def test_entries_are_kept_to_the_token(log: SessionLog) -> None:
    many = np.random.default_rng(7).integers(0, 2**31, size=100_000, dtype=np.int64).astype(np.int32)
    written = [
        entry(1, segment(1, kind="prefix"), segment(kind="prefix")),
        LogEntry(2, 1, 2, (Segment(many, "data"),)),
        LogEntry(3, 2, 1, ()),
        LogEntry(4, 1, 2, (segment(0, 2**31 - 1, 2**31 - 2), segment(), segment(5, kind="prefix"))),
        LogEntry(5, 0, 0, ()),
    ]
    log.create(header(), written[0])
    for one in written[1:]:
        log.append(ANA, ONE, one, used_at=1000.0)
    found = log.entries(ANA, ONE)
    assert list(found) == written
    assert [(one.version, one.base, one.keep) for one in found] == [
        (1, 0, 0),
        (2, 1, 2),
        (3, 2, 1),
        (4, 1, 2),
        (5, 0, 0),
    ]
    assert found[1].segments[0].token_ids.tolist() == many.tolist()
    assert [part.kind for part in found[3].segments] == ["data", "data", "prefix"]
    assert tokens(found[2:]) == [[], [[0, 2147483647, 2147483646], [], [5]], []]
    assert {part.token_ids.dtype for one in found for part in one.segments} == {np.dtype(np.int32)}


def test_what_was_written_does_not_follow_the_array_it_came_from(log: SessionLog) -> None:
    ids = np.array([1, 2, 3], dtype=np.int32)
    log.create(header(), LogEntry(1, 0, 0, (Segment(ids, "prefix"),)))
    ids[:] = 9
    [[[part]]] = [[one.segments for one in log.entries(ANA, ONE)]]
    assert part.token_ids.tolist() == [1, 2, 3]
    assert not part.token_ids.flags.writeable


def test_token_ids_that_are_too_large_are_not_cut_off(log: SessionLog) -> None:
    large = Segment(np.array([2**32 + 5]), "data")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="beyond 32 bits"):
        log.create(header(), LogEntry(1, 0, 0, (large,)))
    assert log.header(ONE) is None


# ---- whose ----


def test_each_owner_has_their_own_alone(log: SessionLog) -> None:
    names = {OwnerId(owner): SessionId(f"{number:02}") for number, owner in enumerate(OWNERS)}
    for number, (owner, name) in enumerate(names.items()):
        begun(log, name, owner, number)
    for number, (owner, name) in enumerate(names.items()):
        assert tokens(log.entries(owner, name)) == [[[number]]]
        assert log.count(owner) == 1
        for other in names.keys() - {owner}:
            with pytest.raises(SessionGone):
                log.entries(other, name)
            assert not log.delete(other, name)
    assert {one.owner: one.id for one in log.headers()} == names
    for gone, (owner, name) in enumerate(names.items(), start=1):
        assert log.purge(owner) == 1
        assert log.header(name) is None
        assert len(log.headers()) == len(names) - gone


def calls_of(log: SessionLog, owner: OwnerId, session_id: SessionId) -> list[Callable[[], object]]:
    return [
        lambda: log.append(owner, session_id, entry(2), used_at=1000.0),
        lambda: log.update(header(session_id, owner)),
        lambda: log.compact(owner, session_id, entry(1)),
        lambda: log.entries(owner, session_id),
    ]


@pytest.mark.parametrize(
    ("owner", "session_id"), [("bo", "5c0e"), ("ana", "5c0"), ("ana", ""), ("ana", "\ud800"), ("an", "a5c0e")]
)
def test_a_session_of_another_is_as_none(log: SessionLog, owner: str, session_id: str) -> None:
    begun(log)
    said = set()
    for call in calls_of(log, OwnerId(owner), SessionId(session_id)):
        with pytest.raises(SessionGone) as caught:
            call()
        said.add(str(caught.value))
    assert said == {f"this owner has no session {session_id!r}"}
    assert not log.delete(OwnerId(owner), SessionId(session_id))
    assert log.header(SessionId(session_id)) == (header() if session_id == ONE else None)
    assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]]]


@pytest.mark.parametrize("owner", [ANA, BO])
def test_an_id_is_taken_once(log: SessionLog, owner: OwnerId) -> None:
    first = begun(log)
    with pytest.raises(SessionExists):
        log.create(header(ONE, owner), entry(1, segment(9)))
    assert log.header(ONE) == first
    assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]]]
    assert (log.count(ANA), log.count(BO)) == (1, 0)


# ---- versions ----


@pytest.mark.parametrize("version", [1, 2, 4, 99])
def test_only_the_next_version_is_added(log: SessionLog, version: int) -> None:
    begun(log)
    log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
    with pytest.raises(SessionMoved, match="version 2"):
        log.append(ANA, ONE, LogEntry(version, 0, 0, (segment(5),)), used_at=1002.0)
    assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]], [[4]]]
    assert log.header(ONE) == header(used_at=1001.0)


def test_the_same_call_again_does_nothing_again(log: SessionLog) -> None:
    first = begun(log)
    begun(log)
    for _ in range(2):
        log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
    log.touch({ONE: 1005.0})
    log.create(first, entry(1, segment(1, 2, 3, kind="prefix")))
    log.append(ANA, ONE, entry(3, segment(5)), used_at=1006.0)
    # Another writer has come in between.
    log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
    assert tokens(log.entries(ANA, ONE)) == [[[1, 2, 3]], [[4]], [[5]]]
    for _ in range(2):
        log.compact(ANA, ONE, LogEntry(3, 0, 0, (segment(5),)))
        log.update(header(used_at=1006.0))
    assert tokens(log.entries(ANA, ONE)) == [[[5]]]
    assert log.header(ONE) == header(used_at=1006.0)


def test_the_same_tokens_of_another_writer_are_another_entry(log: SessionLog) -> None:
    begun(log)
    log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
    with pytest.raises(SessionMoved):
        log.append(ANA, ONE, entry(2, segment(4)), used_at=1002.0)


@pytest.mark.parametrize("how", [{"kind": "prefix"}, {"ids": (4, 0)}, {"ids": ()}, {"keep": 0}])
def test_an_entry_that_differs_in_anything_is_another(log: SessionLog, how: dict) -> None:
    begun(log)
    log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
    other = entry(2, segment(*how.get("ids", (4,)), kind=how.get("kind", "data")), keep=how.get("keep"))
    with pytest.raises(SessionMoved):
        log.append(ANA, ONE, other, used_at=1001.0)


def test_compacting_leaves_the_last_version_alone(log: SessionLog) -> None:
    begun(log)
    for version in (2, 3, 4):
        log.append(ANA, ONE, entry(version, segment(version)), used_at=1000.0 + version)
    whole = (segment(1, 2, 3, kind="prefix"), segment(4))
    for version in (3, 5):
        with pytest.raises(SessionMoved, match="version 4"):
            log.compact(ANA, ONE, LogEntry(version, 0, 0, whole))
    assert len(log.entries(ANA, ONE)) == 4
    log.compact(ANA, ONE, LogEntry(4, 0, 0, whole))
    assert log.entries(ANA, ONE) == [LogEntry(4, 0, 0, whole)]
    assert log.header(ONE) == header(used_at=1004.0)
    # One who has not noticed goes back to what is no longer there.
    with pytest.raises(SessionMoved):
        log.append(ANA, ONE, entry(5, base=2), used_at=1010.0)
    log.append(ANA, ONE, entry(5, segment(5), base=4, keep=2), used_at=1010.0)
    assert [one.version for one in log.entries(ANA, ONE)] == [4, 5]


# ---- times ----


def test_when_a_session_was_used_never_goes_back(log: SessionLog) -> None:
    begun(log, ONE)
    begun(log, TWO, BO)
    steps: list[tuple[dict[str, float], tuple[float, float]]] = [
        ({ONE: 1002.5, TWO: 999.0, "none": 5000.0}, (1002.5, 1000.0)),
        ({ONE: 1002.4999, TWO: 1_790_000_000.0000002}, (1002.5, 1_790_000_000.0000002)),
        ({TWO: 1e9, "\ud800": 1.0}, (1002.5, 1_790_000_000.0000002)),
        ({}, (1002.5, 1_790_000_000.0000002)),
        ({ONE: 1e17, TWO: 1e16}, (1e17, 1e16)),
    ]
    for used, expected in steps:
        log.touch({SessionId(name): at for name, at in used.items()})
        assert tuple(one.used_at for one in log.headers()) == expected
    log.append(ANA, ONE, entry(2), used_at=1.0)
    assert log.header(ONE) == header(used_at=1e17)
    assert len(log.headers()) == 2


def test_many_are_touched_at_once(log: SessionLog) -> None:
    names = [SessionId(f"{number:04}") for number in range(1203)]
    for name in names:
        log.create(header(name), entry(1))
    log.touch({name: 1001.0 + number for number, name in enumerate(names)})
    assert [one.used_at for one in log.headers(limit=5000)] == [1001.0 + number for number in range(1203)]


# ---- pages ----


def test_headers_come_in_pages_by_id(log: SessionLog) -> None:
    names = [
        "",
        "0",
        "00",
        "A",
        "a",
        "a-",
        "a:",
        "aa",
        "b",
        "z",
        "é",
        "鍵",
        "\ue000",
        "🔑",
        *(f"n{i:04}" for i in range(1100)),
    ]
    for name in reversed(names):
        log.create(header(SessionId(name)), entry(1))
    expected = sorted(names)
    for size in (1, 7, 600):
        found: list[str] = []
        while page := log.headers(after=SessionId(found[-1]) if found else None, limit=size if found else 3):
            found += [one.id for one in page]
            if size == 1 and len(found) > 30:
                break
        assert found == expected[: len(found)]
        assert size == 1 or len(found) == len(expected)
    assert [one.id for one in log.headers()] == expected[:1000]
    assert [one.id for one in log.headers(after=SessionId("aZ"), limit=2)] == ["aa", "b"]
    assert log.headers(after=SessionId("\U0010ffff")) == log.headers(limit=0) == []


# ---- removing ----


def test_what_is_deleted_is_gone_and_its_id_free(log: SessionLog) -> None:
    begun(log, ONE)
    log.append(ANA, ONE, entry(2, segment(4)), used_at=1001.0)
    begun(log, TWO)
    assert log.delete(ANA, ONE)
    assert not log.delete(ANA, ONE)
    assert (log.header(ONE), log.count(ANA)) == (None, 1)
    for call in calls_of(log, ANA, ONE):
        with pytest.raises(SessionGone):
            call()
    log.touch({ONE: 2000.0})
    assert [one.id for one in log.headers()] == [TWO]
    begun(log, ONE, BO, 8)
    assert tokens(log.entries(BO, ONE)) == [[[8]]]
    assert tokens(log.entries(ANA, TWO)) == [[[1, 2, 3]]]


def test_a_purge_leaves_the_others_alone(log: SessionLog) -> None:
    for number in range(30):
        begun(log, SessionId(f"a{number}"))
        begun(log, SessionId(f"b{number}"), BO, number)
    theirs = [one for one in log.headers() if one.owner == BO]
    assert log.purge(ANA) == 30
    assert log.purge(ANA) == log.purge(OwnerId("nobody")) == 0
    assert (log.headers(), log.count(ANA), log.count(BO)) == (theirs, 0, 30)
    assert [tokens(log.entries(BO, SessionId(f"b{number}"))) for number in range(30)] == [[[[n]]] for n in range(30)]


# ---- many at once ----


def test_of_threads_that_append_at_once_exactly_one_wins(log: SessionLog) -> None:
    begun(log)
    for version in range(2, 22):
        start, won = threading.Barrier(4), list[int]()

        def append(writer: int, version: int = version, start: threading.Barrier = start, won: list = won) -> None:
            start.wait()
            try:
                log.append(ANA, ONE, entry(version, segment(writer, version)), used_at=2000.0 + writer)
            except SessionMoved:
                return
            won.append(writer)

        threads = [threading.Thread(target=append, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert tokens(log.entries(ANA, ONE))[-1] == [[won[0], version]]
    assert [one.version for one in log.entries(ANA, ONE)] == list(range(1, 22))


# ---- opening and closing ----


def test_what_was_kept_is_there_after_reopening(log: SessionLog, place: str | None) -> None:
    log.create(FULL, entry(1, segment(6)))
    log.append(FULL.owner, FULL.id, entry(2, segment(7)), used_at=FULL.used_at + 1)
    expected = log.entries(FULL.owner, FULL.id)
    log.close()
    reopened = open_session_log(place, MemStoreSettings())
    if place is None:
        assert reopened.headers() == [], "in this process alone"
    else:
        assert reopened.headers() == [replace(FULL, used_at=FULL.used_at + 1)]
        assert reopened.entries(FULL.owner, FULL.id) == expected
    reopened.close()


def test_a_closed_log_says_so(log: SessionLog) -> None:
    begun(log)
    log.close()
    log.close()
    calls = [*calls_of(log, ANA, ONE), lambda: log.header(ONE), log.headers, lambda: log.count(ANA)]
    calls += [lambda: log.create(header(TWO), entry(1)), lambda: log.touch({ONE: 2.0})]
    calls += [lambda: log.delete(ANA, ONE), lambda: log.purge(ANA)]
    for call in calls:
        with pytest.raises(StoreClosed):
            call()


def test_the_location_says_which_log_it_is(tmp_path: Path) -> None:
    settings = MemStoreSettings()
    for location, kind in (
        (None, VolatileSessionLog),
        (tmp_path, SQLiteSessionLog),
        (f"sqlite:///{tmp_path}", SQLiteSessionLog),
    ):
        opened = open_session_log(location, settings)
        assert type(opened) is kind
        opened.close()
    assert (tmp_path / "sessions.sqlite3").exists()
