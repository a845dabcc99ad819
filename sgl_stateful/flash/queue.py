"""Which question is evaluated next: one place in the line for each, however often its session changes.

Sorted by, each after the other: priority and time waited, in whole steps; expected value; arrival. Waiting raises a
question by one step every ``aging_s``, as it does requests (``sessions.ordering``), so that none waits for ever behind
others that are worth more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor

from .entry import Entry


@dataclass(slots=True)
class Wanted:
    """A place in the line.

    Attributes
    ----------
    data_version
        The newest that is known.
    since
        When the data came that nobody has answered on yet, seconds.
    """

    data_version: int
    since: float


class EvaluationQueue:
    """The line of all sessions.

    Parameters
    ----------
    aging_s
        Waiting this long counts as one step of priority.
    most
        How many are evaluated at once.
    """

    def __init__(self, *, aging_s: float, most: int) -> None:
        self._aging_s = aging_s
        self._most = most
        self._waiting: dict[Entry, Wanted] = {}
        self._running: dict[Entry, Wanted] = {}
        self._began_at: dict[Entry, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def want(self, entry: Entry, data_version: int, *, now: float) -> None:
        """Have the question evaluated on a version; one that waits already keeps its place and takes the newer one."""
        wanted = self._waiting.setdefault(entry, Wanted(data_version, now))
        wanted.data_version = max(wanted.data_version, data_version)

    def drop(self, entry: Entry) -> None:
        """The question is no more, or is to be evaluated no more."""
        for table in (self._waiting, self._running, self._began_at):
            table.pop(entry, None)

    def take(self, now: float) -> dict[Entry, Wanted]:
        """The next batch: the first of the line that may run now, and the others of its session; empty without any."""
        ready = sorted((e for e in self._waiting if self._ready_at(e) <= now), key=lambda e: self._rank(e, now))
        batch = [entry for entry in ready if entry.session_id == ready[0].session_id][: self._most]
        for entry in batch:
            self._running[entry] = self._waiting.pop(entry)
            self._began_at[entry] = now
        return {entry: self._running[entry] for entry in batch}

    def done(self, entry: Entry) -> None:
        """A question that was taken has been evaluated, or cannot be."""
        self._running.pop(entry, None)

    def put_back(self, entry: Entry) -> None:
        """A question that was taken was not evaluated: it goes back to where it stood."""
        if (wanted := self._running.pop(entry, None)) is None:
            return
        self._began_at.pop(entry, None)
        newer = self._waiting.get(entry, wanted)
        self._waiting[entry] = Wanted(max(wanted.data_version, newer.data_version), min(wanted.since, newer.since))

    def since(self, entry: Entry) -> float | None:
        """When the data came that a question is being evaluated on; None where it is not."""
        wanted = self._running.get(entry)
        return None if wanted is None else wanted.since

    def next_at(self) -> float | None:
        """When the first of the line may run; None: there is none."""
        return min(map(self._ready_at, self._waiting), default=None)

    def wanted(self, entry: Entry) -> Wanted | None:
        """Where the question stands; None where it does not wait."""
        return self._waiting.get(entry)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._waiting))

    def _ready_at(self, entry: Entry) -> float:
        if entry in self._running:
            return float("inf")
        began, wanted = self._began_at.get(entry), self._waiting[entry]
        return wanted.since if began is None else max(wanted.since, began + 1e-3 * entry.question.min_interval_ms)

    def _rank(self, entry: Entry, now: float) -> tuple[int, float, float]:
        waited = max(now - self._waiting[entry].since, 0.0)
        step = floor(entry.question.priority + waited / self._aging_s)
        return -step, -entry.worth.value(), self._waiting[entry].since
