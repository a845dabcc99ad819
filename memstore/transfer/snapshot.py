"""All facts of one owner as they are at one position of the feed, while others go on writing."""

from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from memstore.errors import FeedGap, StoreBusy
from memstore.records.base import RecordStore
from memstore.transfer.export_file import ExportedFact, fact_line
from memstore.types import ChangeKind, Fact, FactState, OwnerId

_PAGE = 500
_ATTEMPTS = 20
_CATCH_UPS = 1000


class _Place(NamedTuple):
    start: int
    size: int
    former_versions: int


class Snapshot:
    """Lines of an owner's facts in `file`, which may have those of other owners too.

    Everything is read once, and what has changed meanwhile is read again until nothing has. A line that has been
    read again is appended; the file is for this process only.
    """

    def __init__(self, records: RecordStore, owner: OwnerId, file: IO[bytes], *, now: float) -> None:
        self._records = records
        self._owner = owner
        self._file = file
        self._now = now
        self._places: dict[int, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def former_versions(self) -> int:
        """Of all facts."""
        return sum(place.former_versions for place in self._places.values())

    def lines(self) -> Iterator[bytes]:
        """Yield the lines in the order of the store."""
        for _, place in sorted(self._places.items()):
            self._file.seek(place.start)
            yield self._file.read(place.size)

    def take(self, on_read: Callable[[int], None]) -> None:
        """Read the facts, those left out that have expired; `on_read` is told how many current ones there were.

        Raises
        ------
        StoreBusy
            Where they change faster than they can be read.
        """
        for _ in range(_ATTEMPTS):
            self._places.clear()
            position = self._records.head(self._owner).position
            self._read_all(on_read)
            if self._catch_up(position):
                return
        raise StoreBusy(f"the facts of owner {self._owner!r} change faster than they can be read: try again later")

    def _read_all(self, on_read: Callable[[int], None]) -> None:
        after_seq = 0
        while page := self._records.page(self._owner, stream=None, limit=_PAGE, after_seq=after_seq, superseded=True):
            for fact in page:
                self._put(fact)
            after_seq = page[-1].seq
            on_read(sum(fact.state is FactState.CURRENT for fact in page))

    def _catch_up(self, position: int) -> bool:
        """Read again what has changed after `position`; return False where everything has to be."""
        for _ in range(_CATCH_UPS):
            # The feed may have been trimmed past the last change of an owner who has none since.
            if self._records.head(self._owner).position == position:
                return True
            try:
                changes = self._records.changes(position, owner=self._owner, limit=_PAGE)
            except FeedGap:
                return False
            if any(change.kind is ChangeKind.PURGED for change in changes):
                return False
            seqs = [change.seq for change in changes if change.seq is not None]
            facts = self._records.get_by_seqs(self._owner, seqs)
            for seq in seqs:
                self._places.pop(seq, None)
            for fact in facts.values():
                self._put(fact)
            if changes:
                position = changes[-1].position
        return False

    def _put(self, fact: Fact) -> None:
        if fact.expires_at is not None and fact.expires_at <= self._now:
            return
        former = self._records.history(self._owner, fact.id) if fact.version > 1 else []
        # Somebody may have changed the fact since it was read.
        history = tuple(one for one in former if one.version < fact.version)
        line = fact_line(ExportedFact(fact, history))
        start = self._file.seek(0, 2)
        self._file.write(line)
        self._places[fact.seq] = _Place(start, len(line), len(history))
