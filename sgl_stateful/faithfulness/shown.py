"""A table as the status and the log show it."""

from __future__ import annotations

import math
from typing import Any

from .choice import Target, verdict_at
from .table import FLOOR, WITHOUT, Row, Table, ratio_of

_DIGITS = 4
_NAMES = {FLOOR: "text, another order", WITHOUT: "no facts", "none": "spliced"}


def table_json(table: Table, target: Target) -> list[dict[str, Any]]:
    """One object a row: what was served, its KL, its ratio to the floor with a 95 % interval, and the verdict."""
    return [_row_json(table, row, target) for row in table.rows]


def table_text(table: Table, target: Target) -> str:
    """The table in columns, for people."""
    lines = [
        f"{'facts':>5}  {'served':<26} {'questions':>9} {'KL':>8} {'÷ floor':>8}  {'95 %':<15} {'anew':>5}  verdict"
    ]
    for row in table_json(table, target):
        ratio, low_high = row["of_floor"], row["of_floor_interval"]
        lines.append(
            f"{row['k']:>5}  {_NAMES.get(row['served'], 'spliced, ' + row['served']):<26} {row['questions']:>9} "
            f"{row['kl']:>8.4f} {'-' if ratio is None else format(ratio, '.2f'):>8}  "
            f"{'' if low_high is None else '{:.2f} to {:.2f}'.format(*low_high):<15} "
            f"{row['recomputed']:>5.0%}  {row['verdict'] or ''}".rstrip()
        )
    return "\n".join(lines)


def _row_json(table: Table, row: Row, target: Target) -> dict[str, Any]:
    is_reference = row.served in (FLOOR, WITHOUT)
    ratio, low, high = ratio_of(row, table.row(row.k, FLOOR))
    is_bounded = low is not None and high is not None and row.served != FLOOR
    return {
        "k": row.k,
        "served": row.served,
        "questions": len(row.kl),
        "kl": round(row.mean, 6),
        "of_floor": round(ratio, _DIGITS) if math.isfinite(ratio) else None,
        "of_floor_interval": [round(end, _DIGITS) for end in (low, high) if end is not None] if is_bounded else None,
        "recomputed": round(row.recomputed, _DIGITS),
        "verdict": None if is_reference else verdict_at(table, row.k, row.served, target).name.lower(),
    }
