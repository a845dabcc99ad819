"""Any order of add, delete, search and reopen, against a dict."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from bigrams import BigramEmbedder
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from memstore import Fact, FactNotFound, MemStore, MemStoreSettings, NewFact

OWNERS = st.sampled_from(["ana", "bo", "a:b"])
STREAMS = st.sampled_from(["", "D1"])
TEXTS = st.text(st.sampled_from("abc é鍵"), min_size=1, max_size=6).filter(str.strip)


class Machine(RuleBasedStateMachine):
    facts = Bundle("facts")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.embedder = BigramEmbedder(64)
        self.model: dict[str, Fact] = {}
        self.highest_seq = 0
        self.open()

    def open(self) -> None:
        self.store = MemStore(
            self.directory, embedder=self.embedder, settings=MemStoreSettings(max_open_indexes=2, embed_batch=2)
        )

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def of(self, owner: str) -> list[Fact]:
        return sorted((fact for fact in self.model.values() if fact.owner == owner), key=lambda fact: fact.seq)

    @rule(target=facts, owner=OWNERS, texts=st.lists(TEXTS, max_size=4), stream=STREAMS)
    def add_many(self, owner: str, texts: list[str], stream: str) -> object:
        added = self.store.add_many(owner, [NewFact(text, stream=stream) for text in texts])
        assert [(fact.text, fact.stream, fact.owner) for fact in added] == [(text, stream, owner) for text in texts]
        created = []
        for fact in added:
            if fact.id in self.model:
                assert self.model[fact.id] == fact
                continue
            assert not any((old.text, old.stream) == (fact.text, fact.stream) for old in self.of(owner))
            assert fact.seq > self.highest_seq
            self.highest_seq = fact.seq
            self.model[fact.id] = fact
            created.append(fact)
        return multiple(*created)

    @rule(fact=consumes(facts))
    def delete(self, fact: Fact) -> None:
        with pytest.raises(FactNotFound):
            self.store.delete("bo" if fact.owner == "ana" else "ana", fact.id)
        assert self.store.delete(fact.owner, fact.id) == self.model.pop(fact.id)
        with pytest.raises(FactNotFound):
            self.store.get(fact.owner, fact.id)

    @rule(fact=facts)
    def finds_itself(self, fact: Fact) -> None:
        hits = self.store.search(fact.owner, fact.text, k=len(self.model))
        best = [hit.fact for hit in hits if hit.score >= 1 - 1e-6]
        assert fact in best
        assert best == sorted(best, key=lambda other: other.seq) or {b.text for b in best} != {fact.text}

    @rule(owner=OWNERS, query=TEXTS, k=st.integers(0, 8))
    def search(self, owner: str, query: str, k: int) -> None:
        facts = self.of(owner)
        rows = self.embedder.embed([fact.text for fact in facts]).astype(np.float64)
        scores = dict(
            zip([f.id for f in facts], rows @ self.embedder.embed([query])[0].astype(np.float64), strict=True)
        )
        hits = self.store.search(owner, query, k=k)
        assert len(hits) == len({hit.fact.id for hit in hits}) == min(k, len(facts))
        assert [hit.score for hit in hits] == pytest.approx(sorted(scores.values(), reverse=True)[:k], abs=1e-5)
        for hit in hits:
            assert hit.fact == self.model[hit.fact.id]
            assert hit.score == pytest.approx(scores[hit.fact.id], abs=1e-5)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert self.store.owners() == sorted({fact.owner for fact in self.model.values()})
        for owner in ("ana", "bo", "a:b"):
            facts = self.of(owner)
            assert self.store.list(owner, limit=10_000) == facts
            assert self.store.count(owner) == len(facts)
            stored = self.store._records.vectors(facts[0].owner, dimension=64) if facts else None
            if stored is not None:
                assert stored.seqs.tolist() == [fact.seq for fact in facts]
                expected = self.embedder.embed([fact.text for fact in facts])
                np.testing.assert_allclose(stored.vectors, expected, atol=1e-6)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
