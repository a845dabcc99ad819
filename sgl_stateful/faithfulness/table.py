"""The result of a measurement: KL to full prefill by number of facts and by what was served, question by question."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import NamedTuple

FLOOR = "floor"
"""Full prefill of the same facts in another order."""

WITHOUT = "without"
"""Full prefill of the question without any facts."""

# Student's t at 97.5 % by degrees of freedom, from 1.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Ratio(NamedTuple):
    """A ratio of two means over the same questions, with its 95 % interval where there is a bounded one."""

    estimate: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """What one way of serving ``k`` facts measured.

    Attributes
    ----------
    served
        ``floor``, ``without``, or the name of the repair that spliced facts were served with.
    kl
        KL(full prefill || served) of the next token in nats, one a question; questions come in the set's order.
    recomputed
        Share of the facts' tokens that was computed anew, a mean over the questions.
    """

    k: int
    served: str
    kl: tuple[float, ...]
    recomputed: float = 0.0

    @property
    def mean(self) -> float:
        """Mean KL, nats."""
        return fmean(self.kl)


@dataclass(frozen=True, slots=True)
class Table:
    """One measurement of one model under one policy.

    Attributes
    ----------
    measured_at
        ISO 8601, UTC.
    skipped
        The numbers of facts that do not fit the server's context or pool.
    """

    policy: str
    rows: tuple[Row, ...]
    measured_at: str
    skipped: tuple[int, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """The numbers of facts that were measured, ascending."""
        return sorted({row.k for row in self.rows})

    @property
    def repairs(self) -> list[str]:
        """The repairs that were measured at every size, by the share that they compute anew, cheapest first."""
        names = dict.fromkeys(row.served for row in self.rows if row.served not in (FLOOR, WITHOUT))
        return sorted(names, key=lambda name: fmean(self.row(k, name).recomputed for k in self.sizes))

    def row(self, k: int, served: str) -> Row:
        """Return the row of that name.

        Raises
        ------
        KeyError
            There is none.
        """
        for row in self.rows:
            if (row.k, row.served) == (k, served):
                return row
        raise KeyError((k, served))

    def to_json(self) -> str:
        """As text that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Table:
        """Read what ``to_json`` wrote.

        Raises
        ------
        ValueError
            It is something else.
        """
        try:
            raw = json.loads(text)
            rows = tuple(Row(**{**row, "kl": tuple(map(float, row["kl"]))}) for row in raw["rows"])
            return cls(**{**raw, "rows": rows, "skipped": tuple(raw["skipped"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no table of faithfulness: {error!r}") from error


def excess(row: Row, other: Row, *, times: float) -> tuple[float, float]:
    """Mean over questions of ``row``'s KL less ``times`` that of ``other``, and half its 95 % interval (Student's t).

    Half the interval is zero for one question, whose spread nobody knows.
    """
    differences = [mine - times * theirs for mine, theirs in zip(row.kl, other.kl, strict=True)]
    return fmean(differences), _half_width(differences)


def ratio_of(row: Row, other: Row) -> Ratio:
    """``row``'s mean KL over that of ``other``, with Fieller's interval.

    The interval holds every number that ``excess`` does not tell from the ratio: Fieller 1954, "Some problems in
    interval estimation", JRSS B 16(2). It has no bounds where the other mean itself cannot be told from zero.
    """
    n, mine, theirs = len(row.kl), row.mean, other.mean
    if theirs == 0:
        return Ratio(math.inf if mine else 1.0, None, None)
    if n < 2:
        return Ratio(mine / theirs, None, None)
    spread = _t(n) ** 2 / n
    a = theirs**2 - spread * _covariance(other.kl, other.kl)
    b = mine * theirs - spread * _covariance(row.kl, other.kl)
    c = mine**2 - spread * _covariance(row.kl, row.kl)
    if a <= 0:
        return Ratio(mine / theirs, None, None)
    root = math.sqrt(max(b * b - a * c, 0.0))
    return Ratio(mine / theirs, (b - root) / a, (b + root) / a)


def _half_width(values: Sequence[float]) -> float:
    n = len(values)
    return _t(n) * math.sqrt(_covariance(values, values) / n) if n > 1 else 0.0


def _covariance(first: Sequence[float], second: Sequence[float]) -> float:
    mean_first, mean_second = fmean(first), fmean(second)
    products = ((a - mean_first) * (b - mean_second) for a, b in zip(first, second, strict=True))
    return math.fsum(products) / (len(first) - 1)


def _t(count: int) -> float:
    """Quantile for a mean of so many values; the last one listed for more, whose intervals are 5 % too wide at most."""
    return _T[min(count - 2, len(_T) - 1)]
