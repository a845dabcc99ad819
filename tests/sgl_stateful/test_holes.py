from array import array
from itertools import pairwise
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore import EncodingId
from sgl_stateful.directive import Span
from sgl_stateful.sglang_adapter.holes import (
    _PENDING,
    MAX_RUNS,
    MAX_TOKENS,
    Run,
    _next_part,
    _shared_batch,
    around_model_forward,
    holes_of,
)


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


def test_beside_the_tokens_of_a_batch_there_is_room_for_what_a_chunk_leaves() -> None:
    jobs = [(0, Run(0, 1000)), (0, Run(1100, 1200))]
    for tokens, count in ((948, 2), (949, 1), (1048, 1), (1049, 0), (5000, 0)):
        assert len(_next_part(jobs, max_runs=8, tokens=tokens)) == count, tokens
    assert len(_next_part(jobs, max_runs=1, tokens=1)) == 1
    assert len(_next_part(jobs, max_runs=0, tokens=1)) == 0


def test_holes_stand_in_front_of_their_request_s_own_tokens() -> None:
    """Three requests in rows 5, 6 and 7; slot 100 * row + position. The second has two holes, the third one."""
    table = torch.tensor([[100 * row + position for position in range(40)] for row in range(8)])
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), device="cpu")
    prompts = [array("q", [1000 * row + position for position in range(40)]) for row in (5, 6, 7)]
    prefix_lens, extend_lens = [10, 20, 30], [2, 3, 1]
    own = [(p, p + n) for p, n in zip(prefix_lens, extend_lens, strict=True)]
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(full_untruncated_fill_ids=ids) for ids in prompts],
        req_pool_indices=torch.tensor([5, 6, 7]),
        req_pool_indices_cpu=torch.tensor([5, 6, 7]),
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        out_cache_loc=torch.cat([table[row, a:b] for row, (a, b) in zip((5, 6, 7), own, strict=True)]),
        is_prefill_only=False,
    )
    # What is sampled in the meantime is in the tensor of the forward, not in the request.
    forward = SimpleNamespace(input_ids=torch.tensor([91, 92, 93, 94, 95, 96]))
    jobs = [(1, Run(3, 5)), (1, Run(12, 13)), (2, Run(29, 30))]
    shared, kept = _shared_batch(runner, batch, forward, jobs)
    assert kept.tolist() == [0, 3, 5]
    assert shared.req_pool_indices.tolist() == shared.req_pool_indices_cpu.tolist() == [5, 6, 6, 6, 7, 7]
    assert (shared.prefix_lens, shared.extend_lens) == ([10, 3, 12, 20, 29, 30], [2, 2, 1, 3, 1, 1])
    assert shared.seq_lens.tolist() == shared.seq_lens_cpu.tolist() == [12, 5, 13, 23, 30, 31]
    assert (shared.extend_num_tokens, shared.seq_lens_sum) == (10, 114)
    assert shared.input_ids.tolist() == [91, 92, 6003, 6004, 6012, 93, 94, 95, 7029, 96]
    assert shared.out_cache_loc.tolist() == [510, 511, 603, 604, 612, 620, 621, 622, 729, 730]
    assert [id(req) for req in shared.reqs] == [id(batch.reqs[i]) for i in (0, 1, 1, 1, 2, 2)]
    assert (batch.prefix_lens, batch.extend_lens, len(batch.reqs)) == ([10, 20, 30], [2, 3, 1], 3)


def test_holes_that_cannot_be_computed_end_their_own_requests_alone() -> None:
    with_holes, other = SimpleNamespace(), SimpleNamespace()
    runner = SimpleNamespace(device="cpu")  # without what the rows of a request are read from
    batch = SimpleNamespace(reqs=[other, with_holes])
    setattr(runner, _PENDING, (batch, [(1, Run(3, 5)), (1, Run(8, 9))]))
    forwards = []

    def forward(runner: object, forward_batch: object) -> str:
        forwards.append(forward_batch)
        return "output"

    assert around_model_forward(forward, runner, "own") == "output"
    assert forwards == ["own"], "the others' tokens are computed all the same"
    assert with_holes.skip_radix_cache_insert
    assert "text between spliced facts" in with_holes.discard_output_reason.message
    assert vars(other) == {}
    assert around_model_forward(forward, runner, "next") == "output"
    assert forwards == ["own", "next"], "and nothing is left for the forward behind"
