"""The rows as a table for a terminal or for the README."""

from collections.abc import Sequence

from memstore_bench.measure import Row

_HEADER = ("row", "facts", "arm", "median", "p95", "n", "mem0 ÷ ours", "note")


def table(rows: Sequence[Row], *, markdown: bool) -> str:
    """Return one line per row."""
    lines = [_HEADER, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    if markdown:
        rule = tuple("---:" if 0 < column < 7 and column != 2 else "---" for column in range(len(_HEADER)))
        return "\n".join(f"| {' | '.join(line)} |" for line in [_HEADER, rule, *lines[1:]])
    shown = [
        "  ".join(
            cell.rjust(width) if 2 < column < 7 or column == 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(shown)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.size}",
        row.arm,
        f"{_short(row.median)} {row.unit}",
        "" if row.p95 is None else f"{_short(row.p95)} {row.unit}",
        f"{row.n}",
        "" if row.ratio is None else _ratio(row),
        row.note,
    )


def _ratio(row: Row) -> str:
    assert row.ratio is not None
    return f"{_short(row.ratio)}" + ("" if row.ratio_p95 is None else f" ({_short(row.ratio_p95)} at p95)")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
