"""A system whose next-token distributions are known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

from locomo.arms.base import Answer, Scored, Served

FACTS = [f"D1:{number}" for number in range(1, 11)]  # best first
HALF = {1: log(0.5), 2: log(0.5)}
QUARTER = {1: log(0.25), 2: log(0.75)}
EIGHTH = {1: log(0.125), 2: log(0.875)}


@dataclass
class Distributions:
    """Half and half as text; a quarter where it is spliced, an eighth in another order and without facts."""

    tier: str = "spliced"
    scored_tier: str = "spliced"
    ids: tuple[int, ...] = (1, 2, 3)
    asked: list[Any] = field(default_factory=list)
    spliced: dict[int, float] = field(default_factory=lambda: QUARTER)
    owner: str = "ana"
    takes: Callable[[float], None] = lambda seconds: None

    def open(self, conversation: object, units: Sequence[object], on_progress: Callable[[int, int], None]) -> None:
        self.takes(0.02)
        on_progress(0, len(units))
        self.takes(0.2)
        on_progress(len(units), len(units))

    def retrieve(self, question: str, k: int) -> list[str]:
        return FACTS[:k]

    def forget(self) -> None:
        self.asked.append("forget")

    def answer(self, question: str, served: Served) -> Answer:
        self.asked.append(served)
        tier = self.tier if served.policy else "text"
        ids = self.ids if served.policy else (1, 2, 3)
        return Answer("", served.units, tier, None if tier == "spliced" else "why", {}, 1.0, {}, prompt_ids=ids)

    def score(
        self, question: str, served: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored]:
        self.asked.append(served)
        if served.policy:
            return [Scored((-1.0,), (self.spliced,), tier=self.scored_tier)]
        return [Scored((-1.0,), ({**HALF} if served.units == tuple(reversed(FACTS)) else EIGHTH,), tier="text")]
