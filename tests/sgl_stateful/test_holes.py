from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memstore import EncodingId
from sgl_stateful.directive import Span
from sgl_stateful.sglang_adapter.holes import Run, holes_of


def spans_of(*bounds: tuple[int, int]) -> list[Span]:
    return [Span(EncodingId("aa"), start, end) for start, end in bounds]


def test_what_lies_between_spans_is_a_hole() -> None:
    assert holes_of(spans_of((5, 8), (8, 9), (12, 20)), 2, 30) == [Run(2, 5), Run(9, 12), Run(20, 30)]


def test_spans_that_lie_or_reach_outside_are_cut() -> None:
    assert holes_of(spans_of((0, 3), (4, 9), (18, 25), (26, 30)), 6, 20) == [Run(9, 18)]


def test_without_spans_everything_is_a_hole_and_nothing_in_an_empty_stretch() -> None:
    assert holes_of([], 3, 5) == [Run(3, 5)]
    assert holes_of([], 5, 5) == []
    assert holes_of(spans_of((0, 9)), 5, 9) == []


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=8),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_holes_are_the_positions_that_no_span_covers(edges: list[tuple[int, int]], start: int, length: int) -> None:
    bounds, at = [], 0
    for gap, size in edges:
        bounds.append((at + gap, at + gap + size))
        at = bounds[-1][1]
    runs = holes_of(spans_of(*bounds), start, start + length)
    uncovered = [p for p in range(start, start + length) if not any(a <= p < b for a, b in bounds)]
    assert [p for run in runs for p in range(run.start, run.end)] == uncovered
    assert all(a.end < b.start for a, b in pairwise(runs)), "runs are as long as they can be"
