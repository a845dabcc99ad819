"""``sgl-stateful session``: the sessions of a running server, from a shell."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperGroup

from memstore.cli.output import Output, printable
from sgl_stateful.session_table import cells_of, print_session, print_sessions, print_stats, reason_text, screen
from sgl_stateful.session_wire import (
    MOST_ROWS,
    BadAddress,
    Document,
    Refused,
    SessionServer,
    Unreachable,
    part,
    sessions_of,
)

REFUSED, INVALID, UNREACHABLE, INTERRUPTED = 1, 2, 3, 130

# Typer has its own copy of click in some releases, and imports click in others.
_UsageError: Any = typer.BadParameter.__mro__[1]


class SessionGroup(TyperGroup):
    """The group whose commands fail in one line on stderr, with an exit code that says what it was."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command of the group."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            code, message = INVALID, f"{error.format_message().rstrip('.')}: see --help"
        except BadAddress as error:
            code, message = INVALID, str(error)
        except Refused as error:
            code, message = REFUSED, str(error)
        except Unreachable as error:
            code, message = UNREACHABLE, str(error)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        tell(message)
        raise typer.Exit(code)


app = typer.Typer(cls=SessionGroup, no_args_is_help=True, help="The sessions of a running server.")


class OnFull(StrEnum):
    """What becomes of a pin that does not fit."""

    REFUSE = "refuse"
    DEMOTE = "demote"


IdArgument: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="The session's id.", show_default=False)]
OwnerOption: TypeAlias = Annotated[
    str | None, typer.Option("--owner", metavar="OWNER", help="Whose it is; without it the stats say so.")
]
OnlyOwnerOption: TypeAlias = Annotated[
    str | None, typer.Option("--owner", metavar="OWNER", help="Only this owner's sessions.")
]
UrlOption: TypeAlias = Annotated[
    str, typer.Option("--url", metavar="URL", envvar="SGL_STATEFUL_URL", help="Where the server is.")
]
KeyOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="SGL_STATEFUL_API_KEY",
        help="The server's key, if it wants one; of all owners' sessions its admin key.",
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document in one line.")]

DEFAULT_URL = "http://127.0.0.1:30000"


@app.command("list")
def list_sessions(
    owner: OnlyOwnerOption = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most.")] = 100,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the open sessions of all owners, or of one."""
    with closing(SessionServer(url, api_key)) as server:
        listing = server.sessions(owner, limit=limit)
    print_sessions(Output(as_json=as_json), listing.sessions)
    if listing.has_more and not as_json:
        is_all = owner is None and limit >= MOST_ROWS
        tell("there are more: pass --owner" if is_all else "there are more: raise --limit")


@app.command("show")
def show(
    session_id: IdArgument,
    owner: OwnerOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one session."""
    session = _with_one(session_id, owner, url, api_key, lambda server, owner: server.show(session_id, owner))
    print_session(Output(as_json=as_json), session)


@app.command("pin")
def pin(
    session_id: IdArgument,
    on_full: Annotated[
        OnFull | None, typer.Option(metavar="WHAT", help="Where it does not fit: refuse or demote.")
    ] = None,
    owner: OwnerOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a session's KV in the pool."""
    value = None if on_full is None else on_full.value
    call: _Call = lambda server, owner: server.pin(session_id, owner, on_full=value)  # noqa: E731
    _say_pin(Output(as_json=as_json), _with_one(session_id, owner, url, api_key, call))


@app.command("unpin")
def unpin(
    session_id: IdArgument,
    owner: OwnerOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a session's KV go when room is needed; the session stays."""
    session = _with_one(session_id, owner, url, api_key, lambda server, owner: server.unpin(session_id, owner))
    _say_pin(Output(as_json=as_json), session)


@app.command("close")
def close(
    session_id: IdArgument,
    owner: OwnerOption = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Close a session; what runs on it ends."""
    reply = _with_one(session_id, owner, url, api_key, lambda server, owner: server.delete(session_id, owner))
    closed = part(reply, "closed")
    Output(as_json=as_json).say(reply, f"closed {part(closed, 'id')} of {part(closed, 'owner')}")


@app.command("top")
def top(
    owner: OnlyOwnerOption = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="How many sessions at most.")] = 50,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.05, metavar="SECONDS", help="Time between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what fills the pool, the sessions with most cells first, until Ctrl-C."""
    out = Output(as_json=as_json)
    with closing(SessionServer(url, api_key)) as server:

        def look() -> tuple[Document, Sequence[Document]]:
            stats = server.stats(sessions=MOST_ROWS)
            rows = [row for row in sessions_of(stats, "rows") if owner in (None, row.get("owner"))]
            return stats, sorted(rows, key=cells_of, reverse=True)[:limit]

        if once:
            print_stats(out, *look())
            return
        try:
            _watch(out, look, interval_s)
        except KeyboardInterrupt:
            return  # the way to end it


def _watch(out: Output, look: Callable[[], tuple[Document, Sequence[Document]]], interval_s: float) -> None:
    if out.as_json or not sys.stdout.isatty():
        while True:
            print_stats(out, *look())
            time.sleep(interval_s)
    from rich.live import Live

    seen = look()  # before the screen is cleared for it
    with Live(screen(*seen), screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(*seen), refresh=True)
            time.sleep(interval_s)
            seen = look()


_Call: TypeAlias = Callable[[SessionServer, str], Document]


def _with_one(session_id: str, owner: str | None, url: str, api_key: str | None, call: _Call) -> Document:
    with closing(SessionServer(url, api_key)) as server:
        return call(server, owner_for(server, session_id, owner))


def owner_for(server: SessionServer, session_id: str, owner: str | None) -> str:
    """The owner that was named, or whose session it is; refuses what would name another route than the session's."""
    if not session_id.strip("."):
        raise typer.BadParameter(f"{session_id!r} is no session's id")
    return server.owner_of(session_id) if owner is None else owner


def _say_pin(out: Output, session: Document) -> None:
    state, cells, given = (part(session, "pin", name) for name in ("state", "cells", "reason"))
    reason = reason_text(given)
    out.say(session, f"{part(session, 'id')} is {state}, {cells} cells" + (f": {reason}" if reason else ""))


def tell(message: str) -> None:
    """Say something that is no result, on stderr."""
    print(f"sgl-stateful: {printable(' '.join(message.split()))}", file=sys.stderr)
