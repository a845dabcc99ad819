"""Gates of closed sets of answers: how often they are right about the model, and what answering by them takes.

Every question has a gate of its own. On the first half of the stream's versions it learns; on the second half, which it
has not seen, whatever it answers by itself is compared with decoding for real.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_stateful.flash.gate import Gate
from sgl_stateful.flash.interval import Interval, wilson

from .clients import FlashClient, Sample, sample_of
from .questions import Question
from .shape import Shape
from .tape import Tape

TARGET = 0.95
_TOKENS = 4  # more than the longest choice has


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer to one question on one version.

    Attributes
    ----------
    gap
        Nats between the best two of the set.
    agreed
        Decoding for real begins with the choice.
    by
        What had answered: ``gate`` or ``decoding``.
    right
        By the data; None where they do not say.
    """

    question: str
    version: int
    gap: float
    agreed: bool
    by: str
    right: bool | None


@dataclass(slots=True)
class Gates:
    """What it came to.

    Attributes
    ----------
    held_out
        Of the second half.
    gate, decode
        Answers by a gate, and the same questions decoded for real, one list a version.
    retired
        Questions that audits have taken out of service.
    """

    held_out: list[Judged] = field(default_factory=list)
    gate: list[list[Sample]] = field(default_factory=list)
    decode: list[list[Sample]] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)

    @property
    def fired(self) -> list[Judged]:
        """Of the second half, what a gate answered."""
        return [one for one in self.held_out if one.by == "gate"]

    def coverage(self) -> float:
        """Share of the second half that gates answered."""
        return len(self.fired) / len(self.held_out)

    def precision(self) -> tuple[float | None, Interval]:
        """Share of that on which decoding agrees, and its 95 % interval; None where no gate has fired."""
        agreed, fired = sum(one.agreed for one in self.fired), len(self.fired)
        return agreed / fired if fired else None, wilson(agreed, fired)


def pooled(judged: Sequence[Judged]) -> tuple[int, int, int]:
    """One gate for all questions, which learns from every other question and is judged by the rest.

    Returns
    -------
    How many of those that fire agreed, how many fire, and how many there are.
    """
    names = sorted({one.question for one in judged})
    gate, rest = Gate(TARGET), []
    for one in judged:
        if names.index(one.question) % 2 == 0:
            gate.observe(one.gap, agreed=one.agreed)
        else:
            rest.append(one)
    fired = [one for one in rest if gate.fires(one.gap)]
    return sum(one.agreed for one in fired), len(fired), len(rest)


def measure(ours: FlashClient, tape: Tape, questions: Sequence[Question], shape: Shape) -> Gates:
    """Run the stream past the questions.

    Parameters
    ----------
    questions
        With choices, all of them.
    """
    found = Gates()
    tape.grow(shape.gate_context)
    session = ours.open(list(tape.ids), reserve_tokens=64 * shape.gate_versions)["id"]
    for question in questions:
        fields = {"choices": list(question.choices), "gate": {"target": TARGET}}
        ours.register(session, question.name, tape.question(question.text), answer=_TOKENS, **fields)
    for version in range(shape.gate_versions):
        ours.append(session, tape.step())
        shown = ours.wait_answered(session)
        if version < shape.gate_versions // 2:
            continue
        gate, decode = [], []
        for question in questions:
            if (answer := shown[question.name]["answer"]) is None:  # audits have taken it out of service
                found.retired.add(question.name)
                continue
            ids = tape.question(question.text)
            real = ours.ask_session(session, ids, answer=_TOKENS, fresh=True)
            found.held_out.append(_judged(question, version, answer, real.text, tape))
            if answer["by"] == "gate":
                gate.append(sample_of("gate", "gate", 0, ours.stored(session, ids, answer=_TOKENS)))
                decode.append(sample_of("gate", "radix", 0, real))
        found.gate += [gate] if gate else []
        found.decode += [decode] if decode else []
    ours.close(session)
    return found


def _judged(question: Question, version: int, answer: dict[str, Any], said: str, tape: Tape) -> Judged:
    choice = str(answer["choice"])
    agreed = said.strip().casefold().startswith(choice.strip().casefold())
    right = question.is_right(choice, tape.records)
    return Judged(question.name, version, float(answer["gap"]), agreed, str(answer["by"]), right)
