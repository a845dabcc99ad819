"""``score.json``, and ``scored.jsonl`` with what the score knows of each answer: written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from locomo.errors import RunError
from locomo.reporting.measures import Measured
from locomo.reporting.scores import finite
from locomo.whole_file import write_whole

SCORE = "score.json"
SCORED = "scored.jsonl"
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class QuestionScores:
    """One line of ``scored.jsonl``: by arm, the figures that the answer has, by their names in a comparison.

    ``official_f1`` and ``judge`` (whether most verdicts found it correct) are of the answer; ``kl_answer``,
    ``kl_first``, ``top1_first``, ``nll_per_token`` and ``forced_choice`` of its fidelity, of a splice arm only where
    it was spliced.
    """

    sample_id: str
    index: int
    arms: Mapping[str, Mapping[str, float | bool | None]]


def write_scored(folder: Path, score: Mapping[str, Any], questions: Sequence[QuestionScores]) -> dict[str, Any]:
    """Write both files, and return the score as it was written: with numbers of 12 digits.

    The last digits of a sum depend on the machine's vector units; the files should not.

    Raises
    ------
    RunError
        One cannot be written; the one before it, if any, is still there.
    """
    lines = (json.dumps(_rounded(asdict(question)), ensure_ascii=False) + "\n" for question in questions)
    write_whole(folder / SCORED, "".join(lines))
    rounded: dict[str, Any] = _rounded(score)
    write_score(folder / SCORE, rounded)
    return rounded


def write_score(path: Path, score: Mapping[str, Any]) -> None:
    """Write a score to any place; errors as of `write_scored`."""
    write_whole(path, json.dumps(score, indent=1, ensure_ascii=False) + "\n")


def read_scored(folder: Path) -> dict[str, dict[Measured, float]]:
    """Every figure of every answer, as a comparison of runs takes them: by metric, then by question and arm.

    Raises
    ------
    RunError
        The file cannot be read.
    """
    path = folder / SCORED
    found: dict[str, dict[Measured, float]] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for question in (QuestionScores(**json.loads(line)) for line in lines):
                for metric, at, value in _measured(question):
                    found.setdefault(metric, {})[at] = value
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"cannot read {path} ({error}): score the run again") from error
    return found


def _measured(question: QuestionScores) -> Iterable[tuple[str, Measured, float]]:
    for arm, values in question.arms.items():
        at = Measured(question.sample_id, question.index, arm)
        for metric, value in values.items():
            number = float(value) if isinstance(value, bool) else finite(value)
            if number is not None:
                yield metric, at, number


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
