"""Any order of calls to a token log that two have open, against a dict."""

import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from memstore import MemStoreSettings
from memstore.errors import SessionExists, SessionGone, SessionMoved
from memstore.session_log import LogEntry, Segment, SessionHeader, SessionId, SessionLog, open_session_log
from memstore.types import OwnerId

OWNERS = ["ana", "an", "a*", "é"]
IDS = ["5c0e", "5c0", "5c0e:", "🔑", ""]
OTHER_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(st.characters(codec="utf-8"), max_size=8),
    "ttl_s": st.none() | st.floats(0.001, 1e9),
    "max_age_s": st.none() | st.floats(0.001, 1e9),
    "reserve_tokens": st.integers(0, 2**31),
    "priority": st.integers(-100, 100),
    "window_tokens": st.none() | st.integers(1, 2**31),
    "on_full": st.sampled_from(["refuse", "demote"]),
    "is_pinned": st.booleans(),
    "parent": st.none() | st.sampled_from(IDS),
    "parent_version": st.none() | st.integers(1, 2**40),
}
owners = st.sampled_from(OWNERS).map(OwnerId)
ids = st.sampled_from(IDS).map(SessionId)
who = st.integers(0, 1)
times = st.floats(-1e10, 1e10)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda some: np.array(some, dtype=np.int32))
segments = st.lists(st.builds(Segment, token_ids, st.sampled_from(["prefix", "data"])), max_size=3).map(tuple)
others = st.fixed_dictionaries(OTHER_FIELDS)


@dataclass
class Kept:
    """What the model has of one session."""

    header: SessionHeader
    entries: dict[int, LogEntry]
    calls: dict[int, float] = field(default_factory=dict)
    """When each version was written."""

    @property
    def last(self) -> int:
        return max(self.entries)

    def num_segments(self, version: int) -> int:
        entry = self.entries[version]
        return entry.keep + len(entry.segments)

    def use(self, at: float) -> None:
        self.header = self.header.used(max(at, self.header.used_at))


class Machine(RuleBasedStateMachine):
    def __init__(self, open_log: Callable[[], SessionLog], end: Callable[[], None]) -> None:
        super().__init__()
        self.open_log, self.end = open_log, end
        self.logs = [open_log(), open_log()]
        self.kept: dict[SessionId, Kept] = {}
        self.again: Callable[[], object] = lambda: None

    def teardown(self) -> None:
        for log in self.logs:
            log.close()
        self.end()

    def of(self, owner: OwnerId, name: SessionId) -> Kept | None:
        found = self.kept.get(name)
        return found if found is not None and found.header.owner == owner else None

    def call(self, expected: type[Exception] | None, call: Callable[[], object]) -> None:
        if expected is not None:
            with pytest.raises(expected):
                call()
            return
        call()
        self.again = call

    @rule(who=who, owner=owners, name=ids, at=times, other=others, parts=segments)
    def create(
        self, who: int, owner: OwnerId, name: SessionId, at: float, other: dict[str, Any], parts: tuple[Segment, ...]
    ) -> None:
        header = SessionHeader(id=name, owner=owner, created_at=at, used_at=at, **other)
        entry = LogEntry(1, 0, 0, parts)
        kept = self.kept.get(name)
        is_again = kept is not None and (
            (kept.header.used(at), kept.entries.get(1), kept.calls.get(1)) == (header, entry, at)
        )
        expected = SessionExists if kept is not None and not is_again else None
        self.call(expected, lambda: self.logs[who].create(header, entry))
        if kept is None:
            self.kept[name] = Kept(header, {1: entry}, {1: at})

    @rule(who=who, owner=owners, name=ids, at=times, parts=segments, data=st.data())
    def append(
        self, who: int, owner: OwnerId, name: SessionId, at: float, parts: tuple[Segment, ...], data: st.DataObject
    ) -> None:
        kept, mine = self.kept.get(name), self.of(owner, name)
        last = kept.last if kept else 0
        version = last + 1 if data.draw(st.integers(0, 3)) else data.draw(st.integers(1, last + 3))
        base = data.draw(st.sampled_from([0, *(v for v in (kept.entries if kept else ()) if v < version)]))
        keep = data.draw(st.integers(0, kept.num_segments(base))) if kept and base else 0
        entry = LogEntry(version, base, keep, parts)
        if mine is None:
            expected: type[Exception] | None = SessionGone
        else:
            is_again = mine.entries.get(version) == entry and mine.calls[version] == at
            expected = None if version == last + 1 or is_again else SessionMoved
        self.call(expected, lambda: self.logs[who].append(owner, name, entry, used_at=at))
        if mine is not None and version == last + 1:
            mine.entries[version], mine.calls[version] = entry, at
            mine.use(at)

    @precondition(lambda self: any(min(kept.entries) > 1 for kept in self.kept.values()))
    @rule(who=who, at=times, data=st.data())
    def append_to_what_was_compacted(self, who: int, at: float, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, kept in self.kept.items() if min(kept.entries) > 1)))
        kept = self.kept[name]
        base = data.draw(st.integers(1, min(kept.entries) - 1))
        entry = LogEntry(kept.last + 1, base, 0, ())
        self.call(SessionMoved, lambda: self.logs[who].append(kept.header.owner, name, entry, used_at=at))

    @rule(who=who, owner=owners, name=ids, at=times, other=others)
    def update(self, who: int, owner: OwnerId, name: SessionId, at: float, other: dict[str, Any]) -> None:
        mine = self.of(owner, name)
        created_at = mine.header.created_at if mine else 0.0
        header = SessionHeader(id=name, owner=owner, created_at=created_at, used_at=at, **other)
        self.call(None if mine else SessionGone, lambda: self.logs[who].update(header))
        if mine is not None:
            mine.header = replace(header, used_at=max(at, mine.header.used_at))

    @rule(who=who, used=st.dictionaries(ids, times))
    def touch(self, who: int, used: dict[SessionId, float]) -> None:
        self.call(None, lambda: self.logs[who].touch(used))
        for name, at in used.items():
            if name in self.kept:
                self.kept[name].use(at)

    @rule(who=who, owner=owners, name=ids, parts=segments, off=st.sampled_from([0, 0, 0, -1, 1]))
    def compact(self, who: int, owner: OwnerId, name: SessionId, parts: tuple[Segment, ...], off: int) -> None:
        kept, mine = self.kept.get(name), self.of(owner, name)
        version = max(1, (kept.last if kept else 1) + off)
        entry = LogEntry(version, 0, 0, parts)
        expected = SessionGone if mine is None else None if version == mine.last else SessionMoved
        self.call(expected, lambda: self.logs[who].compact(owner, name, entry))
        if mine is not None and expected is None:
            mine.entries, mine.calls = {version: entry}, {version: 0.0}

    @rule(who=who, owner=owners, name=ids)
    def delete(self, who: int, owner: OwnerId, name: SessionId) -> None:
        assert self.logs[who].delete(owner, name) == (self.of(owner, name) is not None)
        if self.of(owner, name) is not None:
            del self.kept[name]
            self.again = lambda: None

    @rule(who=who, owner=owners)
    def purge(self, who: int, owner: OwnerId) -> None:
        mine = [name for name in self.kept if self.of(owner, name) is not None]
        assert self.logs[who].purge(owner) == len(mine)
        for name in mine:
            del self.kept[name]
            self.again = lambda: None

    @rule()
    def repeat(self) -> None:
        """The last call that succeeded, as after a reply that was lost."""
        self.again()

    @rule(who=who)
    def reopen(self, who: int) -> None:
        if self.logs[0] is not self.logs[1]:
            self.logs[who].close()
            self.logs[who] = self.open_log()
            self.again = lambda: None

    @invariant()
    def keeps_what_the_model_keeps(self) -> None:
        names = sorted(self.kept)
        for log in self.logs:
            assert log.headers() == [self.kept[name].header for name in names]
            assert (
                log.headers(after=SessionId("5c0"), limit=2)
                == [self.kept[name].header for name in names if name > "5c0"][:2]
            )
            for owner in OWNERS:
                mine = [name for name in names if self.of(OwnerId(owner), name)]
                assert log.count(OwnerId(owner)) == len(mine)
        for name in IDS:
            kept = self.kept.get(SessionId(name))
            assert self.logs[1].header(SessionId(name)) == (kept.header if kept else None)
            for owner in OWNERS:
                try:
                    found: list[LogEntry] | None = list(self.logs[0].entries(OwnerId(owner), SessionId(name)))
                except SessionGone:
                    found = None
                mine_kept = self.of(OwnerId(owner), SessionId(name))
                assert found == (None if mine_kept is None else [e for _, e in sorted(mine_kept.entries.items())])


def run(make: Callable[[], tuple[Callable[[], SessionLog], Callable[[], None]]], *, examples: int) -> None:
    checked = settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Machine(*make()), settings=checked)  # type: ignore[no-untyped-call]


def test_any_order_of_anything_in_memory() -> None:
    def make() -> tuple[Callable[[], SessionLog], Callable[[], None]]:
        log = open_session_log(None, MemStoreSettings())
        return lambda: log, lambda: None

    run(make, examples=100)


def test_any_order_of_anything_in_sqlite() -> None:
    in_memory = Path("/dev/shm")

    def make() -> tuple[Callable[[], SessionLog], Callable[[], None]]:
        directory = tempfile.mkdtemp(dir=in_memory if in_memory.is_dir() else None)
        return lambda: open_session_log(directory, MemStoreSettings()), lambda: shutil.rmtree(directory)

    run(make, examples=100)


def test_any_order_of_anything_in_redis(redis_url: str) -> None:
    numbers = itertools.count()

    def make() -> tuple[Callable[[], SessionLog], Callable[[], None]]:
        location = f"{redis_url}/0?prefix=machine-{next(numbers)}"
        return lambda: open_session_log(location, MemStoreSettings()), lambda: None

    run(make, examples=30)
