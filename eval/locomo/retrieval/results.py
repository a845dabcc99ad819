"""The figures of one kind of unit as JSON rows and as a table; ids, names of settings and numbers, no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from locomo.retrieval.latency import Latency
from locomo.retrieval.measure import Outcome
from locomo.retrieval.units import UnitKind
from locomo.scoring.recall import Recall, RecallTable
from locomo.scoring.statistics import interval_json

Row = dict[str, Any]


def outcome_rows(kind: UnitKind, outcomes: Sequence[Outcome], latencies: Mapping[str, Latency]) -> list[Row]:
    """One row per variant: repaired recall per k, its difference to the baseline, and what a query costs.

    Recall is a share in [0, 1]; ``ms`` is null where nothing was timed, ``difference`` for a variant without baseline.
    """
    by_name = {outcome.variant.name: outcome for outcome in outcomes}
    return [
        {
            "units": kind.value,
            "variant": outcome.variant.name,
            "baseline": outcome.variant.baseline,
            "n": len(outcome.samples),
            "recall": _by_field(outcome.means()),
            "difference": _differences(outcome, by_name[outcome.variant.baseline]),
            "ms": latencies[outcome.variant.name]._asdict() if outcome.variant.name in latencies else None,
        }
        for outcome in outcomes
    ]


def reference_rows(kind: UnitKind, strict: RecallTable, repaired: RecallTable) -> list[Row]:
    """Two rows: recall of plain vector search per category id, by the strict and by the repaired reading."""
    return [
        {
            "units": kind.value,
            "evidence": name,
            "n": table.n,
            "recall": table.as_json(),
            "by_id": {str(number): _by_field(recalls) for number, recalls in table.by_id.items()},
        }
        for name, table in (("strict", strict), ("repaired", repaired))
    ]


def outcome_table(rows: Sequence[Row]) -> Table:
    """All variants of all units, in per cent and milliseconds."""
    ks = list(rows[0]["recall"]["all"])
    table = Table(title="evidence among the first k units, ids 1-4, repaired, %")
    table.add_column("units", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    table.add_column(f"all@{'/'.join(ks)}", justify="right", no_wrap=True)
    table.add_column(f"any@{'/'.join(ks)}", justify="right", no_wrap=True)
    table.add_column("all@10 against its baseline", justify="right", no_wrap=True)
    table.add_column("added ms (rounds)", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["units"],
            row["variant"],
            *(" ".join(f"{100 * value:.1f}" for value in row["recall"][field].values()) for field in ("all", "any")),
            _difference(row),
            _cost(row["ms"]),
        )
    return table


def _by_field(recalls: Mapping[int, Recall]) -> dict[str, dict[str, float]]:
    return {field: {str(k): float(getattr(recall, field)) for k, recall in recalls.items()} for field in Recall._fields}


def _differences(outcome: Outcome, baseline: Outcome) -> dict[str, Any] | None:
    if baseline is outcome:
        return None
    intervals = {str(k): outcome.difference(baseline, k) for k in outcome.recalls}
    return {
        k: {"mean": i.estimate, "interval": interval_json(i), "over": i.over, "groups": i.groups}
        for k, i in intervals.items()
    }


def _difference(row: Row) -> str:
    if row["difference"] is None:
        return "-"
    at = row["difference"]["10"]
    interval = " [{:+.1f}, {:+.1f}]".format(*(100 * end for end in at["interval"])) if at["interval"] else ""
    return f"{100 * at['mean']:+.1f}{interval} on {row['baseline']}"


def _cost(ms: Mapping[str, float] | None) -> str:
    return "-" if ms is None else f"{ms['added']:+.2f} ({ms['added_low']:+.2f} to {ms['added_high']:+.2f})"
