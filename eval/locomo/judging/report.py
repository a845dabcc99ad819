"""What a judge's verdicts come to: accuracy with its interval, abstentions, and what the controls say of the judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locomo.dataset import Category, Question
from locomo.judging.abstention import abstains
from locomo.judging.controls import Control, ControlKind
from locomo.judging.verdict import Verdict
from locomo.scoring.statistics import Interval, interval_json, interval_of_mean

Verdicts = tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class JudgeItem:
    """An answer to judge: one arm's raw text for one question."""

    arm: str
    question: Question
    prediction: str


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer with its verdict of each run."""

    item: JudgeItem
    verdicts: Verdicts

    @property
    def share_correct(self) -> float | None:
        """Share of the runs with a verdict that found it correct; `None` where none has one."""
        judged = [verdict for verdict in self.verdicts if verdict is not Verdict.UNJUDGED]
        return judged.count(Verdict.CORRECT) / len(judged) if judged else None

    @property
    def verdict(self) -> Verdict:
        """What most runs with a verdict found; ``UNJUDGED`` where none has a majority."""
        judged = Counter(verdict for verdict in self.verdicts if verdict is not Verdict.UNJUDGED)
        if not judged:
            return Verdict.UNJUDGED
        winner, votes = judged.most_common(1)[0]
        return winner if 2 * votes > judged.total() else Verdict.UNJUDGED

    @property
    def is_correct(self) -> bool | None:
        """Whether most runs with a verdict found it correct; `None` where just half did, or none has a verdict."""
        share = self.share_correct
        return None if share is None or share == 0.5 else share > 0.5


@dataclass(frozen=True, slots=True)
class ControlRates:
    """Share of the controls of one run that were judged correct, of those with a verdict; `None` without any."""

    known_wrong_accepted: float | None
    vague_accepted: float | None
    judged: int
    unjudged: int


@dataclass(frozen=True, slots=True)
class ArmVerdicts:
    """One arm's verdicts.

    Over the questions of ids 1 to 4, ``n`` of them: ``accuracy`` is the mean over questions of the share of runs that
    found the answer correct, ``runs`` the accuracy of each run; neither has an unjudged answer in it, above or below.
    ``abstained`` counts answers that most runs found to decline, ``unjudged`` those without a verdict in any run,
    ``tied`` those whose runs have verdicts but no majority, ``missing_verdicts`` the verdicts missing over all runs.

    Over the adversarial questions, ``adversarial_n`` of them: how many answers decline, as they should, by the judge
    (who may call such an answer abstained or correct) and by the answers' wording.
    """

    n: int
    accuracy: Interval | None
    runs: tuple[float | None, ...]
    abstained: int
    unjudged: int
    tied: int
    missing_verdicts: int
    adversarial_n: int
    adversarial_declined_by_judge: int
    adversarial_declined_by_wording: int
    adversarial_unjudged: int

    def as_json(self) -> dict[str, Any]:
        """JSON value for an arm's ``judge`` in ``score.json``; shares in [0, 1]."""
        interval = self.accuracy
        return {
            "n": self.n,
            "accuracy": None if interval is None else interval.estimate,
            "interval": None if interval is None else interval_json(interval),
            "over": None if interval is None else interval.over,
            "groups": None if interval is None else interval.groups,
            "runs": list(self.runs),
            "abstained": self.abstained,
            "unjudged": self.unjudged,
            "tied": self.tied,
            "missing_verdicts": self.missing_verdicts,
            "adversarial": {
                "n": self.adversarial_n,
                "declined_by_judge": self.adversarial_declined_by_judge,
                "declined_by_wording": self.adversarial_declined_by_wording,
                "unjudged": self.adversarial_unjudged,
            },
        }


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """Everything that was judged.

    ``model`` is the one asked for, ``served_models`` what the endpoint called it; ``missing`` counts the reasons of
    verdicts that could not be had, controls included.
    """

    model: str
    served_models: tuple[str, ...]
    prompt_sha256: str
    answers: tuple[JudgedAnswer, ...]
    controls: tuple[ControlRates, ...]
    missing: Mapping[str, int]

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, in the order in which they were given."""
        return tuple(dict.fromkeys(answer.item.arm for answer in self.answers))

    def of_arm(self, arm: str) -> tuple[JudgedAnswer, ...]:
        """One arm's answers: for paired tests against another arm's, by question."""
        return tuple(answer for answer in self.answers if answer.item.arm == arm)

    def arm(self, name: str, *, among: Collection[tuple[str, int]] | None = None) -> ArmVerdicts:
        """Sum up one arm, of the questions whose `(sample_id, index)` is `among` these; by default of all."""
        answers = [
            answer
            for answer in self.of_arm(name)
            if among is None or (answer.item.question.sample_id, answer.item.question.index) in among
        ]
        adversarial = [answer for answer in answers if answer.item.question.category is Category.ADVERSARIAL]
        plain = [answer for answer in answers if answer.item.question.category is not Category.ADVERSARIAL]
        judged = [
            (answer.item.question.sample_id, share) for answer in plain if (share := answer.share_correct) is not None
        ]
        return ArmVerdicts(
            n=len(plain),
            accuracy=interval_of_mean([share for _, share in judged], [name for name, _ in judged], within=(0.0, 1.0))
            if judged
            else None,
            runs=tuple(
                _share(run, {Verdict.CORRECT}) for run in zip(*(answer.verdicts for answer in plain), strict=True)
            ),
            abstained=sum(answer.verdict is Verdict.ABSTAINED for answer in plain),
            unjudged=sum(answer.share_correct is None for answer in plain),
            tied=sum(answer.verdict is Verdict.UNJUDGED and answer.share_correct is not None for answer in plain),
            missing_verdicts=sum(answer.verdicts.count(Verdict.UNJUDGED) for answer in plain),
            adversarial_n=len(adversarial),
            adversarial_declined_by_judge=sum(
                answer.verdict in (Verdict.ABSTAINED, Verdict.CORRECT) for answer in adversarial
            ),
            adversarial_declined_by_wording=sum(abstains(answer.item.prediction) for answer in adversarial),
            adversarial_unjudged=sum(answer.verdict is Verdict.UNJUDGED for answer in adversarial),
        )

    def false_accepts(self) -> dict[str, float | None]:
        """``{"known_wrong", "vague"}``: share of the controls judged correct, mean over the runs that judged any."""
        return {
            "known_wrong": _mean([run.known_wrong_accepted for run in self.controls]),
            "vague": _mean([run.vague_accepted for run in self.controls]),
        }

    def arms_json(self, *, among: Collection[tuple[str, int]] | None = None) -> dict[str, dict[str, Any]]:
        """Each arm's figures, of questions as in `arm`, with the controls' mean over runs as ``"false_accepts"``."""
        false_accepts = self.false_accepts()
        return {name: {**self.arm(name, among=among).as_json(), "false_accepts": false_accepts} for name in self.arms}

    def as_json(self) -> dict[str, Any]:
        """``{"model", "served_models", "prompt_sha256", "controls", "missing"}``: everything but texts and arms.

        ``controls`` has a mapping for each run.
        """
        return {
            "model": self.model,
            "served_models": list(self.served_models),
            "prompt_sha256": self.prompt_sha256,
            "controls": [
                {
                    "known_wrong_accepted": run.known_wrong_accepted,
                    "vague_accepted": run.vague_accepted,
                    "judged": run.judged,
                    "unjudged": run.unjudged,
                }
                for run in self.controls
            ],
            "missing": dict(self.missing),
        }


def control_rates(controls: Sequence[Control], verdicts: Sequence[Verdict]) -> ControlRates:
    """Sum up one run's controls, given the verdict of each."""
    of_kind: dict[ControlKind, list[Verdict]] = {kind: [] for kind in ControlKind}
    for control, verdict in zip(controls, verdicts, strict=True):
        of_kind[control.kind].append(verdict)
    unjudged = sum(verdict is Verdict.UNJUDGED for verdict in verdicts)
    return ControlRates(
        known_wrong_accepted=_share(of_kind[ControlKind.KNOWN_WRONG], {Verdict.CORRECT}),
        vague_accepted=_share(of_kind[ControlKind.VAGUE], {Verdict.CORRECT}),
        judged=len(verdicts) - unjudged,
        unjudged=unjudged,
    )


def _share(verdicts: Sequence[Verdict], wanted: Collection[Verdict]) -> float | None:
    judged = [verdict for verdict in verdicts if verdict is not Verdict.UNJUDGED]
    return sum(verdict in wanted for verdict in judged) / len(judged) if judged else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
