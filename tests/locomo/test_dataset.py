import json
import os
from collections import Counter
from pathlib import Path

import pytest

from locomo.dataset import Category, demo_conversation_path, file_sha256, load
from locomo.errors import DatasetFormatError, DatasetNotFoundError

REPOSITORY = Path(__file__).resolve().parents[2]
LOCOMO_DATA = Path(os.environ.get("LOCOMO_DATA", REPOSITORY.parent / "shared/data/locomo10.json"))


def turn(dia_id: str, text: str, **extra: object) -> dict[str, object]:
    return {"speaker": "Ada", "dia_id": dia_id, "text": text, **extra}


def question(category: int, evidence: list[str], **extra: object) -> dict[str, object]:
    return {"question": "Where? ", "evidence": evidence, "category": category, **extra}


# One of each irregularity of the published file.
MALFORMED = [
    {
        "sample_id": "odd-1",
        "conversation": {
            "speaker_a": "Ada",
            "speaker_b": "Bo",
            "session_10_date_time": "9:00 am on 3 May, 2021",
            "session_10": [turn("D10:1", "last"), turn("D10:19", "“curly” \N{HONEYBEE}\n")],
            "session_2_date_time": "8:00 am on 2 May, 2021",
            "session_2": [
                turn("D2:1", " first ", img_url=["http://x.invalid/a.jpg"], query="never read this"),
                turn("D2:2", "look", blip_caption="a photo of a bee"),
                turn("D2:3", "", blip_caption="a photo of a hive"),
            ],
            "session_11_date_time": "10:00 am on 4 May, 2021",
            "session_12_date_time": "10:00 am on 5 May, 2021",
            "session_12": [],
        },
        "observation": {
            "session_2_observation": {"Ada": [["Ada keeps bees.", "D2:1, D2:2"], ["Ada has a hive.", ["D2:3"]]]},
        },
        "qa": [
            question(1, ["D2:1; D10:1"], answer=2022),
            question(4, ["D2:1", "D", "D:10:19"], answer="x"),
            question(2, ["D2:02"], answer="y"),
            question(3, ["D2:1 D2:2 D10:1"], answer="z"),
            question(3, [], answer="z"),
            question(4, ["D4:36", "D2:1", "D2:1"], answer="z"),
            question(5, ["D2:1"], adversarial_answer="trap"),
            question(5, ["D2:1"], adversarial_answer="Yes", answer="No"),
        ],
    }
]


@pytest.fixture
def odd_file(tmp_path: Path) -> Path:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(MALFORMED), encoding="utf-8")
    return path


def test_sessions_are_ordered_by_number_and_dates_without_turns_are_ignored(odd_file: Path) -> None:
    [conversation] = load(odd_file)
    assert conversation.sessions == (2, 10)
    assert [item.dia_id for item in conversation.turns] == ["D2:1", "D2:2", "D2:3", "D10:1", "D10:19"]
    assert conversation.turns[0].date_time == "8:00 am on 2 May, 2021"
    assert conversation.turns[-1].date_time == "9:00 am on 3 May, 2021"
    assert conversation.speakers == ("Ada", "Bo")


def test_text_carries_the_caption_and_never_the_search_query(odd_file: Path) -> None:
    [conversation] = load(odd_file)
    assert [item.text for item in conversation.turns] == [
        "first",
        "look [shares a photo of a bee]",
        "[shares a photo of a hive]",
        "last",
        "“curly” \N{HONEYBEE}",
    ]
    assert conversation.turns[1].utterance == "look"
    assert conversation.turns[1].image_caption == "a photo of a bee"


def test_evidence_is_repaired_and_what_names_no_turn_is_left_out(odd_file: Path) -> None:
    [conversation] = load(odd_file)
    assert [item.evidence for item in conversation.questions] == [
        ("D2:1", "D10:1"),
        ("D2:1", "D10:19"),
        ("D2:2",),
        ("D2:1", "D2:2", "D10:1"),
        (),
        ("D2:1",),
        ("D2:1",),
        ("D2:1",),
    ]
    assert conversation.questions[5].evidence_raw == ("D4:36", "D2:1", "D2:1")


def test_answers_are_strings_or_absent(odd_file: Path) -> None:
    questions = load(odd_file)[0].questions
    assert questions[0].answer == "2022"
    assert (questions[6].answer, questions[6].adversarial_answer) == (None, "trap")
    assert (questions[7].answer, questions[7].adversarial_answer) == ("No", "Yes")
    assert [item.index for item in questions] == list(range(8))
    assert questions[6].category is Category.ADVERSARIAL
    assert questions[0].question == "Where?"


def test_observations_keep_their_evidence(odd_file: Path) -> None:
    observations = load(odd_file)[0].observations
    assert [(item.text, item.evidence) for item in observations] == [
        ("Ada keeps bees.", ("D2:1", "D2:2")),
        ("Ada has a hive.", ("D2:3",)),
    ]
    assert observations[0].date_time == "8:00 am on 2 May, 2021"


def test_a_missing_file_says_where_to_get_it_and_under_which_licence(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"snap-research/locomo.*CC BY-NC 4\.0"):
        load(tmp_path / "absent.json")


def test_truncated_json_is_named(odd_file: Path) -> None:
    odd_file.write_bytes(odd_file.read_bytes()[:-20])
    with pytest.raises(DatasetFormatError, match="truncated"):
        load(odd_file)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "expected a list"),
        ([{"sample_id": "s", "conversation": {"speaker_a": "A", "speaker_b": "B"}}], "sample s has no session"),
        ([{"sample_id": "s"}], "KeyError: 'conversation'"),
        (["text"], "schema: TypeError"),
    ],
)
def test_what_is_not_the_schema_is_named(tmp_path: Path, document: object, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DatasetFormatError, match=message):
        load(path)


def test_sha256_is_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")  # the test vector of FIPS 180-2
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_demo_conversation_loads_with_every_evidence_id_resolved() -> None:
    [conversation] = load(demo_conversation_path())
    assert len(conversation.turns) >= 130
    assert {len(item.evidence) == len(item.evidence_raw) > 0 for item in conversation.questions} == {True}
    assert [item.answer is None for item in conversation.questions] == [
        item.category is Category.ADVERSARIAL for item in conversation.questions
    ]


@pytest.mark.locomo
@pytest.mark.skipif(not LOCOMO_DATA.is_file(), reason=f"LoCoMo's data file is not at {LOCOMO_DATA}")
def test_the_published_file_has_its_published_counts() -> None:
    conversations = load(LOCOMO_DATA)
    questions = [item for conversation in conversations for item in conversation.questions]
    assert len(conversations) == 10
    assert sum(len(conversation.sessions) for conversation in conversations) == 272
    assert sum(len(conversation.turns) for conversation in conversations) == 5882
    assert sum(len(conversation.observations) for conversation in conversations) == 2541
    assert len(questions) == 1986
    assert Counter(item.category for item in questions) == {4: 841, 1: 282, 2: 321, 3: 96, 5: 446}
    assert sum(not item.evidence for item in questions) == 4
    assert sum(item.answer is None for item in questions) == 444
    assert file_sha256(LOCOMO_DATA).startswith("79fa87e9")
