"""The names of arms: what they say, how they are ordered, and what a reader is shown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering

KINDS = ("full", "text", "splice", "none", "floor")
FAMILIES = ("window", "anchor", "ladder")
FLOORS = {
    "shuffled": "facts in another order",
    "swapped": "one distractor swapped",
    "fp32": "bf16 against fp32",
}


@total_ordering
@dataclass(frozen=True, slots=True)
class ArmName:
    """An arm's name, taken apart.

    Attributes
    ----------
    series
        The name without its k: one line of a chart.
    kind
        One of `KINDS`, or the first part of a name that follows none of them.
    policy
        How facts are encoded, as in ``window:5``; None for what is not spliced.
    repair
        Which tokens of spliced facts are computed anew, as in ``first:4``; None where none are.
    placement
        ``head`` or ``tail``; None where the name has none, as of a floor at the tail.
    oracle
        Whether the facts are the evidence itself instead of what was retrieved.
    k
        Facts asked for; None where the name has none.
    """

    series: str
    kind: str
    policy: str | None
    placement: str | None
    oracle: bool
    k: int | None
    repair: str | None = None

    @property
    def family(self) -> str | None:
        """``window``, ``anchor`` or ``ladder``; None for what is not spliced."""
        return self.policy.partition(":")[0] if self.policy else None

    @property
    def length(self) -> int | None:
        """Facts in front of each fact as it was encoded; None for ladders, which have several lengths."""
        number = self.policy.partition(":")[2] if self.policy else ""
        return int(number) if number.isdecimal() else None

    @property
    def floor(self) -> str | None:
        """Which noise floor this is, as in ``shuffled``; None for an arm under test."""
        if self.kind != "floor":
            return None
        return self.series.partition("/")[2].removesuffix(f"/{self.placement}")

    @property
    def label(self) -> str:
        """What a reader is shown: the name without its k, in words."""
        if self.floor is not None:
            where = f", {self.placement}" if self.placement else ""
            return f"floor: {FLOORS.get(self.floor, self.floor)}{where}"
        words = {"full": "full context", "none": "no memory"}.get(self.kind, self.kind)
        if self.policy:
            family, _, number = self.policy.partition(":")
            words += f", {family} {number}" if number else f", {family}"
        if self.repair:
            words += f", {self.repair.replace(':', ' ').replace('+', ' and ')} anew"
        if self.placement:
            words += f", {self.placement}"
        return f"evidence as {words}" if self.oracle else words

    def _key(self) -> tuple[bool, bool, int, int, int, int, str, str, str, int]:
        floors = list(FLOORS)
        return (
            self.floor is not None,
            self.oracle,
            KINDS.index(self.kind) if self.kind in KINDS else len(KINDS),
            FAMILIES.index(self.family) if self.family in FAMILIES else len(FAMILIES),
            floors.index(self.floor) if self.floor in floors else len(floors),
            self.length or 0,
            self.policy or "",
            self.repair or "",
            self.series,
            self.k or 0,
        )

    def __lt__(self, other: ArmName) -> bool:
        """Order of tables and legends: full context, text, splice by policy and length, no memory, evidence, floors."""
        return self._key() < other._key()


def parse_arm(text: str) -> ArmName:
    """Take ``splice/window:5/tail@10`` apart; a name of another shape is kept whole, as its own kind."""
    series, at, number = text.rpartition("@")
    if not at or not number.isdecimal():
        series, number = text, ""
    parts = series.split("/")
    oracle = parts[0] == "oracle" and len(parts) > 1
    kind, *rest = parts[1:] if oracle else parts
    placement = rest[-1] if rest and rest[-1] in ("head", "tail") else None
    between = rest[: -1 if placement else None] if kind == "splice" else []
    repair = between.pop() if len(between) > 1 and between[-1].startswith(("first:", "share:", "last:")) else None
    policy = "/".join(between) if kind == "splice" and between else None
    return ArmName(series, kind, policy, placement, oracle, int(number) if number else None, repair)
