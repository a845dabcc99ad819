"""Cases M2, M3 and M4, and exact search against numpy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.errors import EmbeddingError
from memstore.index import FactIndex, OwnerIndex
from memstore.records import StoredVectors
from memstore.types import OwnerId

ANA, BO = OwnerId("ana"), OwnerId("bo")


def test_an_id_added_twice_is_one_vector() -> None:
    index = OwnerIndex(2)
    index.add([7], [[1, 0]])
    index.add([7], [[0, 1]])
    assert len(index) == 1
    assert index.search([0, 1], 5) == [(7, 1.0)]
    index.remove([7])
    assert len(index) == 0
    assert index.search([0, 1], 5) == []


def test_the_last_of_one_batch_counts() -> None:
    index = OwnerIndex(2)
    index.add([7, 8, 7], [[1, 0], [1, 1], [0, 1]])
    assert [seq for seq, _ in index.search([0, 1], 5)] == [7, 8]


def test_more_neighbours_than_vectors() -> None:
    index = OwnerIndex(2)
    index.add([1, 2, 3], [[1, 0], [0, 1], [-1, 0]])
    assert [seq for seq, _ in index.search([1, 0.1], 50)] == [1, 2, 3]


def test_cosine_and_not_inner_product() -> None:
    index = OwnerIndex(2)
    index.add([1, 2], [[0.1, 0], [0.5, 0.5]])
    assert index.search([1, 0], 2) == [(1, 1.0), (2, pytest.approx(math.sqrt(0.5)))]


def test_scores_stay_in_range() -> None:
    rows = np.random.default_rng(3).standard_normal((500, 33)).astype(np.float32)
    index = OwnerIndex(33)
    index.add(range(500), rows)
    for row in rows[:50]:
        scores = [score for _, score in index.search(row, 500)] + [score for _, score in index.search(-row, 500)]
        assert max(scores) <= 1.0
        assert min(scores) >= -1.0


def test_ties_come_by_seq_also_at_the_edge() -> None:
    index = OwnerIndex(2)
    seqs = [40, 10, 30, 20, 50, 5]
    index.add(seqs, [[1, 1]] * 5 + [[1, 0]])
    for k in range(1, 7):
        assert [seq for seq, _ in index.search([1, 1], k)] == [10, 20, 30, 40, 50, 5][:k]


@pytest.mark.parametrize("bad", [[math.nan, 0], [math.inf, 0], [0, 0]])
def test_what_has_no_direction_is_refused(bad: list[float]) -> None:
    index = OwnerIndex(2)
    with pytest.raises(EmbeddingError) as caught:
        index.add([1, 2], [[1, 0], bad])
    assert caught.value.position == 1
    assert len(index) == 0
    index.add([1], [[1, 0]])
    with pytest.raises(EmbeddingError):
        index.search(bad, 1)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 80), k=st.integers(1, 90), removed=st.integers(0, 20))
def test_equals_brute_force(seed: int, n: int, k: int, removed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(-2, 3, (n, 6)).astype(np.float64) + 0.25
    query = rng.standard_normal(6)
    index = OwnerIndex(6)
    index.add(range(100, 100 + n), rows)
    gone = {100 + int(row) for row in rng.integers(0, n, removed)}
    index.remove(list(gone))

    left = [seq for seq in range(100, 100 + n) if seq not in gone]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    scores = {seq: float(unit[seq - 100] @ query / np.linalg.norm(query)) for seq in left}
    found = index.search(query, k)
    assert len(found) == min(k, len(left))
    assert len({seq for seq, _ in found}) == len(found)
    for seq, score in found:
        assert score == pytest.approx(scores[seq], abs=1e-5)
    best = sorted(scores.values(), reverse=True)[:k]
    assert [score for _, score in found] == pytest.approx(best, abs=1e-5)


class Loads:
    """Vectors of owners, and the order in which they were asked for."""

    def __init__(self, **seqs: list[int]) -> None:
        self.seqs = seqs
        self.asked: list[str] = []

    def __call__(self, owner: OwnerId) -> StoredVectors:
        self.asked.append(owner)
        seqs = self.seqs.get(owner, [])
        return StoredVectors(np.array(seqs, dtype=np.int64), np.ones((len(seqs), 2), dtype=np.float32))


def test_an_owner_is_loaded_once_and_sees_its_own_vectors() -> None:
    loads = Loads(ana=[1, 2], bo=[3])
    index = FactIndex(loads, dimension=2, max_open=2)
    assert [seq for seq, _ in index.search(ANA, [1, 1], 9)] == [1, 2]
    assert [seq for seq, _ in index.search(BO, [1, 1], 9)] == [3]
    index.add(ANA, [4], np.ones((1, 2), dtype=np.float32))
    index.remove(ANA, [1])
    assert [seq for seq, _ in index.search(ANA, [1, 1], 9)] == [2, 4]
    assert loads.asked == ["ana", "bo"]


def test_the_least_recently_searched_owner_is_dropped() -> None:
    loads = Loads(a=[1], b=[2], c=[3])
    index = FactIndex(loads, dimension=2, max_open=2)
    for owner in ("a", "b", "a", "c", "a", "b"):
        index.search(OwnerId(owner), [1, 1], 1)
    assert loads.asked == ["a", "b", "c", "b"]


def test_owners_without_facts_push_out_nobody() -> None:
    loads = Loads(a=[1])
    index = FactIndex(loads, dimension=2, max_open=1)
    index.search(OwnerId("a"), [1, 1], 1)
    assert index.search(OwnerId("nobody"), [1, 1], 1) == []
    index.search(OwnerId("a"), [1, 1], 1)
    assert loads.asked == ["a", "nobody"]
    index.drop(OwnerId("a"))
    index.search(OwnerId("a"), [1, 1], 1)
    assert loads.asked == ["a", "nobody", "a"]
