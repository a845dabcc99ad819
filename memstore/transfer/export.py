"""Facts of a store to a file; `memstore.transfer.importing` is the way back."""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from memstore.drafts import Progress
from memstore.store import MemStore
from memstore.transfer.export_file import Header
from memstore.transfer.snapshot import Snapshot
from memstore.validation import validate_owner


class ExportReport(NamedTuple):
    """What an export holds."""

    owners: int
    """Those that have a fact."""

    facts: int
    """Superseded ones included."""

    former_versions: int
    sha256: str


def export_facts(
    store: MemStore,
    sink: str | os.PathLike[str] | IO[bytes],
    *,
    owners: Sequence[str] | None = None,
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.time,
) -> ExportReport:
    """Write the facts of some owners, or of all, with their history, to a path or to a binary stream.

    A path is replaced as a whole when everything is written, by a file that only this user can read. Each owner's
    facts are those of one moment, also while others write. Vectors and KV are not exported: they follow from the
    facts. See `memstore.transfer.export_file` for the format.

    Parameters
    ----------
    on_progress
        Called with (current facts read so far, current facts).
    clock
        Unix seconds; what has expired by then is left out.

    Raises
    ------
    InvalidOwner, StoreError, OSError
    """
    names = sorted(store.records.owners() if owners is None else {validate_owner(owner) for owner in owners})
    exported_at = clock()
    total = sum(map(store.records.count, names))
    done = 0

    def on_read(facts: int) -> None:
        nonlocal done
        done = min(done + facts, total)
        if on_progress is not None:
            on_progress(done, total)

    with tempfile.TemporaryFile() as spool:
        snapshots = [Snapshot(store.records, name, spool, now=exported_at) for name in names]
        for snapshot in snapshots:
            snapshot.take(on_read)
        header = Header(
            owners=sum(len(snapshot) > 0 for snapshot in snapshots),
            facts=sum(map(len, snapshots)),
            former_versions=sum(snapshot.former_versions for snapshot in snapshots),
            exported_at=exported_at,
        )
        digest = hashlib.sha256(header.line())
        for snapshot in snapshots:
            for line in snapshot.lines():
                digest.update(line)
        header = header._replace(sha256=digest.hexdigest())
        with _written(sink) as file:
            file.write(header.line())
            for snapshot in snapshots:
                file.writelines(snapshot.lines())
    return ExportReport(header.owners, header.facts, header.former_versions, header.sha256)


@contextmanager
def _written(sink: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    if not isinstance(sink, str | os.PathLike):
        yield sink
        sink.flush()
        return
    path = Path(sink)
    if path.exists() and not path.is_file():
        # A device or a pipe cannot be replaced by a file.
        with path.open("wb") as file:
            yield file
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".export-")
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
