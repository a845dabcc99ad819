"""The small invented conversations in LoCoMo's schema, which have the published file's irregularities."""

from collections import Counter
from pathlib import Path

import pytest

from locomo.dataset import Conversation, load
from locomo.retrieval.units import UnitKind, units_of

SYNTHETIC = Path(__file__).parent / "data/synthetic.json"


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return load(SYNTHETIC)


def test_everything_in_it_is_counted(conversations: list[Conversation]) -> None:
    assert [item.sample_id for item in conversations] == ["conv-901", "conv-902", "conv-903"]
    assert [item.speakers for item in conversations] == [("Mirela", "Oskar"), ("Keita", "Solveig"), ("Amara", "Teodor")]
    assert [len(item.turns) for item in conversations] == [25, 25, 25]
    assert [len(item.observations) for item in conversations] == [14, 11, 13]
    assert [len(item.questions) for item in conversations] == [10, 11, 10]
    ids = Counter(int(question.category) for item in conversations for question in item.questions)
    assert ids == {1: 5, 2: 6, 3: 4, 4: 10, 5: 6}


def test_sessions_are_in_numeric_order_and_dates_without_turns_are_none(conversations: list[Conversation]) -> None:
    assert [item.sessions for item in conversations] == [(1, 2, 10), (1, 2, 3), (1, 2, 4)]
    assert [turn.dia_id for turn in conversations[0].turns[7:10]] == ["D1:8", "D1:9", "D2:1"]
    assert conversations[0].turns[-1].date_time == "10:30 am on 19 November, 2022"


def test_evidence_is_repaired(conversations: list[Conversation]) -> None:
    evidence = {
        (item.sample_id, q.index): (q.evidence_raw, q.evidence) for item in conversations for q in item.questions
    }
    assert evidence["conv-901", 0] == (("D1:1; D2:6",), ("D1:1", "D2:6"))
    assert evidence["conv-901", 4] == ((), ())
    assert evidence["conv-901", 6] == (("D10:8", "D10:8"), ("D10:8",))
    assert evidence["conv-901", 7] == (("D:1:4",), ("D1:4",))
    assert evidence["conv-902", 1] == (("D2:1 D3:6 D1:8",), ("D2:1", "D3:6", "D1:8"))
    assert evidence["conv-902", 2] == (("D2:01",), ("D2:1",))
    assert evidence["conv-902", 6] == (("D1:7", "D4:36"), ("D1:7",))
    assert evidence["conv-902", 7] == (("D2:2", "D"), ("D2:2",))


def test_answers_are_strings_and_absent_for_most_adversarial_questions(conversations: list[Conversation]) -> None:
    first, second, third = (item.questions for item in conversations)
    assert [first[2].answer, second[5].answer, third[5].answer] == ["2024", "14", "91"]
    assert (first[9].answer, first[9].adversarial_answer) == ("None", "Biscuit")
    assert [question.answer for question in (first[8], second[8], second[9], third[8], third[9])] == [None] * 5
    assert second[6].question == second[10].question == "Who drives the night train to Arvik?"
    assert first[5].question == "Where does Mirela take her pottery course?"


def test_texts_have_captions_and_no_queries_or_stray_spaces(conversations: list[Conversation]) -> None:
    texts = {(item.sample_id, turn.dia_id): turn.text for item in conversations for turn in item.turns}
    assert texts["conv-901", "D1:2"] == "Great to hear!  I have been sanding my old canoe all week."
    assert texts["conv-901", "D1:4"] == (
        "Yes, the green one \N{CANOE}. Look at the hull now. [shares a photo of a green canoe on two trestles]"
    )
    assert texts["conv-901", "D1:6"] == "“Patience is the best varnish”, as Henrik says."
    assert texts["conv-901", "D10:5"] == "[shares a photo of six blue bowls on a table]"
    assert texts["conv-902", "D1:5"] == "Here it is. [shares a photo of a telescope on a balcony]"
    assert (
        texts["conv-903", "D1:3"]
        == "Pepper, because of the black spots. [shares a photo of a grey cat on a windowsill]"
    )
    assert not any(word in text for text in texts.values() for word in ("restoration", "stall", "invalid"))


def test_observations_cover_turns_whatever_form_their_evidence_has(conversations: list[Conversation]) -> None:
    covers = {unit.id: unit.covers for unit in units_of(conversations[0], UnitKind.OBSERVATIONS)}
    assert covers["O3"] == ("D1:2", "D1:3", "D1:4")
    assert covers["O4"] == ("D1:8",)
    assert (covers["O5"], covers["O9"], covers["O13"]) == (("D2:2",), ("D10:1",), ("D10:8",))
    assert conversations[0].observations[2].text == "Mirela's sister Dana is allergic to varnish."
    assert {unit.id: unit.covers for unit in units_of(conversations[1], UnitKind.OBSERVATIONS)}["O6"] == (
        "D2:6",
        "D2:8",
    )
