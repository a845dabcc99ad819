"""`memstore facts`: reading and searching."""

from typing import Annotated

import typer

from memstore.cli.command import FactArgument, OwnerOption, command
from memstore.cli.inputs import json_object
from memstore.cli.output import Row, fact_rows, plain
from memstore.cli.session import Session
from memstore.search.views import SearchMode

app = typer.Typer(no_args_is_help=True, help="Facts of one owner.", rich_markup_mode=None)

_COLUMNS = ("id", "seq", "stream", "speaker", "time", "state", "text")


@command(app, "list")
def list_facts(
    session: Session,
    owner: OwnerOption,
    stream: Annotated[str | None, typer.Option(metavar="NAME", help="Only the facts of this stream.")] = None,
    superseded: Annotated[bool, typer.Option("--superseded", help="Superseded facts too.")] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most.")] = 100,
    after: Annotated[int, typer.Option(min=0, metavar="SEQ", help="Only facts with a greater seq.")] = 0,
) -> None:
    """List facts in the order in which they were added."""
    store = session.open_store(with_kv=False)
    # One more tells whether there are more.
    facts = store.list(owner, stream=stream, superseded=superseded, limit=limit + 1, after_seq=after)
    session.out.rows(fact_rows(facts[:limit]), _COLUMNS)
    if len(facts) > limit and not session.out.as_json:
        session.out.note(f"there are more: --after {facts[limit - 1].seq}")


@command(app, "get")
def get(session: Session, fact_id: FactArgument, owner: OwnerOption) -> None:
    """Show one fact, superseded or not."""
    session.out.record(plain(session.open_store(with_kv=False).get(owner, fact_id)))


@command(app, "history")
def history(session: Session, fact_id: FactArgument, owner: OwnerOption) -> None:
    """Show a fact in every version, and the facts that it took the place of, oldest first."""
    versions = session.open_store(with_kv=False).history(owner, fact_id)
    session.out.rows(fact_rows(versions), ("id", "version", "state", "updated_at", "text"))


@command(app, "search")
def search(
    session: Session,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for.", show_default=False)],
    owner: OwnerOption,
    k: Annotated[int, typer.Option("-k", min=1, metavar="N", help="How many at most.")] = 10,
    mode: Annotated[
        SearchMode, typer.Option(metavar="MODE", help="What to rank by: vector, keyword or hybrid.")
    ] = SearchMode.VECTOR,
    where: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='A filter, such as {"speaker": "Ana"}; see docs/store.md.'),
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(metavar="SCORE", help="Leave out hits with a lower score before boosts.")
    ] = None,
) -> None:
    """Search the current facts, best first."""
    hits = session.open_store(with_kv=False).search(
        owner,
        query,
        k=k,
        mode=mode,
        where=None if where is None else json_object("--where", where),
        min_score=min_score,
    )
    rows: list[Row] = [{"score": hit.score, "unboosted": hit.unboosted, "fact": plain(hit.fact)} for hit in hits]
    if session.out.as_json:
        session.out.rows(rows, ())
    else:
        flat = [{**plain(hit.fact), "score": hit.score} for hit in hits]
        session.out.rows(flat, ("score", "id", "speaker", "time", "text"))
