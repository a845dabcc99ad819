"""What a run measured for each question: the ground of paired comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """A run to compare: its score, and the figures of single answers that the score was made of."""

    name: str
    score: Mapping[str, Any]
    measures: Measures = field(default_factory=dict)
