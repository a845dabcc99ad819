"""How sure a share is that was counted."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

_Z_95 = 1.959963984540054  # two-sided, of the normal distribution


class Interval(NamedTuple):
    """Bounds of a share, in [0, 1]."""

    low: float
    high: float


def wilson(hits: int, n: int, *, z: float = _Z_95) -> Interval:
    """Score interval of a binomial share; all of [0, 1] of none.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    assert 0 <= hits <= n, (hits, n)
    if n == 0:
        return Interval(0.0, 1.0)
    share, spread = hits / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * sqrt(share * (1 - share) / n + spread / (4 * n))
    return Interval(max(middle - half, 0.0), min(middle + half, 1.0))


def expected_share(hits: int, n: int) -> float:
    """Mean of a share given ``hits`` of ``n`` and nothing else: the rule of succession, (hits + 1) / (n + 2)."""
    return (hits + 1) / (n + 2)
