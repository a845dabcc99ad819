"""Which tokens of a spliced block are computed anew, behind what is spliced, instead of being spliced.

What is computed anew sees the whole prompt before it, as in full prefill: its KV is right as far as what stands before
it is. Such tokens are left out of the spans of a splice, and join the forward of whatever else no span covers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TOKENS = 1_000_000
_USAGE = "use 'none', 'first:M', 'share:P%', 'last:N' or 'last:P%', or several as in 'first:M+last:N'"
_PART = re.compile(r"(first|share|last):([0-9]{1,7})(%?)", re.ASCII)
_UNITS = {"first": ("",), "share": ("%",), "last": ("", "%")}
_SHORTEST_RUN = 2  # a single token that stays between two that do not costs a run of its own, and saves next to nothing


@dataclass(frozen=True, slots=True)
class Repair:
    """Recompute the first tokens of each fact, those that depend most on what stands before it, the last of the block.

    Attributes
    ----------
    name
        As it was asked for.
    first
        Tokens at the beginning of each fact.
    last
        Tokens of facts at the end of the block, over as many facts as that takes.
    last_percent
        The same in per cent of the block's fact tokens, rounded up; one of the two is zero.
    share_percent
        Per cent of each fact's tokens, rounded up, by `deviation.Deviations`. Of each fact, not of the block, lest what
        is recomputed of a fact depend on facts behind it.
    """

    name: str = "none"
    first: int = 0
    last: int = 0
    last_percent: int = 0
    share_percent: int = 0

    def kept(self, lengths: Sequence[int], orders: Sequence[Sequence[int] | None] | None = None) -> list[list[range]]:
        """Return the runs of tokens of each fact that stay spliced, in order; none of a fact that is all anew.

        Parameters
        ----------
        lengths
            ``[num_facts]``, tokens.
        orders
            ``[num_facts]``, of each fact its tokens, those first that depend most on what stands before it; None where
            that is not known, and no share of them is taken.
        """
        ends = []
        left = self.last or math.ceil(self.last_percent * sum(lengths) / 100)
        for length in reversed(lengths):
            ends.append(max(length - left, 0))
            left = max(left - length, 0)
        kept = []
        for fact, (length, end) in enumerate(zip(lengths, reversed(ends), strict=True)):
            order = orders[fact] if orders is not None and self.share_percent else None
            if order is None:
                whole = range(min(self.first, end), end)
                kept.append([whole] if whole else [])
                continue
            anew = set(order[: math.ceil(self.share_percent * length / 100)])
            kept.append(_runs([place for place in range(self.first, end) if place not in anew]))
        return kept


def _runs(places: Sequence[int]) -> list[range]:
    """Ascending places as runs, without those that are too short."""
    runs: list[range] = []
    for place in places:
        if runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    return [run for run in runs if len(run) >= _SHORTEST_RUN]


def parse_repair(spec: str) -> Repair:
    """``none``; ``first:M``, ``share:P%``, ``last:N`` or ``last:P%``; several with a plus between, each kind once.

    Raises
    ------
    ValueError
        Anything else, by name.
    """
    if spec == "none":
        return Repair()
    counts: dict[str, int] = {}
    for part in spec.split("+"):
        found = _PART.fullmatch(part)
        if found is None or found[1] in (kind.rstrip("%") for kind in counts) or found[3] not in _UNITS[found[1]]:
            raise ValueError(f"unknown repair {spec!r}: {_USAGE}")
        count, most = int(found[2]), 100 if found[3] else MAX_TOKENS
        if not 1 <= count <= most:
            raise ValueError(f"repair {spec!r} is out of range: from 1 to {MAX_TOKENS} tokens, or to 100 %")
        counts[found[1] + found[3]] = count
    return Repair(
        spec,
        first=counts.get("first", 0),
        last=counts.get("last", 0),
        last_percent=counts.get("last%", 0),
        share_percent=counts.get("share%", 0),
    )
