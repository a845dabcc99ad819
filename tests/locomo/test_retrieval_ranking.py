"""Rankers against scores added up by hand, over searches whose hits are given."""

from collections.abc import Mapping

import pytest

from locomo.retrieval.index import Hit
from locomo.retrieval.ranking import (
    Asked,
    MonthBoost,
    NeighbourBoost,
    RankFusion,
    ScoreFusion,
    SpeakerBoost,
    StoreSearch,
    Thread,
    ranked,
    with_neighbours,
)
from locomo.retrieval.speakers import named_speaker
from locomo.retrieval.units import Unit
from locomo.retrieval.variants import variants, within_tokens
from memstore.search.views import SearchMode

# Two sessions of two and three turns.
UNITS = [
    Unit("D1:1", "hello", "Ada", "9:00 am on 3 May, 2021", ("D1:1",), "1"),
    Unit("D1:2", "I bought bees", "Bo", "9:00 am on 3 May, 2021", ("D1:2",), "1"),
    Unit("D2:1", "how are they?", "Ada", "8:00 am on 9 June, 2021", ("D2:1",), "2"),
    Unit("D2:2", "well", "Bo", "8:00 am on 9 June, 2021", ("D2:2",), "2"),
    Unit("D2:3", "good", "Ada", "", ("D2:3",), "2"),
]
HITS = {
    "vector": [Hit("D2:1", 0.8), Hit("D1:2", 0.6), Hit("D2:3", 0.2)],
    # BM25 of 4 and 1, as the store reports them: x / (1 + x).
    "keyword": [Hit("D1:2", 0.8), Hit("D2:2", 0.5)],
}


def given(owner: str, query: str, *, k: int, mode: str, where: Mapping[str, object] | None = None) -> list[Hit]:
    speakers = {unit.id: unit.speaker for unit in UNITS}
    return [hit for hit in HITS[mode] if where is None or speakers[hit.unit] == where["metadata.speaker"]]


def asked(question: str) -> Asked:
    return Asked(question, "conv", ("Ada", "Bo"), Thread(UNITS), given)


@pytest.mark.parametrize(
    ("question", "named"),
    [
        ("What did Bo buy?", "Bo"),
        ("What did bo's bees do?", "Bo"),
        ("Did Ada meet Bo?", None),
        ("What grows in Bologna?", None),
        ("What happened?", None),
    ],
)
def test_a_speaker_is_named_where_it_is_the_only_one(question: str, named: str | None) -> None:
    assert named_speaker(question, ("Ada", "Bo")) == named


def test_the_store_is_filtered_only_where_the_question_names_a_speaker() -> None:
    of_speaker = StoreSearch(own_speaker_only=True)
    assert ranked(of_speaker.scores(asked("What did Bo buy?"))) == ["D1:2"]
    assert ranked(of_speaker.scores(asked("What was bought?"))) == ["D2:1", "D1:2", "D2:3"]


def test_ranks_are_fused_by_their_reciprocals() -> None:
    assert RankFusion(weight=2.0, offset=10).scores(asked("x")) == pytest.approx(
        {"D2:1": 1 / 11, "D1:2": 1 / 12 + 2 / 11, "D2:3": 1 / 13, "D2:2": 2 / 12}
    )


def test_scores_are_fused_by_a_weighted_sum() -> None:
    # BM25 4 and 1 become 1 and 0.25; what the vector search lacks has its least cosine.
    assert ScoreFusion(0.25).scores(asked("x")) == pytest.approx(
        {"D2:1": 0.6, "D1:2": 0.45 + 0.25, "D2:3": 0.15, "D2:2": 0.15 + 0.0625}
    )


def test_boosts_add_to_what_the_question_names() -> None:
    vector = StoreSearch()
    assert SpeakerBoost(vector, 0.5).scores(asked("What did Bo buy?")) == pytest.approx(
        {"D2:1": 0.8, "D1:2": 1.1, "D2:3": 0.2}
    )
    assert SpeakerBoost(vector, 0.5).scores(asked("What did Ada sell Bo?")) == dict(HITS["vector"])
    # A unit whose date is not known is of no month.
    assert MonthBoost(vector, 0.5).scores(asked("What was bought in June?")) == pytest.approx(
        {"D2:1": 1.3, "D1:2": 0.6, "D2:3": 0.2}
    )
    assert MonthBoost(vector, 0.5).scores(asked("What was bought in June 2020?")) == dict(HITS["vector"])


def test_a_neighbour_shares_its_score_within_its_thread() -> None:
    # D2:2, no candidate, counts with the least score, 0.2; D1:2 and D2:1 stand in two threads.
    assert NeighbourBoost(StoreSearch(), 0.5).scores(asked("x")) == pytest.approx(
        {"D2:1": 0.9, "D1:2": 0.7, "D2:3": 0.3}
    )
    # With D2:2 a candidate of 0.5, both of its neighbours gain.
    assert NeighbourBoost(StoreSearch(SearchMode.KEYWORD), 0.5).scores(asked("x")) == pytest.approx(
        {"D1:2": 0.8 + 0.25, "D2:2": 0.5 + 0.25}
    )


def test_equal_scores_keep_the_order_of_the_store() -> None:
    assert ranked({"b": 0.5, "a": 0.5, "c": 0.7}) == ["c", "b", "a"]


def test_neighbours_join_behind_their_hit_each_once() -> None:
    thread = Thread(UNITS)
    assert with_neighbours(["D2:2", "D1:1"], thread, (-1, 1)) == ["D2:2", "D2:1", "D2:3", "D1:1", "D1:2"]
    assert with_neighbours(["D2:1", "D2:2"], thread, (1,)) == ["D2:1", "D2:2", "D2:3"]
    assert with_neighbours(["D1:1", "D2:1"], thread, (-1,)) == ["D1:1", "D2:1"]


def test_a_budget_of_tokens_ends_before_what_does_not_fit() -> None:
    tokens = {"a": 3, "b": 4, "c": 1}.__getitem__
    assert [within_tokens(["a", "b", "c"], budget, tokens) for budget in (2, 3, 7, 8, 99)] == [
        [], ["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c"],
    ]  # fmt: skip


def test_variants_have_names_of_their_own_and_baselines_among_them() -> None:
    compared = variants()
    names = [variant.name for variant in compared]
    assert len(set(names)) == len(names)
    assert {variant.baseline for variant in compared} <= set(names)
