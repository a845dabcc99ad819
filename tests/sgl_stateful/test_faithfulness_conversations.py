import re
from collections import Counter

import pytest
from facts import fact

from sgl_stateful.faithfulness.conversations import OWNER, another_order, built_in, drawn

SET = built_in()


def test_twelve_conversations_of_six_turns_by_two_speakers_who_are_nowhere_else() -> None:
    streams = Counter(fact.stream for fact in SET.facts)
    assert sorted(streams.values()) == [6] * 12
    speakers = {stream: {fact.speaker for fact in SET.facts if fact.stream == stream} for stream in streams}
    assert {len(names) for names in speakers.values()} == {2}
    assert len({name for names in speakers.values() for name in names}) == 24
    assert len({fact.time for fact in SET.facts}) == 12
    assert {fact.owner for fact in SET.facts} == {OWNER}
    assert [fact.seq for fact in SET.facts] == list(range(1, 73))
    assert len({fact.id for fact in SET.facts}) == 72


def test_each_answer_is_said_in_one_turn_and_that_one_is_the_evidence() -> None:
    assert len(SET.questions) == 12
    for question in SET.questions:
        said = [fact for fact in SET.facts if question.answer.lower() in fact.text.lower()]
        assert said == [question.evidence], question.text


def test_each_question_is_about_a_conversation_of_its_own() -> None:
    assert {question.evidence.stream for question in SET.questions} == {str(n) for n in range(12)}
    assert {SET.facts.index(question.evidence) % 6 for question in SET.questions} >= {0, 2, 3, 4, 5}


def test_no_two_sentences_begin_with_the_same_three_words() -> None:
    sentences = [s for fact in SET.facts for s in re.split(r"(?<=[.!?]) ", fact.text)]
    starts = Counter(" ".join(re.findall(r"[\w'-]+", s.lower())[:3]) for s in sentences)
    assert [start for start, count in starts.items() if count > 1] == []


@pytest.mark.parametrize("k", [1, 5, 20, 50, 72])
def test_the_evidence_stands_last_behind_its_own_conversation(k: int) -> None:
    for question in SET.questions:
        facts = SET.facts_for(question, k)
        assert len({fact.id for fact in facts}) == len(facts) == k
        assert facts[-1] == question.evidence
        of_its_own = [fact.stream == question.evidence.stream for fact in facts]
        assert of_its_own == [False] * (k - min(k, 6)) + [True] * min(k, 6)


def test_fewer_facts_are_the_best_of_more() -> None:
    question = SET.questions[3]
    assert SET.facts_for(question, 20) == SET.facts_for(question, 50)[30:]


def test_what_is_drawn_depends_on_the_seed_and_on_nothing_else() -> None:
    facts = [fact(i) for i in range(8)]
    assert drawn(facts, "a") == drawn(list(reversed(facts)), "a")
    assert drawn(facts, "a") != drawn(facts, "b")
    assert sorted(f.seq for f in drawn(facts, "a")) == list(range(8))
    assert SET.facts_for(SET.questions[0], 20)[:5] != SET.facts_for(SET.questions[1], 20)[:5]


def test_another_order_is_another_one_whatever_is_drawn() -> None:
    for seed in "abcdefgh":
        for count in (2, 3, 20):
            facts = [fact(i) for i in range(count)]
            other = another_order(facts, seed)
            assert other != facts
            assert sorted(other, key=lambda f: f.seq) == facts
    two = [fact(0), fact(1)]
    assert {tuple(f.seq for f in another_order(two, seed)) for seed in "abcdefgh"} == {(1, 0)}


def test_as_a_source_it_has_one_owner() -> None:
    assert SET.list(OWNER, limit=3, after_seq=2) == list(SET.facts[2:5])
    assert SET.list("ana", limit=3, after_seq=0) == []
    wanted = [SET.facts[4].id, SET.facts[1].id]
    assert {fact.id for fact in SET.get_many(OWNER, wanted)} == set(wanted)
    assert SET.get_many("ana", wanted) == []
