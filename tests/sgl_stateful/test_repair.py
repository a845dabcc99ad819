import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_stateful.repair import Repair, parse_repair


def test_first_tokens_of_each_fact() -> None:
    assert parse_repair("first:2").kept([5, 2, 1, 3]) == [range(2, 5), range(2, 2), range(1, 1), range(2, 3)]


def test_last_tokens_of_the_block_reach_over_facts() -> None:
    # 4 + 3 + 2 tokens, of which the last four are two of the last fact and two of the one before
    assert parse_repair("last:4").kept([4, 3, 2]) == [range(4), range(1), range(0)]


def test_both_at_once() -> None:
    assert parse_repair("last:4+first:2").kept([4, 3, 2]) == [range(2, 4), range(1, 1), range(0)]


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 12), st.integers(0, 40))
def test_kept_is_what_neither_rule_takes(lengths: list[int], first: int, last: int) -> None:
    tokens = [(fact, offset) for fact, length in enumerate(lengths) for offset in range(length)]
    kept = [
        token for place, token in enumerate(tokens) if token[1] >= first and place < len(tokens) - last
    ]  # token by token, as the rules say it
    found = Repair("any", first, last).kept(lengths)
    assert [(fact, offset) for fact, offsets in enumerate(found) for offset in offsets] == kept


def test_none_keeps_everything() -> None:
    assert parse_repair("none") == Repair()
    assert parse_repair("none").kept([3, 1]) == [range(3), range(1)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown repair ''"),
        ("first", "unknown repair"),
        ("first:", "unknown repair"),
        ("first:x", "unknown repair"),
        ("first:²", "unknown repair"),
        ("first:-1", "unknown repair"),
        ("middle:3", "unknown repair 'middle:3': use 'none', 'first:M'"),
        ("first:1+first:2", "unknown repair"),
        ("first:1+", "unknown repair"),
        ("none+last:2", "unknown repair"),
        ("first:0", "out of range: from 1"),
        ("last:1000001", "out of range"),
        ("last:" + "9" * 5000, "unknown repair"),
    ],
)
def test_what_is_no_repair_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_repair(spec)
