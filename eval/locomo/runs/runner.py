"""The loop of a run: every arm answers a question before the next question comes.

Arms of one question share what was retrieved. Spliced prompts go first and caches are emptied between questions:
a prompt that was prefilled as text would be found by its exact token ids, and nothing would be spliced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from locomo.arms.base import Answer, Scored, Selection, Served, System
from locomo.dataset import Category, Conversation, Question
from locomo.errors import ConfigError, ServerFailed
from locomo.fidelity import kl_divergence, top1
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.units import Unit, UnitKind, UnitText, units_of
from locomo.runs.config import RunConfig, reference_of, sample, selection_of
from locomo.runs.folder import RunFolder
from locomo.runs.selecting import served_by
from locomo.scoring.choice import distractors


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


@dataclass(slots=True)
class _Arm:
    """One arm of the run, and what its prompts gave for the question at hand."""

    name: str
    parsed: ArmName


class Runner:
    """Asks the questions of one run that have no row yet.

    Parameters
    ----------
    precise
        Serves the arms ``floor/fp32``; None where there are none.

    Raises
    ------
    ConfigError
        At construction: an arm that the system cannot serve, with the reason.
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
        self._arms = [_Arm(name, arm) for name, arm in zip(config.arms, config.parsed_arms(), strict=True)]
        for arm in self._arms:
            if (reason := system.why_not(arm.parsed)) is not None:
                raise ConfigError(f"{arm.name} cannot be served: {reason}")
            if arm.parsed.floor == "fp32" and (precise is None or not config.fidelity):
                raise ConfigError(f"{arm.name} needs a second server in fp32 and the fidelity figures")
            if config.fidelity and (lacking := reference_of(arm.parsed, self._config)) not in config.arms:
                raise ConfigError(f"{arm.name} is compared with {lacking or 'a text arm'}, which the run lacks")
        self._largest_k = max((arm.parsed.k or 0 for arm in self._arms), default=0)

    def run(self, conversations: Sequence[Conversation]) -> int:
        """Ask what has no row; returns how many questions were asked.

        Raises
        ------
        ServerFailed, RunError
            It ends there; the rows before are kept, and the same call goes on behind them.
        """
        questions = sample(conversations, self._config)
        done = self._folder.done()
        left = [question for question in questions if (question.sample_id, question.index) not in done]
        everything = [question for conversation in conversations for question in conversation.questions]
        asked = 0
        self._progress.asked(len(questions) - len(left), len(questions))
        for conversation in conversations:
            own = [question for question in left if question.sample_id == conversation.sample_id]
            if not own:
                continue
            units = self._open(conversation)
            for question in own:
                row = self._row(question, units, everything)
                self._folder.append(row)
                asked += 1
                self._progress.asked(len(questions) - len(left) + asked, len(questions))
        return asked

    def _open(self, conversation: Conversation) -> dict[str, Unit]:
        units = units_of(conversation, UnitKind(self._config.units), text=UnitText.PLAIN, captions=True)
        name = conversation.sample_id
        self._system.open(conversation, units, lambda done, total: self._progress.taking_in(name, done, total))
        return {unit.id: unit for unit in units}

    def _row(self, question: Question, units: Mapping[str, Unit], everything: Iterable[Question]) -> dict[str, Any]:
        started = time.perf_counter()
        # One more than is served: what the swapped floor takes a distractor from.
        began = time.perf_counter()
        retrieved = self._system.retrieve(question.question, self._largest_k + 5 if self._largest_k else 0)
        retrieve_ms = 1e3 * (time.perf_counter() - began)
        served = {
            arm.name: served_by(arm.parsed, question, retrieved=retrieved, units=units, seed=self._config.seed)
            for arm in self._arms
        }
        choices = self._choices(question, everything)
        self._system.forget()
        answers: dict[str, Answer] = {}
        scores: dict[str, list[Scored] | None] = {}
        errors: dict[str, str] = {}
        for arm in self._in_order(question):
            try:
                prompt = answers[arm.name] = self._system.answer(question.question, served[arm.name])
                scores[arm.name] = self._score(arm, question, served[arm.name], choices, prompt)
            except ServerFailed as error:
                # A prompt that one arm cannot serve (too long, say) is that arm's figure; a dead server ends the run.
                self._system.describe()
                errors[arm.name] = str(error)
        if len(errors) == sum(bool(given.units) for given in served.values()) > 1:
            raise ServerFailed(f"every arm with facts failed; the last: {errors[next(reversed(errors))]}")
        arms = {arm.name: self._entry(arm, served, answers, scores, errors, retrieve_ms) for arm in self._arms}
        return {
            "sample_id": question.sample_id,
            "index": question.index,
            "category": int(question.category),
            "stratum": int(question.category),
            "retrieved": retrieved[: self._largest_k],
            "arms": arms,
            "seconds": round(time.perf_counter() - started, 3),
        }

    def _in_order(self, question: Question) -> list[_Arm]:
        """Spliced before text; among them another one first for every question, for their times' sake."""
        at = question.index % len(self._arms)
        turned = [*self._arms[at:], *self._arms[:at]]
        return sorted(turned, key=lambda arm: (arm.parsed.policy is None, arm.parsed.kind == "floor"))

    def _choices(self, question: Question, everything: Iterable[Question]) -> tuple[str, ...]:
        """The gold answer and, where choices are wanted, those that it competes with."""
        if not self._config.fidelity or question.answer is None or question.category is Category.ADVERSARIAL:
            return ()
        others = distractors(question, everything) if self._config.choices else ()
        return (question.answer, *others)

    def _score(
        self, arm: _Arm, question: Question, served: Served, choices: tuple[str, ...], prompt: Answer
    ) -> list[Scored] | None:
        if not choices:
            return None
        if arm.parsed.floor == "fp32":
            assert self._precise is not None, "refused at construction"
            return [
                self._precise.score_ids(prompt.prompt_ids, text, top=0 if number else self._config.top)
                for number, text in enumerate(choices)
            ]
        return self._system.score(question.question, served, choices, prompt=prompt, top=self._config.top)

    def _entry(
        self,
        arm: _Arm,
        served: Mapping[str, Served],
        answers: Mapping[str, Answer],
        scores: Mapping[str, list[Scored] | None],
        errors: Mapping[str, str],
        retrieve_ms: float,
    ) -> dict[str, Any]:
        answer = answers.get(arm.name)
        fields: dict[str, Any] = {} if answer is None else asdict(answer)
        fields.pop("prompt_ids", None)
        text = fields.pop("text", None)
        if answer is not None:
            fields["ttft_ms"] = round(answer.ttft_ms, 3)
            fields["ms"] = dict(answer.ms)
            if selection_of(arm.parsed) not in (Selection.NOTHING, Selection.EVERYTHING, Selection.EVIDENCE):
                fields["ms"]["retrieve"] = round(retrieve_ms, 3)
        return {
            "arm": arm.parsed.series,
            "k": arm.parsed.k,
            "prediction": text,
            **fields,
            "fidelity": self._fidelity(arm, scores),
            "error": errors.get(arm.name),
        }

    def _fidelity(self, arm: _Arm, scores: Mapping[str, list[Scored] | None]) -> dict[str, Any] | None:
        mine = scores.get(arm.name)
        reference = scores.get(reference_of(arm.parsed, self._config) or "")
        if not mine or not reference:
            return None
        gold, against = mine[0], reference[0]
        steps = list(zip(against.distributions, gold.distributions, strict=True))
        return {
            "kl_first": kl_divergence(*steps[0]),
            "top1_first": top1(steps[0][0]) == top1(steps[0][1]),
            "kl_answer": sum(kl_divergence(*step) for step in steps) / len(steps),
            "nll": gold.nll,
            "answer_tokens": len(gold.logprobs),
            "choices_nll": [scored.nll for scored in mine] if len(mine) > 1 else None,
        }
