"""What is compared: the reference, and each thing that may be added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from locomo.retrieval.index import PLAIN_HYBRID
from locomo.retrieval.ranking import (
    Asked,
    MonthBoost,
    NeighbourBoost,
    Ranker,
    RankFusion,
    ScoreFusion,
    SpeakerBoost,
    StoreSearch,
    ranked,
    with_neighbours,
)
from memstore.search.views import SearchMode

REFERENCE = "vector"
SERVED = "served"
"""The search that is the default of a server of ours: the store's hybrid one."""

HYBRID = PLAIN_HYBRID
FUSION_WEIGHTS = (0.1, 0.2, 0.3, 0.4)
MONTH_BOOSTS = (0.0, 0.05, 0.1, 0.2)
NEIGHBOUR_BOOSTS = (0.0, 0.1, 0.2, 0.3)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to choose units.

    Attributes
    ----------
    baseline
        Name of the variant that it is compared with.
    joined
        Offsets of the neighbours that join each hit: -1 the unit before it, 1 the one after.
    budget
        What is held fixed: k units; or the tokens of the baseline's first k.
    """

    name: str
    ranker: Ranker
    baseline: str = REFERENCE
    joined: tuple[int, ...] = ()
    budget: Literal["units", "tokens"] = "units"

    def ranking(self, asked: Asked) -> list[str]:
        """Return unit ids, best first, joined neighbours right behind their hits."""
        ranking = ranked(self.ranker.scores(asked))
        return with_neighbours(ranking, asked.units, self.joined) if self.joined else ranking


def within_tokens(ranking: list[str], budget: int, tokens: Callable[[str], int]) -> list[str]:
    """Return the longest start of `ranking` that takes no more than `budget` tokens."""
    taken = 0
    for count, unit in enumerate(ranking):
        taken += tokens(unit)
        if taken > budget:
            return ranking[:count]
    return ranking


def fusion_name(weight: float) -> str:
    """Name of the variant that fuses scores with that weight of the keywords."""
    return f"scores, keyword {weight:g}"


def variants() -> list[Variant]:
    """Every variant, each baseline before what is compared with it."""
    vector, hybrid = StoreSearch(), StoreSearch(PLAIN_HYBRID)
    dated = MonthBoost(hybrid, 0.1)
    return [
        Variant(REFERENCE, vector),
        Variant("keyword", StoreSearch(SearchMode.KEYWORD)),
        Variant(HYBRID, hybrid),
        Variant(SERVED, StoreSearch(SearchMode.HYBRID), HYBRID),
        *(
            Variant(f"ranks, offset {offset}, keyword x {weight:g}", RankFusion(weight, offset), HYBRID)
            for offset in (60, 10)
            for weight in (0.5, 1.0, 2.0)
        ),
        *(Variant(fusion_name(weight), ScoreFusion(weight)) for weight in FUSION_WEIGHTS),
        *(added for name, ranker in ((REFERENCE, vector), (HYBRID, hybrid)) for added in _additions(name, ranker)),
        Variant(f"{HYBRID} + month 0.1 + neighbour 0.2", NeighbourBoost(dated, 0.2), HYBRID),
        Variant(
            f"{HYBRID} + month 0.1 + speaker 0.05 + neighbour 0.2",
            NeighbourBoost(SpeakerBoost(dated, 0.05), 0.2),
            HYBRID,
        ),
    ]


def boost_grid() -> list[Variant]:
    """Plain hybrid search with every pair of boosts that the store's are chosen from."""
    hybrid = StoreSearch(PLAIN_HYBRID)
    return [
        Variant(f"boosts, month {month:g}, neighbour {share:g}", NeighbourBoost(dated, share), HYBRID)
        for month in MONTH_BOOSTS
        for dated in (MonthBoost(hybrid, month),)
        for share in NEIGHBOUR_BOOSTS
    ]


def _additions(name: str, ranker: StoreSearch) -> list[Variant]:
    of_speaker = StoreSearch(ranker.mode, own_speaker_only=True)
    return [
        Variant(f"{name}, of the named speaker", of_speaker, name),
        *(Variant(f"{name} + speaker {amount}", SpeakerBoost(ranker, amount), name) for amount in (0.05, 0.1)),
        *(Variant(f"{name} + month {amount}", MonthBoost(ranker, amount), name) for amount in (0.1, 0.2)),
        *(Variant(f"{name} + neighbour {share}", NeighbourBoost(ranker, share), name) for share in (0.1, 0.2, 0.3)),
        *(
            Variant(f"{name}, joined {label}, same {budget}", ranker, name, offsets, budget)
            for label, offsets in (("before", (-1,)), ("after", (1,)), ("both", (-1, 1)))
            for budget in ("units", "tokens")
        ),
    ]
