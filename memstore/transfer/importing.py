"""Facts of an export into a store."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import IO, NamedTuple, TypeAlias

from memstore.drafts import Progress, embed_facts
from memstore.embedding import Vectors
from memstore.errors import EmbeddingError, FactNotFound, InvalidExport, InvalidFact, InvalidInput
from memstore.records.base import RecordStore, RestoredFact
from memstore.records.codec import record_body
from memstore.searchable import vectors_name
from memstore.store import MemStore
from memstore.transfer.export_file import Checked, ExportedFact, check_file, content_of, read_again
from memstore.types import Fact, FactId, FactState, OwnerId

_Line: TypeAlias = tuple[int, ExportedFact]
_IN_MEMORY_BYTES = 16 * 2**20


class SkipReason(StrEnum):
    """Why a fact was not imported."""

    EXPIRED = "expired"
    SAME_CONTENT = "same content"
    """Another current fact of the owner says it already; of the two expiries the later one counts."""

    OTHER_VERSION = "other version"
    """The store has the fact, and it has changed in one of the two places."""


class Skipped(NamedTuple):
    """A fact that was not imported."""

    owner: OwnerId
    fact_id: FactId
    reason: SkipReason


class ImportReport(NamedTuple):
    """What an import did; the three numbers add up to the facts of the file."""

    created: int
    already_there: int
    skipped: list[Skipped]


def import_facts(
    store: MemStore,
    source: str | os.PathLike[str] | IO[bytes],
    *,
    on_progress: Progress | None = None,
    batch: int = 256,
    clock: Callable[[], float] = time.time,
) -> ImportReport:
    """Store the facts of an export under their own ids, with their versions, times, states and history.

    The whole file is checked before anything is written. What the store has already is neither changed nor embedded,
    so that an import that was interrupted goes on where it was when it is repeated. Seqs are new; they keep the order.

    Parameters
    ----------
    source
        A path or a binary stream; one that cannot seek is copied to a temporary file first.
    on_progress
        Called with (facts of the file dealt with so far, facts of the file).
    batch
        Facts that are embedded and then stored as one.
    clock
        Unix seconds; what has expired by then is skipped.

    Raises
    ------
    InvalidExport
        Naming the line: not the bytes that an export wrote, or a fact that cannot be stored. Nothing was written.
    EmbeddingError
        Naming the line whose text has no direction. What came before it has been stored.
    FileNotFoundError, IsADirectoryError, PermissionError
        By a path, with nothing written.
    StoreError, OSError
    """
    if batch < 1:
        raise InvalidInput(f"batch is {batch}: use at least 1")
    with _seekable(source) as file:
        start = file.tell()
        checked = check_file(file)
        require_no_ids_of_others(store.records, checked)
        file.seek(start)
        importer = _Importer(store, now=clock())
        done = 0
        for owner, lines in _batches(read_again(file, checked), batch):
            importer.take(owner, lines)
            done += len(lines)
            if on_progress is not None:
                on_progress(done, checked.header.facts)
    return ImportReport(importer.created, importer.already_there, importer.skipped)


class _Importer:
    def __init__(self, store: MemStore, *, now: float) -> None:
        self._store = store
        self._now = now
        self.created = 0
        self.already_there = 0
        self.skipped: list[Skipped] = []

    def take(self, owner: OwnerId, lines: Sequence[_Line]) -> None:
        """Store facts of one owner, as one, that are not there yet."""
        records = self._store.records
        held = {fact.id: fact for fact in records.get_many(owner, [exported.fact.id for _, exported in lines])}
        fresh: list[_Line] = []
        for number, exported in lines:
            fact = exported.fact
            if fact.id in held:
                self._count_held(fact, held[fact.id])
            elif _has_expired(fact, self._now):
                self.skipped.append(Skipped(owner, fact.id, SkipReason.EXPIRED))
            else:
                fresh.append((number, exported))
        twins = self._twins(owner, fresh)
        for _, exported in fresh:
            if exported.fact.id in twins:
                self._count_twin(exported.fact, twins[exported.fact.id])
        fresh = [line for line in fresh if line[1].fact.id not in twins]
        vectors = self._embed(fresh)
        restored = [RestoredFact(fact, history, vectors.get(fact.id)) for _, (fact, history) in fresh]
        if not restored:
            return
        try:
            insertions = records.restore(owner, restored, embedder=vectors_name(self._store.embedder))
        except InvalidFact as error:
            # Another import was faster than this one, which has looked at the ids.
            raise InvalidExport(f"lines {fresh[0][0]} to {fresh[-1][0]}: {error}") from error
        for (fact, _, _), insertion in zip(restored, insertions, strict=True):
            if insertion.created:
                self.created += 1
            elif insertion.fact.id == fact.id:
                self._count_held(fact, insertion.fact)
            else:
                self._count_twin(fact, insertion.fact)

    def _twins(self, owner: OwnerId, lines: Sequence[_Line]) -> dict[FactId, Fact]:
        """Return, by the id in the file, facts of the store that say the same as a current one of the file."""
        current = [exported.fact for _, exported in lines if exported.fact.state is FactState.CURRENT]
        found = self._store.records.find_identical(owner, [content_of(fact) for fact in current])
        return {
            fact.id: twin
            for fact, twin in zip(current, found, strict=True)
            if twin is not None and not _has_expired(twin, self._now)
        }

    def _embed(self, lines: Sequence[_Line]) -> dict[FactId, Vectors]:
        current = [(number, exported.fact) for number, exported in lines if exported.fact.state is FactState.CURRENT]
        facts = [fact for _, fact in current]
        try:
            vectors = embed_facts(self._store.embedder, facts, batch=self._store.settings.embed_batch)
        except EmbeddingError as error:
            if error.position is None:
                raise
            number = current[error.position][0]
            raise EmbeddingError(f"line {number}: the text has no usable vector", position=error.position) from error
        return {fact.id: rows for (_, fact), rows in zip(current, vectors, strict=True)}

    def _count_held(self, fact: Fact, held: Fact) -> None:
        # As JSON, since to Python 1 is True.
        if record_body(held) == record_body(fact):
            self.already_there += 1
        else:
            self.skipped.append(Skipped(fact.owner, fact.id, SkipReason.OTHER_VERSION))

    def _count_twin(self, fact: Fact, twin: Fact) -> None:
        self.skipped.append(Skipped(fact.owner, fact.id, SkipReason.SAME_CONTENT))
        if twin.expires_at is None or (fact.expires_at is not None and fact.expires_at <= twin.expires_at):
            return
        # Changed or removed by somebody else since, or expired at last: then nothing is to be kept.
        with suppress(FactNotFound, InvalidFact):
            self._store.update(fact.owner, twin.id, expires_at=fact.expires_at)


def _has_expired(fact: Fact, now: float) -> bool:
    return fact.expires_at is not None and fact.expires_at <= now


def require_no_ids_of_others(records: RecordStore, checked: Checked) -> None:
    """Raise `InvalidExport` where a fact of the file has the id of another owner's fact in the store."""
    for owner, ids in checked.ids_of.items():
        for start in range(0, len(ids), 1000):
            held = records.held_by_others(owner, ids[start : start + 1000])
            if held:
                line = checked.lines_of[held[0]]
                raise InvalidExport(
                    f"line {line}: the id {held[0]!r} is that of a fact of another owner in this store, "
                    "and ids are unique over all owners"
                )


def _batches(lines: Iterable[_Line], size: int) -> Iterator[tuple[OwnerId, list[_Line]]]:
    """Yield up to `size` lines of one owner at a time, in the order of the file."""
    batch: list[_Line] = []
    for line in lines:
        if batch and (len(batch) == size or line[1].fact.owner != batch[0][1].fact.owner):
            yield batch[0][1].fact.owner, batch
            batch = []
        batch.append(line)
    if batch:
        yield batch[0][1].fact.owner, batch


@contextmanager
def _seekable(source: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as opened, _seekable(opened) as file:
            yield file
    elif source.seekable():
        yield source
    else:
        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as copy:
            shutil.copyfileobj(source, copy)
            copy.seek(0)
            yield copy
