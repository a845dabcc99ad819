"""What a run measured for each question, read from its rows: the ground of paired comparisons."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locomo.errors import ReportInputError
from locomo.scoring.choice import is_gold_chosen

from .scores import finite, read_object


@dataclass(frozen=True, slots=True, order=True)
class Measured:
    """One question under one arm; `arm` is ``<arm>@<k>``."""

    sample_id: str
    index: int
    arm: str


Measures = Mapping[str, Mapping[Measured, float]]
"""By metric, then by question and arm; 0 or 1 where the metric says whether something was right."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run to compare.

    `measures` is empty where there are no rows. A caller may add metrics that need more than the rows, under the names
    ``official_f1`` (0 to 1) and ``judge`` (0 or 1, the verdict of most runs).
    """

    name: str
    score: Mapping[str, Any]
    measures: Measures = field(default_factory=dict)


def read_run(folder: Path, *, name: str | None = None) -> Run:
    """Read ``score.json`` of a run's folder, and ``rows.jsonl`` where there is one.

    Raises
    ------
    ReportInputError
        If either cannot be read; a last row that was cut short is passed over, as a resumed run does.
    """
    rows = folder / "rows.jsonl"
    measures = measures_of(read_rows(rows)) if rows.exists() else {}
    return Run(name or folder.resolve().name, read_object(folder / "score.json"), measures)


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a run, one question each; errors as of `read_run`."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    return
                raise ReportInputError(f"{path}, line {number} is not JSON ({error})") from error
            if not isinstance(row, Mapping) or not {"sample_id", "index", "arms"} <= row.keys():
                raise ReportInputError(f"{path}, line {number} is no row of a run")
            yield row


def measures_of(rows: Iterator[Mapping[str, Any]]) -> Measures:
    """Everything in the rows' ``fidelity``; where a question stands twice, its last row counts."""
    found: dict[str, dict[Measured, float]] = {}
    for row in rows:
        for arm, result in row["arms"].items():
            key = Measured(row["sample_id"], row["index"], arm)
            for metric, value in _of_fidelity(result.get("fidelity") or {}):
                found.setdefault(metric, {})[key] = value
    return found


def _of_fidelity(fidelity: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for metric in ("kl_answer", "kl_first", "nll"):
        if (value := finite(fidelity.get(metric))) is not None:
            yield metric, value
    if isinstance(agrees := fidelity.get("top1_first"), bool):
        yield "top1_first", float(agrees)
    if choices := fidelity.get("choices_nll"):
        yield "forced_choice", float(is_gold_chosen(choices))
