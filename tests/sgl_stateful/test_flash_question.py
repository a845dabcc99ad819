"""Templates, sampling parameters, choices, and what of a registration is refused."""

from math import inf
from typing import Any

import pytest
from flash_world import question

from sgl_stateful.errors import (
    BadFlashRequest,
    EmptyFlashQuestion,
    FlashChoicesAlike,
    FlashSlotMissing,
)
from sgl_stateful.flash.choices import Choice, agrees, choices_of, decide
from sgl_stateful.flash.question import Prompt
from sgl_stateful.flash.sampling import canonical_sampling, is_greedy
from sgl_stateful.flash.slots import fill, slots_of
from sgl_stateful.params import MemoryParams
from sgl_stateful.sessions.content import Content

DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": False, "n": 1, "max_new_tokens": 128}


def test_slots_are_filled_in_text_and_in_messages() -> None:
    text = Content(text="Is bed {{bed}} above {{limit}} degrees? {{bed}}!")
    assert slots_of(text) == {"bed", "limit"}
    assert fill(text, {"bed": 3, "limit": "30"}).text == "Is bed 3 above 30 degrees? 3!"
    parts = [{"type": "text", "text": "Bed {{bed}}?"}]
    messages = Content(messages=({"role": "user", "content": parts}, {"role": "user", "content": "{{bed}}"}))
    assert fill(messages, {"bed": "4"}).messages == (
        {"role": "user", "content": [{"type": "text", "text": "Bed 4?"}]},
        {"role": "user", "content": "4"},
    )


def test_data_that_looks_like_a_slot_stays_what_it_is() -> None:
    assert fill(Content(text="{{a}} {{b}}"), {"a": "{{b}}", "b": "x"}).text == "{{b}} x"


def test_the_place_of_facts_is_no_slot() -> None:
    assert fill(Content(text="{{memory}} {{bed}}"), {"bed": 3}).text == "{{memory}} 3"
    with pytest.raises(BadFlashRequest, match="memory"):
        fill(Content(text="{{memory}}"), {"memory": "x"})


@pytest.mark.parametrize(
    ("data", "complaint"), [({}, "no data for bed, limit"), ({"bed": 1, "limit": 2, "more": 3}, "takes more")]
)
def test_slots_and_data_have_to_fit(data: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FlashSlotMissing, match=complaint):
        fill(Content(text="{{bed}} {{limit}}"), data)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 0}, {"temperature": 0.0, "top_p": 0.3, "top_k": 7, "sampling_seed": 4}),
        ({"temperature": 0.5}, {"temperature": 0.5, "top_p": 1, "n": 1, "ignore_eos": False}),
        ({"stop": ["x"]}, {"stop": "x"}),
        ({"stop": []}, {"stop": None, "top_p": None}),
        ({"stop_token_ids": [2, 1]}, {"stop_token_ids": {1, 2}}),
        ({"max_new_tokens": 128}, {}),
        ({}, {"stream_interval": 4}),
    ],
)
def test_parameters_of_the_same_meaning(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical_sampling(one, DEFAULTS) == canonical_sampling(other, DEFAULTS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 0}, {"temperature": 0.1}),
        ({"temperature": 0, "max_new_tokens": 8}, {"temperature": 0, "max_new_tokens": 9}),
        ({"max_new_tokens": None}, {"max_new_tokens": 128}),
        ({"temperature": 0.5, "top_p": 0.3}, {"temperature": 0.5}),
        ({"ignore_eos": True}, {"ignore_eos": False}),
        ({"n": True}, {"n": 2}),
        ({"stop": ["x"]}, {"stop": ["x", "y"]}),
        ({"json_schema": "{}"}, {}),
    ],
)
def test_parameters_of_another_meaning(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical_sampling(one, DEFAULTS) != canonical_sampling(other, DEFAULTS)


def test_what_is_greedy() -> None:
    assert [is_greedy(p) for p in ({"temperature": 0}, {"top_k": 1}, {"temperature": 0.2}, {})] == [
        True,
        True,
        False,
        False,
    ]


def encode(text: str) -> list[int]:
    return [*text.encode()]


def test_choices_are_told_apart_by_their_first_token() -> None:
    made = choices_of(["up", "down"], encode)
    assert made == (Choice("up", (117, 112)), Choice("down", (100, 111, 119, 110)))
    decision = decide(made, {117: -0.2, 100: -1.7, 5: -0.1})
    assert decision.choice.text == "up"
    assert decision.gap == pytest.approx(1.5)


def test_a_choice_that_is_ruled_out_leaves_a_finite_gap() -> None:
    made = choices_of(["up", "down"], encode)
    assert decide(made, {117: -0.2, 100: -inf}) == (made[0], pytest.approx(999.8))
    assert decide(made, {117: -inf, 100: -inf}).gap == 0.0


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["down", "double"], FlashChoicesAlike),
        (["yes"], BadFlashRequest),
        (["yes", ""], BadFlashRequest),
        (["yes", "yes"], BadFlashRequest),
        ([f"{n}" for n in range(65)], BadFlashRequest),
    ],
)
def test_choices_that_are_refused(texts: list[str], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        choices_of(texts, encode)


def test_what_agrees_with_a_choice() -> None:
    up = Choice(" up", (1,))
    assert [agrees(up, text) for text in (" Up.", "up", "upwards", "it is up", "")] == [True, True, True, False, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 257},
        {"name": ""},
        {"name": "a/b"},
        {"name": "..", "word": "x"},
        {"name": "events", "word": "x"},
        {"name": "x" * 65, "word": "x"},
        {"priority": 101},
        {"min_interval_ms": -1},
        {"min_interval_ms": 86_400_001},
        {"audit_target": 1.0},
        {"target": 0.9},
        {"target": 0.0, "choices": choices_of(["a", "b"], encode)},
    ],
)
def test_numbers_and_names_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadFlashRequest):
        question(**wrong)


def test_the_ends_of_the_ranges_are_in_them() -> None:
    for tokens in (1, 256):
        assert question(max_tokens=tokens).max_tokens == tokens
    assert question(name="x" * 64).name == "x" * 64


def test_a_question_without_tokens() -> None:
    with pytest.raises(EmptyFlashQuestion):
        question(behind=Prompt((), ()))


@pytest.mark.parametrize(
    ("memory", "new", "named", "other"),
    [
        (None, False, False, False),
        (MemoryParams(owner="ana", mode="off"), False, False, False),
        (MemoryParams(owner="ana"), True, True, True),
        (MemoryParams(owner="ana", facts=("f1",)), False, True, False),
    ],
)
def test_which_facts_a_question_depends_on(memory: MemoryParams | None, new: bool, named: bool, other: bool) -> None:
    made = question(memory=memory)
    assert [made.depends_on(fact) for fact in (None, "f1", "f2")] == [new, named, other]
