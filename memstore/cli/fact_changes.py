"""`memstore facts`: adding, changing, deleting."""

from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer

from memstore.cli.command import DryRunOption, FactArgument, OwnerOption, command
from memstore.cli.inputs import json_object, read_text, unix_seconds
from memstore.cli.output import plain
from memstore.cli.session import Session
from memstore.errors import InvalidInput
from memstore.lifecycle import KEEP, Keep
from memstore.types import NewFact

T = TypeVar("T")

StreamOption: TypeAlias = Annotated[str | None, typer.Option(metavar="NAME", help="The thread it belongs to.")]
SpeakerOption: TypeAlias = Annotated[str | None, typer.Option(metavar="NAME", help="Who said it.")]
TimeOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TIME", help="When it happened, ISO 8601 or free text.")
]
MetadataOption: TypeAlias = Annotated[str | None, typer.Option(metavar="JSON", help="A JSON object.")]
ExpiresAtOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TIME", help="When it is gone, in ISO 8601 or Unix seconds.")
]
FileOption: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE", help="Read the text from a file.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "add", makes_store=True)(add)
    command(app, "update")(update)
    command(app, "supersede")(supersede)
    command(app, "delete")(delete)


def add(
    session: Session,
    owner: OwnerOption,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="What to remember; - reads stdin.")] = None,
    file: FileOption = None,
    stream: StreamOption = None,
    speaker: SpeakerOption = None,
    time: TimeOption = None,
    metadata: MetadataOption = None,
    expires_at: ExpiresAtOption = None,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Repeated with the same key, the command adds once.")
    ] = None,
) -> None:
    """Add one fact, and say whether the owner had it already; `import` adds many.

    Of a text from stdin or a file, one line break at the end is left out.
    """
    fact = NewFact(
        text=read_text(text, file),
        stream=stream or "",
        speaker=speaker,
        time=time,
        metadata={} if metadata is None else json_object("--metadata", metadata),
        expires_at=None if expires_at is None else unix_seconds("--expires-at", expires_at),
    )
    [addition] = session.open_store(with_kv=False).ingest(owner, [fact], idempotency_key=idempotency_key)
    sentence = f"{'added' if addition.created else 'already there:'} {addition.fact.id}"
    if addition.chunks > 1:
        sentence += f", embedded in {addition.chunks} parts"
    session.out.say(addition, sentence)
    if not session.out.as_json:
        for near in addition.near_duplicates:
            session.out.note(f"almost the same ({near.score:.2f}): {near.fact.id} {near.fact.text}")


def update(
    session: Session,
    fact_id: FactArgument,
    owner: OwnerOption,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="The new text; - reads stdin.")] = None,
    file: FileOption = None,
    stream: StreamOption = None,
    speaker: SpeakerOption = None,
    time: TimeOption = None,
    metadata: MetadataOption = None,
    expires_at: ExpiresAtOption = None,
    clear_speaker: Annotated[bool, typer.Option("--clear-speaker", help="Leave it with no speaker.")] = False,
    clear_time: Annotated[bool, typer.Option("--clear-time", help="Leave it with no time.")] = False,
    clear_expires_at: Annotated[bool, typer.Option("--clear-expires-at", help="Keep it for good.")] = False,
) -> None:
    """Change fields of a fact; what it was becomes history, and its KV is dropped."""
    new_text = KEEP if text is None and file is None else read_text(text, file)
    new_metadata = KEEP if metadata is None else json_object("--metadata", metadata)
    expiry = None if expires_at is None else unix_seconds("--expires-at", expires_at)
    new_speaker = _patch("speaker", speaker, clear=clear_speaker)
    new_time = _patch("time", time, clear=clear_time)
    new_expiry = _patch("expires-at", expiry, clear=clear_expires_at)
    new_stream = KEEP if stream is None else stream
    if all(value is KEEP for value in (new_text, new_stream, new_speaker, new_time, new_metadata, new_expiry)):
        raise InvalidInput("nothing to change: pass --text, or another field")
    fact = session.open_store(with_kv=True).update(
        owner,
        fact_id,
        text=new_text,
        stream=new_stream,
        speaker=new_speaker,
        time=new_time,
        metadata=new_metadata,
        expires_at=new_expiry,
    )
    session.out.say(fact, f"updated {fact.id}, now version {fact.version}")


def supersede(
    session: Session,
    fact_id: FactArgument,
    owner: OwnerOption,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The new fact; - reads stdin.")] = None,
    file: FileOption = None,
    stream: StreamOption = None,
    speaker: SpeakerOption = None,
    time: TimeOption = None,
    metadata: MetadataOption = None,
    expires_at: ExpiresAtOption = None,
) -> None:
    """Put a new fact in the place of another, which is kept as history.

    Stream, speaker and metadata are those of the old fact unless given; time and expiry are not.
    """
    successor = session.open_store(with_kv=True).supersede(
        owner,
        fact_id,
        read_text(text, file),
        stream=KEEP if stream is None else stream,
        speaker=KEEP if speaker is None else speaker,
        time=time,
        metadata=KEEP if metadata is None else json_object("--metadata", metadata),
        expires_at=None if expires_at is None else unix_seconds("--expires-at", expires_at),
    )
    session.out.say(successor, f"{fact_id} is superseded by {successor.id}")


def delete(session: Session, fact_id: FactArgument, owner: OwnerOption, dry_run: DryRunOption = False) -> None:
    """Remove a fact with its history, vectors and KV."""
    if dry_run:
        fact = session.open_store(with_kv=False).get(owner, fact_id)
    else:
        fact = session.open_store(with_kv=True).delete(owner, fact_id)
    sentence = f"{'would delete' if dry_run else 'deleted'} {fact.id} {fact.text}"
    session.out.say({"deleted": not dry_run, "fact": plain(fact)}, sentence)


def _patch(name: str, value: T | None, *, clear: bool) -> T | Keep | None:
    if clear and value is not None:
        raise InvalidInput(f"--{name} and --clear-{name} contradict each other: pass one")
    return None if clear else KEEP if value is None else value
