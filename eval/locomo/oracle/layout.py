"""The sequence, positions and mask with which one forward computes a spliced prompt.

Each spliced fact gets a copy of all that stood in front of it while it was encoded: its *ghosts*. They are extra tokens
behind the prompt, which this fact and its ghosts see, and nobody else. A fact of `n` ghosts whose first token is served
at position `s` was encoded at position `n`; its ghosts get the positions `[s - n, s)`, so that within the encoding
every distance is what it was, while the fact itself stands where it is served. Rotary embeddings turn keys and queries
by their positions, and a score depends on the difference of the two alone: that is why the encoding comes out the same
at other positions, and why the whole sequence may be shifted until no ghost has a negative position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from locomo.errors import OracleError


@dataclass(frozen=True, slots=True)
class SplicedFact:
    """A fact at positions ``[start, end)`` of the served prompt.

    Attributes
    ----------
    seen_ids
        Tokens in front of it while it was encoded, in order.
    shift
        Moves the fact, with all that it saw, away from where it was served: what a wrong rotation of its keys does.
        Zero but in controls.
    """

    start: int
    end: int
    seen_ids: tuple[int, ...]
    shift: int = 0


@dataclass(frozen=True, slots=True)
class ExtendedSequence:
    """A served prompt of N tokens, and behind it the ghosts of its spliced facts: S tokens in all.

    Attributes
    ----------
    token_ids, position_ids
        ``[S]`` int64; no position is negative.
    allowed
        ``[S, S]`` bool: whether the query of a row sees the key of a column.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    allowed: torch.Tensor

    def additive_mask(self) -> torch.Tensor:
        """``[1, 1, S, S]`` fp32, to be added to the scores: 0 where a query sees a key, minus infinity elsewhere."""
        mask = torch.zeros(self.allowed.shape, dtype=torch.float32)
        return mask.masked_fill_(~self.allowed, float("-inf"))[None, None]


def lay_out(prompt_ids: Sequence[int], facts: Sequence[SplicedFact]) -> ExtendedSequence:
    """Lay out a served prompt.

    Every token that is no spliced fact's sees all served tokens before it: the server computed it last, over KV that
    was spliced by then. A spliced fact's token sees the fact's ghosts and the fact's own tokens up to itself.

    Raises
    ------
    OracleError
        Facts that overlap, are empty, or reach outside the prompt.
    """
    _check(len(prompt_ids), facts)
    n = len(prompt_ids)
    size = n + sum(len(fact.seen_ids) for fact in facts)
    ids = torch.tensor([*prompt_ids, *(i for fact in facts for i in fact.seen_ids)], dtype=torch.int64)
    positions = torch.arange(size)
    allowed = torch.zeros(size, size, dtype=torch.bool)
    allowed[:n, :n] = torch.ones(n, n, dtype=torch.bool).tril()
    first_ghost = n
    for fact in facts:
        own = slice(fact.start, fact.end)
        ghosts = slice(first_ghost, first_ghost + len(fact.seen_ids))
        count = len(fact.seen_ids)
        allowed[own, : fact.start] = False
        allowed[own, ghosts] = True
        allowed[ghosts, ghosts] = torch.ones(count, count, dtype=torch.bool).tril()
        positions[own] += fact.shift
        positions[ghosts] = torch.arange(fact.start - count, fact.start) + fact.shift
        first_ghost += count
    return ExtendedSequence(ids, positions - positions.min().clamp(max=0), allowed)


def _check(prompt_tokens: int, facts: Sequence[SplicedFact]) -> None:
    end = 0
    for fact in facts:
        if not end <= fact.start < fact.end <= prompt_tokens:
            raise OracleError(f"a fact at [{fact.start}, {fact.end}) of {prompt_tokens} tokens, behind one to {end}")
        end = fact.end
