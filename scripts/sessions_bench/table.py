"""The rows as a table for a terminal."""

from collections.abc import Sequence

from .measure import Row

_HEADER = ("row", "arm", "median", "p25-p75", "p99", "n", "ratio", "note")
_RIGHT = range(2, 7)


def table(rows: Sequence[Row]) -> str:
    """Return one line per row."""
    lines = [_HEADER, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        row.arm,
        f"{_short(row.median)} {row.unit}".rstrip(),
        "" if row.p25 is None or row.p75 is None else f"{_short(row.p25)}-{_short(row.p75)}",
        "" if row.p99 is None else _short(row.p99),
        f"{row.n}",
        "" if row.ratio is None else f"{row.ratio:.3g}",
        row.note,
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
