"""What a session's request carries, and the table of pins over a radix tree that counts by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_stateful.sessions.hold import HOLD_KEY, Hold, Readback, dump_hold, parse_hold
from sgl_stateful.sglang_adapter import pins as pins_module
from sgl_stateful.sglang_adapter.pins import PinTable


@pytest.mark.parametrize(
    "hold",
    [
        Hold("s", 10, True, 3),
        Hold('é "quoted"', None, False, 2**40, priority=-100, group="g"),
        Hold("s", 10, True, 3, snapshot=Readback("a.kv", 300, 256)),
        Hold("s", None, True, 3, entry="next", ahead=(7, 8)),
    ],
)
def test_a_hold_travels(hold: Hold) -> None:
    assert parse_hold({HOLD_KEY: dump_hold(hold), "own": 1}) == hold


@pytest.mark.parametrize("custom_params", [None, {}, {"memory": {}}, "text"])
def test_a_request_without_a_hold(custom_params: Any) -> None:
    assert parse_hold(custom_params) is None


@pytest.mark.parametrize("raw", ["{", "{}", '{"session_id": "s"}', '{"more": 1}', "[]"])
def test_a_hold_that_cannot_be_read(raw: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        parse_hold({HOLD_KEY: raw})


@dataclass
class Paths:
    """Paths of slots by name, and which are locked; a path that is looked up or locked has not been evicted."""

    paths: dict[str, list[int]]
    locked: list[str] = field(default_factory=list)
    fewest: int = 0  # slots that were locked at the worst moment

    def lock(self, node: str) -> str:
        self.locked.append(node)
        return node

    def unlock(self, lock: str) -> None:
        self.locked.remove(lock)
        self.fewest = min(self.fewest, len(self.slots()))

    def path_device_indices(self, node: str) -> torch.Tensor:
        return torch.tensor(self.paths[node], dtype=torch.int64)

    def slots(self) -> set[int]:
        return {slot for node in self.locked for slot in self.paths[node]}


TREE = {"a": [1, 2, 3], "ab": [1, 2, 3, 4, 5], "ac": [1, 2, 3, 6], "d": [7, 8]}


def pinned(table: PinTable, session: str, node: str, fence: int, priority: int = 0) -> str | None:
    return table.hold(Hold(session, None, True, fence, priority), node, len(TREE[node]))


def pinned_entry(table: PinTable, entry: str, node: str, fence: int, priority: int = -1000) -> None:
    table.hold(Hold("s", None, True, fence, priority, entry=entry), node, len(TREE[node]))


def test_an_entry_has_a_pin_beside_its_session_s_that_goes_first_and_with_it() -> None:
    tree = Paths(TREE)
    table = PinTable(tree, 10)
    pinned(table, "s", "a", 1)
    pinned_entry(table, "next", "ab", 2)
    pinned_entry(table, "other", "ac", 3)
    pinned(table, "t", "d", 4)
    assert table.tokens() == {"s": 3, "s/next": 5, "s/other": 4, "t": 2}
    assert table.pinned_cells == 8
    assert table.unpin("s/next", 5)
    assert table.tokens() == {"s": 3, "s/other": 4, "t": 2}
    assert table.release_one("reclaimed")
    assert (table.tokens(), table.lost()) == ({"s": 3, "t": 2}, {"s/other": "reclaimed"})
    pinned_entry(table, "next", "ab", 6)
    assert table.unpin("s", 7)
    assert (table.tokens(), tree.locked) == ({"t": 2}, ["d"])


def test_an_entry_is_not_pinned_by_a_request_from_before_its_session_was_unpinned() -> None:
    table = PinTable(Paths(TREE), 10)
    pinned(table, "s", "a", 1)
    table.unpin("s", 3)
    pinned_entry(table, "next", "ab", 2)
    assert (table.tokens(), table.counts.stale) == ({}, 1)
    pinned_entry(table, "next", "ab", 4)
    assert table.tokens() == {"s/next": 5}
    table.unpin("s", 4)  # older than what the entry has pinned since
    assert table.tokens() == {"s/next": 5}


def test_sessions_whose_names_begin_alike_are_others() -> None:
    table = PinTable(Paths(TREE), 10)
    pinned(table, "s", "a", 1)
    pinned(table, "sa", "d", 2)
    table.unpin("s", 3)
    assert table.tokens() == {"sa": 2}


def test_what_both_pins_cover_is_never_unlocked() -> None:
    tree = Paths(TREE)
    table = PinTable(tree, 9)
    pinned(table, "s", "a", 1)
    tree.fewest = len(tree.slots())
    pinned(table, "s", "ab", 2)
    assert tree.fewest == 3
    assert (tree.locked, table.pinned_cells) == (["ab"], 5)


def test_the_same_pin_is_not_locked_again() -> None:
    tree = Paths(TREE)
    table = PinTable(tree, 9)
    pinned(table, "s", "a", 1)
    lock = tree.locked[0]
    pinned(table, "s", "a", 2)
    assert tree.locked == [lock]
    assert not table.unpin("s", 2)  # it counts as the second request's by now
    assert table.unpin("s", 3)


def test_who_goes_first() -> None:
    table = PinTable(Paths(TREE), 9)
    pinned(table, "low", "a", 1, priority=-1)
    pinned(table, "used", "ab", 2)
    pinned(table, "idle", "ac", 3)
    pinned(table, "high", "d", 4, priority=5)
    pinned(table, "used", "ab", 5)
    gone = []
    while table.release_one("reclaimed", last="low"):
        gone.append(next(reversed(table.lost())))
    assert gone == ["idle", "used", "high", "low"]
    assert table.pinned_cells == 0
    assert table.stats()["released"] == 4


def test_nothing_left_to_pin_releases_what_there_was() -> None:
    table = PinTable(Paths(TREE), 9)
    pinned(table, "s", "a", 1)
    assert table.hold(Hold("s", 0, True, 2), "root", 0) is None
    assert (len(table), table.pinned_cells) == (0, 0)


def test_fences_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "REMEMBERED", 2)
    table = PinTable(Paths(TREE), 9)
    for session in ("x", "y", "x", "z"):
        table.unpin(session, 10)
    for session in ("x", "y", "z"):
        pinned(table, session, "d", 5)
    assert table.tokens() == {"y": 2}


def test_a_path_of_another_length_is_not_pinned() -> None:
    tree = Paths(TREE)
    table = PinTable(tree, 9)
    with pytest.raises(AssertionError, match="3 slots for 2"):
        table.hold(Hold("s", None, True, 1), "a", 2)
    assert (tree.locked, len(table)) == ([], 0)


class Pins(RuleBasedStateMachine):
    """Any order of requests, unpins, releases and flushes, against a plain dictionary of what should be pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Paths(TREE)
        self.table = PinTable(self.tree, 9)
        self.now = 0
        self.model: dict[str, tuple[str, int]] = {}
        self.unpinned: dict[str, int] = {}
        self.lost: dict[str, str] = {}

    sessions = st.sampled_from(["s", "t", "u"])

    @rule(session=sessions, node=st.sampled_from(sorted(TREE)), age=st.integers(0, 3))
    def request(self, session: str, node: str, age: int) -> None:
        self.now += 1
        fence = self.now - age
        lost = pinned(self.table, session, node, fence)
        newest = self.model.get(session, ("", -9))[1]
        if fence >= max(newest, self.unpinned.get(session, -9)):
            assert lost == (self.lost.pop(session, None))
            self.model[session] = (node, fence)
        else:
            assert lost is None

    @rule(session=sessions, node=st.sampled_from(sorted(TREE)), age=st.integers(0, 3))
    def request_of_an_entry(self, session: str, node: str, age: int) -> None:
        self.now += 1
        fence, name = self.now - age, f"{session}/e"
        self.table.hold(Hold(session, None, True, fence, entry="e"), node, len(TREE[node]))
        newest = self.model.get(name, ("", -9))[1]
        if fence >= max(newest, self.unpinned.get(session, -9), self.unpinned.get(name, -9)):
            self.lost.pop(name, None)
            self.model[name] = (node, fence)

    @rule(session=sessions, entry=st.sampled_from(["", "/e"]), age=st.integers(0, 3))
    def unpin(self, session: str, entry: str, age: int) -> None:
        """Of a session: its entry goes with it."""
        self.now += 1
        fence, name = self.now - age, session + entry
        older = {one for one, (_, at) in self.model.items() if at < fence}
        assert self.table.unpin(name, fence) == (name in older)
        for one in {name, f"{name}/e"} & older:
            del self.model[one]
        self.lost.pop(name, None)
        self.unpinned[name] = max(fence, self.unpinned.get(name, fence))

    @rule()
    def release(self) -> None:
        assert self.table.release_one("reclaimed") == bool(self.model)
        for session in set(self.model) - set(self.table.tokens()):
            del self.model[session]
            self.lost[session] = "reclaimed"

    @rule()
    def flush(self) -> None:
        self.tree.locked.clear()
        assert self.table.lost_all("flushed") == len(self.model)
        self.lost.update(dict.fromkeys(self.model, "flushed"))
        self.model.clear()

    @invariant()
    def counts(self) -> None:
        assert sorted(self.tree.locked) == sorted(node for node, _ in self.model.values())
        assert self.table.pinned_cells == len(self.tree.slots())
        assert self.table.tokens() == {s: len(TREE[node]) for s, (node, _) in self.model.items()}
        assert self.table.lost() == self.lost


TestPins = Pins.TestCase
TestPins.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
