"""Any order of anything that can be done to a store, through two open stores at once, against a dict."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from bigrams import BigramEmbedder
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from memstore import (
    DuplicateFact,
    EmbedderMismatch,
    Fact,
    FactNotFound,
    FactState,
    FactSuperseded,
    IdempotencyConflict,
    InvalidFact,
    MemStore,
    MemStoreSettings,
    NewFact,
    SearchHit,
)
from memstore.reindex import reindex
from memstore.searchable import vectors_name

OWNERS = ("ana", "a:b")
WORDS = ("red", "cello", "key", "鍵")
EVENT_TIMES = {"2023-05-08": 1683504000.0, "29 February 2024": 1709164800.0, "someday": None, None: None}
FILTERS: tuple[tuple[dict[str, object], Callable[[Fact], bool]], ...] = (
    ({"stream": "D1"}, lambda fact: fact.stream == "D1"),
    ({"speaker": {"in": ["Ana", "Bo"]}}, lambda fact: fact.speaker == "Ana"),
    ({"speaker": None, "stream": ""}, lambda fact: fact.speaker is None and fact.stream == ""),
    ({"time": {"gte": "2023-05-08", "lt": "2024-01-01"}}, lambda fact: fact.time == "2023-05-08"),
    ({"metadata.n": 1}, lambda fact: fact.metadata.get("n") == 1 and fact.metadata["n"] is not True),
    ({"metadata.n": True}, lambda fact: fact.metadata.get("n") is True),
    ({"metadata.n": {"gt": 1}}, lambda fact: fact.metadata.get("n") == 2.5),
)
NEAR = 0.9
# One that keeps no more than the owner in use, and one that keeps all.
SETTINGS = [MemStoreSettings(max_open_indexes=n, embed_batch=2, near_duplicate_score=NEAR) for n in (1, 8)]

owners = st.sampled_from(OWNERS)
places = st.integers(0, 40)
ticks = st.sampled_from([0, 0, 0, 1, 60])
lives = st.sampled_from([None, None, None, 1, 60, 61])
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join)
queries = texts | st.sampled_from(["Ana cello", "Eva 2023", "key in May 2023", "red of February"])
streams = st.sampled_from(["", "D1"])
speakers = st.sampled_from([None, "Ana", "Eva"])
times = st.sampled_from([None, *(time for time in EVENT_TIMES if time)])
metadata = st.sampled_from([{}, {"n": 1}, {"n": True}, {"n": 2.5}, {"tag": "a"}])
contents = st.one_of(st.builds(NewFact, texts), st.builds(NewFact, texts, streams, speakers, times, metadata))
changes = st.fixed_dictionaries(
    {}, optional={"text": texts, "stream": streams, "speaker": speakers, "time": times, "metadata": metadata}
)


class Place(Protocol):
    """Where the stores of one example are."""

    location: str

    def crash(self) -> None:
        """Leave what a crash of this moment would leave at `location`."""

    def close(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def content(fact: Fact | NewFact) -> tuple[object, ...]:
    return (fact.text, fact.stream, fact.speaker, fact.time, json.dumps(dict(fact.metadata), sort_keys=True))


def line(fact: Fact) -> str:
    """What is searched of a fact."""
    parts = [f"({fact.time})" if fact.time else "", f"{fact.speaker}:" if fact.speaker else "", fact.text]
    return " ".join(part for part in parts if part)


def longest(*expiries: float | None) -> float | None:
    return None if None in expiries else max(expiry for expiry in expiries if expiry is not None)


class Machine(RuleBasedStateMachine):
    def __init__(self, make_place: Callable[[], Place]) -> None:
        super().__init__()
        self.place = make_place()
        self.clock = Clock()
        self.embedders = itertools.cycle([BigramEmbedder(32), BigramEmbedder(24, name="others")])
        self.embedder = next(self.embedders)
        self.abandoned: list[MemStore] = []
        # Everything that was added and not removed, superseded and expired facts included.
        self.facts: dict[str, Fact] = {}
        self.former: dict[str, list[Fact]] = {}
        self.requests: dict[tuple[str, str], tuple[object, list[str]]] = {}
        self.epochs = dict.fromkeys(OWNERS, 0)
        self.highest_seq = self.followed = 0
        self.following: dict[str, dict[str, int]] = {owner: {} for owner in OWNERS}
        self.open()

    def open(self) -> None:
        self.stores = [
            MemStore(self.place.location, embedder=self.embedder, clock=self.clock, settings=chosen)
            for chosen in SETTINGS
        ]

    def teardown(self) -> None:
        for store in self.stores + self.abandoned:
            store.close()
        self.place.close()

    # ---- the model ----

    def is_alive(self, fact: Fact) -> bool:
        return fact.expires_at is None or fact.expires_at > self.clock.now

    def current(self, owner: str) -> list[Fact]:
        found = [f for f in self.facts.values() if f.owner == owner and f.state == "current" and self.is_alive(f)]
        return sorted(found, key=lambda fact: fact.seq)

    def twin(self, owner: str, wanted: NewFact) -> Fact | None:
        return next((fact for fact in self.current(owner) if content(fact) == content(wanted)), None)

    def forget(self, fact_id: str) -> None:
        self.facts.pop(fact_id)
        self.former.pop(fact_id, None)

    def chain(self, fact: Fact) -> list[Fact]:
        before = self.facts.get(fact.supersedes or "")
        older = self.chain(before) if before is not None and self.is_alive(before) else []
        return [*older, *self.former.get(fact.id, []), fact]

    def pick(self, place: int, owner: str | None = None) -> Fact | None:
        found = sorted(self.facts.values(), key=lambda fact: fact.seq)
        found = [fact for fact in found if owner in (None, fact.owner)]
        return found[place % len(found)] if found else None

    def accept(self, owner: str, wanted: list[NewFact], added: list[Fact]) -> list[bool]:
        """Take over what was added; return which of it was new."""
        assert len(added) == len(wanted)
        created = []
        latest = {}
        for new, fact in zip(wanted, added, strict=True):
            held = latest.get(fact.id) or self.twin(owner, new)
            created.append(held is None)
            if held is None:
                assert fact.seq > self.highest_seq
                assert fact.id not in self.facts
                self.highest_seq = fact.seq
                held = self.made(fact, owner, new, fact.id, fact.seq)
            latest[held.id] = held
            kept = longest(held.expires_at, new.expires_at)
            if kept != held.expires_at:
                latest[held.id] = dataclasses.replace(held, expires_at=kept, updated_at=self.clock.now)
            self.facts[held.id] = latest[held.id]
        assert added == [latest[fact.id] for fact in added]
        return created

    def made(self, fact: Fact, owner: str, new: NewFact, fact_id: str, seq: int) -> Fact:
        now = self.clock.now
        return Fact(
            **{spec.name: getattr(new, spec.name) for spec in dataclasses.fields(NewFact)},
            id=fact.id,
            owner=fact.owner if fact.owner == owner else None,  # type: ignore[arg-type]
            version=1,
            seq=seq,
            created_at=now,
            updated_at=now,
            event_at=EVENT_TIMES[new.time],
        )

    def living(self, new: NewFact, life: float | None) -> NewFact:
        return dataclasses.replace(new, expires_at=None if life is None else self.clock.now + life)

    # ---- adding ----

    @rule(who=st.booleans(), tick=ticks, owner=owners, news=st.lists(st.tuples(contents, lives), max_size=3))
    def add_many(self, who: bool, tick: float, owner: str, news: list[tuple[NewFact, float | None]]) -> None:
        self.clock.now += tick
        wanted = [self.living(new, life) for new, life in news]
        self.accept(owner, wanted, self.stores[who].add_many(owner, wanted))

    @rule(who=st.booleans(), tick=ticks, owner=owners, place=places, life=lives)
    def add_again(self, who: bool, tick: float, owner: str, place: int, life: float | None) -> None:
        self.clock.now += tick
        known = self.pick(place)
        if known is not None:
            fields = {spec.name: getattr(known, spec.name) for spec in dataclasses.fields(NewFact)}
            wanted = self.living(NewFact(**fields), life)
            fields = {spec.name: getattr(wanted, spec.name) for spec in dataclasses.fields(NewFact)}
            self.accept(owner, [wanted], [self.stores[who].add(owner, fields.pop("text"), **fields)])

    @rule(who=st.booleans(), tick=ticks, owner=owners, news=st.lists(st.tuples(contents, lives), max_size=3))
    def ingest(self, who: bool, tick: float, owner: str, news: list[tuple[NewFact, float | None]]) -> None:
        self.clock.now += tick
        wanted = [self.living(new, life) for new, life in news]
        additions = self.stores[who].ingest(owner, wanted)
        created = self.accept(owner, wanted, [addition.fact for addition in additions])
        assert [addition.created for addition in additions] == created
        assert [addition.chunks for addition in additions] == [1] * len(additions)
        for fact, is_new, near, _ in additions:
            scores = self.cosines(owner, line(fact))
            others = {other.seq for other in self.current(owner) if other.speaker != fact.speaker}
            scores = {seq: score for seq, score in scores.items() if seq not in {fact.seq, *others}}
            self.check_hits(list(near), scores, scores)
            surely = sum(score > NEAR + 1e-5 for score in scores.values()) if is_new else 0
            maybe = sum(score > NEAR - 1e-5 for score in scores.values()) if is_new else 0
            assert min(5, surely) <= len(near) <= min(5, maybe)
            assert all(hit.score >= NEAR for hit in near)

    @rule(
        who=st.booleans(),
        tick=ticks,
        owner=owners,
        key=st.sampled_from(["k 1", "ключ"]),
        news=st.lists(st.tuples(contents, lives), min_size=1, max_size=3),
        again=st.booleans(),
    )
    def add_with_key(
        self,
        who: bool,
        tick: float,
        owner: str,
        key: str,
        news: list[tuple[NewFact, float | None]],
        again: bool,
    ) -> None:
        self.clock.now += tick
        store = self.stores[who]
        wanted = [self.living(new, life) for new, life in news]
        before, ids = self.requests.get((owner, key), (None, []))
        if again and before is not None:
            wanted = before  # type: ignore[assignment]
        if any(new.expires_at is not None and new.expires_at <= self.clock.now for new in wanted):
            with pytest.raises(InvalidFact):
                store.add_many(owner, wanted, idempotency_key=key)
        elif before is None:
            added = store.add_many(owner, wanted, idempotency_key=key)
            self.accept(owner, wanted, added)
            self.requests[owner, key] = (wanted, [fact.id for fact in added])
        elif [(content(new), new.expires_at) for new in wanted] != [(content(b), b.expires_at) for b in before]:  # type: ignore[attr-defined]
            with pytest.raises(IdempotencyConflict):
                store.add_many(owner, wanted, idempotency_key=key)
        elif all(fact_id in self.facts and self.is_alive(self.facts[fact_id]) for fact_id in ids):
            assert store.add_many(owner, wanted, idempotency_key=key) == [self.facts[fact_id] for fact_id in ids]
        else:
            with pytest.raises(FactNotFound):
                store.add_many(owner, wanted, idempotency_key=key)

    # ---- changing ----

    def refusal(self, owner: str, fact: Fact) -> type[Exception] | None:
        if owner != fact.owner or not self.is_alive(fact):
            return FactNotFound
        return None if fact.state == "current" else FactSuperseded

    @rule(
        who=st.booleans(), tick=ticks, owner=st.none() | owners, place=places, like=st.none() | places, fields=changes,
        life=st.just("keep") | lives,
    )  # fmt: skip
    def update(
        self,
        who: bool,
        tick: float,
        owner: str | None,
        place: int,
        like: int | None,
        fields: dict[str, Any],
        life: float | str | None,
    ) -> None:
        self.clock.now += tick
        fact = self.pick(place)
        if fact is None:
            return
        other = None if like is None else self.pick(like, fact.owner)
        if other is not None:
            fields = {name: getattr(other, name) for name in ("text", "stream", "speaker", "time", "metadata")}
        if life != "keep":
            assert not isinstance(life, str)
            fields = {**fields, "expires_at": None if life is None else self.clock.now + life}
        store, owner = self.stores[who], owner or fact.owner
        refused = self.refusal(owner, fact)
        if refused is not None:
            with pytest.raises(refused):
                store.update(owner, fact.id, **fields)
            return
        new = dataclasses.replace(fact, **fields)
        is_changed = content(new) != content(fact)
        twin = self.twin(owner, new) if is_changed else None  # type: ignore[arg-type]
        if twin is not None:
            with pytest.raises(DuplicateFact) as caught:
                store.update(owner, fact.id, **fields)
            assert caught.value.fact_id == twin.id
            return
        if is_changed or new.expires_at != fact.expires_at:
            new = dataclasses.replace(
                new,
                version=fact.version + is_changed,
                updated_at=self.clock.now,
                event_at=EVENT_TIMES[new.time],
            )
        else:
            new = fact
        assert store.update(owner, fact.id, **fields) == new
        self.facts[fact.id] = new
        if is_changed:
            self.former.setdefault(fact.id, []).append(fact)

    @rule(
        who=st.booleans(), tick=ticks, owner=st.none() | owners, place=places, like=st.none() | places, text=texts,
        fields=changes, life=lives,
    )  # fmt: skip
    def supersede(
        self,
        who: bool,
        tick: float,
        owner: str | None,
        place: int,
        like: int | None,
        text: str,
        fields: dict[str, Any],
        life: float | None,
    ) -> None:
        self.clock.now += tick
        old = self.pick(place)
        if old is None:
            return
        other = None if like is None else self.pick(like, old.owner)
        if other is not None:
            fields = {name: getattr(other, name) for name in ("text", "stream", "speaker", "time", "metadata")}
        fields = {"text": text, **fields, "expires_at": None if life is None else self.clock.now + life}
        store, owner = self.stores[who], owner or old.owner
        refused = self.refusal(owner, old)
        if refused is not None:
            with pytest.raises(refused):
                store.supersede(owner, old.id, **fields)
            return
        kept = {spec.name: getattr(old, spec.name) for spec in dataclasses.fields(NewFact)}
        new = NewFact(**{**kept, "time": None, **fields})
        twin = self.twin(owner, new)
        successor = store.supersede(owner, old.id, **fields)
        if twin is not None and twin.id != old.id:
            expected = dataclasses.replace(
                twin,
                supersedes=twin.supersedes or old.id,
                expires_at=longest(twin.expires_at, new.expires_at),
                updated_at=self.clock.now,
            )
        else:
            assert successor.seq > self.highest_seq
            assert successor.id not in self.facts
            self.highest_seq = successor.seq
            made = self.made(successor, owner, new, successor.id, successor.seq)
            expected = dataclasses.replace(made, supersedes=old.id)
        assert successor == expected
        self.former.setdefault(old.id, []).append(old)
        self.facts[old.id] = dataclasses.replace(
            old, state=FactState.SUPERSEDED, version=old.version + 1, updated_at=self.clock.now
        )
        self.facts[successor.id] = successor

    # ---- removing ----

    @rule(who=st.booleans(), tick=ticks, owner=st.none() | owners, place=places)
    def delete(self, who: bool, tick: float, owner: str | None, place: int) -> None:
        self.clock.now += tick
        fact = self.pick(place)
        if fact is None:
            return
        owner = owner or fact.owner
        if owner == fact.owner and self.is_alive(fact):
            assert self.stores[who].delete(owner, fact.id) == fact
            self.forget(fact.id)
        with pytest.raises(FactNotFound):
            self.stores[not who].delete(owner, fact.id)

    @rule(who=st.booleans(), tick=ticks, owner=owners)
    def purge(self, who: bool, tick: float, owner: str) -> None:
        self.clock.now += tick
        mine = [fact for fact in self.facts.values() if fact.owner == owner]
        feed = len(self.stores[not who].changes(0, owner=owner, limit=10_000))
        counts = self.stores[who].purge(owner).records
        self.epochs[owner] += 1
        keys = [key for key in self.requests if key[0] == owner]
        assert (counts.facts, counts.changes, counts.idempotency_keys, counts.epoch) == (
            len(mine),
            feed,
            len(keys),
            self.epochs[owner],
        )
        assert counts.history == sum(len(self.former.get(fact.id, [])) for fact in mine)
        assert counts.vectors >= sum(fact.state == "current" for fact in mine)
        for fact in mine:
            self.forget(fact.id)
        for key in keys:
            del self.requests[key]

    @rule(who=st.booleans(), tick=ticks, owner=st.none() | owners)
    def expire(self, who: bool, tick: float, owner: str | None) -> None:
        self.clock.now += tick
        due = [fact.id for fact in self.facts.values() if owner in (None, fact.owner) and not self.is_alive(fact)]
        assert self.stores[who].expire(owner) == len(due)
        for fact_id in due:
            self.forget(fact_id)

    # ---- searching ----

    def cosines(self, owner: str, query: str) -> dict[int, float]:
        facts = self.current(owner)
        rows = self.embedder.embed([line(fact) for fact in facts] + [query]).astype(np.float64)
        return dict(zip([fact.seq for fact in facts], (rows[:-1] @ rows[-1]).tolist(), strict=True))

    def bm25(self, owner: str, query: str) -> dict[int, float]:
        """Robertson and Zaragoza (2009), equation 3.15, as FTS5 bounds its weights."""
        counts = {fact.seq: Counter(re.findall(r"\w+", line(fact))) for fact in self.current(owner)}
        mean = sum(sum(words.values()) for words in counts.values()) / max(1, len(counts))
        scores = {}
        for seq, words in counts.items():
            total = 0.0
            for word in set(query.split()) & set(words):
                holding = sum(word in other for other in counts.values())
                weight = math.log((len(counts) - holding + 0.5) / (holding + 0.5))
                norm = 1.2 * (0.25 + 0.75 * sum(words.values()) / mean)
                total += (weight if weight > 0 else 1e-6) * words[word] * 2.2 / (words[word] + norm)
            if set(query.split()) & set(words):
                scores[seq] = total / (1 + total)
        return scores

    def boosted(self, owner: str, query: str, fused: Mapping[int, float]) -> dict[int, float]:
        """As means: a tenth for the month that the query names, a fifth of the better fact beside in the stream.

        Of a fact without a stream it is a fifth of its own.
        """
        time = {"key in May 2023": "2023-05-08", "red of February": "29 February 2024"}.get(query)
        current = self.current(owner)
        own = {
            fact.seq: fused[fact.seq] if time is None else (fused[fact.seq] + 0.1 * (fact.time == time)) / 1.1
            for fact in current
            if fact.seq in fused
        }
        scores, least = dict(own), min(own.values(), default=0.0)
        seqs = [fact.seq for fact in current if fact.stream == "D1"]
        lent = [least, *(own.get(seq, least) for seq in seqs), least]
        for place, seq in enumerate(seqs):
            if seq in own:
                scores[seq] = (own[seq] + 0.2 * max(lent[place], lent[place + 2])) / 1.2
        return scores

    def check_hits(self, hits: list[SearchHit], scores: Mapping[int, float], unboosted: Mapping[int, float]) -> None:
        ranks = [(-hit.score, hit.fact.seq) for hit in hits]
        assert ranks == sorted(set(ranks))
        for hit in hits:
            assert hit.fact == self.facts[hit.fact.id]
            assert hit.score == pytest.approx(scores[hit.fact.seq], abs=1e-5)
            assert hit.unboosted == pytest.approx(unboosted[hit.fact.seq], abs=1e-5)
        best = sorted(scores.values(), reverse=True)[: len(hits)]
        assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-5)

    @rule(
        who=st.booleans(),
        tick=ticks,
        owner=owners,
        query=queries,
        k=st.integers(0, 6) | st.just(1000),
        chosen=st.none() | st.sampled_from(FILTERS),
        mode=st.sampled_from(["vector", "keyword", "hybrid"]),
    )
    def search(
        self,
        who: bool,
        tick: float,
        owner: str,
        query: str,
        k: int,
        chosen: tuple[dict[str, object], Callable[[Fact], bool]] | None,
        mode: str,
    ) -> None:
        self.clock.now += tick
        where, passes = chosen or (None, lambda fact: True)
        passing = {fact.seq for fact in self.current(owner) if passes(fact)}
        if mode == "hybrid":
            # No owner here has more facts than the fusion looks at.
            words = {seq: score / (1 - score) for seq, score in self.bm25(owner, query).items() if seq in passing}
            norm = max([1.0, *words.values()])
            cosines = self.cosines(owner, query)
            unboosted = {seq: 0.8 * cosines[seq] + 0.2 * words.get(seq, 0.0) / norm for seq in passing}
            scores = self.boosted(owner, query, unboosted)
        else:
            scores = self.cosines(owner, query) if mode == "vector" else self.bm25(owner, query)
            unboosted = scores = {seq: score for seq, score in scores.items() if seq in passing}
        hits = self.stores[who].search(owner, query, k=k, where=where, mode=mode)
        assert len(hits) == min(k, len(scores))
        self.check_hits(hits, scores, unboosted)

    # ---- the store itself ----

    @rule()
    def reopen(self) -> None:
        for store in self.stores:
            store.close()
        self.open()

    @rule()
    def crash(self) -> None:
        self.abandoned += self.stores
        self.place.crash()
        self.open()

    @rule(last=st.booleans())
    def open_one_anew(self, last: bool) -> None:
        former = self.stores
        self.open()
        self.stores[last].close()
        self.stores[last] = former[last]
        former[not last].close()

    @rule(is_ended=st.booleans())
    def reindex(self, is_ended: bool) -> None:
        target = next(self.embedders)
        if not is_ended and self.facts:

            def stop(done: int, total: int) -> None:
                raise InterruptedError

            with pytest.raises(InterruptedError):
                reindex(self.stores[0].records, target, batch=1, on_progress=stop)
            next(self.embedders)
            return
        reindex(self.stores[0].records, target, batch=2)
        for store in self.stores:
            for refused in (
                lambda s: s.search("ana", "red", k=1),
                lambda s: s.add("ana", "not there yet"),
            ):
                with pytest.raises(EmbedderMismatch):
                    refused(store)
            store.close()
        self.embedder = target
        self.open()

    # ---- what always holds ----

    @invariant()
    def holds_together(self) -> None:
        # Not earlier: a step has to do with what has expired and is still there.
        expired = [fact for fact in self.facts.values() if not self.is_alive(fact)]
        for fact in expired:
            self.forget(fact.id)
        self.shows_the_living()
        if expired:
            # The step itself may have removed some.
            assert self.stores[1].expire() <= len(expired)
            self.shows_the_living()
        self.counts_what_the_model_counts()
        self.keeps_history()
        self.is_sound()
        self.can_be_followed()

    def of(self, owner: str) -> tuple[list[Fact], list[Fact]]:
        mine = sorted((f for f in self.facts.values() if f.owner == owner), key=lambda fact: fact.seq)
        return mine, [fact for fact in mine if fact.state == "current"]

    def shows_the_living(self) -> None:
        one, other = self.stores
        for owner in OWNERS:
            mine, current = self.of(owner)
            assert one.list(owner, limit=1000, superseded=True) == mine
            assert other.list(owner) == current
            assert other.list(owner, stream="D1") == [fact for fact in current if fact.stream == "D1"]
            assert other.count(owner) == len(current)

    def counts_what_the_model_counts(self) -> None:
        other = self.stores[1]
        for owner in OWNERS:
            mine, current = self.of(owner)
            stats = other.stats(owner)
            assert stats[:2] == (len(current), len(mine) - len(current))
            assert stats.history == sum(len(self.former.get(fact.id, [])) for fact in mine)
            assert stats.epoch == self.epochs[owner]
        assert other.owners() == sorted({fact.owner for fact in self.facts.values()})

    def keeps_history(self) -> None:
        for fact in self.facts.values():
            if fact.id in self.former or fact.supersedes:
                assert self.stores[1].history(fact.owner, fact.id) == self.chain(fact)

    def is_sound(self) -> None:
        records = self.stores[0].records
        embedder, dimension = vectors_name(self.embedder), self.embedder.dimension
        assert records.check(embedder=embedder, dimension=dimension, repair=False) == []

    def can_be_followed(self) -> None:
        expected: dict[str, dict[str, int]] = {owner: {} for owner in OWNERS}
        for fact in self.facts.values():
            if fact.state == "current":
                expected[fact.owner][fact.id] = fact.version
        anew: dict[str, dict[str, int]] = {owner: {} for owner in OWNERS}
        self.follow(0, anew)
        self.followed = self.follow(self.followed, self.following)
        assert anew == self.following == expected
        assert self.followed == self.stores[1].records.last_position()

    def follow(self, since: int, current: dict[str, dict[str, int]]) -> int:
        while page := self.stores[0].changes(since, limit=100):
            for change in page:
                assert change.position > since
                since = change.position
                if change.kind == "purged":
                    current[change.owner].clear()
                elif change.kind in ("added", "updated"):
                    assert change.fact_id is not None
                    assert change.version is not None
                    current[change.owner][change.fact_id] = change.version
                else:
                    assert change.fact_id is not None
                    current[change.owner].pop(change.fact_id, None)
        return since


class Directory:
    """A new directory in memory; what its disk would cost tells nothing."""

    def __init__(self) -> None:
        in_memory = Path("/dev/shm")
        self._root = Path(tempfile.mkdtemp(dir=in_memory if in_memory.is_dir() else None))
        self._numbers = itertools.count()
        self._enter()

    def crash(self) -> None:
        former = self._path
        self._enter()
        shutil.copytree(former, self._path, ignore=shutil.ignore_patterns("*-shm"))

    def close(self) -> None:
        shutil.rmtree(self._root)

    def _enter(self) -> None:
        self._path = self._root / str(next(self._numbers))
        self.location = f"sqlite:///{self._path}"


class Prefix:
    """A prefix of its own on a server."""

    def __init__(self, location: str) -> None:
        self.location = location

    def crash(self) -> None:
        """The server does not notice."""

    def close(self) -> None:
        """The keys go with the server."""


def run(make_place: Callable[[], Place], *, examples: int) -> None:
    checked = settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Machine(make_place), settings=checked)  # type: ignore[no-untyped-call]


def test_any_order_of_anything_in_sqlite() -> None:
    run(Directory, examples=200)


@pytest.mark.timeout(1200)
def test_any_order_of_anything_in_redis(redis_url: str) -> None:
    numbers = itertools.count()
    # Some sixty round trips a step.
    run(lambda: Prefix(f"{redis_url}/0?prefix=machine-{next(numbers)}"), examples=200)
