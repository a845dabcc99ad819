"""The few figures that a run is held against, each with its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .contents import format_number
from .scores import finite


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure's meaning and its target: at least or at most, or none."""

    title: str
    digits: int
    at_least: float | None = None
    at_most: float | None = None

    @property
    def target(self) -> str | None:
        """The target in words."""
        if self.at_least is not None:
            return f"target ≥ {self.at_least:g}"
        return None if self.at_most is None else f"target ≤ {self.at_most:g}"

    def is_met_by(self, value: float) -> bool | None:
        """Whether a value meets the target; None where there is none."""
        if self.at_least is not None:
            return value >= self.at_least
        return None if self.at_most is None else value <= self.at_most


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A bar and what was measured."""

    bar: Bar
    value: float

    @property
    def text(self) -> str:
        """The value as shown."""
        return format_number(self.value, self.bar.digits)

    @property
    def verdict(self) -> str | None:
        """``met`` or ``missed``; None where there is no target."""
        return {True: "met", False: "missed", None: None}[self.bar.is_met_by(self.value)]


BARS = {
    "kl_over_shuffle_floor": Bar("KL of splicing ÷ KL of the same facts in another order", 2, at_most=1.5),
    "share_of_information_kept": Bar("Share of the answer's information kept", 3),
    "recall_all_at_10": Bar("All evidence among the first 10 units", 3),
    "ttft_text_over_splice_k50": Bar("TTFT, text at the tail ÷ splice, k = 50", 1, at_least=25),
    "ttft_splice_k50_over_k0": Bar("TTFT of splice, k = 50 ÷ k = 0", 2),
    "qps_ratio_16_users_k50": Bar("Requests per second ÷ text at the tail, 16 users, k = 50", 2, at_least=4.5),
    "encode_tokens_per_fact_token": Bar("Tokens prefilled per fact token encoded", 2),
}


def key_figures(score: Mapping[str, Any], benches: Mapping[str, Mapping[str, Any]]) -> list[KeyFigure]:
    """Every known bar that the score or a benchmark's file has."""
    measured: dict[str, Any] = {}
    for source in (*benches.values(), score):
        measured.update(source.get("bars") or {})
    return [KeyFigure(bar, value) for name, bar in BARS.items() if (value := finite(measured.get(name))) is not None]
