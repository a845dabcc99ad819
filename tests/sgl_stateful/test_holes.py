from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memstore import EncodingId
from sgl_stateful.directive import Span
from sgl_stateful.sglang_adapter.holes import MAX_RUNS, MAX_TOKENS, Run, _next_part, holes_of


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


def parts_of(lengths: list[int], *, max_runs: int = 2048) -> list[int]:
    """How many runs of these lengths go into one forward after the other."""
    jobs = [(0, Run(1000 * i, 1000 * i + length)) for i, length in enumerate(lengths)]
    counts, at = [], 0
    while at < len(jobs):
        part = _next_part(jobs[at:], max_runs=max_runs)
        assert list(part) == jobs[at : at + len(part)], "left to right"
        counts.append(len(part))
        at += len(part)
    return counts


def test_a_forward_of_holes_has_so_many_runs_and_tokens_at_most() -> None:
    assert (MAX_RUNS, MAX_TOKENS) == (64, 2048)
    assert parts_of([1] * 64) == [64]
    assert parts_of([1] * 150) == [64, 64, 22]
    assert parts_of([1] * 10, max_runs=4) == [4, 4, 2]
    assert parts_of([32] * 65) == [64, 1]
    assert parts_of([33] * 64) == [62, 2]  # 62 times 33 is 2046
    assert parts_of([5000, 1, 2047]) == [1, 2], "a run is never divided"
