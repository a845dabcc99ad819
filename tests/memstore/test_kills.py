"""Processes and servers that are killed at any moment: what was acknowledged is there, and nothing is there by half."""

import multiprocessing
import random
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from bigrams import BigramEmbedder
from redis_server import RedisServer

from memstore import FactState, MemStore, NewFact, StoreError
from memstore.searchable import vectors_name

KILLS = 50
RESTARTS = 12
BATCH = 5
EMBEDDER = BigramEmbedder(64)

# Children are forked from a process that has these, and has opened nothing.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["memstore", "pytest", "redis"])


def work(location: str, life: int, pipe: Connection) -> None:
    """Add, change and supersede facts without end; report what is acknowledged as (id, text, state)."""
    chance = random.Random(life)
    owner = owner_of(life)
    try:
        with MemStore(location, embedder=EMBEDDER) as store:
            for step in range(10**9):
                text = f"fact {step} of life {life}"
                kind = chance.choice(["add", "batch", "update", "supersede"])
                parts = [f"{text}, part {part}" for part in range(BATCH)] if kind == "batch" else [text]
                facts = store.add_many(owner, [NewFact(part, stream=f"{kind} {text}") for part in parts])
                pipe.send([(fact.id, fact.text, fact.state) for fact in facts])
                if kind == "update":
                    changed = store.update(owner, facts[0].id, text=f"{text}, changed")
                    pipe.send([(changed.id, changed.text, changed.state)])
                elif kind == "supersede":
                    new = store.supersede(owner, facts[0].id, f"{text}, succeeded")
                    pipe.send([(facts[0].id, text, FactState.SUPERSEDED), (new.id, new.text, new.state)])
    except StoreError as error:
        # Where the server was killed.
        pipe.send(type(error).__name__)


def owner_of(life: int) -> str:
    return f"owner {life % 20}"


Acknowledged = dict[str, list[tuple[str, FactState]]]
"""By id, in the order of the reports."""


class Life:
    """One child, and what it reported."""

    def __init__(self, location: str, number: int) -> None:
        self.number = number
        self.acknowledged: Acknowledged = {}
        self.ended_with: str | None = None
        self._pipe, theirs = FORKSERVER.Pipe(duplex=False)
        self.process: BaseProcess = FORKSERVER.Process(target=work, args=(location, number, theirs))
        self.process.start()
        theirs.close()

    def listen(self, reports: int) -> None:
        for _ in range(reports):
            self._take(self._pipe.recv())

    def end(self) -> None:
        """Take what was still reported before the end."""
        while True:
            try:
                self._take(self._pipe.recv())
            except EOFError:
                break
        self.process.join()
        self.process.close()
        self._pipe.close()

    def _take(self, report: str | list[tuple[str, str, FactState]]) -> None:
        if isinstance(report, str):
            self.ended_with = report
            return
        for fact_id, text, state in report:
            self.acknowledged.setdefault(fact_id, []).append((text, state))


def verify(store: MemStore, life: Life, *, searched: float) -> None:
    """Everything of one life is there as it was acknowledged, whole, and this part of it is found."""
    owner = owner_of(life.number)
    facts = {fact.id: fact for fact in store.list(owner, limit=100_000, superseded=True)}
    assert set(life.acknowledged) <= set(facts)
    chance = random.Random(life.number)
    for fact_id, reports in life.acknowledged.items():
        fact, (text, state) = facts[fact_id], reports[-1]
        # The change after the last one that was reported may have happened as well, whole.
        later = (f"{text}, changed", state), (text, FactState.SUPERSEDED)
        assert (fact.text, fact.state) in ((text, state), *later)
        if len(reports) > 1:
            assert [former.text for former in store.history(owner, fact_id)] == [reports[0][0], fact.text]
        if fact.state is FactState.CURRENT and chance.random() < searched:
            hits = store.search(owner, fact.text, k=50)
            assert fact in [hit.fact for hit in hits if hit.score > 1 - 1e-6]
        elif fact.state is FactState.SUPERSEDED:
            assert any(other.supersedes == fact_id for other in facts.values())
    streams = Counter(fact.stream for fact in facts.values())
    assert {count for stream, count in streams.items() if stream.startswith("batch")} <= {BATCH}


def check(store: MemStore) -> None:
    assert store.records.check(embedder=vectors_name(EMBEDDER), dimension=EMBEDDER.dimension, repair=False) == []


def test_what_was_acknowledged_survives_the_death_of_its_writer(location: str) -> None:
    chance = random.Random(7)
    lives = []
    for number in range(KILLS):
        life = Life(location, number)
        life.listen(chance.randint(1, 12))
        # A moment within the next writes.
        time.sleep(chance.uniform(0, 0.003))
        life.process.kill()
        life.end()
        lives.append(life)
        with MemStore(location, embedder=EMBEDDER) as reopened:
            verify(reopened, life, searched=1.0)
            check(reopened)
    with MemStore(location, embedder=EMBEDDER) as reopened:
        for life in lives:
            verify(reopened, life, searched=0.0)
            assert reopened.add(owner_of(life.number), f"after life {life.number}").version == 1


def test_what_was_acknowledged_survives_the_death_of_the_server(has_redis: None) -> None:
    chance = random.Random(8)
    lives = []
    with RedisServer("appendonly yes", "appendfsync always", 'save ""') as server:
        for number in range(RESTARTS):
            life = Life(server.url, number)
            life.listen(chance.randint(1, 25))
            time.sleep(chance.uniform(0, 0.003))
            server.kill()
            life.end()
            assert life.ended_with == "StoreUnreachable"
            lives.append(life)
            server.start()
            with MemStore(server.url, embedder=EMBEDDER) as store:
                verify(store, life, searched=1.0)
                check(store)
        with MemStore(server.url, embedder=EMBEDDER) as store:
            for life in lives:
                verify(store, life, searched=0.1)
