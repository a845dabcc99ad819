"""Recall and its differences on invented conversations, counted by hand."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from locomo.dataset import Category, Conversation, Observation, Question, Turn
from locomo.retrieval.index import Hit
from locomo.retrieval.latency import measure_latency
from locomo.retrieval.measure import Corpus, Outcome, chosen_elsewhere, measure, remembering
from locomo.retrieval.ranking import StoreSearch
from locomo.retrieval.units import UnitKind, UnitText, covers_of, units_of
from locomo.retrieval.variants import Variant
from locomo.scoring.recall import Recall

HIT, MISS = Recall(1.0, 1.0, 1.0), Recall(0.0, 0.0, 0.0)


def question(index: int, evidence: tuple[str, ...], category: Category = Category.SINGLE_HOP) -> Question:
    return Question("odd-1", index, f"question {index}", "x", None, evidence, evidence, category)


CONVERSATION = Conversation(
    "odd-1",
    ("Ada", "Bo"),
    (
        Turn("D1:1", "Ada", "look", "a photo of a bee", 1, "9:00 am on 3 May, 2021"),
        Turn("D1:2", "Bo", "nice", None, 1, "9:00 am on 3 May, 2021"),
    ),
    (
        question(0, ("D1:1",)),
        question(1, ("D1:1", "D1:2")),
        question(2, ("D1:1",), Category.ADVERSARIAL),
        question(3, ()),
    ),
    (
        Observation("Ada", "Ada saw a bee.", ("D1:1", "D1:2"), 1, "9:00 am on 3 May, 2021"),
        Observation("Bo", "Bo is kind.", (), 1, "9:00 am on 3 May, 2021"),
    ),
)


@pytest.mark.parametrize(
    ("kind", "text", "captions", "expected"),
    [
        ("turns", "dated", False, "(9:00 am on 3 May, 2021) Ada: look"),
        ("turns", "dated", True, "(9:00 am on 3 May, 2021) Ada: look [shares a photo of a bee]"),
        ("turns", "spoken", False, "Ada: look"),
        ("turns", "plain", True, "look [shares a photo of a bee]"),
        ("observations", "dated", False, "(9:00 am on 3 May, 2021) Ada saw a bee."),
        ("observations", "spoken", False, "Ada saw a bee."),
        ("observations", "plain", False, "Ada saw a bee."),
    ],
)
def test_texts_of_units(kind: str, text: str, captions: bool, expected: str) -> None:
    units = units_of(CONVERSATION, UnitKind(kind), text=UnitText(text), captions=captions)
    assert units[0].text == expected
    assert (units[0].speaker, units[0].date_time) == ("Ada", "9:00 am on 3 May, 2021")


def test_an_observation_covers_its_evidence() -> None:
    units = {"odd-1": units_of(CONVERSATION, UnitKind.OBSERVATIONS)}
    assert covers_of(units) == {"odd-1": {"O0": ("D1:1", "D1:2"), "O1": ()}}
    assert [unit.thread for unit in units["odd-1"]] == ["1 Ada", "1 Bo"]


def test_recall_of_each_variant_is_counted_over_the_questions_that_count() -> None:
    def search(owner: str, query: str, *, k: int, mode: str, where: Mapping[str, object] | None = None) -> list[Hit]:
        assert owner == "odd-1"
        return [Hit("D1:1", 0.9), Hit("D1:2", 0.1)] if query == "question 0" else [Hit("D1:2", 0.9), Hit("D1:1", 0.1)]

    corpus = Corpus(
        [CONVERSATION], {"odd-1": units_of(CONVERSATION, UnitKind.TURNS)}, {"odd-1": {"D1:1": 2, "D1:2": 5}}
    )
    compared = [
        Variant("vector", StoreSearch()),
        Variant("joined", StoreSearch(), joined=(1,), budget="tokens"),
    ]
    plain, joined = measure(corpus, compared, search, ks=(1, 2))
    assert plain.recalls == {1: [HIT, Recall(0.0, 1.0, 0.5)], 2: [HIT, HIT]}
    assert plain.means() == {1: Recall(0.5, 1.0, 0.75), 2: HIT}
    # The first hit of question 0 takes 2 tokens, into which its neighbour does not fit.
    assert joined.recalls == plain.recalls
    assert joined.difference(plain, 1)[:3] == (0.0, None, None)


def test_a_remembering_search_asks_once_for_each_thing() -> None:
    calls: list[tuple[str, str, object]] = []

    def search(owner: str, query: str, *, k: int, mode: str, where: Mapping[str, object] | None = None) -> list[Hit]:
        calls.append((query, mode, where))
        return [Hit(query, 0.0)]

    find = remembering(search)
    for _ in range(2):
        assert find("a", "x", k=5, mode="vector") == [Hit("x", 0.0)]
        assert find("a", "x", k=5, mode="vector", where={"speaker": "Bo"}) == [Hit("x", 0.0)]
        assert find("a", "y", k=5, mode="keyword") == [Hit("y", 0.0)]
    assert calls == [("x", "vector", None), ("x", "vector", {"speaker": "Bo"}), ("y", "keyword", None)]


def outcome(name: str, recalls: list[Recall]) -> Outcome:
    return Outcome(Variant(name, StoreSearch()), ["a", "a", "b", "c"], {10: recalls})


def test_a_setting_is_chosen_on_the_other_conversations() -> None:
    # On b and c the second is better (2 against 0), on a and c, and on a and b, the first (2 against 1).
    first = outcome("first", [HIT, HIT, MISS, MISS])
    second = outcome("second", [MISS, MISS, HIT, HIT])
    assert chosen_elsewhere([first, second], 10, name="chosen").recalls == {10: [MISS, MISS, MISS, MISS]}
    always = outcome("always", [HIT, HIT, HIT, HIT])
    assert chosen_elsewhere([first, always], 10, name="chosen").recalls[10] == [HIT, HIT, HIT, HIT]


def test_differences_are_paired_by_question() -> None:
    first = Outcome(Variant("first", StoreSearch()), list("aabcde"), {10: [HIT, HIT, MISS, HIT, HIT, MISS]})
    second = Outcome(Variant("second", StoreSearch()), list("aabcde"), {10: [HIT, MISS, MISS, MISS, HIT, HIT]})
    interval = first.difference(second, 10)
    # Differences by conversation: 1 of 2, 0, 1, 0, -1; less the mean 1/6 of each question 2/3, -1/6, 5/6, -1/6, -7/6.
    half = 2.776 * (5 / 4 * (16 + 1 + 25 + 1 + 49) / 36) ** 0.5 / 6
    assert interval[:3] == pytest.approx((1 / 6, 1 / 6 - half, 1 / 6 + half), abs=1e-3)
    assert interval[3:] == ("conversations", 5)


def test_added_time_is_that_of_the_same_query_and_round() -> None:
    @dataclass(frozen=True)
    class Counting:
        calls: list[str]
        name: str

        def scores(self, asked: object) -> dict[str, float]:
            self.calls.append(self.name)
            return {}

    calls: list[str] = []
    compared = [Variant("vector", Counting(calls, "vector")), Variant("other", Counting(calls, "other"))]
    units = {"odd-1": units_of(CONVERSATION, UnitKind.TURNS)}
    search = lambda *args, **kwargs: []  # noqa: E731
    asked = [about for _, about in Corpus([CONVERSATION], units, {}).asked(search)]
    found = measure_latency(asked, compared, queries=5, rounds=3)
    # Two questions count; one round warms up. The variants take turns.
    assert calls == ["vector", "other"] * (2 * 4)
    assert found["vector"][1:] == (0.0, 0.0, 0.0)
    assert found["other"].added_low <= found["other"].added <= found["other"].added_high
