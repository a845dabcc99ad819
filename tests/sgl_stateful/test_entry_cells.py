"""The budget of cells: never more than there are, and the least valuable gives way."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_stateful.flash.cells import CellBudget

WORTH = {"a": 1, "b": 1, "c": 2, "d": 3}


def budget(limit: int = 10) -> CellBudget[str]:
    return CellBudget(limit, lambda key, cells: WORTH[key])


def held(cells: CellBudget[str]) -> dict[str, int]:
    return {key: cells.of(key) for key in cells}


def test_what_is_worth_least_gives_way_and_no_more_than_has_to() -> None:
    cells = budget()
    assert [cells.claim(key, 3) for key in "abc"] == [[], [], []]
    assert cells.claim("d", 6) == ["a", "b"]
    assert held(cells) == {"c": 3, "d": 6}
    assert cells.claim("c", 4) == []
    assert cells.cells == 10


def test_nobody_gives_way_to_what_is_worth_no_more() -> None:
    cells = budget()
    assert cells.claim("a", 8) == []
    assert cells.claim("b", 3) is None
    assert held(cells) == {"a": 8}


def test_nobody_gives_way_in_vain() -> None:
    cells = budget()
    assert [cells.claim(key, 5) for key in "ad"] == [[], []]
    assert cells.claim("c", 6) is None  # d is worth more, and a alone does not make room
    assert held(cells) == {"a": 5, "d": 5}


def test_a_key_keeps_what_it_has_while_it_claims() -> None:
    cells = budget()
    cells.claim("a", 6)
    assert cells.claim("a", 4) == []
    assert cells.of("a") == 6  # both may be in the pool until the new one stands
    cells.settle("a", 4)
    assert held(cells) == {"a": 4}
    cells.settle("a", 0)
    assert held(cells) == {}


class Budget(RuleBasedStateMachine):
    """Against a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = budget(20)
        self.model: dict[str, int] = {}

    @rule(key=st.sampled_from("abcd"), wanted=st.integers(0, 25))
    def claim(self, key: str, wanted: int) -> None:
        wanted = max(wanted, self.model.get(key, 0))
        others = {k: n for k, n in self.model.items() if k != key}
        lesser = [k for k in others if WORTH[k] < WORTH[key]]
        firm = sum(n for k, n in others.items() if k not in lesser)
        gone = self.cells.claim(key, wanted)
        assert (gone is None) == (firm + wanted > 20)
        if gone is None:
            return
        assert set(gone) <= set(lesser)
        stay = [k for k in lesser if k not in gone]
        assert max((WORTH[k] for k in gone), default=0) <= min((WORTH[k] for k in stay), default=9)
        if gone:  # without the last of them it would not fit
            kept = sum(others[k] for k in others if k not in gone)
            assert kept + others[gone[-1]] + wanted > 20
        self.model = {k: n for k, n in others.items() if k not in gone} | {key: wanted}

    @rule(key=st.sampled_from("abcd"), share=st.floats(0, 1))
    def settle(self, key: str, share: float) -> None:
        if key in self.model:
            self.model[key] = int(self.model[key] * share)
            self.cells.settle(key, self.model[key])
            if not self.model[key]:
                del self.model[key]

    @rule(key=st.sampled_from("abcd"))
    def release(self, key: str) -> None:
        self.model.pop(key, None)
        self.cells.release(key)

    @invariant()
    def agrees(self) -> None:
        assert held(self.cells) == self.model
        assert self.cells.cells == sum(self.model.values()) <= 20


TestBudget = Budget.TestCase
TestBudget.settings = settings(max_examples=100, deadline=None)
