"""Two or more runs beside each other: paired, question by question, wherever they have rows of the same questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locomo.errors import ReportInputError
from locomo.scoring.statistics import Interval, McNemar, bootstrap_paired_difference, mcnemar

from .arm_names import parse_arm
from .measures import Measured, Run
from .provenance import flatten
from .scores import ArmScore


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name for a reader, where a score has its mean, and whether it says right or wrong."""

    title: str
    path: tuple[str, ...]
    binary: bool = False
    digits: int = 3


METRICS: Mapping[str, Metric] = {
    "kl_answer": Metric("KL, answer tokens (nats)", ("kl_answer", "mean"), digits=4),
    "kl_first": Metric("KL, first token (nats)", ("kl_first", "mean"), digits=4),
    "top1_first": Metric("same first token", ("top1_first", "mean"), binary=True),
    "nll": Metric("NLL (nats per token)", ()),
    "forced_choice": Metric("forced choice", ("forced_choice", "mean"), binary=True),
    "official_f1": Metric("official F1", ("official_f1", "all")),
    "judge": Metric("judge accuracy", ("judge", "accuracy"), binary=True),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one arm in two runs; `first` and `second` are means.

    Attributes
    ----------
    n
        Questions that both runs have; None where the means are the scores' and nothing is paired.
    interval
        Of ``second - first``, paired; None where nothing is paired.
    discordant
        Of metrics that say right or wrong: in how many questions only one run was right, and McNemar's p.
    """

    arm: str
    metric: Metric
    first: float
    second: float
    n: int | None = None
    interval: Interval | None = None
    discordant: McNemar | None = None

    @property
    def difference(self) -> float:
        """``second - first``."""
        return self.second - self.first


@dataclass(frozen=True, slots=True)
class Pair:
    """A run against the first of all: what differs in their settings, then in what they found."""

    first: Run
    second: Run
    settings: Sequence[tuple[str, str, str]]
    differences: Sequence[Difference]


def compare(runs: Sequence[Run]) -> list[Pair]:
    """Compare every run with the first.

    Raises
    ------
    ReportInputError
        If there are fewer than two runs.
    """
    if len(runs) < 2:
        raise ReportInputError("a comparison needs two runs or more")
    first, *others = runs
    return [Pair(first, other, _settings(first, other), list(_differences(first, other))) for other in others]


def _settings(first: Run, second: Run) -> list[tuple[str, str, str]]:
    """Every leaf of configuration and header that is not the same in both."""
    sides = [
        {f"{part}.{name}": value for part in ("config", "header") for name, value in flatten(run.score.get(part) or {})}
        for run in (first, second)
    ]
    names = dict.fromkeys([*sides[0], *sides[1]])
    found = [(name, sides[0].get(name, "–"), sides[1].get(name, "–")) for name in names]
    return [(name, one, other) for name, one, other in found if one != other]


def _differences(first: Run, second: Run) -> Iterator[Difference]:
    mine, theirs = (run.score.get("arms") or {} for run in (first, second))
    for arm in sorted(mine.keys() & theirs.keys(), key=parse_arm):
        for key, metric in METRICS.items():
            found = _paired(first, second, arm, key) or _unpaired(mine[arm], theirs[arm], arm, metric)
            if found:
                yield found


def _paired(first: Run, second: Run, arm: str, key: str) -> Difference | None:
    one, other = ({at: x for at, x in run.measures.get(key, {}).items() if at.arm == arm} for run in (first, second))
    shared: list[Measured] = sorted(one.keys() & other.keys())
    if not shared:
        return None
    before, after = [one[at] for at in shared], [other[at] for at in shared]
    metric = METRICS[key]
    return Difference(
        arm,
        metric,
        sum(before) / len(shared),
        sum(after) / len(shared),
        len(shared),
        bootstrap_paired_difference(after, before, [at.sample_id for at in shared]),
        mcnemar([x == 1 for x in before], [x == 1 for x in after]) if metric.binary else None,
    )


def _unpaired(first: Mapping[str, Any], second: Mapping[str, Any], arm: str, metric: Metric) -> Difference | None:
    if not metric.path:
        return None
    one, other = (ArmScore(parse_arm(arm), values).number(*metric.path) for values in (first, second))
    return None if one is None or other is None else Difference(arm, metric, one, other)
