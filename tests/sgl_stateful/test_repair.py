import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_stateful.repair import Repair, parse_repair


def test_first_tokens_of_each_fact() -> None:
    assert parse_repair("first:2").kept([5, 2, 1, 3]) == [[range(2, 5)], [], [], [range(2, 3)]]


def test_last_tokens_of_the_block_reach_over_facts() -> None:
    # 4 + 3 + 2 tokens, of which the last four are two of the last fact and two of the one before
    assert parse_repair("last:4").kept([4, 3, 2]) == [[range(4)], [range(1)], []]


def test_a_share_of_the_block_is_rounded_up() -> None:
    # 40 % of 9 tokens are 3.6
    assert parse_repair("last:40%").kept([4, 3, 2]) == [[range(4)], [range(1)], []]
    assert parse_repair("last:1%").kept([4, 3, 2]) == [[range(4)], [range(3)], [range(1)]]
    assert parse_repair("last:100%+first:1").kept([4, 3]) == [[], []]
    assert parse_repair("last:50%").kept([]) == []


def test_a_share_of_each_fact_by_what_depends_most_on_context() -> None:
    share = parse_repair("share:20%")
    # Two of ten tokens, one of three, rounded up; of the third fact it is not known.
    orders = [[7, 2, 0, 1, 3, 4, 5, 6, 8, 9], [0, 1, 2], None]
    assert share.kept([10, 3, 5], orders) == [[range(2), range(3, 7), range(8, 10)], [range(1, 3)], [range(5)]]
    assert share.kept([10, 3, 5]) == [[range(10)], [range(3)], [range(5)]]
    assert parse_repair("share:100%").kept([3], [[1, 0, 2]]) == [[]]


def test_a_token_that_would_be_a_run_of_its_own_is_computed_too() -> None:
    assert parse_repair("share:40%").kept([5], [[1, 3, 0, 2, 4]]) == [[]]
    assert parse_repair("share:20%").kept([6], [[1, 4, 0, 2, 3, 5]]) == [[range(2, 4)]]


def test_shares_and_the_other_rules_add_up() -> None:
    found = parse_repair("first:1+share:25%+last:2").kept([8, 3], [[4, 5, 0, 1, 2, 3, 6, 7], None])
    assert found == [[range(1, 4), range(6, 8)], []]


def test_both_at_once() -> None:
    assert parse_repair("last:4+first:2").kept([4, 3, 2]) == [[range(2, 4)], [], []]


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(0, 12), st.integers(0, 40))
def test_kept_is_what_neither_rule_takes(lengths: list[int], first: int, last: int) -> None:
    tokens = [(fact, offset) for fact, length in enumerate(lengths) for offset in range(length)]
    kept = [
        token for place, token in enumerate(tokens) if token[1] >= first and place < len(tokens) - last
    ]  # token by token, as the rules say it
    found = Repair("any", first, last).kept(lengths)
    assert [(fact, offset) for fact, runs in enumerate(found) for run in runs for offset in run] == kept


def test_none_keeps_everything() -> None:
    assert parse_repair("none") == Repair()
    assert parse_repair("none").kept([3, 1]) == [[range(3)], [range(1)]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown repair ''"),
        ("first", "unknown repair"),
        ("first:", "unknown repair"),
        ("first:x", "unknown repair"),
        ("first:²", "unknown repair"),
        ("first:-1", "unknown repair"),
        ("middle:3", "unknown repair 'middle:3': use 'none', 'first:M', 'share:P%'"),
        ("first:1+first:2", "unknown repair"),
        ("first:1+", "unknown repair"),
        ("none+last:2", "unknown repair"),
        ("first:0", "out of range: from 1"),
        ("first:5%", "unknown repair"),
        ("last:%", "unknown repair"),
        ("share:5", "unknown repair"),
        ("share:1%+share:2%", "unknown repair"),
        ("share:101%", "or to 100 %"),
        ("last:5%+last:2", "unknown repair"),
        ("last:0%", "out of range"),
        ("last:101%", "or to 100 %"),
        ("last:1000001", "out of range"),
        ("last:" + "9" * 5000, "unknown repair"),
    ],
)
def test_what_is_no_repair_is_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_repair(spec)
