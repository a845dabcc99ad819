from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from memory_bench.gate import RedGate
from memory_bench.selection import (
    CHRONOLOGICAL,
    RELEVANCE_LAST,
    SHUFFLED,
    Asked,
    Taken,
    Way,
    asked_of,
    bars_of,
    floors,
    orders_of,
    row_of,
    take,
    ways_of,
)
from memory_bench.setting import DEFAULT_POLICY
from memory_bench.subject import Subject

from locomo.arms.base import Answer, Scored, Served
from locomo.dataset import Category, Question, demo_conversation_path, load
from locomo.retrieval.units import UnitKind, units_of

UNITS = ["D1:1", "D1:2", "D1:3", "D1:4"]
HITS = (("D1:3", 0.9), ("D1:1", 0.5), ("D1:4", 0.4))


def asked(sample: str, index: int) -> Asked:
    question = Question(sample, index, f"Question {index}?", "Lisbon", None, ("D1:1",), ("D1:1",), Category.SINGLE_HOP)
    return Asked(sample, question, HITS, frozenset(("D1:1", "D1:2")))


@dataclass
class Cached:
    """A system that finds the beginning of a prompt again that an earlier one had; 50 tokens, and 10 for each fact."""

    tier: str = "text"
    prompts: list[tuple[str, ...]] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)
    units: list[str] = field(default_factory=lambda: list(UNITS))

    def forget(self) -> None:
        self.prompts.clear()
        self.said.append("forget")

    def search(self, question: str, k: int) -> list[tuple[str, float]]:
        assert k == 10
        return list(HITS)

    def answer(self, question: str, what: Served) -> Answer:
        self.said.append(what)
        common = max((self._common(what.units, prompt) for prompt in self.prompts), default=-1)
        self.prompts.append(what.units)
        prompt, cached = 50 + 10 * len(what.units), 0 if common < 0 else 20 + 10 * common
        tier = "none" if not what.units else self.tier
        tokens = {"prompt": prompt, "prefilled": prompt - cached, "spliced": 0}
        if what.policy is not None:
            tokens = {"prompt": prompt, "prefilled": 30, "spliced": prompt - cached - 30}
        return Answer("", what.units, tier, None, tokens, 100.0 - cached, {})

    def score(
        self, question: str, what: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored]:
        assert (continuations, top) == (["Lisbon"], 0)
        return [Scored((-1.0, -2.0 if what.units == ("D1:4", "D1:1", "D1:3") else -3.0), (), tier="text")]

    @staticmethod
    def _common(one: Sequence[str], other: Sequence[str]) -> int:
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def taken_of(ways: Sequence[Way]) -> Taken:
    taken: Taken = defaultdict(dict)
    for sample in ("conv-0", "conv-1"):
        for way in ways:
            tier = "text" if way.policy is None else "spliced"
            take(Cached(tier), way, [asked(sample, 0), asked(sample, 1)], taken[way])
    return taken


def test_orders_by_hand() -> None:
    orders = orders_of({unit: place for place, unit in enumerate(UNITS)})
    one = asked("conv-0", 0)
    found = [unit for unit, _ in HITS]
    assert orders[RELEVANCE_LAST](one, found) == ["D1:4", "D1:1", "D1:3"]
    assert orders[CHRONOLOGICAL](one, found) == ["D1:1", "D1:3", "D1:4"]
    assert sorted(orders[SHUFFLED](one, found)) == sorted(found)
    assert orders[SHUFFLED](one, found) == orders[SHUFFLED](one, found)


def test_every_order_is_asked_as_text_and_spliced_and_every_floor_as_text() -> None:
    assert ways_of([0.5]) == [
        *(Way(order, None, None) for order in (RELEVANCE_LAST, CHRONOLOGICAL, SHUFFLED)),
        *(Way(order, None, DEFAULT_POLICY) for order in (RELEVANCE_LAST, CHRONOLOGICAL, SHUFFLED)),
        Way(RELEVANCE_LAST, 0.5, None),
    ]


def test_figures_are_those_worked_out_by_hand() -> None:
    default, chronological, floor = (
        Way(RELEVANCE_LAST, None, None),
        Way(CHRONOLOGICAL, None, None),
        Way(RELEVANCE_LAST, 0.45, None),
    )
    taken = taken_of([default, chronological, floor])
    rows = [row_of(way, taken) for way in (default, chronological, floor)]
    # Of two questions with the same three facts the second finds 20 + 30 of 80 tokens.
    assert rows[0]["cached_share"]["mean"] == pytest.approx((0 + 50 / 80) / 2)
    assert (rows[0]["prefilled_tokens"], rows[0]["prompt_tokens"]) == (pytest.approx(55), 80)
    assert [row["nll"]["mean"] for row in rows] == [1.5, 2.0, 2.0]
    assert [row["dnll"]["mean"] for row in rows] == [0.0, 0.5, 0.5]
    # Of the two units that answer it D1:1 is found, with 0.5; below 0.45 is D1:4 alone.
    assert [row["evidence_share"] for row in rows] == [0.5, 0.5, 0.5]
    assert [row["facts"] for row in rows] == [3, 3, 2]
    assert rows[2]["prompt_tokens"] == 70
    assert bars_of(rows) == {"cached_chronological_over_relevance_last": pytest.approx(1.0)}


def test_spliced_tokens_are_not_cached_ones() -> None:
    way = Way(RELEVANCE_LAST, None, DEFAULT_POLICY)
    found = row_of(way, taken_of([way]))
    assert found["cached_share"]["mean"] == pytest.approx((0 + 50 / 80) / 2)
    assert found["prefilled_tokens"] == 30


def test_each_way_begins_with_empty_caches_and_asks_in_the_same_order() -> None:
    system, taken = Cached(), defaultdict(dict)
    take(system, Way(RELEVANCE_LAST, 0.95, None), [asked("conv-0", 0), asked("conv-0", 1)], taken)
    assert system.said == ["forget", Served((), "tail", None), Served((), "tail", None)]  # nothing scores so much


@pytest.mark.parametrize(("tier", "policy"), [("text", DEFAULT_POLICY), ("spliced", None), ("none", None)])
def test_facts_that_were_served_otherwise_end_the_measurement(tier: str, policy: str | None) -> None:
    with pytest.raises(RedGate, match=f"3 of 3 facts as '{tier}'"):
        take(Cached(tier), Way(RELEVANCE_LAST, None, policy), [asked("conv-0", 0)], {})


def test_questions_have_their_evidence_and_what_is_found_for_them() -> None:
    conversation = load(demo_conversation_path())[0]
    questions = tuple(q.question for q in conversation.questions if q.answer and q.evidence)
    units = tuple(units_of(conversation, UnitKind.TURNS))
    subject = Subject(conversation, units, questions, Path("m"), True, {})
    found = asked_of(subject, Cached(), 3)
    assert [one.question.question for one in found] == [questions[n * len(questions) // 3] for n in range(3)]
    for one in found:
        assert one.found == HITS
        assert one.evidence == set(one.question.evidence)  # a turn stands for itself


def test_a_floor_is_a_score() -> None:
    assert floors("0.3, 0.5,0.3") == (0.3, 0.5)
    for text in ("1.5", "-1", "x"):
        with pytest.raises(ValueError, match=text):
            floors(text)
