"""One ranking out of a vector search and a keyword search."""

from collections.abc import Sequence

from memstore.search.vectors import Neighbour

KEYWORD_WEIGHT = 0.2
"""The rest is the cosine's. Bruch et al. (see `fuse`) found 0.2 to suit collections that it was not chosen on."""

# Where even the best hit has less, only words that most facts hold were found: they must not decide.
_LEAST_NORM = 1.0


def fuse(nearest: Sequence[Neighbour], worded: Sequence[Neighbour], k: int) -> list[Neighbour]:
    """Return the best `k` facts of both searches, best first, ties by seq.

    The score is the convex combination ``0.8 * cosine + 0.2 * x / max(best x, 1)`` of the cosine similarity and of the
    BM25 value x, which is 0 for a fact that the words did not find; it lies in [-0.8, 1]. Unlike ranks, scores keep
    how far the best hits are from the others (Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid
    Retrieval", ACM TOIS 42(1), 2023, section 4). What a search returns is boosted afterwards: `memstore.search.boosts`.

    Parameters
    ----------
    nearest
        Facts with their cosines, among them every one of `worded`.
    worded
        What `KeywordIndex.search` returns: facts with x / (1 + x).
    """
    values = {seq: score / (1 - score) for seq, score in worded}
    norm = max(_LEAST_NORM, *values.values()) if values else _LEAST_NORM
    fused = [
        Neighbour(seq, (1 - KEYWORD_WEIGHT) * cosine + KEYWORD_WEIGHT * values.get(seq, 0.0) / norm)
        for seq, cosine in nearest
    ]
    return sorted(fused, key=lambda neighbour: (-neighbour.score, neighbour.seq))[:k]
