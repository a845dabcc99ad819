"""A comparison as tables: on the terminal, and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from locomo.scoring.statistics import FEWEST_GROUPS

from .arm_names import parse_arm
from .comparison import Difference, Pair
from .contents import ABSENT, Cell, Table, count, estimate, number, text
from .page import environment
from .scores import Estimate


def comparison_tables(pair: Pair) -> Iterator[Table]:
    """Settings that differ, then the differences found."""
    names = (pair.first.name, pair.second.name)
    if pair.settings:
        rows = [[text(cell) for cell in row] for row in pair.settings]
        yield Table("Settings that differ", ("Setting", *names), rows)
    columns = ["Arm", "k", "Metric", *names, "Difference, 95 %", "n", "Groups"]
    columns += [*(f"Only {name} right" for name in names), "p"]
    yield Table(f"{names[1]} less {names[0]}", columns, [_row(difference) for difference in pair.differences])


def _row(found: Difference) -> list[Cell]:
    name, digits = parse_arm(found.arm), found.metric.digits
    change = found.interval
    pairs = found.discordant
    return [
        text(name.label),
        count(name.k),
        text(found.metric.title),
        number(found.first, digits),
        number(found.second, digits),
        estimate(Estimate(found.difference, change.low, change.high), digits),
        count(found.n),
        count(change.groups),
        count(pairs.only_first if pairs else None),
        count(pairs.only_second if pairs else None),
        number(pairs.p_value if pairs else None, 4),
    ]


def notes(pair: Pair) -> list[str]:
    """What a reader must know of the intervals."""
    if not pair.differences:
        return ["The runs have no arm with a metric of the same question in common."]
    over = " or ".join(sorted({found.interval.over for found in pair.differences}))
    return [
        "Paired: both means are over the questions of which both runs have the metric, spliced arms where they were "
        f"spliced in both; n counts these. Intervals: 95 %, by Student's t over {over}, which Groups counts; none "
        f"under {FEWEST_GROUPS}. p: exact McNemar test of the questions that only one run has right, which takes them "
        "as independent."
    ]


def render(pairs: Sequence[Pair]) -> Group:
    """Everything for a rich console."""
    parts: list[RichTable | Text] = []
    for pair in pairs:
        for table in comparison_tables(pair):
            shown = RichTable(title=Text(table.caption), title_justify="left")
            for index, column in enumerate(table.columns):
                shown.add_column(Text(column), justify="right" if table.is_numeric(index) else "left")
            for row in table.rows:
                shown.add_row(*(Text(" ".join(filter(None, (cell.text, cell.interval)))) for cell in row))
            parts.append(shown)
        parts += [Text(note) for note in notes(pair)]
    return Group(*parts)


def write_comparison(pairs: Sequence[Pair], out: Path) -> Path:
    """Write the same as one self-contained page, and return its path.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    page = (
        environment()
        .get_template("compare.html.jinja")
        .render(
            title=" against ".join([*(pair.second.name for pair in pairs), pairs[0].first.name] if pairs else [ABSENT]),
            pairs=[(pair, notes(pair), list(comparison_tables(pair))) for pair in pairs],
        )
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out
