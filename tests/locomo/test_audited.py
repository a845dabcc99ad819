import json
from pathlib import Path

import pytest

from locomo.dataset import Category, Conversation, Question, Turn
from locomo.errors import AuditFormatError
from locomo.scoring.audited import load_audit


def conversation(sample_id: str, questions: int) -> Conversation:
    asked = tuple(
        Question(sample_id, index, f"Where is {index}?", "x", None, (), (), Category.SINGLE_HOP)
        for index in range(questions)
    )
    return Conversation(sample_id, ("Ada", "Bo"), (Turn("D1:1", "Ada", "hi", None, 1, ""),), asked, ())


DATA = [conversation("conv-26", 5), conversation("conv-30", 3)]


def write(folder: Path, text: str) -> Path:
    path = folder / "wrong.txt"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "# wrong golds\nlocomo_0_qa4\n\nlocomo_1_qa0  # another\n",
        '["locomo_0_qa4", "locomo_1_qa0", "locomo_1_qa0"]',
        json.dumps([{"question_id": "locomo_0_qa4", "question": " where is  4?"}, {"id": "locomo_1_qa0"}]),
        'category,question_id,note\n4,locomo_0_qa4,"wrong, and long"\n1,locomo_1_qa0,\n',
        "\N{ZERO WIDTH NO-BREAK SPACE}locomo_0_qa4\r\nlocomo_1_qa0\r\n",
        # by the conversations' numbers, which are no positions here
        "locomo_26_qa4\nlocomo_30_qa0\n",
        "locomo_conv-26_qa4\nlocomo_conv30_qa0\n",
    ],
)
def test_every_form_of_the_list(tmp_path: Path, text: str) -> None:
    audit = load_audit(write(tmp_path, text), DATA)
    assert audit.excluded == {("conv-26", 4), ("conv-30", 0)}
    assert audit.kept == 0


def test_an_empty_list_excludes_nothing(tmp_path: Path) -> None:
    assert load_audit(write(tmp_path, ""), DATA).excluded == frozenset()
    assert load_audit(write(tmp_path, "[]"), DATA).excluded == frozenset()


def test_a_wrong_citation_leaves_the_gold_right(tmp_path: Path) -> None:
    items = [
        {"question_id": "locomo_0_qa1", "error_type": "WRONG_CITATION"},
        {"question_id": "locomo_0_qa2", "error_type": "HALLUCINATION"},
    ]
    assert load_audit(write(tmp_path, json.dumps(items)), DATA) == ({("conv-26", 2)}, 1)


def test_one_reading_must_fit_the_whole_file(tmp_path: Path) -> None:
    with pytest.raises(AuditFormatError, match="locomo_30_qa0 names no question"):
        load_audit(write(tmp_path, "locomo_0_qa4\nlocomo_30_qa0\n"), DATA)


def test_two_readings_that_differ_are_refused_and_one_that_the_index_rules_out_is_not(tmp_path: Path) -> None:
    data = [conversation("conv-1", 2), conversation("conv-0", 5)]
    with pytest.raises(AuditFormatError, match="both by the conversation's position and by its number"):
        load_audit(write(tmp_path, "locomo_0_qa1"), data)
    # position 0 has two questions only: the number is meant
    assert load_audit(write(tmp_path, "locomo_0_qa4"), data).excluded == {("conv-0", 4)}
    same = [conversation("conv-0", 2), conversation("conv-1", 2)]
    assert load_audit(write(tmp_path, "locomo_1_qa1"), same).excluded == {("conv-1", 1)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("locomo_0_qa5", "locomo_0_qa5 names no question"),
        ("locomo_2_qa0", "locomo_2_qa0 names no question"),
        ("26/4", "'26/4' is not an id"),
        ("[1]", "'1' is not an id"),
        ('[{"name": "locomo_0_qa1"}]', "is not an id"),
        ('["locomo_0_qa1"', "not JSON"),
        ('{"errors": []}', "expected a JSON list"),
        ('[{"id": "locomo_0_qa1", "question": "Who?"}]', "another question than conv-26 has at index 1"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(AuditFormatError, match=message):
        load_audit(write(tmp_path, text), DATA)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AuditFormatError, match="absent"):
        load_audit(tmp_path / "absent", DATA)
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(AuditFormatError, match="cannot read"):
        load_audit(tmp_path / "latin", DATA)
