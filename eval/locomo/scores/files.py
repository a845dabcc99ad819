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
    """One line of ``scored.jsonl``: by arm, ``{"official_f1": 0 to 1, "judge": true, false or null}``."""

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
    """``official_f1`` and ``judge`` of every answer, as a comparison of runs takes them; empty without the file.

    Raises
    ------
    RunError
        The file cannot be read.
    """
    path = folder / SCORED
    if not path.exists():
        return {}
    found: dict[str, dict[Measured, float]] = {"official_f1": {}, "judge": {}}
    try:
        with path.open(encoding="utf-8") as lines:
            for question in (QuestionScores(**json.loads(line)) for line in lines):
                for metric, at, value in _measured(question):
                    found[metric][at] = value
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"cannot read {path} ({error}): score the run again") from error
    return {metric: values for metric, values in found.items() if values}


def _measured(question: QuestionScores) -> Iterable[tuple[str, Measured, float]]:
    for arm, values in question.arms.items():
        at = Measured(question.sample_id, question.index, arm)
        if (f1 := finite(values.get("official_f1"))) is not None:
            yield "official_f1", at, f1
        if isinstance(right := values.get("judge"), bool):
            yield "judge", at, float(right)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
