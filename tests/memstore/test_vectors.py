"""Cases M1 to M4, and exact search against sums in float64."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from memstore.embedding import Vectors, unit_rows
from memstore.errors import EmbeddingError
from memstore.search.vectors import Neighbour, VectorIndex, _product


def vec(*rows: Iterable[float]) -> Vectors:
    return np.array(rows, dtype=np.float32)


def unit(rows: npt.ArrayLike) -> Vectors:
    matrix = np.asarray(rows)
    return unit_rows(matrix, rows=len(matrix), dimension=matrix.shape[1])


def nearest(
    facts: Mapping[int, Vectors], query: npt.ArrayLike, k: int, allowed: Iterable[int] | None = None
) -> list[tuple[int, float]]:
    """Every score summed without rounding, then rounded to float32 once."""
    [q] = unit(np.asarray(query)[None])
    scores = {}
    for seq in facts if allowed is None else set(facts).intersection(allowed):
        rows = unit(facts[seq])
        best = max(math.fsum(np.multiply(row, q, dtype=np.float64)) for row in rows)
        scores[seq] = max(-1.0, min(1.0, float(np.float32(best))))
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[: max(k, 0)]


def index_of(facts: Mapping[int, Vectors], dimension: int) -> VectorIndex:
    index = VectorIndex(dimension)
    index.add(list(facts), list(facts.values()))
    return index


def sorted_seqs(seqs: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(sorted(seqs), dtype=np.int64)


def test_m1_each_fact_finds_itself_after_a_removal() -> None:
    a, b, c, d = np.eye(4, dtype=np.float32)
    index = index_of({1: a[None], 2: b[None], 3: c[None]}, 4)
    index.remove([1])
    index.add([4], [d[None]])
    assert [index.search(row, 1) for row in (b, c, d)] == [[(2, 1.0)], [(3, 1.0)], [(4, 1.0)]]
    assert [seq for seq, _ in index.search(a, 10)] == [2, 3, 4]


def test_m2_a_seq_added_twice_is_one_fact() -> None:
    index = VectorIndex(2)
    index.add([7], [vec([1, 0])])
    index.add([7], [vec([0, 1])])
    assert len(index) == 1
    assert index.search([0, 1], 5) == [Neighbour(7, 1.0)]
    index.remove([7])
    assert len(index) == 0
    assert index.search([0, 1], 5) == []


def test_m3_more_neighbours_than_facts() -> None:
    index = index_of({1: vec([1, 0]), 2: vec([0, 1]), 3: vec([-1, 0])}, 2)
    for k in (3, 50, 10**9):
        assert [seq for seq, _ in index.search([1, 0.1], k)] == [1, 2, 3]


def test_m4_cosine_and_not_inner_product() -> None:
    index = index_of({1: vec([0.1, 0]), 2: vec([0.5, 0.5])}, 2)
    assert index.search([1, 0], 2) == [(1, 1.0), (2, pytest.approx(math.sqrt(0.5)))]


@pytest.mark.parametrize("k", [0, -1])
def test_no_neighbours_wanted(k: int) -> None:
    index = index_of({1: vec([1, 0])}, 2)
    assert index.search([1, 0], k) == []
    assert index.search_many(vec([1, 0]), k) == [[]]


def test_an_index_without_facts() -> None:
    index = VectorIndex(3)
    index.add([], [])
    index.load(np.array([], dtype=np.int64), np.empty((0, 3), dtype=np.float32))
    index.remove([4])
    assert (len(index), index.nbytes) == (0, 0)
    assert index.search([1, 0, 0], 5) == []
    assert index.search([1, 0, 0], 5, allowed=sorted_seqs([1])) == []
    assert index.search_many([[1, 0, 0], [0, 1, 0]], 5) == [[], []]
    assert index.search_many(np.empty((0, 3)), 5) == []


def test_the_best_chunk_of_a_fact_counts_and_the_fact_comes_once() -> None:
    index = index_of({1: vec([1, 0], [0, 1], [1, 1]), 2: vec([3, 4]), 3: vec([-1, 0], [-1, 0])}, 2)
    assert len(index) == 3
    for k in (1, 2, 3, 9):
        assert index.search([0, 2], k) == [(1, 1.0), (2, pytest.approx(0.8)), (3, 0.0)][:k]
    index.remove([1])
    assert [seq for seq, _ in index.search([0, 1], 9)] == [2, 3]


def test_many_chunks_of_one_fact_leave_room_for_others() -> None:
    index = index_of({1: vec(*[[1, 0.001 * chunk] for chunk in range(1000)]), 2: vec([0, 1]), 3: vec([-1, -1])}, 2)
    assert [seq for seq, _ in index.search([1, 0], 2)] == [1, 2]
    assert [seq for seq, _ in index.search([1, 0], 3)] == [1, 2, 3]


def test_a_replaced_fact_loses_all_its_chunks() -> None:
    index = index_of({1: vec([1, 0], [0, 1]), 2: vec([1, 1])}, 2)
    index.add([1], [vec([-1, 0])])
    assert len(index) == 2
    assert index.search([0, 1], 5) == [(2, pytest.approx(math.sqrt(0.5))), (1, 0.0)]


def test_the_last_of_one_batch_counts() -> None:
    index = VectorIndex(2)
    index.add([7, 8, 7], [vec([1, 0], [1, 0]), vec([1, 1]), vec([0, 1])])
    assert len(index) == 2
    assert index.search([0, 1], 5) == [(7, 1.0), (8, pytest.approx(math.sqrt(0.5)))]
    assert index.search([1, 0], 5) == [(8, pytest.approx(math.sqrt(0.5))), (7, 0.0)]


def test_loaded_rows_are_those_that_were_added() -> None:
    rows = unit(np.random.default_rng(1).standard_normal((30, 5)))
    seqs = np.repeat(np.arange(10, dtype=np.int64), 3)
    loaded = VectorIndex(5)
    loaded.load(seqs.copy(), rows.copy())
    added = index_of({seq: rows[3 * seq : 3 * seq + 3] for seq in range(10)}, 5)
    assert len(loaded) == len(added) == 10
    for query in rows:
        assert loaded.search(query, 4) == added.search(query, 4)


def test_loading_leaves_the_caller_its_array() -> None:
    rows = vec([1, 0], [0, 1])
    index = VectorIndex(2)
    index.load(sorted_seqs([1, 2]), rows.copy())
    rows[:] = -1
    index.add([3], [vec([1, 1])])
    index.remove([1])
    assert index.search([0, 1], 1) == [(2, 1.0)]
    assert rows.tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("bad", [[math.nan, 0], [math.inf, 0], [0, 0], [1, 1], [3e38, 3e38]])
def test_rows_that_are_no_unit_vectors_are_not_loaded(bad: list[float]) -> None:
    index = VectorIndex(2)
    with pytest.raises(EmbeddingError, match="fact 9") as caught:
        index.load(sorted_seqs([8, 9]), vec([1, 0], bad))
    assert caught.value.position == 1
    assert len(index) == 0


@pytest.mark.parametrize("bad", [[math.nan, 0], [math.inf, 0], [0, 0]])
def test_what_has_no_direction_is_refused_and_nothing_changes(bad: list[float]) -> None:
    index = index_of({1: vec([1, 0])}, 2)
    with pytest.raises(EmbeddingError, match="text 2") as caught:
        index.add([1, 2, 3], [vec([0, 1], [0, 1]), vec([0, 1]), vec([1, 1], bad)])
    assert caught.value.position == 2
    assert len(index) == 1
    assert index.search([1, 0], 5) == [(1, 1.0)]
    with pytest.raises(EmbeddingError):
        index.search(bad, 1)
    with pytest.raises(EmbeddingError):
        index.search_many(vec([1, 0], bad), 1)


@pytest.mark.parametrize("shape", [(1, 3), (0, 2), (2,), (1, 1, 2)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    index = VectorIndex(2)
    with pytest.raises(EmbeddingError, match="shape") as caught:
        index.add([1, 2], [vec([1, 0]), np.ones(shape, dtype=np.float32)])
    assert caught.value.position == 1
    assert len(index) == 0
    with pytest.raises(EmbeddingError):
        index.search([1, 0, 0], 1)


def test_ties_come_by_seq_also_at_the_edge() -> None:
    index = index_of({seq: vec([1, 1]) for seq in (40, 10, 30, 20, 50)} | {5: vec([1, 0])}, 2)
    for k in range(7):
        assert [seq for seq, _ in index.search([1, 1], k)] == [10, 20, 30, 40, 50, 5][:k]
        assert [seq for seq, _ in index.search([1, 1], k, allowed=sorted_seqs([5, 20, 50]))] == [20, 50, 5][:k]


def test_equal_rows_tie_wherever_they_lie() -> None:
    # Kernels sum in an order that depends on where a row lies; more equal rows than are scored again at once.
    rng = np.random.default_rng(2)
    same, query = rng.standard_normal((2, 96))
    seqs = rng.permutation(12_000)
    index = VectorIndex(96)
    for start in range(0, len(seqs), 1000):
        block = seqs[start : start + 1000]
        index.add(block, [(same if seq % 2 else rng.standard_normal(96) - 9 * query)[None] for seq in block])
    scores = {score for _, score in index.search(query, 6000)}
    assert len(scores) == 1
    for k in (1, 7, 5999):
        odd = list(range(1, 2 * k, 2))
        assert [seq for seq, _ in index.search(query, k)] == odd
        assert [seq for seq, _ in index.search_many([query, query], k)[1]] == odd
        for allowed in (range(1000), range(11_000)):  # rows gathered first, and all of them scored
            found = index.search(query, k, allowed=sorted_seqs(allowed))
            assert [seq for seq, _ in found][: len(allowed) // 2] == odd[: len(allowed) // 2]


def test_scores_stay_in_range() -> None:
    rows = np.random.default_rng(3).standard_normal((200, 33)).astype(np.float32)
    index = index_of(dict(enumerate(rows[:, None])), 33)
    for row in rows:
        assert index.search(row, 1)[0].score == pytest.approx(1, abs=1e-6)
        scores = [score for _, score in index.search(row, 200) + index.search(-row, 200)]
        assert max(scores) <= 1.0
        assert min(scores) >= -1.0


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_beyond_the_range_tie(sign: int) -> None:
    # A loaded row may be a little longer than 1.
    index = VectorIndex(2)
    index.load(sorted_seqs([1, 2, 3, 4]), vec([1.0002, 0], [1, 0], [1.0004, 0], [1.0001, 0]) * np.float32(sign))
    for k in (1, 2, 3, 4):
        assert index.search([1, 0], k) == [(seq, sign) for seq in (1, 2, 3, 4)][:k]


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_differ_in_the_last_place_are_in_order(sign: int) -> None:
    # Closer than an fp32 product can tell apart, and beyond 1 or -1 before they are clamped.
    rng = np.random.default_rng(4)
    query = rng.standard_normal(200)
    noise = rng.standard_normal((400, 200)) * rng.choice([1e-7, 1e-4, 5e-4, 7e-4], 400)[:, None]
    facts = {seq: (sign * query + step)[None].astype(np.float32) for seq, step in enumerate(noise)}
    index = index_of(facts, 200)
    for k in (1, 10, 100, 390):
        assert index.search(query, k) == nearest(facts, query, k)
        assert index.search_many([query], k) == [nearest(facts, query, k)]


components = st.integers(-2, 2)


@st.composite
def directions(draw: st.DrawFn, dimension: int) -> list[int]:
    row = draw(st.lists(components, min_size=dimension, max_size=dimension))
    return row if any(row) else [1, *row[1:]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, dict[int, list[list[int]]], list[int], set[int], int]:
    dimension = draw(st.integers(1, 4))
    row = directions(dimension)
    seqs = st.integers(-5, 60)
    facts = draw(st.dictionaries(seqs, st.lists(row, min_size=1, max_size=3), max_size=40))
    return dimension, facts, draw(row), draw(st.sets(seqs)), draw(st.integers(0, 45))


@settings(max_examples=300, deadline=None)
@given(case=cases(), removed=st.sets(st.integers(-5, 60), max_size=20), batch=st.integers(1, 9))
def test_equals_brute_force(
    case: tuple[int, dict[int, list[list[int]]], list[int], set[int], int], removed: set[int], batch: int
) -> None:
    dimension, drawn, query, allowed, k = case
    facts = {seq: vec(*rows) for seq, rows in drawn.items()}
    index = VectorIndex(dimension)
    for start in range(0, len(facts), batch):
        index.add(list(facts)[start : start + batch], list(facts.values())[start : start + batch])
    index.remove(list(removed))
    left = {seq: rows for seq, rows in facts.items() if seq not in removed}

    assert len(index) == len(left)
    assert index.search(query, k) == nearest(left, query, k)
    assert index.search(query, k, allowed=sorted_seqs(allowed)) == nearest(left, query, k, allowed)
    negated = [-component for component in query]
    assert index.search_many([query, negated], k) == [nearest(left, query, k), nearest(left, negated, k)]


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("gap", [1, 10**12], ids=["dense", "sparse"])
def test_larger_indexes_equal_brute_force(num_chunks: int, gap: int) -> None:
    rng = np.random.default_rng(num_chunks)
    centres = rng.standard_normal((50, 64))
    rows = unit(centres[rng.integers(0, 50, 6000)] + 1e-3 * rng.standard_normal((6000, 64)))
    seqs = np.arange(6000, dtype=np.int64) // num_chunks * gap
    index = VectorIndex(64)
    index.load(seqs.copy(), rows.copy())
    removed = [*seqs[rng.integers(0, 6000, 500)], *seqs[-60:]]
    index.remove(removed)
    left = ~np.isin(seqs, removed)
    seqs, rows = seqs[left], rows[left]
    distinct = np.unique(seqs)
    assert len(index) == len(distinct)

    for query in unit(centres[:8] + 0.1 * rng.standard_normal((8, 64))):
        exact = (rows.astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
        best = np.maximum.reduceat(exact, np.searchsorted(seqs, distinct))
        for part in (1.0, 0.5, 0.005, 0.0):
            matching = rng.random(len(distinct)) < part
            order = np.lexsort((distinct[matching], -best[matching]))
            expected = list(zip(distinct[matching][order].tolist(), best[matching][order].tolist(), strict=True))
            allowed = sorted_seqs([*distinct[matching].tolist(), -1, 10**17])
            for k in (1, 10, 150, 10**9):
                assert index.search(query, k, allowed=allowed) == expected[:k]
                if part == 1:
                    assert index.search(query, k) == expected[:k]


def test_many_searches_are_each_of_them() -> None:
    rng = np.random.default_rng(6)
    index = index_of(dict(enumerate(rng.standard_normal((6000, 1, 4)))), 4)
    # 16.8 million scores at a time: two batches.
    queries = rng.standard_normal((3000, 4))
    found = index.search_many(queries, 3)
    assert len(found) == 3000
    for row in (0, 1, 2795, 2796, 2797, 2999):
        assert found[row] == index.search(queries[row], 3)


def test_ten_thousand_changes_leave_what_was_added_last() -> None:
    rng = np.random.default_rng(7)
    index, facts = VectorIndex(6), dict[int, Vectors]()
    for step in range(10_000):
        seq = int(rng.integers(0, 200))
        if rng.random() < 0.5:
            facts[seq] = rng.integers(-3, 4, (rng.integers(1, 4), 6)).astype(np.float32) + 0.25
            index.add([seq], [facts[seq]])
        else:
            index.remove([seq])
            facts.pop(seq, None)
        if step % 500 == 499:
            query = rng.standard_normal(6)
            assert len(index) == len(facts)
            assert index.search(query, 10) == nearest(facts, query, 10)
    assert index.search([1] * 6, 10**9) == nearest(facts, [1] * 6, 10**9)


def test_memory_follows_what_is_left() -> None:
    row_bytes = 16 * 4 + 8
    index = VectorIndex(16)
    index.load(np.arange(1000, dtype=np.int64), unit(np.ones((1000, 16))))
    assert index.nbytes == 1000 * row_bytes
    index.add([1000], [np.ones((1, 16), dtype=np.float32)])
    assert index.nbytes == 1250 * row_bytes
    for seq in range(1001):
        index.remove([seq])
        assert index.nbytes <= min(1250, 2 * len(index) + 1) * row_bytes
    assert index.nbytes == 0


def test_a_search_uses_one_thread() -> None:
    """Two pools of threads on the same cores make a search after an embedding ten times as long."""

    class Rows:
        def __matmul__(self, other: object) -> list[int]:
            return threads()

    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    with threadpool_limits(limits=2, user_api="blas"):
        before = threads()
        assert set(_product(Rows(), np.ones(2))) == {1}  # type: ignore[arg-type,call-overload]
        assert threads() == before
