"""What a page is made of: sections of tables and figures, with no markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .scores import Estimate

ABSENT = "–"
LONG_ROWS = 30


class Cell(NamedTuple):
    """What a cell shows, and the number behind it where it is one."""

    text: str
    value: float | None = None
    interval: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table: `columns` are its headings, and every row has as many cells."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def is_long(self) -> bool:
        """Whether a page should show it on demand alone."""
        return len(self.rows) > LONG_ROWS

    def is_numeric(self, column: int) -> bool:
        """Whether any cell of the column is a number."""
        return any(row[column].value is not None for row in self.rows)


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawn chart: `png` for files, `svg` for the page, `alt` for who cannot see it."""

    name: str
    alt: str
    caption: str
    png: bytes = field(repr=False)
    svg: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Missing:
    """A part that the input does not have, and the command that would make it."""

    what: str
    command: str


Part = Figure | Table | Missing


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page; `kind` sets those apart that were not measured here."""

    id: str
    title: str
    lead: Sequence[str] = ()
    parts: Sequence[Part] = ()
    kind: str = "measured"

    @property
    def figures(self) -> list[Figure]:
        """Those of the parts that are charts."""
        return [part for part in self.parts if isinstance(part, Figure)]


def text(value: object) -> Cell:
    """A cell of words; absent values show as a dash."""
    return Cell(ABSENT if value is None else str(value))


def number(value: float | None, digits: int = 3) -> Cell:
    """A cell of a number, with so many digits behind the point and a thin space between thousands."""
    if value is None:
        return Cell(ABSENT)
    return Cell(format_number(value, digits), value)


def count(value: float | None) -> Cell:
    """A cell of a whole number."""
    return number(value, 0)


def estimate(value: Estimate | None, digits: int = 3, *, n: int | None = None) -> Cell:
    """A cell of a mean with its interval, and with the number of its questions where that is not `n`."""
    if value is None:
        return Cell(ABSENT)
    differing = None if n is None or value.n is None or value.n == n else f"n = {value.n}"
    small = ", ".join(filter(None, (format_interval(value, digits), differing)))
    return Cell(format_number(value.mean, digits), value.mean, small or None)


def share_of(value: float | None, n: float | None, digits: int = 3) -> Cell:
    """A cell of a mean without an interval, with the number that it is of."""
    cell = number(value, digits)
    return cell if value is None or n is None else cell._replace(interval=f"n = {n:.0f}")


def format_number(value: float, digits: int = 3) -> str:
    """``1 234.5``, with a real minus sign; a value that rounds to zero has none."""
    rounded = f"{value:,.{digits}f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    if rounded.startswith("-"):
        rounded = rounded[1:] if not any(digit in "123456789" for digit in rounded) else f"−{rounded[1:]}"
    return rounded


def format_interval(value: Estimate, digits: int = 3) -> str | None:
    """``[0.071, 0.101]``, or None where there is no interval."""
    if value.low is None or value.high is None:
        return None
    return f"[{format_number(value.low, digits)}, {format_number(value.high, digits)}]"
