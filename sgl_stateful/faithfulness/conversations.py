"""The built-in set: twelve small conversations between invented people, and a question about each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from memstore import Fact, FactId, OwnerId

OWNER = OwnerId("\x00faithfulness")  # no caller can have it: the store refuses NUL
_FILE = "conversations.json"


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer is in one fact, ``evidence``."""

    text: str
    answer: str
    evidence: Fact


@dataclass(frozen=True, slots=True)
class ConversationSet:
    """Facts of one owner, one stream a conversation, and a question about each conversation.

    Attributes
    ----------
    version
        Digest of the file that it was read from.
    """

    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]
    version: str

    def facts_for(self, question: Question, k: int) -> Sequence[Fact]:
        """Return ``k`` facts in the order of the prompt: the evidence last, as what was found best.

        Before it stand the other turns of its conversation, and before these turns of the others, each in an order
        that is drawn once and for all.
        """
        stream = question.evidence.stream
        own = [fact for fact in self.facts if fact.stream == stream and fact != question.evidence]
        others = [fact for fact in self.facts if fact.stream != stream]
        best_first = [question.evidence, *drawn(own, question.text), *drawn(others, question.text)]
        return best_first[k - 1 :: -1]

    # ---- as a source of facts to encode ----

    def list(self, owner: str, *, limit: int, after_seq: int) -> Sequence[Fact]:
        """As of ``FactSource``."""
        return [fact for fact in self.facts if fact.owner == owner and fact.seq > after_seq][:limit]

    def get_many(self, owner: str, fact_ids: Sequence[FactId]) -> Sequence[Fact]:
        """As of ``FactSource``."""
        wanted = set(fact_ids)
        return [fact for fact in self.facts if fact.owner == owner and fact.id in wanted]


def drawn(facts: Sequence[Fact], seed: str) -> Sequence[Fact]:
    """Return the facts in an order that looks random and depends on ``seed`` and on the facts' ids alone."""
    return sorted(facts, key=lambda fact: hashlib.blake2b(f"{seed}\n{fact.id}".encode()).digest())


def another_order(facts: Sequence[Fact], seed: str) -> Sequence[Fact]:
    """Return two facts or more in an order other than theirs."""
    assert len(facts) > 1, "one fact has no other order"
    other = list(drawn(facts, seed))
    return other if other != list(facts) else [*other[1:], other[0]]


@cache
def built_in() -> ConversationSet:
    """Return the set that ships with the package."""
    raw = resources.files(__package__).joinpath(_FILE).read_bytes()
    facts: list[Fact] = []
    questions = []
    for number, conversation in enumerate(json.loads(raw)):
        turns = [
            _fact(len(facts) + i, turn, stream=str(number), time=conversation["date"])
            for i, turn in enumerate(conversation["turns"])
        ]
        questions.append(Question(conversation["question"], conversation["answer"], turns[conversation["evidence"]]))
        facts += turns
    return ConversationSet(tuple(facts), tuple(questions), hashlib.blake2b(raw, digest_size=8).hexdigest())


def _fact(number: int, turn: dict[str, str], *, stream: str, time: str) -> Fact:
    return Fact(
        id=FactId(f"faithfulness-{number}"),
        owner=OWNER,
        text=turn["text"],
        stream=stream,
        speaker=turn["speaker"],
        time=time,
        metadata={},
        version=1,
        seq=number + 1,
        created_at=0.0,
        updated_at=0.0,
    )
