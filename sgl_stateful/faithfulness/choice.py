"""What a server serves in the light of its table: the cheapest way within the target by number of facts, or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from .table import FLOOR, WITHOUT, Table, excess


class Target(StrEnum):
    """How near to full prefill spliced answers have to be, at every number of facts that is measured."""

    OFF = "off"
    """Nothing is measured, and nothing is refused."""

    FLOOR = "floor"
    """No further than the same facts in another order."""

    STRICT = "strict"
    """Half as far."""

    FAST = "fast"
    """Less than half as far as the question without any facts, which the other targets ask for as well."""


class Limit(NamedTuple):
    """Mean KL must not be above ``times`` that of ``served``."""

    served: str
    times: float


_SANITY = Limit(WITHOUT, 0.5)
LIMITS: dict[Target, tuple[Limit, ...]] = {
    Target.OFF: (),
    Target.FLOOR: (Limit(FLOOR, 1.0), _SANITY),
    Target.STRICT: (Limit(FLOOR, 0.5), _SANITY),
    Target.FAST: (_SANITY,),
}


class Verdict(IntEnum):
    """What the questions say about one way of serving and a limit; the larger, the worse."""

    WITHIN = 0
    """The mean is within the limit."""

    UNDECIDED = 1
    """The mean is above, but no further than by chance: its 95 % interval holds the limit."""

    BEYOND = 2
    """The whole interval is above."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is served by default with one number of facts.

    Attributes
    ----------
    repair
        The chosen repair; None where facts are to be served as text.
    verdict
        Of what was chosen; `Verdict.BEYOND` where nothing was.
    """

    repair: str | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Choices:
    """What is served by default, by number of facts: those that were measured, ascending."""

    by_size: Mapping[int, Choice]

    def at(self, count: int) -> Choice:
        """Return what ``count`` facts are served with: the choice of the nearest number, by ratio, that was measured.

        The smaller one where two are as near. Where nothing was measured, nothing is chosen.
        """
        if not self.by_size:
            return Choice(None, Verdict.BEYOND)
        return self.by_size[min(self.by_size, key=lambda size: (max(size, count) / max(min(size, count), 1), size))]


def verdict_at(table: Table, k: int, served: str, target: Target) -> Verdict:
    """Judge one way of serving ``k`` facts, by the limit that it does worst at."""
    return max((_verdict(table, k, served, limit) for limit in LIMITS[target]), default=Verdict.WITHIN)


def choose(table: Table, target: Target, *, repairs: Sequence[str] | None = None) -> Choices:
    """Choose for each number of facts the cheapest repair, by the share that it computes anew, within the target.

    Where the means of none are, the cheapest that is not shown to miss it; where all are, none.

    Parameters
    ----------
    repairs
        Those to choose from; None takes all that were measured.
    """
    ways = [name for name in table.repairs if repairs is None or name in repairs]
    return Choices({k: _choose_at(table, k, ways, target) for k in table.sizes})


def _choose_at(table: Table, k: int, ways: Sequence[str], target: Target) -> Choice:
    cheapest_first = sorted(ways, key=lambda name: table.row(k, name).recomputed)
    verdicts = [(verdict_at(table, k, name, target), cost, name) for cost, name in enumerate(cheapest_first)]
    verdict, _, name = min(verdicts, default=(Verdict.BEYOND, 0, ""))
    return Choice(None if verdict is Verdict.BEYOND else name, verdict)


def _verdict(table: Table, k: int, served: str, limit: Limit) -> Verdict:
    mean, half = excess(table.row(k, served), table.row(k, limit.served), times=limit.times)
    if mean <= 0:
        return Verdict.WITHIN
    return Verdict.BEYOND if mean > half else Verdict.UNDECIDED
