"""Cells of claims against their definition, and how much of a content is looked at."""

from dataclasses import fields

import hypothesis.strategies as st
import pytest
from hypothesis import given
from session_values import ANA, BO, cells_of, segment

from sgl_stateful.errors import PinNumbers, PinRefused
from sgl_stateful.sessions.chain import Head, Link, extend, first, links, root_key
from sgl_stateful.sessions.ledger import Ledger

Parts = tuple[tuple[int, ...], ...]

MANY = 2000
FEW = 8  # links that an append of one segment may look at, however long the session is


def content(*parts: tuple[int, ...], owner: str = ANA) -> Head:
    return extend(None, [segment(*part) for part in parts], owner=owner)


class CountedLink(Link):
    """Counts how often somebody goes on to what stands before."""

    __slots__ = ()
    followed = 0

    def __getattribute__(self, name: str) -> object:
        if name == "parent":
            CountedLink.followed += 1
        return super().__getattribute__(name)


def counted(head: Head) -> Head:
    made: Head = None
    for link in reversed(list(links(head))):
        made = CountedLink(made, *(getattr(link, field.name) for field in fields(Link)[1:]))
    CountedLink.followed = 0
    return made


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(budget=10 * MANY, quota=10 * MANY)


def test_an_append_looks_at_what_is_new(ledger: Ledger) -> None:
    longer = counted(content(*((n,) for n in range(MANY + 1))))
    assert longer is not None
    present = longer.parent
    ledger.claim("a", ANA, present)
    assert CountedLink.followed <= MANY + FEW
    CountedLink.followed = 0
    ledger.claim("a", ANA, present, longer)
    assert ledger.pinned == MANY + 1
    ledger.claim("a", ANA, longer)
    assert ledger.pinned == MANY + 1
    assert CountedLink.followed <= FEW


def test_a_window_that_moves_looks_at_what_goes_and_what_comes(ledger: Ledger) -> None:
    prefix = counted(content(*((n,) for n in range(MANY))))
    before = extend(prefix, [segment(7), segment(8)], owner=ANA)
    after = extend(prefix, [segment(8), segment(9)], owner=ANA)
    ledger.claim("a", ANA, before)
    CountedLink.followed = 0
    ledger.claim("a", ANA, before, after)
    assert ledger.pinned == MANY + 4
    ledger.claim("a", ANA, after)
    assert ledger.pinned == MANY + 2
    assert CountedLink.followed <= FEW


def test_a_refused_append_looks_at_what_is_new() -> None:
    ledger = Ledger(budget=MANY, quota=MANY)
    longer = counted(content(*((n,) for n in range(MANY + 1))))
    assert longer is not None
    present = longer.parent
    ledger.claim("a", ANA, present)
    CountedLink.followed = 0
    with pytest.raises(PinRefused) as refused:
        ledger.claim("a", ANA, present, longer)
    assert (refused.value.numbers.needed, refused.value.numbers.pinned, ledger.pinned) == (1, MANY, MANY)
    assert CountedLink.followed <= FEW


def test_what_the_stats_ask_looks_at_nothing(ledger: Ledger) -> None:
    head = counted(content(*((n,) for n in range(MANY))))
    ledger.claim("a", ANA, head, reserve_tokens=MANY + 5)
    ledger.claim("b", ANA, head)
    CountedLink.followed = 0
    assert (ledger.cells("a"), ledger.cells("b"), ledger.reserved, ledger.pinned) == (MANY + 5, MANY, 5, MANY + 5)
    assert root_key(head) == root_key(content((0,)))
    assert CountedLink.followed == 0


def test_the_root_of_a_content() -> None:
    assert root_key(None) == b""
    assert root_key(content((1, 2), (3,))) == root_key(content((1, 2), (4,), (5,)))
    assert len({root_key(content((1,))), root_key(content((1, 2))), root_key(content((1,), owner=BO))}) == 3


parts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), max_size=5).map(tuple)
claims = st.tuples(
    st.sampled_from(["a", "b", "c", "d"]), st.one_of(st.none(), st.lists(parts, max_size=3)), st.integers(0, 12)
)
OWNERS = {"a": ANA, "b": ANA, "c": ANA, "d": BO}


@given(st.lists(claims, max_size=12), st.integers(5, 40), st.integers(5, 40))
def test_any_claims_count_what_they_hold_once(
    made: list[tuple[str, list[Parts] | None, int]], budget: int, quota: int
) -> None:
    ledger = Ledger(budget=budget, quota=quota)
    held: dict[str, tuple[list[Parts], int]] = {}

    def own(contents: list[Parts]) -> int:
        return cells_of([(ANA, one, 0) for one in contents])

    def total(claimed: dict[str, tuple[list[Parts], int]], owner: str | None = None) -> int:
        of = {name: claim for name, claim in claimed.items() if owner in (None, OWNERS[name])}
        spare = sum(max(0, reserve - own(contents)) for contents, reserve in of.values())
        return spare + cells_of([(OWNERS[name], one, 0) for name, (contents, _) in of.items() for one in contents])

    for name, contents, reserve in made:
        if contents is None:
            ledger.release(name)
            held.pop(name, None)
        else:
            after = held | {name: (contents, reserve)}
            needed = total(after) - total(held)
            fits = total(after) <= budget and total(after, OWNERS[name]) <= quota
            heads = [content(*one, owner=OWNERS[name]) for one in contents]
            try:
                ledger.claim(name, OWNERS[name], *heads, reserve_tokens=reserve)
            except PinRefused as refused:
                numbers = refused.numbers
            else:
                numbers = None
            if numbers is not None:
                assert needed > 0
                assert not fits
                assert (numbers.needed, numbers.pinned) == (needed, total(held))
            else:
                assert needed <= 0 or fits
                held = after
        assert ledger.pinned == total(held)
        assert ledger.by_owner == {owner: cells for owner in (ANA, BO) if (cells := total(held, owner))}
        assert ledger.reserved == sum(max(0, kept - own(contents)) for contents, kept in held.values())
        for one in OWNERS:
            contents, kept = held.get(one, ([], 0))
            assert ledger.cells(one) == max(kept, own(contents))


def test_a_part_of_a_content_is_not_counted_again(ledger: Ledger) -> None:
    head = content((1, 2), (3,), (4, 5))
    ledger.claim("a", ANA, head, first(head, 1))
    assert ledger.cells("a") == 5
    ledger.claim("a", ANA, first(head, 1), head)
    assert ledger.cells("a") == 5
    ledger.claim("a", ANA, first(head, 1))
    assert (ledger.cells("a"), ledger.pinned) == (2, 2)


def test_what_can_never_fit_is_not_to_be_asked_for_again() -> None:
    base = {"needed": 11, "pinned": 5, "budget": 20, "quota": 10, "owner_pinned": 0}
    later = PinRefused(PinNumbers(**{**base, "needed": 16, "quota": 20}))
    assert (later.status_code, later.retry_after_s) == (429, 2)
    assert "16 more cells do not fit: 5 of 20 are pinned; close" in str(later)
    of_owner = PinRefused(PinNumbers(**base))
    assert (of_owner.status_code, of_owner.retry_after_s) == (413, None)
    assert "11 more cells never fit: no more than 10 may be pinned by this owner" in str(of_owner)
    crowded = PinRefused(PinNumbers(**{**base, "pinned": 15}))
    assert (crowded.status_code, crowded.is_of_owner) == (413, True)
    at_all = PinRefused(PinNumbers(**{**base, "needed": 21, "quota": 20}))
    assert (at_all.status_code, at_all.retry_after_s) == (413, None)
    assert "never fit: no more than 20 may be pinned; ask" in str(at_all)
