"""What a hybrid search adds to the scores of its candidates: a month that the query names, a good fact beside."""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from memstore.search.mentions import Month, named_months
from memstore.search.streams import StreamIndex
from memstore.search.vectors import Neighbour


class Ranked(NamedTuple):
    """A fact that a search found."""

    seq: int
    score: float
    unboosted: float
    """The score before boosts."""


class Boosts(NamedTuple):
    """Weights beside the 1 that a fact's own score has, each at least 0; all 0 leave the scores as they are."""

    month: float
    neighbour: float


def boosted(
    candidates: Sequence[Neighbour], k: int, *, query: str, streams: StreamIndex, boosts: Boosts
) -> list[Ranked]:
    """Return the best `k` of `candidates`, boosted, best first, ties by seq.

    With s the score of a candidate, kept as `unboosted`, its new score is a weighted mean, twice::

        d     = (s + month * of_month) / (1 + month)    where the query names a month, else s
        score = (d + neighbour * best_beside) / (1 + neighbour)

    ``of_month`` is 1 for a fact whose event time is in a month that the query names, in UTC, else 0. ``best_beside`` is
    the greatest d of the two facts directly before and after it in its stream; one that is no candidate counts with the
    least d of all candidates, and so does a stream's end. Facts without a stream (stream "") stand beside none: for
    these ``best_beside`` is their own d, so that they keep it.

    As means, scores stay within [-0.8, 1], the range of what `memstore.search.fusion.fuse` returns. All facts of a
    search have the same divisors, which therefore change no order.
    """
    unboosted = dict(candidates)
    scores = unboosted
    months = frozenset(named_months(query)) if boosts.month else frozenset()
    if months:
        scores = _of_months(scores, months, streams, boosts.month)
    if boosts.neighbour:
        scores = _with_best_beside(scores, streams, boosts.neighbour)
    found = (Ranked(seq, score, unboosted[seq]) for seq, score in scores.items())
    return sorted(found, key=lambda hit: (-hit.score, hit.seq))[:k]


def _of_months(
    scores: Mapping[int, float], months: Set[Month], streams: StreamIndex, weight: float
) -> dict[int, float]:
    def is_named(seq: int) -> bool:
        at = streams.event_at(seq)
        return at is not None and Month.of(at).is_among(months)

    return {seq: (score + weight * is_named(seq)) / (1 + weight) for seq, score in scores.items()}


def _with_best_beside(scores: Mapping[int, float], streams: StreamIndex, weight: float) -> dict[int, float]:
    least = min(scores.values(), default=0.0)

    def best_beside(seq: int) -> float:
        if not streams.stream_of(seq):
            return scores[seq]
        return max((scores.get(other, least) for other in streams.beside(seq)), default=least)

    return {seq: (score + weight * best_beside(seq)) / (1 + weight) for seq, score in scores.items()}
