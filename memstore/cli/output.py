"""What a command prints: one JSON document, a table for a person, or tab-separated rows for a pipe."""

import dataclasses
import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeAlias

from memstore.drafts import Progress
from memstore.types import Fact

Row: TypeAlias = Mapping[str, object]

_TIMES = ("at", "created_at", "updated_at", "expires_at", "event_at")
_LEAST_TEXT_WIDTH = 20


class Output:
    """Writes results to stdout, and nothing else goes there.

    Parameters
    ----------
    as_json
        One JSON document in one line, in ASCII. Otherwise a table on a terminal; in a pipe tab-separated rows under
        a line of names, control characters as escapes.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, value: object, sentence: str) -> None:
        """Print one result, to a person as a sentence."""
        print(_json(value) if self.as_json else printable(sentence))

    def record(self, value: Row) -> None:
        """Print one result with a name and a value in each row."""
        if self.as_json:
            print(_json(value))
        else:
            self._table([{"name": name, "value": _cell(name, item)} for name, item in value.items()], ["name", "value"])

    def rows(self, values: Sequence[Row], columns: Sequence[str]) -> None:
        """Print several results; of each, a person sees `columns`."""
        if self.as_json:
            print(_json(values))
        else:
            self._table(values, columns)

    def line(self, value: Row) -> None:
        """Print one of results without an end, and have it read at once."""
        cells = (printable(_cell(name, item)) for name, item in value.items())
        print(_json(value) if self.as_json else "\t".join(cells), flush=True)

    def note(self, text: str) -> None:
        """Tell a person something about the result, on stderr."""
        print(f"memstore: {printable(text)}", file=sys.stderr)

    def _table(self, values: Sequence[Row], columns: Sequence[str]) -> None:
        cells = [[printable(_cell(name, value.get(name))) for name in columns] for value in values]
        if not sys.stdout.isatty():
            for row in [columns, *cells]:
                print("\t".join(row))
            return
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        # A screen has no room for columns that say nothing.
        shown = [number for number in range(len(columns)) if any(row[number] for row in cells)]
        table = Table(box=SIMPLE)
        for number in shown:
            name = columns[number]
            # An identifier that is broken over two lines cannot be copied.
            least = _LEAST_TEXT_WIDTH if name == "text" else None
            table.add_column(name, no_wrap=name in ("id", "owner", "name"), overflow="fold", min_width=least)
        for row in cells:
            table.add_row(*(Text(row[number]) for number in shown))
        Console().print(table)


def plain(value: Any) -> Any:
    """Return a value of the package as JSON has it: dataclasses and named tuples by the names of their fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {spec.name: plain(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def fact_rows(facts: Sequence[Fact]) -> list[Row]:
    """Return facts as rows."""
    return [plain(fact) for fact in facts]


def printable(text: str) -> str:
    """Return `text` in one line, without characters that would act on a terminal or that it cannot show."""
    shown = "".join(repr(char)[1:-1] if unicodedata.category(char) in ("Cc", "Zl", "Zp") else char for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """Yield what shows progress on stderr, or None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        show: Callable[[int, int], None] = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        yield show


def _json(value: object) -> str:
    return json.dumps(plain(value), allow_nan=False)


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and name in _TIMES:
        return _date(value)
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(value) if isinstance(value, str | int) else _json(value)


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        # Beyond the year 9999.
        return str(seconds)
