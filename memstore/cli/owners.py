"""`memstore owners`."""

import sys
from typing import Annotated

import typer

from memstore.cli.command import DryRunOption, command
from memstore.cli.failures import no_such_owner
from memstore.cli.output import Row, plain, printable
from memstore.cli.session import Session
from memstore.errors import InvalidInput
from memstore.types import OwnerId
from memstore.validation import validate_owner

app = typer.Typer(no_args_is_help=True, help="Whose facts are in the store.", rich_markup_mode=None)

_COUNTS = ("current", "superseded", "history", "text_bytes", "epoch")


@command(app, "list")
def list_owners(session: Session) -> None:
    """List every owner that has a fact."""
    records = session.records
    rows: list[Row] = [{"owner": owner, "facts": records.count(owner)} for owner in records.owners()]
    session.out.rows(rows, ("owner", "facts"))


@command(app, "stats")
def stats(
    session: Session,
    owners: Annotated[list[str] | None, typer.Argument(metavar="OWNER", help="All without any.")] = None,
) -> None:
    """Count what the store holds of each owner: facts, former versions, bytes of text."""
    names = [validate_owner(owner) for owner in owners] if owners else session.records.owners()
    session.out.rows([{"owner": name, **_counts(session, name)} for name in names], ("owner", *_COUNTS))


@command(app, "purge")
def purge(
    session: Session,
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="Whose facts go.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Remove everything of an owner: facts, history, vectors, KV, sessions, and the entries of the change feed.

    Asks for the owner's name first. Without a terminal, or where the name is another one, nothing is removed.
    """
    name = validate_owner(owner)
    counts = _counts(session, name, sessions=session.count_sessions(name))
    size = (
        f"{counts['current']} facts, {counts['superseded']} superseded ones, {counts['history']} former versions, "
        f"{counts['sessions']} sessions"
    )
    if dry_run:
        session.out.say({"purged": False, "owner": name, **counts}, f"would remove {size} and all KV of {name}")
        return
    if not yes:
        _confirm(name, f"{size} and all KV of {name} will be gone for good.")
    receipt = session.open_store(with_kv=True).purge(name)
    gone = receipt.records
    sentence = (
        f"removed {gone.facts} facts, {gone.history} former versions, {gone.vectors} vectors, {gone.changes} entries "
        f"of the feed, {receipt.encodings} KV encodings and {receipt.sessions} sessions of {name}"
    )
    session.out.say({"purged": True, **plain(receipt)}, sentence)
    if gone.remains is not None and not session.out.as_json:
        session.out.note(f"the text may still be in {gone.remains}")


def _counts(session: Session, owner: OwnerId, **more: int) -> dict[str, int]:
    counts: dict[str, int] = {**plain(session.records.stats(owner)), **more}
    if not any(counts.values()):
        raise no_such_owner(owner)
    return counts


def _confirm(owner: OwnerId, warning: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput("a purge cannot be undone: pass --yes, or confirm it on a terminal")
    print(f"{printable(warning)}\nType the owner's name to confirm: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().rstrip("\r\n") != owner:
        raise InvalidInput("that is not the owner's name: nothing was removed")
