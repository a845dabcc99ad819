"""`memstore stats`, `doctor` and `watch`: what a store holds, how it is, and what happens to it."""

from typing import Annotated

import typer

from memstore.cli.command import command
from memstore.cli.failures import FOUND_PROBLEMS
from memstore.cli.output import Row, plain
from memstore.cli.session import Session
from memstore.cli.stored_embedder import stored_fingerprint
from memstore.errors import BlobStoreError, EmbedderMismatch, EmbeddingError, FeedGap, InvalidInput
from memstore.records.base import Finding
from memstore.searchable import vectors_name
from memstore.validation import validate_owner

_PAGE = 1000
_NEARLY_FULL = 0.9


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "stats")(stats)
    command(app, "doctor")(doctor)
    command(app, "watch")(watch)


def stats(session: Session) -> None:
    """Count what is in the store and in the KV cache."""
    records = session.records
    of_owners = [records.stats(owner) for owner in records.owners()]
    counts = {
        "facts": sum(one.current for one in of_owners),
        "superseded": sum(one.superseded for one in of_owners),
        "history": sum(one.history for one in of_owners),
        "text_bytes": sum(one.text_bytes for one in of_owners),
        "owners": len(of_owners),
        "feed_position": records.last_position(),
        "embedder": stored_fingerprint(records),
    }
    kv = None if session.blobs is None else {"path": str(session.kv_path), **plain(session.blobs.stats())}
    session.out.record({"store": records.location, **counts, "kv": kv})


def doctor(session: Session) -> None:
    """Say what an operator should know: durability, reach, versions, the embedder, the KV cache.

    Exits with 1 where something is an error.
    """
    findings = [*session.records.doctor(), _embedder_finding(session), _kv_finding(session)]
    rows: list[Row] = [plain(finding) for finding in findings]
    session.out.rows(rows, ("level", "subject", "message"))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(FOUND_PROBLEMS)


def watch(
    session: Session,
    since: Annotated[
        int | None, typer.Option(min=0, metavar="POSITION", help="Begin after it. [default: what comes from now on]")
    ] = None,
    owner: Annotated[str | None, typer.Option(metavar="OWNER", help="Only the changes of one owner.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="End after so many changes.")] = None,
    once: Annotated[bool, typer.Option("--once", help="End when there are no more, instead of waiting.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.01, metavar="SECONDS", help="Time between two looks.")
    ] = 1.0,
) -> None:
    """Print the changes of facts as they happen, one a line, until Ctrl-C.

    The feed names facts and never repeats what they say. Where changes were trimmed before they were read, a line of
    kind `gap` says so (on stderr, without --json), and the changes that are left follow.
    """
    records, name = session.records, None if owner is None else validate_owner(owner)
    last = records.last_position()
    position = last if since is None else since
    if position > last:
        raise InvalidInput(f"--since is {position}, and the last change of this store is {last}")
    left = limit
    while left is None or left > 0:
        # Whatever came up to here is in the page, if the page has room.
        end, size = records.last_position(), _PAGE if left is None else min(left, _PAGE)
        try:
            changes = records.changes(position, owner=name, limit=size)
        except FeedGap as gap:
            _tell(session, gap)
            position = gap.floor
            continue
        for change in changes:
            session.out.line(plain(change))
            position = change.position
        left = None if left is None else left - len(changes)
        if len(changes) < size:
            position = max(position, end)
            if once:
                return
            session.host.wait(interval_s)


def _tell(session: Session, gap: FeedGap) -> None:
    if session.out.as_json:
        session.out.line({"kind": "gap", "since": gap.since, "floor": gap.floor})
    else:
        session.out.note(str(gap))


def _embedder_finding(session: Session) -> Finding:
    stored = stored_fingerprint(session.records)
    try:
        loaded = vectors_name(session.load_embedder())
    except EmbeddingError as error:
        return Finding("error", "embedder", str(error))
    if stored is None:
        return Finding("ok", "embedder", f"{loaded}; the store has no vectors yet")
    if stored != loaded:
        return Finding("error", "embedder", str(EmbedderMismatch(stored=stored, offered=loaded)))
    return Finding("ok", "embedder", stored)


def _kv_finding(session: Session) -> Finding:
    try:
        blobs = session.blobs
    except BlobStoreError as error:
        return Finding("error", "KV cache", str(error))
    if blobs is None:
        return Finding("ok", "KV cache", "none: no --kv, and none beside the store")
    size = blobs.stats()
    share = size.blob_bytes / size.map_size_bytes
    message = (
        f"{blobs.path}: {size.encodings} encodings, {size.blob_bytes / 2**20:.1f} MiB, {share:.0%} of the budget of "
        f"{size.map_size_bytes / 2**20:.0f} MiB"
    )
    if share > _NEARLY_FULL:
        advice = "nearly full, so that new encodings push out old ones: raise MEMSTORE_BLOB_MAP_SIZE_BYTES"
        return Finding("warning", "KV cache", f"{message}: {advice}")
    return Finding("ok", "KV cache", message)
