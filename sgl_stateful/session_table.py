"""How ``sgl-stateful session`` shows sessions and stats to a person."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memstore.cli.output import Output, printable
from sgl_stateful.session_wire import Document, number, part

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = (
    "id",
    "owner",
    "pin.state",
    "pin.cells",
    "tokens",
    "version",
    "priority",
    "queue.waiting",
    "used_at",
    "expires_at",
    "pin.reason",
)
_NUMBERS = ("pin.cells", "tokens", "version", "priority", "queue.waiting")
_CELLS = ("pool", "pinned", "evictable", "free", "budget", "quota", "admitted", "reserved")
_OPERATIONS = ("append", "query", "turn", "rebuild")


def print_session(out: Output, session: Document) -> None:
    """Print one session with all that it has."""
    out.record(session if out.as_json else flat(session))


def print_sessions(out: Output, sessions: Sequence[Document]) -> None:
    """Print many, each in a row."""
    out.rows(sessions if out.as_json else [flat(session) for session in sessions], COLUMNS)


def print_stats(out: Output, stats: Document, sessions: Sequence[Document]) -> None:
    """Print one look at a server: its counts, and ``sessions``."""
    if out.as_json:
        out.record({**stats, "rows": sessions})
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(screen(stats, sessions))
    else:
        print(*map(printable, headline(stats)), sep="\n", end="\n\n")
        print_sessions(out, sessions)
    sys.stdout.flush()


def screen(stats: Document, sessions: Sequence[Document]) -> RenderableType:
    """The same for a terminal."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = [flat(session) for session in sessions]
    table = Table(box=SIMPLE, expand=False)
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    for name in columns:
        # An id that is broken over two lines cannot be copied.
        table.add_column(
            name, justify="right" if name in _NUMBERS else "left", no_wrap=name in ("id", "owner"), overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text("" if row.get(name) is None else printable(str(row[name]))) for name in columns))
    return Group(*(Text(printable(line)) for line in headline(stats)), table)


def headline(stats: Document) -> Iterator[str]:
    """Yield the counts of a server in a few lines; raises ``Refused`` where one is missing."""
    yield "cells     " + pairs({name: number(stats, "cells", name) for name in _CELLS})
    yield "admitted  " + pairs(part(stats, "cells", "by_owner_class"))
    waiting, dropped = (number(stats, "queue", name) for name in ("waiting", "dropped"))
    counts = {name: number(stats, "sessions", name) for name in ("open", "pinned", "lost", "unpinned")}
    yield f"sessions  {pairs(counts)}   queue waiting {waiting}  dropped {dropped}"
    totals = part(stats, "totals")
    given = {name: number(totals, name) for name in ("admissions", "demotions")}
    labelled = "   ".join(f"{name} {pairs(part(totals, name))}" for name in ("refusals", "expiries", "lost", "tokens"))
    yield f"totals    {pairs(given)}   {labelled}"
    times = (f"{name} {_times(part(totals, 'operations', name))}" for name in _OPERATIONS)
    yield "p50/p99   " + "   ".join(times)


def reason_text(reason: Any) -> str | None:
    """Return a pin's reason in one cell: in words as it is, or the numbers of one that does not fit."""
    if isinstance(reason, dict):
        return f"does not fit: {pairs(reason)}"
    return None if reason is None else str(reason)


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"pin": {"state": s}}`` as ``{"pin.state": s}``, with times as dates and a reason in one cell."""
    row: dict[str, Any] = {}
    for name, value in document.items():
        if prefix + name == "pin.reason":
            row["pin.reason"] = reason_text(value)
        elif isinstance(value, dict):
            row |= flat(value, f"{prefix}{name}.")
        else:
            row[prefix + name] = _date(value) if name.endswith("_at") and isinstance(value, int | float) else value
    return row


def cells_of(session: Document) -> int:
    """Return what the session counts against the budget, by which it is sorted."""
    return number(session, "pin", "cells")


def pairs(counts: Any) -> str:
    """Return counts with their names, in one line."""
    shown = "  ".join(f"{name} {value}" for name, value in dict(counts).items())
    return shown or "none"


def _times(operation: Any) -> str:
    count, p50, p99 = (part(operation, name) for name in ("count", "p50_ms", "p99_ms"))
    return "none" if p50 is None or p99 is None else f"{p50:.1f}/{p99:.1f} ms of {count}"


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return str(seconds)  # beyond the year 9999
