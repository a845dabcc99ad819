"""The rows of a run, each answer beside its question of the data file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from locomo.dataset import Conversation, Question
from locomo.errors import RunError
from locomo.reporting.arm_names import ArmName, parse_arm
from locomo.reporting.scores import finite
from locomo.runs.config import RunConfig
from locomo.runs.folder import RunFolder
from locomo.scoring.choice import is_gold_chosen

Key = tuple[str, int]
"""``(sample_id, index)`` of a question."""

Figures = Mapping[Key, float]
"""One figure of one arm, for the questions that have it, in order of their keys."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one arm gave for one question.

    Attributes
    ----------
    prediction
        Raw text of the answer; None where there is none.
    tier
        How the facts got into the prompt; None where nothing was served.
    fidelity
        As the row has it; empty where it was not measured.
    """

    question: Question
    prediction: str | None
    tier: str | None
    error: str | None
    fidelity: Mapping[str, Any]


def tier_of(name: ArmName) -> str:
    """The tier in which a splice arm is served where it is served as it asks."""
    return "repaired" if name.repair else "spliced"


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm at one k over all questions of a run that it was asked."""

    key: str
    name: ArmName
    entries: Mapping[Key, Entry]

    @property
    def measured(self) -> dict[Key, Mapping[str, Any]]:
        """Fidelity by question; of a splice arm only where facts were spliced, and repaired if it asks for that.

        What was found whole in a cache, or prefilled as text after all, says nothing of splicing.
        """
        return {
            key: entry.fidelity
            for key, entry in self.entries.items()
            if entry.fidelity and (self.name.kind != "splice" or entry.tier == tier_of(self.name))
        }

    def figure(self, name: str) -> Figures:
        """A number of the fidelity, or whether something was right as 0 or 1, for the questions that have it."""
        found = {key: fidelity.get(name) for key, fidelity in self.measured.items()}
        numbers = {key: float(value) if isinstance(value, bool) else finite(value) for key, value in found.items()}
        return {key: value for key, value in numbers.items() if value is not None}

    def answer_nats(self) -> Figures:
        """Negative log likelihood of the whole gold answer, nats."""
        nll, tokens = self.figure("nll"), self.figure("answer_tokens")
        return {key: nll[key] * tokens[key] for key in nll if key in tokens}

    def forced_choice(self) -> Figures:
        """1 where the gold is likelier than each of the other choices, else 0."""
        choices = {key: fidelity.get("choices_nll") for key, fidelity in self.measured.items()}
        return {
            key: float(is_gold_chosen(values))
            for key, values in choices.items()
            if values and all(finite(value) is not None for value in values)
        }

    def forced_choice_chance(self) -> Figures:
        """What guessing gets, for the questions of `forced_choice`: 1 over the number of choices."""
        return {key: 1.0 / len(self.measured[key]["choices_nll"]) for key in self.forced_choice()}


@dataclass(frozen=True, slots=True)
class Rows:
    """A run's rows in order of their questions' keys, whatever order they were written in.

    Attributes
    ----------
    retrieved
        Unit ids, best first, by question.
    arms
        In the order of the config.
    not_served
        By question, the arms that had nothing to serve for it: floors without another order, or anything to swap.
    """

    config: RunConfig
    retrieved: Sequence[tuple[Question, Sequence[str]]]
    arms: Sequence[Arm]
    not_served: Mapping[Key, Collection[str]] = field(default_factory=dict)

    def arm(self, key: str) -> Arm | None:
        """The arm of that name and k, if the run has it."""
        return next((arm for arm in self.arms if arm.key == key), None)

    def without(self, excluded: Collection[Key]) -> Rows:
        """The rows of all other questions."""
        return Rows(
            config=self.config,
            retrieved=[
                (question, units)
                for question, units in self.retrieved
                if (question.sample_id, question.index) not in excluded
            ],
            arms=[
                replace(arm, entries={key: entry for key, entry in arm.entries.items() if key not in excluded})
                for arm in self.arms
            ],
            not_served={key: arms for key, arms in self.not_served.items() if key not in excluded},
        )


def read_rows(folder: RunFolder, config: RunConfig, conversations: Sequence[Conversation]) -> Rows:
    """Read every row of a run and find its questions.

    Raises
    ------
    RunError
        There is no row, one is of another shape, stands twice, or its question is not in the data.
    """
    questions = {(item.sample_id, item.index): item for sample in conversations for item in sample.questions}
    found: dict[Key, Mapping[str, Any]] = {}
    for number, row in enumerate(folder.rows(), 1):
        where = f"{folder.path}, row {number}"
        key = _key(row, where)
        if key in found:
            raise RunError(f"{where}: question {key[1]} of {key[0]} has a row already")
        if key not in questions or int(questions[key].category) != row.get("category"):
            raise RunError(f"{where}: the data has no question {key[1]} of {key[0]} with its category id")
        found[key] = row
    if not found:
        raise RunError(f"{folder.path} has no row yet: nothing to score")
    rows = [(questions[key], found[key]) for key in sorted(found)]
    seen = {name for _, row in rows for name in row["arms"]}
    order = [name for name in config.arms if name in seen] + sorted(seen - set(config.arms))
    return Rows(
        config=config,
        retrieved=[(question, row["retrieved"]) for question, row in rows],
        arms=[Arm(name, parse_arm(name), _entries(name, rows, folder)) for name in order],
        not_served={key: tuple(found[key].get("not_served") or ()) for key in sorted(found)},
    )


def _key(row: Any, where: str) -> Key:
    fields = row if isinstance(row, Mapping) else {}
    sample, index = fields.get("sample_id"), fields.get("index")
    shaped = isinstance(fields.get("arms"), Mapping) and isinstance(fields.get("retrieved"), list)
    if not (isinstance(sample, str) and isinstance(index, int) and shaped):
        raise RunError(f"{where} is no row of a run")
    return sample, index


def _entries(name: str, rows: Sequence[tuple[Question, Mapping[str, Any]]], folder: RunFolder) -> dict[Key, Entry]:
    entries = {}
    for question, row in rows:
        fields = row["arms"].get(name)
        if fields is None:
            continue
        if not isinstance(fields, Mapping) or not isinstance(fields.get("fidelity") or {}, Mapping):
            raise RunError(f"{folder.path}: {name} of question {question.index} of {question.sample_id} is no answer")
        entries[question.sample_id, question.index] = Entry(
            question,
            fields.get("prediction"),
            fields.get("tier"),
            fields.get("error"),
            fields.get("fidelity") or {},
        )
    return entries
