"""Boosts of a hybrid search: sums worked out by hand, and a reference that looks at all records."""

import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np
import pytest
from bigrams import BigramEmbedder

from memstore import Fact, MemStore, MemStoreSettings, NewFact, SearchHit
from memstore.embedding import Vectors
from memstore.search.boosts import Boosts, boosted
from memstore.search.streams import StreamIndex
from memstore.search.vectors import Neighbour
from memstore.types import FactId, OwnerId

PLAIN = MemStoreSettings(month_boost=0, neighbour_boost=0)
CANDIDATES = [Neighbour(1, 0.6), Neighbour(2, 0.5), Neighbour(3, 0.3)]


def fact(seq: int, stream: str, at: str | None) -> Fact:
    return Fact(
        id=FactId(str(seq)), owner=OwnerId("ana"), text="x", stream=stream, speaker=None, time=at, metadata={},
        version=1, seq=seq, created_at=0.0, updated_at=0.0,
        event_at=None if at is None else datetime.fromisoformat(at).timestamp(),
    )  # fmt: skip


def streams(**members: Mapping[int, str | None]) -> StreamIndex:
    """Of each stream its facts by seq, with the moment of each."""
    index = StreamIndex()
    index.add([fact(seq, name, at) for name, of_stream in members.items() for seq, at in of_stream.items()])
    return index


TWO_STREAMS = streams(
    chat={1: "2024-06-01T00:00:00+00:00", 3: "2024-05-31T23:59:59+00:00", 4: None},
    notes={2: None, 5: "2024-05-02T12:00:00+00:00"},
)


def scored(query: str, month: float, neighbour: float, k: int = 9) -> list[tuple[int, object]]:
    boosts = Boosts(month=month, neighbour=neighbour)
    hits = boosted(CANDIDATES, k, query=query, streams=TWO_STREAMS, boosts=boosts)
    return [(hit.seq, pytest.approx(hit.score, abs=1e-12)) for hit in hits]


def test_the_better_fact_beside_counts_and_others_with_the_least_score() -> None:
    assert scored("What?", 0.0, 0.5) == [
        (1, 0.5),  # (0.6 + 0.5 * 0.3) / 1.5: 3 is beside it
        (2, 0.65 / 1.5),  # (0.5 + 0.5 * 0.3): 5, beside it, is no candidate
        (3, 0.4),  # (0.3 + 0.5 * 0.6): 1 is the better one of 1 and 4
    ]


def test_a_named_month_counts_where_the_fact_has_its_time_there_in_utc() -> None:
    assert scored("What was there in May 2024?", 0.5, 0.0) == [(3, 0.8 / 1.5), (1, 0.4), (2, 0.5 / 1.5)]
    assert scored("What was there in June?", 0.5, 0.0) == [(1, 1.1 / 1.5), (2, 0.5 / 1.5), (3, 0.2)]
    assert scored("What was there in June 2023?", 0.5, 0.0) == [(1, 0.4), (2, 0.5 / 1.5), (3, 0.2)]
    # Where no month is named, the weight is not there.
    assert scored("What was there?", 0.5, 0.0) == list(CANDIDATES)


def test_a_fact_beside_lends_its_month_too() -> None:
    assert scored("What was there in May?", 0.1, 0.2) == [
        (1, 0.68 / 1.32),  # 0.6 + 0.2 * (0.3 + 0.1)
        (2, 0.58 / 1.32),  # 0.5 + 0.2 * (0.3 + 0.1), the least: 5 is of May and no candidate
        (3, 0.52 / 1.32),  # 0.3 + 0.1 + 0.2 * 0.6
    ]


def test_the_best_k_come_after_boosting_and_ties_by_seq() -> None:
    assert scored("What?", 0.0, 1.0, k=2) == [(1, 0.45), (3, 0.45)]  # 2 has (0.5 + 0.3) / 2
    assert scored("What?", 0.1, 0.2, k=0) == []
    assert boosted([], 5, query="in May", streams=TWO_STREAMS, boosts=Boosts(month=0.1, neighbour=0.2)) == []


def test_a_lone_fact_keeps_its_score_and_the_bounds_are_those_of_the_fusion() -> None:
    both = Boosts(month=0.1, neighbour=0.2)
    for score in (-0.8, 0.25, 1.0):
        for index in (StreamIndex(), streams(chat={1: None})):
            [alone] = boosted([Neighbour(1, score)], 1, query="x", streams=index, boosts=both)
            assert alone == (1, pytest.approx(score), score)
    pair = streams(chat={1: "2024-05-01T00:00:00+00:00", 2: "2024-05-01T00:00:00+00:00"})
    best = boosted([Neighbour(1, 1.0), Neighbour(2, 1.0)], 2, query="in May", streams=pair, boosts=both)
    assert best == [(1, pytest.approx(1.0), 1.0), (2, pytest.approx(1.0), 1.0)]


def test_facts_without_a_stream_lend_each_other_nothing() -> None:
    index = StreamIndex()
    index.add([fact(1, "", None), fact(2, "", "2024-05-02T12:00:00+00:00"), fact(3, "chat", None)])
    boosts = Boosts(month=0.5, neighbour=0.5)
    plain = boosted(CANDIDATES, 9, query="What?", streams=index, boosts=boosts)
    # 3 ends its stream on both sides: (0.3 + 0.5 * 0.3) / 1.5.
    assert plain == [(1, pytest.approx(0.6), 0.6), (2, pytest.approx(0.5), 0.5), (3, pytest.approx(0.3), 0.3)]
    dated = boosted(CANDIDATES, 9, query="in May", streams=index, boosts=boosts)
    # (0.5 + 0.5) / 1.5, 0.6 / 1.5, 0.3 / 1.5
    assert dated == [(2, pytest.approx(1 / 1.5), 0.5), (1, pytest.approx(0.4), 0.6), (3, pytest.approx(0.2), 0.3)]


# ---- in a store ----


def expected(
    plain: Sequence[SearchHit], current: Iterable[Fact], months: Sequence[tuple[int, int]] = ()
) -> list[tuple[Fact, object, object]]:
    """What a search with the weights 0.1 and 0.2 returns for candidates with their plain scores, by all records."""

    def is_named(fact: Fact) -> bool:
        day = None if fact.event_at is None else datetime.fromtimestamp(fact.event_at, UTC)
        return day is not None and (day.month, day.year) in months

    own = {hit.fact.seq: (hit.score + 0.1 * is_named(hit.fact)) / (1.1 if months else 1) for hit in plain}
    least, scores = min(own.values(), default=0.0), {}
    facts = list(current)
    for fact in [hit.fact for hit in plain]:
        seqs = [other.seq for other in facts if other.stream == fact.stream]
        before = max((seq for seq in seqs if seq < fact.seq), default=None)
        after = min((seq for seq in seqs if seq > fact.seq), default=None)
        lent = max(least if seq is None else own.get(seq, least) for seq in (before, after))
        scores[fact.seq] = (own[fact.seq] + 0.2 * lent) / 1.2 if fact.stream else own[fact.seq]
    ranked = sorted(plain, key=lambda hit: (-round(scores[hit.fact.seq], 9), hit.fact.seq))
    return [(fact, pytest.approx(scores[fact.seq], abs=1e-9), score) for fact, score, _ in ranked]


WORDS = ("kayak", "cello", "ferry", "quince", "locker")
TIMES = (None, "3 May 2023", "2023-05-31T23:30:00-01:00", "2024-05-02", "9 June 2023", "someday")
QUERIES: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("cello locker", ()),
    ("the ferry in May 2023", ((5, 2023),)),
    ("a quince of June", ((6, 2023),)),
    ("a kayak on 2 May, or in June", ((5, 2023), (5, 2024), (6, 2023))),
)


def test_boosts_follow_whatever_happens_to_facts(location: str) -> None:
    chance = random.Random(7)
    with (
        MemStore(location, embedder=BigramEmbedder()) as store,
        MemStore(location, embedder=BigramEmbedder(), settings=PLAIN) as plain,
    ):
        for step in range(60):
            owner, facts = (name := chance.choice(("ana", "bo"))), store.list(name)
            fact = chance.choice(facts) if facts else None
            new = NewFact(
                " ".join(chance.choices(WORDS, k=3)) + f" {step}",
                stream=chance.choice(("", "chat", "notes")),
                time=chance.choice(TIMES),
                metadata={"odd": bool(step % 2)},
            )
            kind = chance.choice(("add", "add", "add", "text", "move", "supersede", "delete"))
            if fact is None or kind == "add":
                store.add_many(owner, [new])
            elif kind == "text":
                store.update(owner, fact.id, text=new.text, time=new.time)
            elif kind == "move":
                store.update(owner, fact.id, stream=new.stream)
            elif kind == "supersede":
                store.supersede(owner, fact.id, new.text)
            else:
                store.delete(owner, fact.id)
            query, months = chance.choice(QUERIES)
            where = chance.choice((None, {"metadata.odd": True}))
            candidates = plain.search(owner, query, k=100, mode="hybrid", where=where)
            found = store.search(owner, query, k=100, mode="hybrid", where=where)
            assert found == expected(candidates, store.list(owner), months)
            assert store.search(owner, query, k=3, mode="hybrid", where=where) == found[:3]


def test_candidates_are_the_best_of_the_fusion(location: str) -> None:
    chance = random.Random(3)
    with (
        MemStore(location, embedder=BigramEmbedder()) as store,
        MemStore(location, embedder=BigramEmbedder(), settings=PLAIN) as plain,
    ):
        texts = [" ".join(chance.choices(WORDS, k=4)) + f" {n}" for n in range(150)]
        store.add_many("ana", [NewFact(text, stream="chat") for text in texts])
        current = store.list("ana", limit=1000)
        for k in (3, 120):
            candidates = plain.search("ana", "cello ferry", k=max(k, 100), mode="hybrid")
            assert store.search("ana", "cello ferry", k=k, mode="hybrid") == expected(candidates, current)[:k]


def test_what_a_filter_leaves_out_neither_comes_nor_counts(location: str) -> None:
    with MemStore(location, embedder=BigramEmbedder()) as store:
        store.add_many(
            "ana",
            [
                NewFact("at ten", stream="other"),
                NewFact("at two", stream="chat"),
                NewFact("the red kayak", stream="chat", metadata={"secret": True}),
                NewFact("at six", stream="chat"),
            ],
        )
        store.add("bo", "the red kayak", stream="other")  # of another owner: beside nothing of hers
        where = {"stream": {"in": ["chat", "other"]}, "metadata.secret": {"in": [False, None]}}
        assert store.search("ana", "the red kayak", k=9, mode="hybrid", where=where) == []
        for fact in store.list("ana"):
            if fact.text != "the red kayak":
                store.update("ana", fact.id, metadata={"secret": False})
        both = [hit.fact.text for hit in store.search("ana", "the red kayak", k=9, mode="hybrid")]
        assert both[0] == "the red kayak"
        hits = store.search("ana", "the red kayak", k=9, mode="hybrid", where=where)
        with MemStore(location, embedder=BigramEmbedder(), settings=PLAIN) as plain:
            candidates = plain.search("ana", "the red kayak", k=9, mode="hybrid", where=where)
        least = candidates[-1].score
        # Nothing of the three stands beside another: "at two" and "at six" have the secret between them.
        assert hits == [(fact, pytest.approx((score + 0.2 * least) / 1.2), score) for fact, score, _ in candidates]
        assert len(hits) == 3


class CompassEmbedder(BigramEmbedder):
    """Texts with "north" lie at cosine 1 to each other, at 0.6 to those with "rise", at 0 to the rest."""

    def __init__(self) -> None:
        super().__init__(dimension=3, name="compass")

    def embed(self, texts: Sequence[str]) -> Vectors:
        rows = [(1, 0, 0) if "north" in text else (0.6, 0.8, 0) if "rise" in text else (0, 0, 1) for text in texts]
        return np.array(rows, dtype=np.float32)


def test_min_score_is_of_the_score_before_boosts_whatever_else_is_there(location: str) -> None:
    with MemStore(location, embedder=CompassEmbedder()) as store:
        texts = ("kayaks", "north shore", "cellos", "sunrise", "ferries")
        store.add_many("ana", [NewFact(text, stream="chat") for text in texts])
        # No fact has the word: s is 0.8 * cosine, that is 0.8, 0.48 and three times 0.
        found = store.search("ana", "northern", k=9, mode="hybrid")
        assert [(hit.fact.text, hit.score, hit.unboosted) for hit in found] == [
            ("north shore", pytest.approx(0.8 / 1.2), pytest.approx(0.8)),
            ("sunrise", pytest.approx(0.48 / 1.2), pytest.approx(0.48)),
            ("kayaks", pytest.approx(0.16 / 1.2), pytest.approx(0)),
            ("cellos", pytest.approx(0.16 / 1.2), pytest.approx(0)),
            ("ferries", pytest.approx(0.096 / 1.2), pytest.approx(0)),
        ]

        def passing(min_score: float, k: int = 9) -> list[str]:
            hits = store.search("ana", "northern", k=k, mode="hybrid", min_score=min_score)
            return [hit.fact.text for hit in hits]

        assert (passing(0.79), passing(0.47), passing(0.81)) == (["north shore"], ["north shore", "sunrise"], [])
        # "cellos" has 0.13, and 0 of its own.
        assert passing(0.05) == ["north shore", "sunrise"]
        store.add_many("ana", [NewFact(f"quince {n}", stream="chat") for n in range(120)])
        for k in (2, 9, 125):
            assert passing(0.79, k) == ["north shore"]
            assert passing(0.47, k) == ["north shore", "sunrise"]


def test_other_modes_and_a_plain_hybrid_have_one_score(location: str) -> None:
    for settings in (None, PLAIN):
        with MemStore(location, embedder=BigramEmbedder(), settings=settings) as store:
            store.add_many("ana", [NewFact("the red kayak", stream="chat"), NewFact("a red cello", stream="chat")])
            for mode in ("vector", "keyword", "hybrid") if settings else ("vector", "keyword"):
                hits = store.search("ana", "red kayak", k=9, mode=mode)
                assert [hit.unboosted for hit in hits] == [hit.score for hit in hits]
                assert len(hits) == 2


def test_what_the_boosts_take_of_memory_counts(location: str) -> None:
    with MemStore(location, embedder=BigramEmbedder()) as store:
        store.add_many("ana", [NewFact(f"fact {n}", stream=f"chat-{n % 2}") for n in range(10)])
        store.search("ana", "fact", k=1, mode="keyword")
        words = store.index_bytes()
        store.search("ana", "fact", k=1, mode="hybrid")
        # 10 facts, 2 streams, whose names have 6 characters.
        assert store.index_bytes() == words + 10 * 32 + 2 * (230 + 6)
    with MemStore(location, embedder=BigramEmbedder(), settings=PLAIN) as plain:
        plain.search("ana", "fact", k=1, mode="hybrid")
        assert plain.index_bytes() == words
