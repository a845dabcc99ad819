"""The loop of a run: every arm answers a question before the next question comes.

Arms of one question share what was retrieved. Spliced prompts go first and caches are emptied between questions:
a prompt that was prefilled as text would be found by its exact token ids, and nothing would be spliced.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from locomo.arms.base import TIERS, Answer, Scored, Selection, Served, System
from locomo.dataset import Category, Conversation, Question
from locomo.errors import ConfigError, NothingToServe, RequestRefused
from locomo.fidelity import kl_divergence, top1
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.units import Unit, UnitKind, UnitText, units_of
from locomo.runs.config import RunConfig, has_gold, reference_of, sample, selection_of
from locomo.runs.folder import COUNTS, RunFolder
from locomo.runs.selecting import served_by
from locomo.scoring.choice import distractors

_SPARE = 5  # retrieved beyond what is served: where the swapped floor finds a unit to swap in


class Precise(Protocol):
    """The same model in fp32, asked with whole prompts."""

    def score_ids(self, prompt_ids: Sequence[int], continuation: str, *, top: int) -> Scored:
        """Force a continuation behind a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Called while a run goes on: what is being done, how much of it, of how much."""

    taking_in: Callable[[str, int, int], None]
    asked: Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Arm:
    """One arm of the run, by the name that the config has for it."""

    name: str
    parsed: ArmName


@dataclass(slots=True)
class _Outcome:
    """What one arm gave for one question.

    Attributes
    ----------
    answer
        None where nothing was decoded.
    scores
        Of the gold and then of what it competes with; empty where nothing was forced.
    error
        Why the server refuses the arm's prompt.
    """

    answer: Answer | None = None
    scores: list[Scored] = field(default_factory=list)
    error: str | None = None

    @property
    def weakest(self) -> Answer | Scored | None:
        """Of all requests the one whose units got into the prompt least as a spliced arm asks for it."""
        requests = [request for request in (self.answer, *self.scores) if request is not None]
        return max(requests, key=lambda request: TIERS.index(request.tier), default=None)


class Runner:
    """Asks the questions of one run that have no row yet.

    Parameters
    ----------
    precise
        Serves the arms ``floor/fp32``; None where there are none.

    Raises
    ------
    ConfigError
        At construction: a config that fails its `check`, or an arm that the system cannot serve, with the reason.
    """

    def __init__(
        self,
        config: RunConfig,
        system: System,
        folder: RunFolder,
        *,
        precise: Precise | None,
        progress: Progress,
    ) -> None:
        self._config = config
        self._system = system
        self._precise = precise
        self._folder = folder
        self._progress = progress
        config.check()
        self._arms = [_Arm(name, arm) for name, arm in zip(config.arms, config.parsed_arms(), strict=True)]
        for arm in self._arms:
            if (reason := system.why_not(arm.parsed)) is not None:
                raise ConfigError(f"{arm.name} cannot be served: {reason}")
            if arm.parsed.floor == "fp32" and precise is None:
                raise ConfigError(f"{arm.name} needs a second server in fp32")
        self._largest_k = max((arm.parsed.k or 0 for arm in self._arms), default=0)

    def run(self, conversations: Sequence[Conversation]) -> int:
        """Ask what has no row; returns how many questions were asked.

        Raises
        ------
        LocomoError
            It ends there, with no row of the question at hand; the rows before are kept, and the same call goes on
            behind them.
        """
        questions = sample(conversations, self._config)
        done = self._folder.done()
        left = [question for question in questions if (question.sample_id, question.index) not in done]
        everything = [item for conversation in conversations for item in conversation.questions if has_gold(item)]
        earlier, at_start = self._folder.encodings(), self._system.encodings()
        asked = 0
        self._progress.asked(len(questions) - len(left), len(questions))
        for conversation in conversations:
            own = [question for question in left if question.sample_id == conversation.sample_id]
            if not own:
                continue
            units = self._open(conversation)
            self._count_encodings(earlier, at_start)
            for question in own:
                row = self._row(question, units, everything)
                self._folder.append(row)
                asked += 1
                self._progress.asked(len(questions) - len(left) + asked, len(questions))
        if asked:
            self._count_encodings(earlier, at_start)
        return asked

    def _count_encodings(
        self, earlier: Mapping[str, Mapping[str, float]], at_start: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Write what encoding has cost: in earlier starts, and since this one."""
        now = self._system.encodings()
        total = {
            policy: {
                name: earlier.get(policy, {}).get(name, 0)
                + now.get(policy, {}).get(name, 0)
                - at_start.get(policy, {}).get(name, 0)
                for name in COUNTS
            }
            for policy in dict.fromkeys([*earlier, *now])
        }
        if total:
            self._folder.write_encodings(total)

    def _open(self, conversation: Conversation) -> dict[str, Unit]:
        units = units_of(conversation, UnitKind(self._config.units), text=UnitText.PLAIN, captions=True)
        name = conversation.sample_id
        self._system.open(conversation, units, lambda done, total: self._progress.taking_in(name, done, total))
        return {unit.id: unit for unit in units}

    def _row(self, question: Question, units: Mapping[str, Unit], everything: Iterable[Question]) -> dict[str, Any]:
        started = time.perf_counter()
        retrieved = self._system.retrieve(question.question, self._largest_k + _SPARE if self._largest_k else 0)
        retrieve_ms = 1e3 * (time.perf_counter() - started)
        served: dict[str, Served] = {}
        not_served: dict[str, str] = {}
        for arm in self._arms:
            try:
                served[arm.name] = served_by(
                    arm.parsed, question, retrieved=retrieved, units=units, seed=self._config.seed
                )
            except NothingToServe as reason:
                not_served[arm.name] = str(reason)
        choices = self._choices(question, everything)
        self._system.forget()
        outcomes: dict[str, _Outcome] = {}
        for arm in self._in_order(question):
            if arm.name in served:
                outcomes[arm.name] = self._ask(arm, question, served[arm.name], choices, outcomes)
        if all(outcome.answer is None for outcome in outcomes.values()):
            self._system.check()  # it may refuse everything, and then this question deserves no row
        return {
            "sample_id": question.sample_id,
            "index": question.index,
            "category": int(question.category),
            "retrieved": retrieved[: self._largest_k],
            "arms": {arm.name: self._entry(arm, outcomes, retrieve_ms) for arm in self._arms if arm.name in outcomes},
            "not_served": not_served,
            "seconds": round(time.perf_counter() - started, 3),
        }

    def _in_order(self, question: Question) -> list[_Arm]:
        """Spliced before text; among them another one first for every question, for their times' sake."""
        at = question.index % len(self._arms)
        turned = [*self._arms[at:], *self._arms[:at]]
        return sorted(turned, key=lambda arm: (arm.parsed.policy is None, arm.parsed.kind == "floor"))

    def _choices(self, question: Question, everything: Iterable[Question]) -> tuple[str, ...]:
        """The gold answer and, where choices are wanted, those that it competes with."""
        if not self._config.fidelity or not question.answer or question.category is Category.ADVERSARIAL:
            return ()
        others = distractors(question, everything) if self._config.choices else ()
        return (question.answer, *others)

    def _ask(
        self, arm: _Arm, question: Question, served: Served, choices: tuple[str, ...], before: Mapping[str, _Outcome]
    ) -> _Outcome:
        """Have a prompt answered and scored. That one is refused (too long, say) is a figure of its arm."""
        outcome = _Outcome()
        try:
            if arm.parsed.floor == "fp32":
                reference = before[reference_of(arm.parsed, self._config) or ""].answer
                outcome.scores = self._forced_in_fp32(reference, choices)
                return outcome
            outcome.answer = self._system.answer(question.question, served)
            if choices:
                prompt, top = outcome.answer, self._config.top
                outcome.scores = self._system.score(question.question, served, choices, prompt=prompt, top=top) or []
        except RequestRefused as error:
            outcome.error = str(error)
        return outcome

    def _forced_in_fp32(self, reference: Answer | None, choices: tuple[str, ...]) -> list[Scored]:
        """Choices behind the very prompt of the text arm, which floors come after."""
        assert self._precise is not None, "refused at construction"
        if reference is None:
            raise RequestRefused("the prompt of its text arm was refused")
        return [
            self._precise.score_ids(reference.prompt_ids, text, top=0 if number else self._config.top)
            for number, text in enumerate(choices)
        ]

    def _entry(self, arm: _Arm, outcomes: Mapping[str, _Outcome], retrieve_ms: float) -> dict[str, Any]:
        """An arm's part of a row; its tier is the weakest of its requests."""
        outcome = outcomes[arm.name]
        weakest, answer = outcome.weakest, outcome.answer
        entry: dict[str, Any] = {
            "arm": arm.parsed.series,
            "k": arm.parsed.k,
            "prediction": None,
            "tier": None if weakest is None else weakest.tier,
            "reason": None if weakest is None else weakest.reason,
        }
        if answer is not None:
            is_retrieved = selection_of(arm.parsed) not in (Selection.NOTHING, Selection.EVERYTHING, Selection.EVIDENCE)
            entry |= {
                "prediction": answer.text,
                "answer_tier": answer.tier,
                "used": list(answer.used),
                "dropped": answer.dropped,
                "tokens": answer.tokens,
                "ttft_ms": round(answer.ttft_ms, 3),
                "ms": {**answer.ms, **({"retrieve": round(retrieve_ms, 3)} if is_retrieved else {})},
            }
        return {
            **entry,
            "scored": [{"tier": one.tier, "reason": one.reason, "tokens": one.tokens} for one in outcome.scores],
            "fidelity": self._fidelity(arm, outcomes),
            "error": outcome.error,
        }

    def _fidelity(self, arm: _Arm, outcomes: Mapping[str, _Outcome]) -> dict[str, Any] | None:
        mine, reference = outcomes[arm.name], outcomes.get(reference_of(arm.parsed, self._config) or "")
        if not mine.scores or reference is None or not reference.scores:
            return None
        gold, against = mine.scores[0], reference.scores[0]
        steps = list(zip(against.distributions, gold.distributions, strict=True))
        return {
            "kl_first": kl_divergence(*steps[0]),
            "top1_first": top1(steps[0][0]) == top1(steps[0][1]),
            "kl_answer": sum(kl_divergence(*step) for step in steps) / len(steps),
            "nll": gold.nll,
            "answer_tokens": len(gold.logprobs),
            "unlisted": sum(max(0.0, 1 - sum(map(math.exp, step.values()))) for step in gold.distributions)
            / len(steps),
            "choices_nll": [scored.nll for scored in mine.scores] if len(mine.scores) > 1 else None,
        }


def _unlisted(distribution: Mapping[int, float]) -> float:
    """Probability of all tokens that a distribution does not list."""
    return max(0.0, 1 - sum(map(math.exp, distribution.values())))
