"""A world of sessions, facts and weights around a `FlashTable`, whose engine answers by what it is given alone.

Everything that can happen is one call. What the table is told of may come late, as the changes of other processes do;
sessions alone tell it at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from session_values import Clock

from sgl_stateful.flash.answers import Answer, FactVersions, Present
from sgl_stateful.flash.entry import Entry
from sgl_stateful.flash.outcomes import Hit, Miss, Run
from sgl_stateful.flash.question import Ask, Prompt, Question
from sgl_stateful.flash.table import FlashTable
from sgl_stateful.params import MemoryParams
from sgl_stateful.sessions.content import Content

OWNERS = ("ana", "bo")
FACTS_FOUND = 2


def question(name: str = "q", word: str = "what", sampling: str = '{"temperature":0}', **more: Any) -> Question:
    """A question whose token ids are its bytes; in an empty session another byte stands before them."""
    ids = tuple(word.encode())
    values: dict[str, Any] = {
        "name": name,
        "content": Content(text=word),
        "behind": Prompt((), ids),
        "first": Prompt((), (1, *ids)),
        "sampling_params": {"temperature": 0},
        "sampling": sampling,
        "audit_target": 0.5,
    }
    return Question(**(values | more))


def answered(text: str = "yes", **more: Any) -> Answer:
    return Answer(text, tuple(text.encode()), **more)


@dataclass
class WorldSession:
    owner: str
    version: int = 0
    versions: dict[int, str] = field(default_factory=dict)
    left_at: dict[int, float] = field(default_factory=dict)
    flushes: int = 0

    @property
    def content(self) -> str:
        return self.versions[self.version]


@dataclass
class Running:
    run: Run
    text: str


class World:
    """The truth, and a table that is asked about it."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.clock = Clock(1000.0)
        self.table = FlashTable(
            limit=9,
            owner_limit=6,
            batch=3,
            aging_s=4.0,
            audit_every=3,
            kept_events=8,
            clock=self.clock,
            chance=rng.random,
        )
        self.sessions: dict[str, WorldSession] = {}
        self.facts: dict[str, dict[str, tuple[int, str]]] = {owner: {} for owner in OWNERS}
        self.epochs = dict.fromkeys(OWNERS, 0)
        self.weights: str | None = "w0"
        self.count = 0
        self.late: list[Callable[[], None]] = []
        self.runs: list[Running] = []
        self.hits = self.stale_allowed = self.misses = 0

    # ---- the truth ----

    def found(self, owner: str, memory: MemoryParams | None) -> FactVersions:
        """What the store has for a question now."""
        if memory is None or memory.mode == "off":
            return ()
        there = self.facts[owner]
        if memory.facts is not None:
            return tuple((name, there[name][0]) for name in memory.facts if name in there)
        best = sorted(there, key=lambda name: hashlib.md5(there[name][1].encode()).hexdigest())[:FACTS_FOUND]
        return tuple((name, there[name][0]) for name in best)

    def decoded(self, session: WorldSession, content: str, ask: Ask, facts: FactVersions) -> str:
        """What the engine says, by everything that it is given."""
        texts = [self.facts[session.owner][name][1] for name, _ in facts]
        given = (content, ask.prompt, ask.sampling, ask.memory, texts, self.weights, self.epochs[session.owner])
        return hashlib.md5(repr(given).encode()).hexdigest()

    def present(self, session: WorldSession) -> Present:
        return Present(session.version, self.epochs[session.owner], self.weights, session.content == "")

    # ---- telling the table ----

    def tell(self, what: Callable[[], None], touched: Callable[[Entry], bool]) -> None:
        """Now or later; then exactly the answers that are touched are gone."""

        def at_last() -> None:
            entries = self.table.registrations.everyone()
            before = {entry for entry in entries if entry.stored is not None}
            gone = {entry for entry in before if touched(entry)}
            what()
            assert {entry for entry in before if entry.stored is not None} == before - gone

        if self.rng.random() < 0.3:
            self.late.append(at_last)
        else:
            self.deliver()
            at_last()

    def deliver(self) -> None:
        """Tell the table what it has not been told yet, in order."""
        late, self.late = self.late, []
        for one in late:
            one()

    # ---- sessions ----

    def open(self, owner: str, content: str) -> None:
        name = f"s{self.count}"
        self.count += 1
        self.sessions[name] = WorldSession(owner, 1, {1: content})

    def change(self, name: str, content: str) -> None:
        """Append, or rewind: another version, whatever it holds."""
        session = self.sessions[name]
        session.left_at[session.version] = self.clock.now
        session.version += 1
        session.versions[session.version] = content
        before = {entry: entry.stored for entry in self.table.registrations.everyone()}
        self.table.changed(name, session.version)
        assert {entry: entry.stored for entry in self.table.registrations.everyone()} == before

    def append(self, name: str, more: str) -> None:
        self.change(name, self.sessions[name].content + more)

    def rewind(self, name: str) -> None:
        session = self.sessions[name]
        self.change(name, session.versions[self.rng.choice(sorted(session.versions))])

    def close(self, name: str) -> None:
        del self.sessions[name]
        self.tell(lambda: self.table.ended(name), lambda entry: entry.session_id == name)

    # ---- questions ----

    def register(self, name: str, asked: Question) -> Entry:
        session = self.sessions[name]
        return self.table.register(name, session.owner, asked, data_version=session.version)

    def update(self, entry: Entry, asked: Question) -> None:
        before = {one for one in self.table.registrations.everyone() if one.stored is not None}
        self.table.update(entry, asked)
        assert {one for one in before if one.stored is not None} == before - {entry}

    # ---- everything else ----

    def set_fact(self, owner: str, fact_id: str, text: str) -> None:
        """Add a fact, or change it."""
        is_new = fact_id not in self.facts[owner]
        version = 1 if is_new else self.facts[owner][fact_id][0] + 1
        self.facts[owner][fact_id] = (version, text)
        self._facts_changed(owner, None if is_new else fact_id)

    def delete_fact(self, owner: str, fact_id: str) -> None:
        del self.facts[owner][fact_id]
        self._facts_changed(owner, fact_id)

    def _facts_changed(self, owner: str, fact_id: str | None) -> None:
        def stood_in(entry: Entry) -> bool:
            return entry.owner == owner and entry.stored is not None and fact_id in dict(entry.stored.key.facts)

        self.tell(lambda: self.table.facts_changed(owner, fact_id), stood_in)

    def purge(self, owner: str) -> None:
        """Facts and sessions go; sessions opened since would stay, of which some are here."""
        self.epochs[owner] += 1
        self.facts[owner].clear()
        for name in [n for n, s in self.sessions.items() if s.owner == owner and self.rng.random() < 0.7]:
            self.close(name)
        self.tell(lambda: self.table.purged(owner), lambda entry: entry.owner == owner)

    def flush(self) -> None:
        self.tell(self.table.flushed, lambda entry: True)

    def update_weights(self) -> None:
        """Begin an update, or end the one that is under way."""
        if self.weights is not None:
            self.weights = None
            return
        self.count += 1
        self.weights = f"w{self.count}"
        self.tell(self.table.weights_changed, lambda entry: True)

    # ---- evaluating ----

    def take(self) -> None:
        """Begin a batch, as the worker does: all that each run depends on is looked up now, and decoded from that."""
        batch = self.table.take()
        assert len({entry.session_id for entry in batch}) <= 1
        for entry in batch:
            session = self.sessions.get(entry.session_id)
            if session is None or self.weights is None:
                self.table.put_back(entry)
                continue
            facts = self.found(session.owner, entry.question.memory)
            run = self.table.begin(entry, self.present(session), facts)
            if run is not None:
                text = self.decoded(session, session.content, run.key.ask, facts)
                self.runs.append(Running(run, text))

    def finish(self, how: str) -> None:
        """One of the runs comes to its end."""
        if not self.runs:
            return
        running = self.runs.pop(self.rng.randrange(len(self.runs)))
        match how:
            case "evaluated":
                self.table.evaluated(running.run, answered(running.text))
            case "failed":
                self.table.failed(running.run.entry, running.run, "out of order")
            case _:
                self.table.put_back(running.run.entry, running.run)

    def audit(self) -> None:
        """Decode a hit again; one in four has come out otherwise."""
        if (run := self.table.take_audit()) is not None:
            match self.rng.randrange(8):
                case 0:
                    self.table.put_back_audit(run)
                case 1:
                    self.table.drop_audit(run)
                case n:
                    self.table.audited(run, agreed=n > 2)

    # ---- asking ----

    def ask(self, name: str, asked: Question, max_staleness_s: float) -> Hit | Miss | None:
        """Ask now, and compare what is served with the truth."""
        session = self.sessions[name]
        present, facts = self.present(session), self.found(session.owner, asked.memory)
        ask = asked.ask(is_first=present.is_first)
        found = self.table.find(name, ask, present=present, facts=facts, max_staleness_s=max_staleness_s)
        if not isinstance(found, Hit):
            self.misses += 1
            return found
        self.hits += 1
        version = found.stored.key.present.data_version
        if version != session.version:
            self.stale_allowed += 1
            assert max_staleness_s > 0
            assert self.clock.now - session.left_at[version] <= max_staleness_s
        assert self.weights is not None
        assert found.stored.answer.text == self.decoded(session, session.versions[version], ask, facts), "stale"
        return found
