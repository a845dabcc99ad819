"""Which of several encodings of a fact is spliced, by the rank that the fact has in the prompt.

A fact at rank r of the block is closest to full prefill when about r other facts stood in front of it while it was
encoded: behind the bare header it has the keys of a first item, which are right for rank 0 and for no other. A ladder
is a choice of encodings by rank; a single policy is a ladder with one rung.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .policies import AnchorList, EncodingPolicy, StreamWindow, parse_policy


@dataclass(frozen=True, slots=True)
class Rung:
    """Encodings of ``policy`` for facts from ``first_rank`` on; None computes these with the rest of the prompt."""

    first_rank: int
    policy: EncodingPolicy | None


@dataclass(frozen=True, slots=True)
class Ladder:
    """What a server serves under one name: rungs in order of rank, the first from rank 0."""

    name: str
    rungs: tuple[Rung, ...]

    @property
    def policies(self) -> list[EncodingPolicy]:
        """The policies that facts must be encoded under."""
        return [rung.policy for rung in self.rungs if rung.policy is not None]

    def is_live(self, rank: int) -> bool:
        """Whether a fact at ``rank`` is computed with the rest of the prompt, and not spliced."""
        return self._rung(rank).policy is None

    def for_rank(self, rank: int) -> list[EncodingPolicy]:
        """Policies for a fact at ``rank``: the rung's own, then the others by distance, for where that one lacks.

        None at all where `is_live`.
        """
        if self.is_live(rank):
            return []
        at = self.rungs.index(self._rung(rank))
        nearest = sorted(range(len(self.rungs)), key=lambda i: (abs(i - at), -i))
        return [policy for i in nearest if (policy := self.rungs[i].policy) is not None]

    def _rung(self, rank: int) -> Rung:
        return max((rung for rung in self.rungs if rung.first_rank <= rank), key=lambda rung: rung.first_rank)


def parse_ladder(spec: str) -> Ladder:
    """``ladder:0+4+32`` (lengths of the lists in front, ascending; 0 is the bare header), or a single policy.

    The rung of lists of length b begins at rank ``ceil(sqrt(a * b))`` behind that of length a, and at 1 behind the
    bare header. With ``live`` in place of 0 the first fact of a block is not spliced: it is computed with the rest of
    the prompt, which costs its tokens and saves an encoding.

    Raises
    ------
    ValueError
        Anything else, by name.
    """
    kind, _, rest = spec.partition(":")
    if kind != "ladder":
        return Ladder(spec, (Rung(0, parse_policy(spec)),))
    parts = rest.split("+")
    is_live = parts[0] == "live" and len(parts) > 1
    if is_live:
        parts[0] = "0"
    lengths = [int(part) for part in parts if part.isascii() and part.isdigit()]
    if len(lengths) != len(parts) or any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(f"unknown encoding policy {spec!r}: a ladder has ascending lengths, as in 'ladder:0+4+32'")
    firsts = [0, *(max(math.ceil(math.sqrt(a * b)), 1) for a, b in pairwise(lengths))]
    rungs = [Rung(first, _policy(n)) for first, n in zip(firsts, lengths, strict=True)]
    return Ladder(spec, (Rung(0, None), *rungs[1:]) if is_live else tuple(rungs))


def _policy(length: int) -> EncodingPolicy:
    return AnchorList(length) if length else StreamWindow(0)


def policies_of(ladders: Sequence[Ladder]) -> list[EncodingPolicy]:
    """Every policy that some ladder serves from, each once."""
    return list({policy.name: policy for ladder in ladders for policy in ladder.policies}.values())
