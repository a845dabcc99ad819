"""Which runs of one sequence share an attention call."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from sgl_stateful.sglang_adapter.attention_plan import _CALL_PRODUCTS, _GATHER_PRODUCTS, _groups

Parts = list[tuple[int, int]]


def work(groups: list[Parts]) -> int:
    """Products of a query and a key, with what each call and each gathered key cost."""
    total = 0
    for group in groups:
        num_keys = max(prefix + extend for prefix, extend in group)
        total += _CALL_PRODUCTS + num_keys * (_GATHER_PRODUCTS + sum(extend for _, extend in group))
    return total


def test_a_run_far_in_front_reads_no_keys_behind_itself() -> None:
    # 50 tokens at 50 and 12 at 2,850: together 62 queries over 2,862 keys, apart 50 over 100 and 12 over 2,862.
    assert _groups([(50, 50), (2850, 12)]) == [[(50, 50)], [(2850, 12)]]


def test_neighbours_share_a_call() -> None:
    assert _groups([(100, 3), (110, 3), (120, 12)]) == [[(100, 3), (110, 3), (120, 12)]]
    assert _groups([]) == []


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 60)), min_size=1, max_size=7))
def test_no_other_division_is_less_work(gaps: Parts) -> None:
    parts, at = [], 0
    for gap, extend in gaps:
        parts.append((at + gap, extend))
        at += gap + extend
    found = [list(group) for group in _groups(parts)]
    assert [part for group in found for part in group] == parts
    divisions = []
    for cuts in product((False, True), repeat=len(parts) - 1):
        groups: list[Parts] = [[parts[0]]]
        for cut, part in zip(cuts, parts[1:], strict=True):
            if cut:
                groups.append([part])
            else:
                groups[-1].append(part)
        divisions.append(groups)
    assert work(found) == min(map(work, divisions))
