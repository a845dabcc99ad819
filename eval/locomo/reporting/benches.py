"""Rows of the speed benchmarks' JSON files, as charts and tables read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from locomo.errors import ReportInputError

from .arm_names import ArmName, parse_arm
from .scores import finite

Row = Mapping[str, Any]


def rows_of(bench: Mapping[str, Any] | None) -> Sequence[Row]:
    """The rows of a benchmark's file; empty where there is none.

    Raises
    ------
    ReportInputError
        If the file's ``rows`` are not a list of objects.
    """
    rows = (bench or {}).get("rows") or ()
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise ReportInputError("a benchmark's rows are not a list of objects")
    return rows


def arm_of(row: Row) -> ArmName:
    """The arm that a row measures."""
    return parse_arm(str(row.get("arm")))


def value(row: Row, *path: str) -> float | None:
    """Follow the keys down to a number; None where one is absent or null."""
    found: Any = row
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return finite(found)
