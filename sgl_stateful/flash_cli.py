"""``sgl-stateful flash``: the registered questions and entries of a running server, from a shell."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote

import typer

from memstore.cli.output import Output, printable
from sgl_stateful.session_cli import (
    DEFAULT_URL,
    JsonOption,
    KeyOption,
    OnlyOwnerOption,
    OwnerOption,
    SessionGroup,
    UrlOption,
    owner_for,
    tell,
)
from sgl_stateful.session_table import flat, pairs
from sgl_stateful.session_wire import MOST_ROWS, Document, Refused, SessionServer, documents_of, number, part

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer(
    cls=SessionGroup, no_args_is_help=True, help="The registered questions and entries of a running server."
)

COLUMNS = (
    "session",
    "name",
    "owner",
    "state",
    "waiting",
    "hits",
    "evaluations",
    "value",
    "answer.data_version",
    "answer.age_s",
    "answer.confidence",
    "answer.text",
    "error",
    "retired",
)
ENTRY_COLUMNS = (
    "session",
    "name",
    "owner",
    "state",
    "waiting",
    "hits",
    "evaluations",
    "value",
    "cells",
    "ahead.tokens",
    "ahead.data_version",
    "ahead.age_s",
    "ahead.text",
    "error",
    "retired",
)
_NUMBERS = ("hits", "evaluations", "value", "answer.data_version", "answer.age_s", "answer.confidence")

SessionArgument: TypeAlias = Annotated[str, typer.Argument(metavar="SESSION", help="Its id.", show_default=False)]
NameArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="The question's, or the entry's.", show_default=False)
]


class FlashServer(SessionServer):
    """One server's routes of registered questions. Every method raises ``Refused`` or ``Unreachable``."""

    def flash_stats(self, *, rows: int) -> Document:
        """Counts of the server, and up to ``rows`` questions, those with most hits first."""
        return self._ask("GET", "/v1/flash/stats", params={"rows": rows})

    def questions(self, session_id: str, owner: str) -> list[Document]:
        """A session's questions."""
        return documents_of(self._ask("GET", _path(session_id), params={"owner": owner}), "questions")

    def entries(self, session_id: str, owner: str) -> list[Document]:
        """A session's entries."""
        return documents_of(self._ask("GET", _entries_path(session_id), params={"owner": owner}), "entries")

    def entry(self, session_id: str, name: str, owner: str) -> Document:
        """One entry."""
        return self._ask("GET", f"{_entries_path(session_id)}/{quote(name, safe='')}", params={"owner": owner})

    def question(self, session_id: str, name: str, owner: str) -> Document:
        """One question."""
        return self._ask("GET", f"{_path(session_id)}/{quote(name, safe='')}", params={"owner": owner})


def _path(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}/flash"


def _entries_path(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}/entries"


@app.command("list")
def list_questions(
    session_id: Annotated[
        str | None, typer.Argument(metavar="[SESSION]", help="Only this session's.", show_default=False)
    ] = None,
    owner: OnlyOwnerOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the questions of all sessions, those with most hits first, or of one."""
    with closing(FlashServer(url, api_key)) as server:
        if session_id is not None:
            of = owner_for(server, session_id, owner)
            rows, has_more = server.questions(session_id, of), False
        else:
            stats = server.flash_stats(rows=MOST_ROWS)
            rows, has_more = _rows(stats, owner), number(stats, "registered") > MOST_ROWS
    _print_rows(Output(as_json=as_json), rows)
    if has_more and not as_json:
        tell("there are more: name a session")


@app.command("entries")
def list_entries(
    session_id: Annotated[
        str | None, typer.Argument(metavar="[SESSION]", help="Only this session's.", show_default=False)
    ] = None,
    owner: OnlyOwnerOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the entries of all sessions, those with most hits first, or of one."""
    with closing(FlashServer(url, api_key)) as server:
        if session_id is not None:
            rows, has_more = server.entries(session_id, owner_for(server, session_id, owner)), False
        else:
            stats = part(server.flash_stats(rows=MOST_ROWS), "entries")
            rows, has_more = _rows(stats, owner), number(stats, "registered") > MOST_ROWS
    _print_rows(Output(as_json=as_json), rows, ENTRY_COLUMNS)
    if has_more and not as_json:
        tell("there are more: name a session")


@app.command("show")
def show(
    session_id: SessionArgument,
    name: NameArgument,
    is_entry: Annotated[bool, typer.Option("--entry", help="An entry of that name, not a question.")] = False,
    owner: OwnerOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one question or entry with what is known of its answer, its gate and its audits."""
    with closing(FlashServer(url, api_key)) as server:
        of = owner_for(server, session_id, owner)
        question = (server.entry if is_entry else server.question)(session_id, name, of)
    out = Output(as_json=as_json)
    if as_json:
        out.record(question)
        return
    gate = question.pop("gate", None) or {}
    curve = documents_of({"curve": gate.pop("curve", [])}, "curve")
    out.record({**flat(question), **flat(gate, "gate.")})
    if curve:
        print()
        out.rows([flat(one) for one in curve], ("low", "high", "n", "agreed", "interval"))


@app.command("top")
def top(
    owner: OnlyOwnerOption = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="How many questions at most.")] = 50,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.05, metavar="SECONDS", help="Time between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show hits and misses, and the questions with most hits, until Ctrl-C."""
    out = Output(as_json=as_json)
    with closing(FlashServer(url, api_key)) as server:

        def look() -> tuple[Document, list[Document]]:
            stats = server.flash_stats(rows=MOST_ROWS)
            return stats, _rows(stats, owner)[:limit]

        try:
            _print_stats(out, *look())
            while not once:
                time.sleep(interval_s)
                _print_stats(out, *look())
        except KeyboardInterrupt:
            return  # the way to end it


def _rows(stats: Document, owner: str | None) -> list[Document]:
    return [row for row in documents_of(stats, "rows") if owner in (None, row.get("owner"))]


def _print_rows(out: Output, rows: Sequence[Document], columns: Sequence[str] = COLUMNS) -> None:
    out.rows(rows if out.as_json else [flat(row) for row in rows], columns)


def _print_stats(out: Output, stats: Document, rows: Sequence[Document]) -> None:
    if out.as_json:
        out.record({**stats, "rows": rows})
    elif sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.clear()
        console.print(screen(stats, rows))
    else:
        print(*map(printable, headline(stats)), sep="\n", end="\n\n")
        _print_rows(out, rows)
    sys.stdout.flush()


def screen(stats: Document, rows: Sequence[Document]) -> RenderableType:
    """One look for a terminal."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = [flat(row) for row in rows]
    table = Table(box=SIMPLE, expand=False)
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in shown)]
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
    for row in shown:
        table.add_row(*(Text("" if row.get(name) is None else printable(str(row[name]))) for name in columns))
    return Group(*(Text(printable(line)) for line in headline(stats)), table)


def headline(stats: Document) -> Iterator[str]:
    """Yield the counts of a server in a few lines; raises ``Refused`` where one is missing."""
    totals = part(stats, "totals")
    if not isinstance(totals, dict):
        raise Refused("totals in the server's answer are not counts")
    yield "questions    " + pairs({name: number(stats, name) for name in ("registered", "retired", "queue")})
    plain = ("hits", "stale_prevented", "audits", "false_accepts", "dropped_readers")
    yield "answers      " + pairs({name: number(totals, name) for name in plain})
    yield "misses       " + pairs(_some(part(totals, "misses")))
    yield "evaluations  " + pairs({**_some(part(totals, "evaluations")), "seconds": part(totals, "seconds")})
    yield "tokens       " + pairs(part(totals, "tokens"))
    yield "p50/p99      " + pairs({name: _times(part(totals, name)) for name in ("hit_ms", "fresh_s")})
    yield from _entry_lines(part(stats, "entries"))


def _entry_lines(entries: Any) -> Iterator[str]:
    totals, held = part(entries, "totals"), part(entries, "cells")
    yield "entries      " + pairs({**{name: number(entries, name) for name in ("registered", "retired")}, **held})
    plain = ("hits", "stale_prevented", "tokens_ahead", "audits", "false_accepts")
    yield "  served     " + pairs({**{name: number(totals, name) for name in plain}, **_some(part(totals, "uses"))})
    yield "  misses     " + pairs(_some(part(totals, "misses")))
    yield "  decoded    " + pairs({**_some(part(totals, "evaluations")), **part(totals, "tokens")})


def _some(counts: Any) -> dict[str, Any]:
    return {name: count for name, count in dict(counts).items() if count}


def _times(values: Any) -> str:
    p50, p99 = part(values, "p50"), part(values, "p99")
    return "none" if p50 is None or p99 is None else f"{p50:.3g}/{p99:.3g}"
