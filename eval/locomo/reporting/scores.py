"""Reading `score.json`: its arms, and its estimates with their intervals."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locomo.errors import ReportInputError

from .arm_names import ArmName, parse_arm

USUAL_K = 10


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval; `low` and `high` are None where there is none.

    `over` says what the interval takes to vary (``conversations`` or ``questions``), `groups` how many of these there
    are, and `n` how many questions the mean is of; None where the score does not say.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    over: str | None = None
    groups: int | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True)
class ArmScore:
    """What the score says of one arm at one k."""

    name: ArmName
    values: Mapping[str, Any]

    def number(self, *path: str) -> float | None:
        """Follow the keys down to a number; None where one is absent or null."""
        found: Any = self.values
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return finite(found)

    def estimate(self, *path: str, mean: str = "mean") -> Estimate | None:
        """Follow the keys down to ``{"mean": x, "interval": [low, high] or null, "over", "groups", "n"}``, or to null.

        `mean` is the mean's name where it has another.
        """
        found: Any = self.values
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        centre = finite(found.get(mean)) if isinstance(found, Mapping) else None
        if centre is None:
            return None
        low, high = interval_of(found.get("interval"))
        over, groups, n = found.get("over"), found.get("groups"), found.get("n")
        return Estimate(
            centre,
            low,
            high,
            over if isinstance(over, str) else None,
            groups if isinstance(groups, int) else None,
            n if isinstance(n, int) else None,
        )


def finite(value: object) -> float | None:
    """The number, or None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def interval_of(value: object) -> tuple[float | None, float | None]:
    """Both ends of ``[low, high]``; None twice for what is no interval."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return None, None
    low, high = map(finite, value)
    return (None, None) if low is None or high is None else (low, high)


def arms_of(score: Mapping[str, Any]) -> list[ArmScore]:
    """The arms of a score, in the order of tables."""
    arms = [ArmScore(parse_arm(name), values) for name, values in score.get("arms", {}).items()]
    return sorted(arms, key=lambda arm: arm.name)


def usual_k(names: Iterable[ArmName]) -> int | None:
    """The k that bars and charts of a single k are of: 10, or else the one that most arms have, nearest to 10."""
    counts = Counter(name.k for name in names if name.k is not None)
    if USUAL_K in counts:
        return USUAL_K
    return min(counts, key=lambda k: (-counts[k], abs(k - USUAL_K))) if counts else None


def main_k(score: Mapping[str, Any]) -> int | None:
    """The score's k; of one that does not say, as of `usual_k`."""
    k = score.get("k")
    return k if isinstance(k, int) else usual_k(arm.name for arm in arms_of(score))


def at_k(arms: Sequence[ArmScore], k: int | None) -> list[ArmScore]:
    """The arms at that k, and those whose name has none."""
    return [arm for arm in arms if arm.name.k in (k, None)]


def spread(estimates: Iterable[Estimate | None]) -> str | None:
    """What the intervals of these take to vary and how many of it, in words; None where none says."""
    known = {(value.groups, value.over) for value in estimates if value and value.groups and value.over}
    if not known:
        return None
    over = " or ".join(sorted({kind for _, kind in known}))
    counts = sorted({groups for groups, _ in known})
    return f"{counts[0]} {over}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} {over}"


def read_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON file that holds one object.

    Raises
    ------
    ReportInputError
        If there is no such file, or it is not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportInputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ReportInputError(f"{path} is not JSON ({error}): was it cut short?") from error
    if not isinstance(value, Mapping):
        raise ReportInputError(f"{path} holds no JSON object")
    return value
