"""Fusion of cosines and BM25 against sums worked out by hand."""

from fractions import Fraction
from pathlib import Path

import pytest
from bigrams import BigramEmbedder

from memstore import MemStore, MemStoreSettings, NewFact
from memstore.search.fusion import fuse
from memstore.search.vectors import Neighbour


def worded(**values: Fraction) -> list[Neighbour]:
    """What a keyword search returns for these BM25 values."""
    return [Neighbour(int(name[1:]), float(x / (1 + x))) for name, x in values.items()]


def test_scores_are_weighted_sums() -> None:
    nearest = [Neighbour(7, 0.5), Neighbour(3, 0.3), Neighbour(9, -1.0)]
    assert fuse(nearest, worded(f3=Fraction(4), f9=Fraction(1)), 10) == [
        (3, pytest.approx(0.44)),  # 0.8 * 0.3 + 0.2 * 4 / 4
        (7, pytest.approx(0.4)),  # 0.8 * 0.5
        (9, pytest.approx(-0.75)),  # -0.8 + 0.2 * 1 / 4
    ]


def test_a_rare_word_beats_a_slightly_nearer_fact_and_not_a_much_nearer_one() -> None:
    assert [seq for seq, _ in fuse([Neighbour(1, 0.6), Neighbour(2, 0.5)], worded(f2=Fraction(6)), 2)] == [2, 1]
    assert [seq for seq, _ in fuse([Neighbour(1, 0.9), Neighbour(2, 0.5)], worded(f2=Fraction(6)), 2)] == [1, 2]


def test_words_that_most_facts_hold_do_not_decide() -> None:
    # BM25 of such a word is about 1e-6, of which the best is not stretched to 1.
    [first, second] = fuse([Neighbour(1, 0.51), Neighbour(2, 0.5)], worded(f2=Fraction(1, 1_000_000)), 2)
    assert (first.seq, second.seq) == (1, 2)
    assert second.score == pytest.approx(0.4 + 0.2e-6, abs=1e-12)


def test_ties_come_by_seq() -> None:
    assert [seq for seq, _ in fuse([Neighbour(seq, 0.5) for seq in (5, 4, 6)], [], 3)] == [4, 5, 6]


def test_nothing_found_and_nothing_wanted() -> None:
    assert fuse([], [], 5) == []
    assert fuse([Neighbour(1, 0.5)], [], 0) == []


def test_what_only_the_words_found_has_its_true_cosine(tmp_path: Path) -> None:
    embedder, unboosted = BigramEmbedder(), MemStoreSettings(month_boost=0, neighbour_boost=0)
    query, far = "planted a quince", "others planted one quince"
    with MemStore(tmp_path, embedder=embedder, settings=unboosted) as store:
        store.add_many("ana", [*(NewFact(f"planted a quilt {number}") for number in range(200)), NewFact(far)])
        assert far not in [hit.fact.text for hit in store.search("ana", query, k=100)]
        [best] = store.search("ana", query, k=1, mode="hybrid")
    left, right = embedder.embed([query, far]).astype(float)
    # Alone in holding a rare word, it has the best BM25 of all.
    assert best.fact.text == far
    assert best.score == pytest.approx(0.8 * float(left @ right) + 0.2, abs=1e-5)
