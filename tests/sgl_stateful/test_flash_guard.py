"""Which questions may be taken for one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_stateful.flash.audit import AlikeAudit
from sgl_stateful.flash.choices import Choice, leading
from sgl_stateful.flash.guard import guarded
from sgl_stateful.flash.semantic import says_the_same
from sgl_stateful.flash.wording import Wording, Words, nearest, words_of
from sgl_stateful.sessions.content import Content

SAME = [
    ("Which bed needs water?", "What bed needs water?"),
    ("Which bed needs water?", "please say which bed needs water"),
    ("Is the vent open?", "is the vent opened"),
    ("Is bed 3 dry?", "Please say whether bed 3 is dry."),
    ("Isn't it dry?", "is it not dry"),
    ("Where is Ana's office?", "where is the office of Ana"),
]
DIFFERENT = [
    ("Is the vent open?", "Is the vent closed?"),
    ("Is bed 3 dry?", "Is bed 4 dry?"),
    ("Is bed 3 dry?", "Is bed three dry?"),
    ("Is it dry?", "Is it not dry?"),
    ("Is it dry?", "Isn't it dry?"),
    ("Is it dry?", "Is it wet?"),
    ("Where is Ana?", "Where is Bo?"),
    ("Where does ORVA trade?", "Where does KELT trade?"),
    ("Does it take 5 minutes?", "Does it take 5 hours?"),
    ("Is it above 5 °C?", "Is it above 5 °F?"),
    ("Is ORVA above KELT?", "Is KELT above ORVA?"),
    ("How far is it from Porto to Faro?", "How far is it from Faro to Porto?"),
    ("Who opened it?", "When was it opened?"),
    ("Is my office here?", "Is your office here?"),
    ("Is it locked?", "Is it unlocked?"),
    ("Which was the highest?", "Which was the lowest?"),
    ("Is it 1.5?", "Is it 15?"),
    ("Is it +5?", "Is it -5?"),
    ("Is it 5 %?", "Is it 5?"),
    ("Is it １?", "Is it ２?"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_other_words_for_the_same(one: str, other: str) -> None:
    assert guarded(one) == guarded(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_a_word_that_decides(one: str, other: str) -> None:
    assert guarded(one) != guarded(other)


PLAIN = ["which", "the", "bed", "needs", "water", "is", "there", "soil", "please", "plant", "garden"]
words = st.lists(st.sampled_from(PLAIN), min_size=1, max_size=8)
deciding = st.sampled_from(["not", "open", "closed", "3", "4.5", "Ana", "ORVA", "above", "km", "never", "%", "seven"])


@given(words, words)
def test_plain_words_are_not_guarded(one: list[str], other: list[str]) -> None:
    assert guarded(" ".join(one)) == guarded(" ".join(other)) == ()


@given(words, st.integers(0, 8), deciding, deciding)
def test_another_deciding_word_in_its_place_is_another_question(
    plain: list[str], at: int, one: str, other: str
) -> None:
    at = min(at, len(plain))
    asked = [guarded(" ".join([*plain[:at], word, *plain[at:]])) for word in (one, other)]
    assert (asked[0] == asked[1]) is (one == other)
    assert asked[0] != guarded(" ".join(plain))


@given(words, deciding, deciding)
def test_order_counts(plain: list[str], one: str, other: str) -> None:
    there, back = (guarded(" ".join([first, *plain, second])) for first, second in ((one, other), (other, one)))
    assert (there == back) is (one == other)


@given(st.text(max_size=60))
def test_any_text_has_its_guarded_words(text: str) -> None:
    found = guarded(text)
    assert all(word and not word.isspace() for word in found)
    assert guarded(f"{text} 7") == (*found, "7")


@given(st.text(max_size=20), st.integers(0, 10**9), st.integers(0, 10**9))
def test_numbers_always_count(text: str, one: int, other: int) -> None:
    assert (guarded(f"{text} {one} x") == guarded(f"{text} {other} x")) is (one == other)


# ---- the nearest ----


def wording(angle: float, text: str = "which bed", form: tuple[str, ...] = ("text",)) -> Wording:
    return Wording.of(Words(form, text), np.array([np.cos(angle), np.sin(angle)], np.float32))


@given(
    st.floats(0, 3),
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["bed", "bed 3"]), st.floats(0.05, 1)), max_size=6),
)
def test_the_nearest_is_the_best_that_its_threshold_takes(asked: float, others: list[tuple[float, str, float]]) -> None:
    found = nearest(wording(asked, "bed 3"), [(wording(angle, text), least) for angle, text, least in others])
    # By the angle between both, as the cosine falls with it.
    near = [
        (round(abs(angle - asked), 4), place)
        for place, (angle, text, least) in enumerate(others)
        if text == "bed 3" and np.cos(angle - asked) > least + 1e-4
    ]
    if near:
        assert found is not None
        assert abs(abs(others[found.place][0] - asked) - min(near)[0]) < 1e-2
    if found is not None:
        angle, text, least = others[found.place]
        assert text == "bed 3"
        assert found.similarity == pytest.approx(np.cos(angle - asked), abs=1e-5)
        assert found.similarity >= least


def test_questions_of_another_form_are_others() -> None:
    assert nearest(wording(0), [(wording(0, form=("user",)), 0.5)]) is None
    assert nearest(wording(0), [(wording(0.1), 0.5), (wording(0), 0.5)]) == (1, pytest.approx(1.0))
    assert nearest(wording(0), [(wording(0), 0.5), (wording(0), 0.5)]) == (0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"text": "Why?"}, (("text",), "Why?")),
        (
            {"messages": ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})},
            (("system", "user"), "Be brief.\nWhy?"),
        ),
        ({"messages": ({"role": "user", "content": [{"type": "text", "text": "Why?"}]},)}, None),
        ({"messages": ({"role": "user", "content": "Why?", "name": "ana"},)}, None),
        ({"messages": ()}, None),
        ({"input_ids": (1, 2)}, None),
    ],
)
def test_words_of_a_question(content: dict[str, Any], expected: object) -> None:
    assert words_of(Content(**content)) == expected


# ---- audits ----


class Asked:
    def __init__(self, *texts: str) -> None:
        self.choices = tuple(Choice(text, (n,)) for n, text in enumerate(texts))


@pytest.mark.parametrize(
    ("choices", "served", "decoded", "same"),
    [
        ((), "Bed 3.", " Bed 3. ", True),
        ((), "Bed 3.", "Bed 4.", False),
        ((" Yes", " No"), " Yes", " yes, it is", True),
        ((" Yes", " No"), " Yes, it is dry", " No", False),
        ((" Yes", " No"), " Yes", " Perhaps", False),
        ((" Yes", " No"), " Perhaps", " Perhaps ", True),
        ((" Bed", " Bed 3"), " Bed 3", " Bed", False),
    ],
)
def test_answers_agree_by_choice_or_by_text(choices: tuple[str, ...], served: str, decoded: str, same: bool) -> None:
    assert says_the_same(Asked(*choices), served, decoded) is same  # type: ignore[arg-type]


def test_the_longest_choice_leads() -> None:
    few, more = Choice("no", (1,)), Choice("nothing", (2,))
    assert leading([few, more], "Nothing at all") is more
    assert leading([few, more], "No.") is few
    assert leading([few, more], "yes") is None


def test_other_words_go_out_of_service_once() -> None:
    audit = AlikeAudit(target=0.5)
    assert audit.false_accept_share() is None
    assert [audit.judged(agreed=agreed) for agreed in (True, False, False, False)] == [None] * 4
    assert audit.false_accept_share() == 0.75
    # By Wilson's formula 1 of 6 reaches up to 0.56, 1 of 7 to 0.51, and 1 of 8 to 0.47.
    said = [audit.judged(agreed=False) for _ in range(5)]
    assert [one is None for one in said] == [True, True, True, False, True]
    assert said[3] == audit.retired
    assert str(said[3]).startswith("7 of 8 answers")
