"""The few figures that a run is held against, each with its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .contents import format_interval, format_number
from .scores import Estimate, finite, interval_of


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

    def verdict_on(self, value: Estimate) -> str | None:
        """``met`` or ``missed`` where the whole interval lies on one side of the target, else ``undecided``.

        None without a target, or without an interval: a point decides nothing.
        """
        if self.target is None or value.low is None or value.high is None:
            return None
        if self.at_least is not None:
            return "met" if value.low >= self.at_least else "missed" if value.high < self.at_least else "undecided"
        assert self.at_most is not None
        return "met" if value.high <= self.at_most else "missed" if value.low > self.at_most else "undecided"


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A bar and what was measured."""

    bar: Bar
    measured: Estimate

    @property
    def value(self) -> float:
        """The figure alone."""
        return self.measured.mean

    @property
    def text(self) -> str:
        """The value as shown."""
        return format_number(self.value, self.bar.digits)

    @property
    def interval(self) -> str | None:
        """Its 95 % interval as shown; None where there is none."""
        return format_interval(self.measured, self.bar.digits)

    @property
    def verdict(self) -> str | None:
        """As of `Bar.verdict_on`."""
        return self.bar.verdict_on(self.measured)


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
    """Every known bar that the score or a benchmark's file has, with what stands under ``<bar>_interval`` beside it."""
    measured: dict[str, Any] = {}
    for source in (*benches.values(), score):
        measured.update(source.get("bars") or {})
    return [
        KeyFigure(bar, Estimate(value, *interval_of(measured.get(f"{name}_interval"))))
        for name, bar in BARS.items()
        if (value := finite(measured.get(name))) is not None
    ]
