"""Ways to rank the units of a conversation for a question, each on top of the store's own searches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from locomo.retrieval.index import SPEAKER, Hit
from locomo.retrieval.speakers import named_speaker
from locomo.retrieval.units import Unit
from memstore.event_time import parse_event_time
from memstore.search.mentions import Month, named_months
from memstore.search.views import SearchMode

DEPTH = 100
"""Units that each search contributes, at least."""

Scores: TypeAlias = dict[str, float]
"""Unit id to score, higher is better; of equal ones the first inserted is better."""


class Search(Protocol):
    """A search of `locomo.retrieval.index.UnitIndex`."""

    def __call__(
        self, owner: str, query: str, *, k: int, mode: str, where: Mapping[str, object] | None = None
    ) -> list[Hit]: ...


class Thread:
    """The units of one conversation by id, and which follow each other in their thread."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = tuple(units)
        self._places = {unit.id: place for place, unit in enumerate(units)}

    def __getitem__(self, unit_id: str) -> Unit:
        return self._units[self._places[unit_id]]

    def beside(self, unit_id: str, offset: int) -> str | None:
        """Return the unit `offset` places behind that one in its thread, or None."""
        place = self._places[unit_id] + offset
        if not 0 <= place < len(self._units) or self._units[place].thread != self[unit_id].thread:
            return None
        return self._units[place].id


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, whom and what it may be about, and the search that answers it."""

    question: str
    owner: str
    speakers: tuple[str, str]
    units: Thread
    search: Search

    def found(self, mode: str, *, where: Mapping[str, object] | None = None) -> list[Hit]:
        """Return the best `DEPTH` hits of the store's search."""
        return self.search(self.owner, self.question, k=DEPTH, mode=mode, where=where)


class Ranker(Protocol):
    """Scores units for a question."""

    def scores(self, asked: Asked) -> Scores:
        """Return the score of every candidate."""
        ...


@dataclass(frozen=True, slots=True)
class StoreSearch:
    """A search of the index as it is; with `own_speaker_only`, filtered by the speaker where the question names one."""

    mode: str = SearchMode.VECTOR
    own_speaker_only: bool = False

    def scores(self, asked: Asked) -> Scores:
        """Return the scores of that search."""
        named = named_speaker(asked.question, asked.speakers) if self.own_speaker_only else None
        return dict(asked.found(self.mode, where=None if named is None else {f"metadata.{SPEAKER}": named}))


@dataclass(frozen=True, slots=True)
class RankFusion:
    """Weighted reciprocal rank fusion: 1 / (offset + rank) by vector, and `weight` times that by keyword.

    Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods",
    SIGIR 2009, with weight 1 and offset 60.
    """

    weight: float = 1.0
    offset: int = 60

    def scores(self, asked: Asked) -> Scores:
        """Return the sums over both rankings."""
        fused: Scores = defaultdict(float)
        for mode, weight in ((SearchMode.VECTOR, 1.0), (SearchMode.KEYWORD, self.weight)):
            for rank, hit in enumerate(asked.found(mode), start=1):
                fused[hit.unit] += weight / (self.offset + rank)
        return dict(fused)


@dataclass(frozen=True, slots=True)
class ScoreFusion:
    """``(1 - weight) * cosine + weight * BM25 / best BM25``: a convex combination.

    Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval", ACM TOIS 42(1), 2023, section 4, with
    BM25 normalised by its theoretical minimum, 0. A unit that one search did not find has that search's least score: 0
    for BM25, the last hit's cosine.
    """

    weight: float = 0.2

    def scores(self, asked: Asked) -> Scores:
        """Return the combined scores, in [-1, 1]."""
        cosines = dict(asked.found(SearchMode.VECTOR))
        # The store's score is x / (1 + x) of the BM25 value x.
        words = {unit: score / (1 - score) for unit, score in asked.found(SearchMode.KEYWORD)}
        best, least = max(words.values(), default=1.0), min(cosines.values(), default=0.0)
        return {
            unit: (1 - self.weight) * cosines.get(unit, least) + self.weight * words.get(unit, 0.0) / best
            for unit in [*cosines, *(unit for unit in words if unit not in cosines)]
        }


@dataclass(frozen=True, slots=True)
class SpeakerBoost:
    """Adds `amount` to the units of the speaker whom the question names."""

    inner: Ranker
    amount: float

    def scores(self, asked: Asked) -> Scores:
        """Return the scores of `inner`, boosted."""
        named, scores = named_speaker(asked.question, asked.speakers), self.inner.scores(asked)
        return {unit: score + self.amount * (asked.units[unit].speaker == named) for unit, score in scores.items()}


@dataclass(frozen=True, slots=True)
class MonthBoost:
    """Adds `amount` to the units of a month that the question names."""

    inner: Ranker
    amount: float

    def scores(self, asked: Asked) -> Scores:
        """Return the scores of `inner`, boosted."""
        months, scores = frozenset(named_months(asked.question)), self.inner.scores(asked)
        if not months:
            return scores

        def is_named(unit: str) -> bool:
            at = parse_event_time(asked.units[unit].date_time)
            return at is not None and Month.of(at).is_among(months)

        return {unit: score + self.amount * is_named(unit) for unit, score in scores.items()}


@dataclass(frozen=True, slots=True)
class NeighbourBoost:
    """Adds `share` of the better neighbour's score: what stands beside a good unit is likelier to answer.

    A neighbour that is no candidate counts with the least score of all candidates.
    """

    inner: Ranker
    share: float

    def scores(self, asked: Asked) -> Scores:
        """Return the scores of `inner`, boosted."""
        scores = self.inner.scores(asked)
        least = min(scores.values(), default=0.0)

        def best_beside(unit: str) -> float:
            beside = (asked.units.beside(unit, offset) for offset in (-1, 1))
            return max((scores.get(other, least) for other in beside if other is not None), default=least)

        return {unit: score + self.share * best_beside(unit) for unit, score in scores.items()}


def ranked(scores: Scores) -> list[str]:
    """Return the unit ids, best first."""
    return sorted(scores, key=lambda unit: -scores[unit])


def with_neighbours(ranking: Sequence[str], units: Thread, offsets: Sequence[int]) -> list[str]:
    """Return `ranking` with the neighbours of each unit right behind it, each unit once, at its first place."""
    found: dict[str, None] = {}
    for unit in ranking:
        found.setdefault(unit)
        beside = (units.beside(unit, offset) for offset in offsets)
        for other in beside:
            if other is not None:
                found.setdefault(other)
    return list(found)
