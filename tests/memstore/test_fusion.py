"""Reciprocal rank fusion against sums worked out by hand."""

from fractions import Fraction
from itertools import permutations

import pytest

from memstore.search.fusion import fuse


def test_scores_are_sums_of_reciprocal_ranks() -> None:
    assert fuse([[7, 3], [3, 9]], 10) == [
        (3, pytest.approx(float(Fraction(1, 62) + Fraction(1, 61)))),
        (7, pytest.approx(1 / 61)),
        (9, pytest.approx(1 / 62)),
    ]


def test_two_middling_ranks_beat_one_first() -> None:
    assert [seq for seq, _ in fuse([[1, 2], [3, 2]], 1)] == [2]


def test_ties_come_by_seq_whatever_the_order_of_the_rankings() -> None:
    rankings = [[5, 4, 6], [4, 6, 5], [6, 5, 4]]
    for order in permutations(rankings):
        assert [seq for seq, _ in fuse(order, 3)] == [4, 5, 6]


def test_a_repeated_seq_counts_at_its_better_place() -> None:
    assert fuse([[8, 8, 9]], 2) == [(8, pytest.approx(1 / 61)), (9, pytest.approx(1 / 62))]


def test_nothing_ranked_and_nothing_wanted() -> None:
    assert fuse([], 5) == []
    assert fuse([[], []], 5) == []
    assert fuse([[1, 2]], 0) == []
