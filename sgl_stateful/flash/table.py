"""The registered questions of one server as a state machine: what is asked, what is known, and what no longer holds.

::

    register ──► wanted ──► running ──► answered ──► served, now and then audited
                   ▲           │            │                        │
                   │  preempted│            │ append, rewind         │ precision under its target
                   ├───────────┘            │ fact, flush, weights   ▼
                   └────────────────────────┘                     retired

No I/O and no engine: time comes from a clock, chance from a generator, runs are handed out. An answer is served where
all that it depends on (``AnswerKey``) is what it is now. Whatever changes makes void what it touches, in the table and
of what runs, and has that evaluated again; a key that was missed by that would still not match.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from .answers import Answer, AnswerKey, FactVersions, Present, Stored
from .entry import Entry
from .events import EventLogs
from .outcomes import Hit, Miss, Run
from .question import Ask, Prompt, Question
from .queue import EvaluationQueue
from .registrations import Registrations
from .shown import shown_answer

_MOST_AUDITS = 100  # that wait


class FlashTable:
    """Questions and answers. Of one thread.

    Parameters
    ----------
    limit, owner_limit
        Questions in all, and of one owner.
    batch
        How many are evaluated at once.
    aging_s
        Waiting this long counts as one step of priority.
    audit_every
        One in so many hits is decoded again, by chance.
    kept_events
        Of each session.
    queue, noun
        A queue that several tables share, None for one of its own; and what it holds, in messages.
    clock, chance
        Seconds; numbers in [0, 1).
    """

    def __init__(
        self,
        *,
        limit: int,
        owner_limit: int,
        batch: int = 16,
        aging_s: float = 5.0,
        audit_every: int = 50,
        kept_events: int = 256,
        queue: EvaluationQueue | None = None,
        noun: str = "question",
        clock: Callable[[], float],
        chance: Callable[[], float] | None = None,
    ) -> None:
        self.registrations = Registrations(limit=limit, owner_limit=owner_limit, noun=noun)
        self.queue = EvaluationQueue(aging_s=aging_s, most=batch) if queue is None else queue
        self.events = EventLogs(kept_events)
        self.clock = clock
        self.flushes = 0
        self._chance = chance or random.random
        self._aging_s = aging_s
        self._audit_every = audit_every
        self._template_versions = 0
        self._versions: dict[str, int] = {}
        self._runs: set[Run] = set()
        self._audits: list[Run] = []

    # ---- registering ----

    def register(self, session_id: str, owner: str, question: Question, *, data_version: int) -> Entry:
        """Register a question, to be evaluated on the session's present version.

        Raises
        ------
        FlashExists, FlashLimitReached
        """
        self.registrations.check(session_id, owner, question)
        entry = Entry(session_id, owner, question, 0, self.clock())
        self.registrations.add(entry)
        self._versions[session_id] = data_version
        self._renew(entry)
        return entry

    def update(self, entry: Entry, question: Question) -> None:
        """Put another question under the name; what is known about the former is forgotten, and it is in service.

        Raises
        ------
        FlashExists
            Another of the session asks the very same; the entry is as before.
        """
        self.registrations.check_new(entry.session_id, question)
        self._void([entry], "updated")
        self.registrations.replace(entry, question)
        self._renew(entry)

    def _renew(self, entry: Entry) -> None:
        self._template_versions += 1
        entry.template_version = self._template_versions
        entry.retired = entry.error = None
        entry.learn_anew()
        self._want(entry)

    def remove(self, entry: Entry) -> None:
        """End a registration."""
        self._forget(entry)
        self.events.tell(entry.session_id, "removed", name=entry.name)

    # ---- what happens ----

    def changed(self, session_id: str, data_version: int) -> None:
        """A session has another version: its answers are of an earlier one, and are wanted of this one."""
        if not (entries := self.registrations.of_session(session_id)):
            return
        now = self.clock()
        self._versions[session_id] = data_version
        held: list[Stored | Run] = [entry.stored for entry in entries if entry.stored is not None]
        held += [run for run in self._runs if run.session_id == session_id]
        for one in held:
            if one.superseded_at is None and one.key.present.data_version != data_version:
                one.superseded_at = now
        for entry in entries:
            self._want(entry)

    def version(self, session_id: str) -> int | None:
        """The newest version of a session that is known; None where it has no questions."""
        return self._versions.get(session_id)

    def ended(self, session_id: str) -> None:
        """A session has ended, and its questions with it."""
        for entry in self.registrations.of_session(session_id):
            self._forget(entry)
        self._versions.pop(session_id, None)
        self.events.end(session_id)

    def facts_changed(self, owner: str, fact_id: str | None) -> None:
        """A fact of an owner was changed or is gone; None: facts were added.

        Answers that it stood in are void. Whose search may find others now is looked at again: where it finds the same,
        its answer holds.
        """
        entries = [entry for entry in self.registrations.of_owner(owner) if entry.question.depends_on(fact_id)]
        self._void([entry for entry in entries if entry.stored and entry.stored.key.has_fact(fact_id)], "fact changed")
        for run in self._runs:
            if run.entry.owner == owner and run.key.has_fact(fact_id):
                run.is_void = True
        for entry in entries:
            self._want(entry)

    def purged(self, owner: str) -> None:
        """Everything of an owner is gone: of a session that is left, which was opened since, nothing is known."""
        entries = self.registrations.of_owner(owner)
        self._void(entries, "purged")
        for entry in entries:
            self._want(entry)

    def flushed(self) -> None:
        """The cache was flushed: what was worked out is forgotten, and worked out again."""
        self.flushes += 1
        self._void_all("flushed")

    def weights_changed(self) -> None:
        """The model has other weights: what gates and audits have seen was of the former."""
        for entry in self.registrations.everyone():
            entry.learn_anew()
        self._void_all("weights changed")

    def _void_all(self, why: str) -> None:
        entries = self.registrations.everyone()
        self._void(entries, why)
        self._audits.clear()
        for entry in entries:
            self._want(entry)

    # ---- evaluating ----

    def take(self) -> list[Entry]:
        """The next batch, all of one session; each to be followed by ``begin`` or ``put_back``; empty without any."""
        return list(self.queue.take(self.clock()))

    def next_at(self) -> float | None:
        """When there is something to do, seconds; None: nothing waits."""
        return self.clock() if self._audits else self.queue.next_at()

    def begin(self, entry: Entry, present: Present, facts: FactVersions = ()) -> Run | None:
        """Begin to evaluate an entry that was taken; None: the answer that there is holds.

        To be followed by ``evaluated``, ``failed``, ``abandon`` or ``put_back``.
        """
        key = self._key(entry, present, facts)
        if not self.registrations.has(entry) or (entry.stored is not None and entry.stored.key == key):
            self.queue.done(entry)
            return None
        run = Run(entry, key, began_at=self.clock(), since=self.queue.since(entry))
        if self._versions.get(entry.session_id) != present.data_version:
            run.superseded_at = self.clock()
        self._runs.add(run)
        return run

    def evaluated(self, run: Run, answer: Answer) -> Stored | None:
        """Take an answer in; None where it no longer holds, or a newer one is there."""
        entry = self._end(run)
        self.queue.done(entry)
        if run.is_void or entry.retired is not None or not self.registrations.has(entry):
            return None
        entry.error = None
        if entry.stored is not None and entry.stored.key.present.data_version > run.key.present.data_version:
            return None
        entry.stored = Stored(run.key, answer, self.clock(), run.superseded_at)
        entry.worth.evaluated(answer)
        self.events.tell(entry.session_id, "answer", name=entry.name, **shown_answer(entry, entry.stored, self.clock()))
        return entry.stored

    def failed(self, entry: Entry, run: Run | None, why: str) -> None:
        """An entry that was taken cannot be evaluated: it is left alone until its session changes."""
        self.abandon(entry, run)
        if (run is None or not run.is_void) and self.registrations.has(entry):
            entry.error = why
            self.events.tell(entry.session_id, "error", name=entry.name, message=why)

    def abandon(self, entry: Entry, run: Run | None) -> None:
        """An entry that was taken is not evaluated, nor wanted any more as far as is known."""
        if run is not None:
            self._end(run)
        self.queue.done(entry)

    def put_back(self, entry: Entry, run: Run | None = None) -> None:
        """An entry that was taken has to wait once more, as callers' requests go first."""
        if run is not None:
            self._end(run)
        self.queue.put_back(entry)
        if not self.registrations.has(entry):
            self.queue.drop(entry)

    def observed(self, entry: Entry, gap: float, *, agreed: bool) -> None:
        """A choice of the gate's was compared with decoding for real."""
        if entry.gate is not None:
            entry.gate.observe(gap, agreed=agreed)

    # ---- serving ----

    def find(
        self,
        session_id: str,
        ask: Ask,
        *,
        present: Present,
        facts: FactVersions = (),
        max_staleness_s: float = 0.0,
    ) -> Hit | Miss | None:
        """The answer of a question that is asked now; None where no such question is registered.

        Parameters
        ----------
        facts
            What the memory has for it now.
        max_staleness_s
            For how long at most the answer's version may have been out of date.
        """
        entries = self.registrations.asked(session_id, ask.prompt)
        entry = next((e for e in entries if e.question.ask(is_first=present.is_first) == ask), None)
        if entry is None:
            return Miss("sampling", entries[0]) if entries else None
        found = self.look(entry, present=present, facts=facts, max_staleness_s=max_staleness_s)
        if isinstance(found, Hit):
            self.served(found)
        return found

    def look(
        self, entry: Entry, *, present: Present, facts: FactVersions = (), max_staleness_s: float = 0.0
    ) -> Hit | Miss:
        """The answer of a question, if it holds now; not counted before it is ``served``."""
        if entry.retired is not None:
            return Miss("retired", entry)
        if present.weight_version is None:
            return Miss("weights", entry)
        if (stored := entry.stored) is None:
            return Miss("not_ready", entry)
        staleness_s = stored.staleness_s(self.clock())
        key = self._key(entry, present, facts)
        if stored.key == key:
            return Hit(entry, stored, 0.0)
        if stored.key.facts != facts:
            return Miss("facts", entry)
        then = stored.key.present
        is_older = then.data_version != present.data_version and stored.superseded_at is not None
        if not is_older or not 0 < max_staleness_s >= staleness_s:
            return Miss("version" if then.data_version != present.data_version else "not_ready", entry)
        # All but the version, which the caller allows to lag behind.
        if stored.key == self._key(entry, present._replace(data_version=then.data_version), facts):
            return Hit(entry, stored, staleness_s)
        return Miss("version", entry)

    def counted(self, hit: Hit) -> None:
        """Count a hit."""
        hit.entry.worth.used += hit.stored.hits == 0
        hit.entry.hits += 1
        hit.stored.hits += 1

    def served(self, hit: Hit, *, asked: Prompt | None = None, audit_every: int | None = None) -> None:
        """Count a hit, and by chance have it audited; ``asked``: what was, where it was not the question itself."""
        self.counted(hit)
        is_audited = hit.entry.question.is_greedy and self._chance() * (audit_every or self._audit_every) < 1
        if is_audited and len(self._audits) < _MOST_AUDITS:
            stored, now = hit.stored, self.clock()
            self._audits.append(Run(hit.entry, stored.key, began_at=now, audits=stored.answer, asked=asked))

    # ---- audits ----

    @property
    def has_audits(self) -> bool:
        """Whether hits wait to be decoded again."""
        return bool(self._audits)

    def take_audit(self) -> Run | None:
        """The next hit to be decoded again: while nothing else is to be done, or when it has waited for long."""
        while self._audits:
            run, now = self._audits[0], self.clock()
            if not self._holds(run):
                self._audits.pop(0)
                continue
            next_at = self.queue.next_at()
            if next_at is not None and next_at <= now and now - run.began_at < self._aging_s:
                return None
            self._runs.add(self._audits.pop(0))
            return run
        return None

    def audited(self, run: Run, *, agreed: bool) -> None:
        """A hit was decoded again; a question whose precision falls short, or other words for it, go out of service."""
        entry = self._end(run)
        if run.is_void or not self._holds(run):
            return
        if run.asked is not None and entry.alike is not None:
            if (why := entry.alike.judged(agreed=agreed)) is not None:
                self.events.tell(entry.session_id, "semantic_retired", name=entry.name, message=why)
            return
        entry.audit.saw(agreed=agreed)
        if run.audits is not None and run.audits.gap is not None and run.audits.by == "gate":
            self.observed(entry, run.audits.gap, agreed=agreed)
        if entry.audit.has_failed and entry.retired is None:
            entry.retired = entry.audit.verdict()
            entry.stored = None
            self.queue.drop(entry)
            self.events.tell(entry.session_id, "retired", name=entry.name, message=entry.retired)

    def put_back_audit(self, run: Run) -> None:
        """A hit was not decoded again, as callers' requests go first."""
        self._end(run)
        if not run.is_void:
            self._audits.insert(0, run)

    def drop_audit(self, run: Run) -> None:
        """A hit cannot be decoded again: what it was computed on is not there any more."""
        self._end(run)

    def _holds(self, run: Run) -> bool:
        return self.registrations.has(run.entry) and run.entry.template_version == run.key.template_version

    # ---- what several need ----

    def _key(self, entry: Entry, present: Present, facts: FactVersions) -> AnswerKey:
        ask = entry.question.ask(is_first=present.is_first)
        return AnswerKey(entry.session_id, present, self.flushes, entry.template_version, ask, facts)

    def _want(self, entry: Entry) -> None:
        if entry.retired is None:
            self.queue.want(entry, self._versions[entry.session_id], now=self.clock())

    def _void(self, entries: Iterable[Entry], why: str) -> None:
        for entry in entries:
            for run in self._runs:
                if run.entry is entry:
                    run.is_void = True
            if entry.stored is not None:
                entry.stored = None
                self.events.tell(entry.session_id, "invalid", name=entry.name, reason=why)

    def _forget(self, entry: Entry) -> None:
        entry.stored = None
        self.queue.drop(entry)
        self.registrations.remove(entry)

    def _end(self, run: Run) -> Entry:
        self._runs.discard(run)
        return run.entry
