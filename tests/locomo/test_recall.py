import pytest

from locomo.dataset import Category, Question
from locomo.scoring.recall import Recall, covered_turns, repaired_recall, repaired_table, strict_recall, strict_table


def question(
    category: int, raw: list[str], repaired: list[str] | None = None, *, sample: str = "conv-1", index: int = 0
) -> Question:
    evidence = tuple(raw if repaired is None else repaired)
    return Question(sample, index, "Which?", "x", None, evidence, tuple(raw), Category(category))


def test_strict_recall_takes_the_strings_as_they_are() -> None:
    joined = question(1, ["D8:6; D9:17", "D1:1"], ["D8:6", "D9:17", "D1:1"])
    assert strict_recall(joined, {"D8:6", "D9:17", "D1:1"}) == Recall(0.0, 1.0, 0.5)
    assert repaired_recall(joined, {"D8:6", "D9:17", "D1:1"}) == Recall(1.0, 1.0, 1.0)
    assert repaired_recall(joined, {"D9:17", "D4:4"}) == Recall(0.0, 1.0, pytest.approx(1 / 3))


def test_a_repeated_evidence_string_counts_twice_when_strict() -> None:
    twice = question(1, ["D1:1", "D1:1", "D2:2"], ["D1:1", "D2:2"])
    assert strict_recall(twice, {"D1:1"}).share == pytest.approx(2 / 3)
    assert repaired_recall(twice, {"D1:1"}) == Recall(0.0, 1.0, 0.5)


def test_no_evidence_is_found_when_strict_and_does_not_count_when_repaired() -> None:
    assert strict_recall(question(3, []), set()) == Recall(1.0, 1.0, 1.0)
    assert repaired_recall(question(3, []), set()) is None
    # a string that names no turn stays missing when strict
    assert strict_recall(question(3, ["D"], []), {"D1:1"}) == Recall(0.0, 0.0, 0.0)
    assert repaired_recall(question(3, ["D"], []), {"D1:1"}) is None
    assert repaired_recall(question(5, ["D1:1"]), {"D1:1"}) is None


def test_a_unit_covers_the_turns_it_was_drawn_from() -> None:
    covers = {"o1": ["D1:1", "D1:2"], "o2": [], "o3": ["D1:2"]}
    assert covered_turns(["o1", "o2", "o3"], covers) == {"D1:1", "D1:2"}
    assert covered_turns(["D1:1"]) == {"D1:1"}
    with pytest.raises(KeyError, match="o4"):
        covered_turns(["o4"], covers)


RETRIEVED = [
    (question(1, ["D1:1", "D1:2"], index=0), ["D1:1", "D9:9", "D1:2"]),
    (question(4, ["D1:3"], index=1), ["D1:3", "D9:9", "D9:8"]),
    (question(4, ["D1:4"], index=2), ["D9:9", "D9:8", "D9:7"]),
    (question(3, [], index=3), ["D9:9", "D9:8", "D9:7"]),
    (question(5, ["D1:5"], index=4), ["D1:5", "D9:8", "D9:7"]),
]


def test_repaired_table_by_k_and_id() -> None:
    table = repaired_table(RETRIEVED, ks=(1, 3))
    assert table.n == 3
    assert table.overall == {
        1: Recall(pytest.approx(1 / 3), pytest.approx(2 / 3), pytest.approx(1.5 / 3)),
        3: Recall(pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(2 / 3)),
    }
    assert table.by_id == {
        1: {1: Recall(0.0, 1.0, 0.5), 3: Recall(1.0, 1.0, 1.0)},
        4: {1: Recall(0.5, 0.5, 0.5), 3: Recall(0.5, 0.5, 0.5)},
    }
    assert table.as_json()["any"] == {"1": pytest.approx(2 / 3), "3": pytest.approx(2 / 3)}
    assert list(table.as_json()) == ["all", "any", "share"]


def test_strict_table_has_every_question() -> None:
    table = strict_table(RETRIEVED, ks=(1,))
    assert table.n == 5
    assert table.overall == {1: Recall(pytest.approx(3 / 5), pytest.approx(4 / 5), pytest.approx(3.5 / 5))}
    assert list(table.by_id) == [1, 3, 4, 5]


def test_units_are_those_of_the_questions_own_conversation() -> None:
    covers = {"conv-1": {"0": ["D1:1"]}, "conv-2": {"0": ["D7:7"]}}
    here = question(4, ["D1:1"])
    there = question(4, ["D1:1"], sample="conv-2")
    table = repaired_table([(here, ["0"]), (there, ["0"])], ks=(5,), covers=covers)
    assert table.overall == {5: Recall(0.5, 0.5, 0.5)}


def test_no_question_no_figure() -> None:
    table = repaired_table([(question(5, ["D1:1"]), ["D1:1"])])
    assert (table.n, table.overall, table.by_id) == (0, {}, {})
    assert table.as_json() == {"all": {}, "any": {}, "share": {}}
