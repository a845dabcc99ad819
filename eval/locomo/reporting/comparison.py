"""Two or more runs beside each other: paired, question by question, wherever they have rows of the same questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from locomo.errors import ReportInputError
from locomo.scoring.statistics import Interval, McNemar, interval_of_difference, mcnemar

from .arm_names import parse_arm
from .measures import Measured, Run
from .provenance import flatten


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name for a reader, and whether it says right or wrong."""

    title: str
    binary: bool = False
    digits: int = 3


METRICS: Mapping[str, Metric] = {
    "kl_answer": Metric("KL, answer tokens (nats)", digits=4),
    "kl_first": Metric("KL, first token (nats)", digits=4),
    "top1_first": Metric("same first token", binary=True),
    "nll_per_token": Metric("NLL (nats per token)"),
    "forced_choice": Metric("forced choice", binary=True),
    "official_f1": Metric("official F1"),
    "judge": Metric("judge accuracy", binary=True),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of one arm in two runs; `first` and `second` are means.

    Attributes
    ----------
    n
        Questions that both runs have the metric of; both means are over these.
    interval
        Of ``second - first``, paired.
    discordant
        Of metrics that say right or wrong: in how many questions only one run was right, and McNemar's p.
    """

    arm: str
    metric: Metric
    first: float
    second: float
    n: int
    interval: Interval
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
    mine, theirs = ({at.arm for values in run.measures.values() for at in values} for run in (first, second))
    for arm in sorted(mine & theirs, key=parse_arm):
        for key in METRICS:
            if found := _paired(first, second, arm, key):
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
        interval_of_difference(after, before, [at.sample_id for at in shared]),
        mcnemar([x == 1 for x in before], [x == 1 for x in after]) if metric.binary else None,
    )
