"""The gate of a closed set of answers: how far ahead the best has to be for the set to answer by itself.

Calibrated on what was observed: the gap between the best two of the set, and whether decoding for real said the same.
It says nothing about the model's being right, only about its agreeing with itself, so a model of any size can fire.
Source: Speculative Pre-Positioning (arXiv 2606.29565).
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

from .interval import Interval, expected_share, wilson

DEFAULT_TARGET = 0.95
_KEPT = 1000
_BINS = 10


class Observation(NamedTuple):
    """One decision; ``gap`` in nats."""

    gap: float
    agreed: bool


class Bin(NamedTuple):
    """Decisions with gaps in ``[low, high]``: how many, how many of them agreed, and the 95 % interval of the share."""

    low: float
    high: float
    n: int
    agreed: int
    interval: Interval


class Gate:
    """The gate of one question.

    Parameters
    ----------
    target
        Share of decisions that fire and agree with real decoding, of those that fire; in (0, 1).

    Attributes
    ----------
    threshold
        The least gap that fires, nats; infinite while too little has been observed.
    """

    def __init__(self, target: float = DEFAULT_TARGET) -> None:
        self.target = target
        self.threshold = inf
        self._seen: deque[Observation] = deque(maxlen=_KEPT)

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, gap: float, *, agreed: bool) -> None:
        """A decision was compared with real decoding."""
        self._seen.append(Observation(gap, agreed))
        self.threshold = self._calibrated()

    @property
    def is_calibrated(self) -> bool:
        """Whether enough has been observed for some gap to fire."""
        return self.threshold < inf

    def fires(self, gap: float) -> bool:
        """Whether the best of the set is the answer."""
        return gap >= self.threshold

    def confidence(self, gap: float) -> float | None:
        """Expected share of agreement among decisions with about that gap; None where none was observed."""
        bins = self.curve()
        at = next((one for one in bins if gap <= one.high), bins[-1] if bins else None)
        return None if at is None else expected_share(at.agreed, at.n)

    def coverage(self) -> float:
        """Share of what was observed that fires."""
        return sum(self.fires(one.gap) for one in self._seen) / len(self._seen) if self._seen else 0.0

    def precision(self) -> tuple[int, int]:
        """How many of those that fire agreed, and how many fire."""
        fired = [one for one in self._seen if self.fires(one.gap)]
        return sum(one.agreed for one in fired), len(fired)

    def curve(self, bins: int = _BINS) -> list[Bin]:
        """The reliability curve: what was observed, by gap, in bins of about as many decisions each."""
        ranked = sorted(self._seen)
        made, n = [], len(ranked)
        for start, end in ((n * i // bins, n * (i + 1) // bins) for i in range(bins)):
            if part := ranked[start:end]:
                agreed = sum(one.agreed for one in part)
                made.append(Bin(part[0].gap, part[-1].gap, len(part), agreed, wilson(agreed, len(part))))
        return made

    def _calibrated(self) -> float:
        """The least gap above which the expected share of agreement meets the target."""
        best, agreed, n = inf, 0, 0
        ranked = sorted(self._seen, reverse=True)
        for i, one in enumerate(ranked):
            agreed, n = agreed + one.agreed, n + 1
            is_last_of_its_gap = i + 1 == len(ranked) or ranked[i + 1].gap < one.gap
            if is_last_of_its_gap and expected_share(agreed, n) >= self.target:
                best = one.gap
        return best
