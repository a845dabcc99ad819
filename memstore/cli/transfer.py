"""`memstore export` and `import`: facts to a file, and from files of this and of other programs."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, Annotated

import typer

from memstore.cli.command import DryRunOption, command
from memstore.cli.failures import no_such_owner
from memstore.cli.output import plain, progress_bar
from memstore.cli.session import Session
from memstore.errors import InvalidExport, InvalidInput
from memstore.records.codec import content_digest
from memstore.transfer.export import export_facts
from memstore.transfer.export_file import FORMAT, check_file
from memstore.transfer.foreign import OwnedFact, import_foreign, read_locomo, read_mem0
from memstore.transfer.importing import import_facts, require_no_ids_of_others
from memstore.types import FactId, NewFact, OwnerId
from memstore.validation import validate_owner

_HEADER_START = json.dumps({"format": FORMAT}).removesuffix("}").encode()
_IN_MEMORY_BYTES = 16 * 2**20
_BATCH = 256


class FileFormat(StrEnum):
    """What wrote a file."""

    AUTO = "auto"
    MEMSTORE = "memstore"
    MEM0 = "mem0"
    LOCOMO = "locomo"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    command(app, "export")(export)
    command(app, "import", makes_store=True)(import_file)


def export(
    session: Session,
    owner: Annotated[list[str] | None, typer.Option(metavar="OWNER", help="Of this owner; may be repeated.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is stdout.")] = Path("-"),
) -> None:
    """Write facts with their history to a file: a header with a checksum, then one JSON object a line.

    What was written is counted on stdout, or on stderr where the facts go to stdout. An owner without any fact is an
    error, and nothing is written then.
    """
    store = session.open_store(with_kv=False)
    for name in owner or ():
        if not store.records.page(validate_owner(name), stream=None, limit=1, after_seq=0, superseded=True):
            raise no_such_owner(name)
    to_stdout = str(output) == "-"
    with progress_bar("exporting") as on_progress:
        sink = sys.stdout.buffer if to_stdout else output
        report = export_facts(store, sink, owners=owner or None, on_progress=on_progress)
    sentence = f"exported {report.facts} facts and {report.former_versions} former versions of {report.owners} owners"
    if to_stdout:
        session.out.note(sentence)
    else:
        session.out.say({"output": str(output), **plain(report)}, f"{sentence} to {output}")


def import_file(
    session: Session,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What to read; - is stdin.", show_default=False)],
    written_by: Annotated[
        FileFormat, typer.Option("--format", metavar="FORMAT", help="auto, memstore, mem0 or locomo.")
    ] = FileFormat.AUTO,
    owner: Annotated[
        str | None, typer.Option(metavar="OWNER", help="Whose they are, instead of whom a Mem0 or LoCoMo file names.")
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Add the facts of an export, of Mem0's memories, or of LoCoMo's conversations.

    The whole file is checked before anything is written, and repeating an import adds nothing. A dry run does the
    same check; of an export, it counts as already there what the store has under the same id.
    """
    with _opened(source) as file:
        written_by = _recognised(file) if written_by is FileFormat.AUTO else written_by
        if written_by is FileFormat.MEMSTORE and owner is not None:
            raise InvalidInput("--owner is for files of other programs: an export says whose facts they are")
        if dry_run:
            counts = _counted(session, file, written_by, owner)
            sentence = f"would import {counts['facts'] - counts['already_there']} of {counts['facts']} facts"
            session.out.say({"imported": False, "format": written_by, **counts}, sentence)
        else:
            _import(session, file, written_by, owner)


def _import(session: Session, file: IO[bytes], written_by: FileFormat, owner: str | None) -> None:
    document = {"imported": True, "format": written_by}
    with progress_bar("importing") as on_progress:
        if written_by is FileFormat.MEMSTORE:
            report = import_facts(session.open_store(with_kv=False), file, on_progress=on_progress)
            document |= plain(report)
        else:
            facts = list(_read(file, written_by))
            store = session.open_store(with_kv=False)
            document |= plain(import_foreign(store, facts, owner=owner, on_progress=on_progress))
            document |= {"skipped": []}
    sentence = f"imported {document['created']} facts, {document['already_there']} were there"
    skipped: Sequence[dict[str, str]] = document["skipped"]  # type: ignore[assignment]
    session.out.say(document, f"{sentence}, {len(skipped)} were skipped" if skipped else sentence)
    if not session.out.as_json:
        for one in skipped:
            session.out.note(f"skipped {one['fact_id']} of {one['owner']}: {one['reason']}")


def _counted(session: Session, file: IO[bytes], written_by: FileFormat, owner: str | None) -> dict[str, int]:
    """Check the file, and count what is in it and what of that is in the store."""
    if written_by is FileFormat.MEMSTORE:
        checked = check_file(file)
        if session.has_store:
            require_no_ids_of_others(session.records, checked)
        held = sum(_held(session, name, ids) for name, ids in checked.ids_of.items())
        return {"owners": checked.header.owners, "facts": checked.header.facts, "already_there": held}
    by_owner: dict[OwnerId, list[NewFact]] = {}
    for named, fact in _read(file, written_by):
        whose = named if owner is None else owner
        if whose is None:
            raise InvalidExport("the file does not say whose the facts are: pass --owner")
        by_owner.setdefault(validate_owner(whose), []).append(fact)
    total = sum(map(len, by_owner.values()))
    new = sum(_new(session, name, facts) for name, facts in by_owner.items())
    return {"owners": len(by_owner), "facts": total, "already_there": total - new}


def _held(session: Session, owner: OwnerId, ids: Sequence[FactId]) -> int:
    if not session.has_store:
        return 0
    return sum(
        len(session.records.get_many(owner, ids[start : start + _BATCH])) for start in range(0, len(ids), _BATCH)
    )


def _new(session: Session, owner: OwnerId, facts: Sequence[NewFact]) -> int:
    distinct = list({content_digest(fact): fact for fact in facts}.values())
    if not session.has_store:
        return len(distinct)
    parts = (distinct[start : start + _BATCH] for start in range(0, len(distinct), _BATCH))
    return sum(twin is None for part in parts for twin in session.records.find_identical(owner, part))


def _read(file: IO[bytes], written_by: FileFormat) -> Iterator[OwnedFact]:
    return read_locomo(file) if written_by is FileFormat.LOCOMO else read_mem0(file)


def _recognised(file: IO[bytes]) -> FileFormat:
    """Return what wrote a file, and leave it where it was."""
    is_export = file.read(len(_HEADER_START)) == _HEADER_START
    file.seek(0)
    if is_export:
        return FileFormat.MEMSTORE
    try:
        content = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidExport("the file is neither an export nor JSON: pass --format to see what is wrong") from error
    file.seek(0)
    first = content[0] if isinstance(content, list) and content else None
    return FileFormat.LOCOMO if isinstance(first, dict) and "sample_id" in first else FileFormat.MEM0


@contextmanager
def _opened(source: Path) -> Iterator[IO[bytes]]:
    """Yield a file that can be read twice."""
    with ExitStack() as stack:
        file: IO[bytes] = sys.stdin.buffer if str(source) == "-" else stack.enter_context(source.open("rb"))
        if not file.seekable() or file is sys.stdin.buffer:
            copy = stack.enter_context(tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES))
            shutil.copyfileobj(file, copy)
            copy.seek(0)
            file = copy
        yield file
