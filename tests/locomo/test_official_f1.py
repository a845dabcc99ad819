import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locomo.dataset import Category, Question, load
from locomo.errors import ScoringError
from locomo.scoring.official import NOT_MENTIONED, gold_answer, normalise, official_f1, parts_f1, token_f1

LOCOMO_DATA = Path(
    os.environ.get("LOCOMO_DATA", Path(__file__).resolve().parents[2].parent / "shared/data/locomo10.json")
)
TEXTS = st.text(st.sampled_from("ab ,.;'XY7é\n") | st.characters(codec="utf-8"), max_size=40)


def question(category: int, answer: str | None) -> Question:
    return Question("conv-1", 0, "Which?", answer, None, (), (), Category(category))


@pytest.mark.parametrize(
    ("category", "gold", "prediction", "score"),
    [  # what the data set's own functions gave
        (2, "7 May 2023", "May 7, 2023", 1.0),
        (4, "mental health", "Running a charity race for mental health awareness", 0.4444),
        (1, "pottery, camping, painting, swimming", "painting and pottery, running, swims", 0.5833),
        (3, "Likely no; though she likes reading, she wants to be a counselor", "No, she likely would not", 0.5714),
        (5, "x", "I don't have that information.", 0.0),
        (5, "x", "Not Mentioned in what they said", 1.0),
        (1, "Sweden", "Sweden, her home country, is where she moved from", 1.0),
    ],
)
def test_the_worked_values(category: int, gold: str, prediction: str, score: float) -> None:
    assert official_f1(prediction, question(category, gold)) == pytest.approx(score, abs=5e-5)


def test_commas_join_and_other_punctuation_goes_without_a_space() -> None:
    assert normalise("Well-known,\tThe  'Gardens' and an A-frame, 1,000 m.") == "wellknown gardens aframe 1000 m"


def test_a_temporal_answer_is_not_split_at_commas() -> None:
    # gold {red, blue}, prediction {red, boat}: one of two shared either way round
    assert official_f1("red, boat", question(2, "red, blue")) == 0.5
    # split: red finds red (1), blue finds nothing (0)
    assert official_f1("red, boat", question(1, "red, blue")) == 0.5
    # whole: 2 * 1 / (3 + 1); split: the part "red" is found whole
    assert official_f1("red, boat, oar", question(2, "red")) == 0.5
    assert official_f1("red, boat, oar", question(1, "red")) == 1.0


def test_repeated_words_count_as_often_as_both_sides_have_them() -> None:
    # shared multiset {very: 2, good: 1} of 4 and 3 tokens: 2 * 3 / 7
    assert token_f1("very very very good", "very very good") == pytest.approx(6 / 7)


def test_only_the_gold_of_an_open_domain_question_is_cut() -> None:
    assert official_f1("yes", question(3, "Yes; she said so")) == 1.0
    # prediction {yes, she, said, so} against {yes}: 2 * 1 / 5
    assert official_f1("Yes; she said so", question(3, "Yes; she said so")) == pytest.approx(0.4)


@pytest.mark.parametrize("prediction", ["no INFORMATION available", "It is not mentioned, but probably Rome."])
def test_an_adversarial_question_is_right_by_either_phrase(prediction: str) -> None:
    assert official_f1(prediction, question(5, None)) == 1.0
    assert official_f1("Rome", question(5, "Rome")) == 0.0


@pytest.mark.parametrize("category", [1, 2, 3, 4])
def test_a_question_without_a_gold_is_no_zero(category: int) -> None:
    with pytest.raises(ScoringError, match=rf"question 0 of conv-1 \(id {category}\) has no gold"):
        official_f1("anything", question(category, None))
    assert official_f1("", question(category, "anything")) == 0.0


@given(TEXTS, TEXTS)
def test_f1_is_symmetric_and_a_share(one: str, other: str) -> None:
    assert token_f1(one, other) == token_f1(other, one)
    assert 0.0 <= token_f1(one, other) <= 1.0


@given(TEXTS)
def test_a_text_with_any_word_is_its_own_perfect_answer(text: str) -> None:
    assert token_f1(text, text) == float(bool(normalise(text)))
    assert parts_f1(text, text) == pytest.approx(
        sum(bool(normalise(part)) for part in text.split(",")) / len(text.split(","))
    )


@given(st.lists(st.sampled_from(["red", "blue", "boats", "7"]), min_size=1, max_size=6).flatmap(st.permutations))
def test_order_case_and_articles_do_not_matter(words: list[str]) -> None:
    assert token_f1(f"The {' a '.join(words).upper()}!", " ".join(sorted(words))) == 1.0


@pytest.mark.locomo
@pytest.mark.skipif(not LOCOMO_DATA.is_file(), reason=f"LoCoMo's data file is not at {LOCOMO_DATA}")
def test_a_perfect_run_scores_one_but_for_the_uncut_golds_of_open_domain_questions() -> None:
    scores = defaultdict(list)
    for conversation in load(LOCOMO_DATA):
        for item in conversation.questions:
            scores[int(item.category)].append(official_f1(gold_answer(item), item))
    assert sum(map(len, scores.values())) == 1986
    for number in (1, 2, 4, 5):
        assert min(scores[number]) == 1.0, number
    assert sum(scores[3]) / len(scores[3]) == pytest.approx(0.927, abs=5e-4)
    assert gold_answer(question(5, "No")) == NOT_MENTIONED
