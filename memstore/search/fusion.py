"""One ranking out of several whose scores cannot be compared."""

import math
from collections.abc import Sequence

# Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning
# Methods", SIGIR 2009: the constant that they fixed in a pilot study and kept.
_RANK_OFFSET = 60


def fuse(rankings: Sequence[Sequence[int]], k: int) -> list[tuple[int, float]]:
    """Return the best `k` of all that is ranked, as (seq, score), best first, ties by seq.

    Reciprocal rank fusion: the score is the sum of 1 / (60 + rank) over the rankings that hold the seq, with ranks
    from 1, so it lies in (0, len(rankings) / 61]. A seq that one ranking holds twice counts at its better place.
    """
    shares: dict[int, list[float]] = {}
    for ranking in rankings:
        for rank, seq in enumerate(dict.fromkeys(ranking), start=1):
            shares.setdefault(seq, []).append(1 / (_RANK_OFFSET + rank))
    # fsum, because the order of the rankings must not break a tie.
    ranked = sorted((-math.fsum(parts), seq) for seq, parts in shares.items())
    return [(seq, -negated) for negated, seq in ranked[:k]]
