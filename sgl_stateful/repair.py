"""Which tokens of a spliced block are computed anew, behind what is spliced, instead of being spliced.

What is computed anew sees the whole prompt before it, as in full prefill: its KV is right as far as what stands before
it is. Such tokens are left out of the spans of a splice, and join the forward of whatever else no span covers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_TOKENS = 1_000_000
_USAGE = "use 'none', 'first:M', 'last:N' or 'first:M+last:N'"


@dataclass(frozen=True, slots=True)
class Repair:
    """Recompute the first tokens of each fact, the last ones of the block, or both.

    Attributes
    ----------
    name
        As it was asked for.
    first
        Tokens at the beginning of each fact.
    last
        Tokens of facts at the end of the block, over as many facts as that takes.
    """

    name: str = "none"
    first: int = 0
    last: int = 0

    def kept(self, lengths: Sequence[int]) -> list[range]:
        """Return the tokens of each fact that stay spliced, by the facts' lengths; an empty range where none do."""
        ends = []
        left = self.last
        for length in reversed(lengths):
            ends.append(max(length - left, 0))
            left = max(left - length, 0)
        return [range(min(self.first, end), end) for end in reversed(ends)]


def parse_repair(spec: str) -> Repair:
    """``none``, ``first:M``, ``last:N``, or both with a plus between, each once and 1 or more.

    Raises
    ------
    ValueError
        Anything else, by name.
    """
    if spec == "none":
        return Repair()
    counts: dict[str, int] = {}
    for part in spec.split("+"):
        kind, _, number = part.partition(":")
        known = kind in ("first", "last") and kind not in counts
        if not (known and number.isascii() and number.isdigit() and len(number) <= len(str(MAX_TOKENS))):
            raise ValueError(f"unknown repair {spec!r}: {_USAGE}")
        counts[kind] = int(number)
        if not 1 <= counts[kind] <= MAX_TOKENS:
            raise ValueError(f"repair {spec!r} is out of range: from 1 to {MAX_TOKENS} tokens")
    return Repair(spec, counts.get("first", 0), counts.get("last", 0))
