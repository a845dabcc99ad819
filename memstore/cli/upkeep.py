"""`memstore verify`, `reindex` and `compact`: what mends a store and moves it to another embedder."""

from typing import Annotated

import typer

from memstore.cli.command import DryRunOption, command
from memstore.cli.failures import FOUND_PROBLEMS
from memstore.cli.output import Row, plain, progress_bar
from memstore.cli.session import Session
from memstore.cli.stored_embedder import stored_fingerprint
from memstore.errors import BlobStoreDamaged, BlobStoreError
from memstore.reindex import reindex as reindex_store
from memstore.searchable import vectors_name
from memstore.verify import verify as verify_store


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "verify")(verify)
    command(app, "reindex")(reindex)
    command(app, "compact")(compact)


def verify(
    session: Session,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Check every record, vector and KV blob against each other.

    A damaged record is set aside, since nothing can bring it back; vectors are made anew, damaged KV is dropped, and a
    KV cache that is damaged as a whole, or of another release, is moved aside. Without --repair nothing is changed.
    Exits with 1 where something is wrong, unless all of it was mended.
    """
    mends = repair and not dry_run
    kv_damage: BlobStoreDamaged | None = None
    try:
        store = session.open_store(with_kv=True, replace_damaged_kv=mends)
    except BlobStoreDamaged as error:
        kv_damage, store = error, session.open_store(with_kv=False)
    report = verify_store(store, repair=mends, kv_damage=kv_damage)
    if session.out.as_json:
        session.out.record({**plain(report), "is_sound": report.is_sound})
    else:
        problems: list[Row] = [plain(problem) for problem in report.problems]
        if problems:
            session.out.rows(problems, ("kind", "owner", "fact_id", "detail", "repaired"))
        if report.blobs is not None:
            session.out.record(plain(report.blobs))
        verdict = "sound" if report.is_sound else "not sound" if repair else "not sound: --repair mends what it can"
        session.out.say(None, f"{report.facts} facts, {verdict}")
    if not report.is_sound:
        raise typer.Exit(FOUND_PROBLEMS)


def reindex(
    session: Session,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH|ID", help="Sentence-transformers model. [default: as set]"),
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Make the vectors of every fact with another embedder, or as this release makes them, then change the store over.

    Until then whoever has the store open goes on with the former ones; from then on they are refused, and have to be
    started anew. A run that was interrupted is continued by the next one. Of a store of an earlier release, end the
    programs of that release first.
    """
    records, embedder = session.records, session.load_embedder(model)
    if dry_run:
        target = vectors_name(embedder)
        counts = {owner: records.count(owner) for owner in records.owners()}
        lacking = sum(len(records.unindexed(o, embedder=target, limit=count)) for o, count in counts.items() if count)
        document: Row = {
            "reindexed": False,
            "previous": stored_fingerprint(records),
            "embedder": target,
            "embedded": lacking,
            "facts": sum(counts.values()),
        }
        session.out.say(document, f"would embed {lacking} of {document['facts']} facts with {target}")
        return
    with progress_bar("embedding") as on_progress:
        report = reindex_store(records, embedder, batch=session.settings.embed_batch, on_progress=on_progress)
    sentence = f"embedded {report.embedded} of {report.facts} facts; the store is {report.embedder}'s"
    session.out.say({"reindexed": True, **plain(report)}, sentence)


def compact(session: Session, dry_run: DryRunOption = False) -> None:
    """Give back the space of what was removed, and forget old idempotency keys.

    The KV cache can be compacted only while no server has it open.
    """
    records, kv_path = session.records, session.kv_path
    document: dict[str, object] = {"compacted": not dry_run, "records": None, "kv": None}
    if dry_run:
        document |= {"records": records.location, "kv": None if kv_path is None else str(kv_path)}
        session.out.say(document, f"would compact {records.location}" + ("" if kv_path is None else f" and {kv_path}"))
        return
    document["records"] = _sizes(records.compact())
    failure: BlobStoreError | None = None
    try:
        if session.blobs is not None:
            document["kv"] = _sizes(session.blobs.compact())
    except BlobStoreError as error:
        failure = error
    # What was done is told also where the rest could not be.
    parts = [(name, document[name]) for name in ("records", "kv") if document[name] is not None]
    session.out.say(document, "; ".join(f"{name}: {_shrunk(sizes)}" for name, sizes in parts))
    if failure is not None:
        raise failure


def _sizes(before_and_after: tuple[int, int]) -> Row:
    return dict(zip(("before_bytes", "after_bytes"), before_and_after, strict=True))


def _shrunk(sizes: object) -> str:
    assert isinstance(sizes, dict), sizes
    return f"{sizes['before_bytes']} bytes before, {sizes['after_bytes']} after"
