from itertools import count

import pytest

from locomo.dataset import Category, Question, demo_conversation_path, load
from locomo.errors import ScoringError
from locomo.scoring.choice import distractors, is_gold_chosen

INDEX = count()


def question(sample: str, category: int, answer: str | None) -> Question:
    return Question(sample, next(INDEX), "Which?", answer, None, (), (), Category(category))


ASKED = question("conv-1", 2, "May")
POOL = [
    ASKED,
    *(question("conv-1", 2, answer) for answer in ("June", "july", "JULY.", "MAY", "the May")),
    *(question("conv-2", 2, answer) for answer in ("August", "June", "1 May")),
    *(question("conv-1", 4, answer) for answer in ("a boat", "a kite")),
    *(question("conv-2", 1, answer) for answer in ("Rome", "Oslo", None)),
    question("conv-1", 5, None),
]


def test_same_id_comes_first_and_within_it_the_same_conversation() -> None:
    chosen = distractors(ASKED, POOL)
    assert {answer.lower().rstrip(".") for answer in chosen[:2]} == {"june", "july"}
    assert set(chosen[2:4]) == {"August", "1 May"}
    assert set(chosen[4:6]) == {"a boat", "a kite"}
    assert set(chosen[6:]) == {"Rome", "Oslo"}  # eight different ones are all there are
    assert distractors(ASKED, POOL, count=3) == chosen[:3]


def test_no_distractor_is_the_gold_or_another_distractor_again() -> None:
    lowered = [answer.lower().strip(".") for answer in distractors(ASKED, POOL)]
    assert len(set(lowered)) == len(lowered)
    assert not {"may", "the may"} & set(lowered)


def test_the_choice_depends_on_the_question_and_not_on_the_order_of_the_pool() -> None:
    assert distractors(ASKED, reversed(POOL)) == distractors(ASKED, POOL)
    many = [question("conv-1", 4, f"thing {number}") for number in range(200)]
    first, second = many[:2]
    assert distractors(first, many) != distractors(second, many)
    assert len(set(distractors(first, many))) == 9
    # sha256sum of "conv-9\0" "7\0" and the answer, in order
    asked = Question("conv-9", 7, "Which?", "gold", None, (), (), Category.SINGLE_HOP)
    assert distractors(asked, [question("conv-9", 4, letter) for letter in "pqrs"]) == SORTED_BY_DIGEST


SORTED_BY_DIGEST = ("q", "s", "r", "p")


def test_an_adversarial_question_has_real_answers_for_distractors() -> None:
    [conversation] = load(demo_conversation_path())
    asked = next(item for item in conversation.questions if item.category is Category.ADVERSARIAL)
    golds = {item.answer for item in conversation.questions if item.category is not Category.ADVERSARIAL}
    chosen = distractors(asked, conversation.questions)
    assert len(chosen) == 9
    assert set(chosen) <= golds


@pytest.mark.parametrize(
    ("choices_nll", "chosen"),
    [([1.0, 2.0, 3.0], True), ([2.0, 1.0, 3.0], False), ([1.0, 1.0, 3.0], False), ([1.0, float("inf")], True)],
)
def test_the_gold_wins_only_outright(choices_nll: list[float], chosen: bool) -> None:
    assert is_gold_chosen(choices_nll) is chosen


@pytest.mark.parametrize("choices_nll", [[], [1.0], [1.0, float("nan")], [float("nan"), 1.0]])
def test_what_is_no_choice_is_refused(choices_nll: list[float]) -> None:
    with pytest.raises(ScoringError, match="forced choice"):
        is_gold_chosen(choices_nll)
