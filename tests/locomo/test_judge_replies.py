from pathlib import Path

import pytest

from locomo.errors import JudgePromptError
from locomo.judging.abstention import abstains
from locomo.judging.prompt import load_prompt
from locomo.judging.verdict import Verdict, parse_verdict


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('{"verdict": "correct"}', Verdict.CORRECT),
        ('{"label": "WRONG"}', Verdict.WRONG),
        ('```json\n{"reason": "it says {nothing}", "verdict": "Abstained"}\n```', Verdict.ABSTAINED),
        ('It names another town, so: {"verdict": "wrong"}', Verdict.WRONG),
        ('{"verdict": "correct", "reason": "the answer is not wrong"}', Verdict.CORRECT),
        ('{"verdict": "wrong"} and again {"verdict": "wrong"}', Verdict.WRONG),
        ('{"verdict": "correct", "reason": "it names the sa', Verdict.CORRECT),
        ('"verdict": "incorrect"', Verdict.WRONG),
        ("**Verdict:** correct", Verdict.CORRECT),
        ("Verdict: not correct.", Verdict.WRONG),
        ("CORRECT.", Verdict.CORRECT),
        (" **wrong** ", Verdict.WRONG),
        ("The answer is correct.", Verdict.CORRECT),
        ("The answer is wrong because it names another town.", Verdict.WRONG),
        ("The generated answer was incorrect, since the year differs.", Verdict.WRONG),
        ('<think>Is it {"verdict": "wrong"}? The answer is wrong.</think>{"verdict": "correct"}', Verdict.CORRECT),
    ],
)
def test_what_can_be_read_in_one_way(reply: str, verdict: Verdict) -> None:
    assert parse_verdict(reply) is verdict


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I would have to think about it.",
        "The answer is not correct.",
        "The answer isn’t wrong.",
        "The correct answer is Paris.",
        "The reference answer is correct.",
        "The answer is correct only in part.",
        "The answer is correct, but it lacks the year.",
        "If it is correct, so be it.",
        "The answer is correct. The answer is wrong.",
        "It is wrong to call this correct.",
        '{"verdict": "correct"} or {"verdict": "wrong"}',
        '{"verdict": "partially correct"} The answer is correct.',
        '{"verdict": "corr',
        '{"verdict": null}',
        '{"verdict": ["correct"]}',
        '{"verdict": "unjudged"}',
        "Verdict: correct or wrong",
        "right",
        "{" * 50,
        '{"a":' * 5000,
    ],
)
def test_what_cannot_is_no_verdict(reply: str) -> None:
    assert parse_verdict(reply) is None


@pytest.mark.parametrize(
    "prediction",
    [
        "I don't know.",
        "I don’t have that information.",
        "Not mentioned in the conversation",
        "No information available",
        "The facts do not mention a dog.",
        "It isn't specified when.",
        "There is no mention of a trip.",
        "It cannot be determined from the text.",
        "Unknown.",
        "That was not explicitly stated.",
    ],
)
def test_an_answer_that_declines(prediction: str) -> None:
    assert abstains(prediction)


@pytest.mark.parametrize(
    "prediction",
    [
        "In May 2023",
        "She does not have a dog.",
        "She said no.",
        "He is not happy",
        "An unknown painter",
        "Not Rome",
        "",
    ],
)
def test_an_answer_that_commits_itself(prediction: str) -> None:
    assert not abstains(prediction)


def test_our_prompt_shows_all_three_and_the_form_of_the_reply() -> None:
    text = load_prompt().render(question="Where to?", gold="Rome", prediction="To {gold}, {she} said \\1")
    for line in ("Question: Where to?", "Reference answer: Rome", "Answer to grade: To {gold}, {she} said \\1"):
        assert line in text.splitlines()
    for word in ("correct", "wrong", "abstained"):
        assert f'{{"verdict": "{word}"}}' in text


def test_a_prompt_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text('{question}/{gold}/{prediction}/{gold} as {"label": 1}', encoding="utf-8")
    prompt = load_prompt(path)
    assert prompt.render(question="q", gold="g", prediction="p") == 'q/g/p/g as {"label": 1}'
    # sha256sum of the file
    assert prompt.sha256 == "23ca9625f47c682c36cbe0841afcc5319aee2a01fb10a0bcd6c7cf6caa47ca25"


@pytest.mark.parametrize(
    ("content", "message"),
    [("{question} {gold}", r"lacks \{prediction\}"), ("", r"lacks \{gold\}, \{prediction\}, \{question\}")],
)
def test_a_prompt_without_a_placeholder_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(JudgePromptError, match=message):
        load_prompt(path)


def test_a_prompt_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(JudgePromptError, match="absent"):
        load_prompt(tmp_path / "absent")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(JudgePromptError, match="cannot read"):
        load_prompt(tmp_path / "latin")
