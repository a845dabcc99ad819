"""The table of a run, and what its JSON file says."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from rich.table import Table

from .run import Row

BAR = "splice_oracle_max_difference"
_VERSIONS = ("sgl-stateful", "sglang", "torch", "transformers", "numpy")
_COLUMNS = (
    *("policy", "placement", "facts", "spliced", "seen", "positions"),
    *("max |d|", "mean |d|", "argmax", "off by one"),
)
_CONTROL_FACTOR = 10  # a control must be this many tolerances away, else the check could not tell


def failures(rows: Sequence[Row], tolerance: float) -> list[str]:
    """What is wrong with these rows, a line each; none where all agree and every control is rejected."""
    found = []
    for row in rows:
        name = f"{row.case.policy} at the {row.case.placement} with {row.case.k} facts"
        if not row.difference.max <= tolerance:
            found.append(f"{name}: the server differs from the reference by {row.difference.max:.2e}")
        if row.control is not None and row.control.max < _CONTROL_FACTOR * tolerance:
            found.append(f"{name}: positions off by one differ by no more than {row.control.max:.2e}")
    return found


def table_of(rows: Sequence[Row]) -> Table:
    """One line a case; differences are of log probabilities, in nats."""
    table = Table(title="spliced prompts against one forward of the reference model, fp32")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _COLUMNS[:2] else "right", no_wrap=True)
    for row in rows:
        difference = row.difference
        table.add_row(
            row.case.policy,
            row.case.placement,
            str(row.case.k),
            str(row.spliced_tokens),
            str(row.seen_tokens),
            str(difference.positions),
            f"{difference.max:.1e}",
            f"{difference.mean:.1e}",
            f"{difference.argmax_agreement:.3f}",
            f"{row.control.max:.1e}" if row.control is not None else "",
        )
    return table


def record_of(
    rows: Sequence[Row], *, tolerance: float, model: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """What the JSON file holds: the bar's figure, every row, and what they were measured with."""
    controls = [row.control.max for row in rows if row.control is not None]
    return {
        "bars": {BAR: max((row.difference.max for row in rows), default=None)},
        "tolerance": tolerance,
        "least_control_difference": min(controls, default=None),
        "rows": [row.as_dict() for row in rows],
        "options": options,
        "model": model,
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": {name: version(name) for name in _VERSIONS},
    }
