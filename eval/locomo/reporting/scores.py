"""Reading `score.json`: its arms, and its estimates with their intervals."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locomo.errors import ReportInputError

from .arm_names import ArmName, parse_arm

USUAL_K = 10


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval; `low` and `high` are None where none was worked out.

    `over` says what the interval was taken over (``conversations`` or ``questions``), where the score says so.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    over: str | None = None


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

    def estimate(self, key: str, *, mean: str = "mean") -> Estimate | None:
        """Read ``{"mean": x, "interval": [low, high]}``, or a bare number; None where there is neither."""
        found = self.values.get(key)
        if not isinstance(found, Mapping):
            return None if (number := finite(found)) is None else Estimate(number)
        centre = finite(found.get(mean))
        if centre is None:
            return None
        interval = found.get("interval")
        over = found.get("over")
        if isinstance(interval, Mapping):
            over = interval.get("over", over)
            interval = [interval.get("low"), interval.get("high")]
        low, high = map(finite, interval) if isinstance(interval, Sequence) and len(interval) == 2 else (None, None)
        return Estimate(centre, low, high, over if isinstance(over, str) else None)


def finite(value: object) -> float | None:
    """The number, or None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def arms_of(score: Mapping[str, Any]) -> list[ArmScore]:
    """The arms of a score, in the order of tables."""
    arms = [ArmScore(parse_arm(name), values) for name, values in score.get("arms", {}).items()]
    return sorted(arms, key=lambda arm: arm.name)


def main_k(arms: Sequence[ArmScore]) -> int | None:
    """The k that most arms were run at, among equals the one nearest to 10: what charts of a single k show."""
    counts = Counter(arm.name.k for arm in arms if arm.name.k is not None)
    return min(counts, key=lambda k: (-counts[k], abs(k - USUAL_K))) if counts else None


def at_main_k(arms: Sequence[ArmScore]) -> list[ArmScore]:
    """The arms at that k, and those whose name has none."""
    return [arm for arm in arms if arm.name.k in (main_k(arms), None)]


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
