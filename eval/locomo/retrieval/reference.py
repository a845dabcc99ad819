"""Recall that a right pipeline has on the published file: plain vector search with all-MiniLM-L6-v2.

Normalised vectors, exact inner product, the raw question, units dated and without captions; evidence repaired, ids 1 to
4. Of an observation, whose text names its speaker, the unit is ``({date_time}) {text}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PUBLISHED_SHA256 = "79fa87e90f04081343b8c8debecb80a9a6842b76a7aa537dc9fdf651ea698ff4"

REFERENCE_PER_CENT: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "turns": {
        "all": {"5": 34.5, "10": 42.6, "20": 51.3, "50": 65.6},
        "any": {"5": 44.1, "10": 54.7, "20": 64.6, "50": 79.2},
    },
    "observations": {
        "all": {"5": 48.2, "10": 53.6, "20": 59.1, "50": 66.1},
        "any": {"5": 61.7, "10": 67.8, "20": 73.4, "50": 80.0},
    },
}


def points_off(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the greatest distance of the repaired rows from the reference, over units, kinds and k, in points."""
    return max(
        abs(100 * float(row["recall"][field][k]) - expected)
        for row in rows
        if row.get("evidence") == "repaired"
        for field, by_k in REFERENCE_PER_CENT[row["units"]].items()
        for k, expected in by_k.items()
    )
