"""What a run is: written down before its first question, and never changed."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from locomo.arms.base import Selection
from locomo.dataset import Category, Conversation, Question
from locomo.errors import ConfigError
from locomo.reporting.arm_names import FLOORS, ArmName, parse_arm
from locomo.retrieval.units import UnitKind

ANSWERABLE = (Category.MULTI_HOP, Category.TEMPORAL, Category.OPEN_DOMAIN, Category.SINGLE_HOP)
_FORMS = (
    "full, none, text/head, text/tail, splice/POLICY[/REPAIR]/head|tail, oracle/..., "
    "floor/shuffled|swapped|fp32[/head]; then @k"
)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything that decides what a run's rows say, their times apart.

    Attributes
    ----------
    arms
        Names with their k, as in ``splice/ladder:0+4/tail@10``; ``full`` and ``none`` have no k.
    units
        ``turns`` or ``observations``.
    questions
        How many, over the category ids and conversations in proportion; 0 takes all.
    ids
        Category ids.
    conversations
        Sample ids; empty takes all.
    max_tokens
        Of an answer.
    answers
        Whether answers are decoded to the end; else one token is, for its time.
    fidelity
        Whether the gold answer is forced behind every prompt.
    choices
        Whether the gold competes with nine other answers.
    top
        Tokens of each distribution that divergences are computed from; the rest is pooled.
    seed
        Of the sample of questions and of the floors' orders.
    """

    arms: tuple[str, ...]
    units: str = UnitKind.OBSERVATIONS.value
    questions: int = 200
    ids: tuple[int, ...] = ANSWERABLE
    conversations: tuple[str, ...] = ()
    max_tokens: int = 24
    answers: bool = True
    fidelity: bool = True
    choices: bool = True
    top: int = 1000
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        """As JSON has it, tuples as lists."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunConfig:
        """From what `as_json` gave.

        Raises
        ------
        ConfigError
            A field is unknown or missing.
        """
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        try:
            return cls(**fields)
        except TypeError as error:
            raise ConfigError(f"this is no run's config: {error}") from error

    def parsed_arms(self) -> list[ArmName]:
        """The arms, taken apart.

        Raises
        ------
        ConfigError
            A name says nothing that can be run, or is there twice.
        """
        if not self.arms:
            raise ConfigError("a run needs an arm")
        if len(set(self.arms)) < len(self.arms):
            raise ConfigError(f"an arm is there twice: {', '.join(self.arms)}")
        arms = [parse_arm(name) for name in self.arms]
        for name, arm in zip(self.arms, arms, strict=True):
            if not _is_sound(arm):
                raise ConfigError(f"{name!r} is no arm; there are {_FORMS}")
        return arms

    def check(self) -> None:
        """Refuse what no server and no data could make a run of.

        Raises
        ------
        ConfigError
            As of `parsed_arms`; or an id is no category's, or an arm's reference is not among the arms.
        """
        known = [int(category) for category in Category]
        if unknown := [str(id_) for id_ in self.ids if id_ not in known]:
            raise ConfigError(f"no category has the id {', '.join(unknown)}; there are {known[0]} to {known[-1]}")
        for name, arm in zip(self.arms, self.parsed_arms(), strict=True):
            if arm.floor == "fp32" and not self.fidelity:
                raise ConfigError(f"{name} has fidelity figures alone, which this run has none of")
            if self.fidelity and (lacking := reference_of(arm, self)) not in self.arms:
                raise ConfigError(f"{name} is compared with {lacking or 'a text arm'}, which the run lacks")


def _is_sound(arm: ArmName) -> bool:
    match arm.kind:
        case "full" | "none":
            return arm.series == arm.kind and arm.k is None
        case "text" | "splice":
            has_policy = (arm.policy is not None) == (arm.kind == "splice")
            return (
                has_policy
                and _is_repair(arm.repair)
                and arm.placement is not None
                and (arm.k is not None)
                and arm.k > 0
            )
        case "floor":
            is_known = arm.floor in FLOORS and not arm.oracle
            return is_known and arm.placement != "tail" and arm.k is not None and arm.k > 0
    return False


def _is_repair(repair: str | None) -> bool:
    """Whether it is one that a server knows: the first tokens of each fact, the last ones of the block, or both."""
    return (
        repair is None or re.fullmatch(r"first:[1-9]\d*(\+last:[1-9]\d*)?|last:[1-9]\d*", repair, re.ASCII) is not None
    )


def selection_of(arm: ArmName) -> Selection:
    """Which units an arm serves."""
    if arm.kind in ("none", "full"):
        return {"none": Selection.NOTHING, "full": Selection.EVERYTHING}[arm.kind]
    if arm.oracle:
        return Selection.EVIDENCE
    floors = {"shuffled": Selection.SHUFFLED, "swapped": Selection.SWAPPED}
    return floors.get(arm.floor or "", Selection.RETRIEVED)


def reference_of(arm: ArmName, config: RunConfig) -> str | None:
    """The text arm with the same facts in the same place, as a run compares with; the first one for what has no k."""
    placement = arm.placement or "tail"
    if arm.k is None:
        return next((name for name in config.arms if name.startswith(f"text/{placement}@")), None)
    return f"{'oracle/' if arm.oracle else ''}text/{placement}@{arm.k}"


def sample(conversations: Sequence[Conversation], config: RunConfig) -> list[Question]:
    """The questions of a run, in the order of the data.

    Every (conversation, category id) gives its share, rounded by largest remainder; which of its questions is drawn
    with the run's seed.

    Raises
    ------
    ConfigError
        The data lacks one of the run's conversations, or has no question of its ids in them.
    """
    names = [conversation.sample_id for conversation in conversations]
    if unknown := [name for name in config.conversations if name not in names]:
        raise ConfigError(f"the data has no conversation {', '.join(unknown)}; it has {', '.join(names)}")
    strata: dict[tuple[str, int], list[Question]] = {}
    for conversation in conversations:
        if config.conversations and conversation.sample_id not in config.conversations:
            continue
        for question in conversation.questions:
            if question.category in config.ids and has_gold(question):
                strata.setdefault((question.sample_id, int(question.category)), []).append(question)
    total = sum(map(len, strata.values()))
    wanted = min(config.questions or total, total)
    if total == 0:
        raise ConfigError("no question of the data has one of the run's ids and conversations")
    exact = {key: wanted * len(found) / total for key, found in strata.items()}
    counts = {key: int(value) for key, value in exact.items()}
    by_remainder = sorted(exact, key=lambda key: (counts[key] - exact[key], key))
    for key in by_remainder[: wanted - sum(counts.values())]:
        counts[key] += 1
    drawn = {
        (question.sample_id, question.index)
        for key, found in strata.items()
        for question in random.Random(f"{config.seed} {key}").sample(found, counts[key])
    }
    return [
        question
        for conversation in conversations
        for question in conversation.questions
        if (question.sample_id, question.index) in drawn
    ]


def has_gold(question: Question) -> bool:
    """Whether there is an answer to force, or, of an adversarial question, to be wary of."""
    return bool((question.answer or "").strip()) or question.category is Category.ADVERSARIAL
