"""Moving a store to another embedder while others write to it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from bigrams import BigramEmbedder

from memstore import MemStoreSettings, NewFact, StoreDamaged, reindex
from memstore.drafts import embed_facts
from memstore.location import open_records
from memstore.records import Batch, Draft, RecordStore, VectorUpdate
from memstore.searchable import vectors_name
from memstore.types import Fact, OwnerId

OLD, NEW = BigramEmbedder(32), BigramEmbedder(48, name="new")
ANA, BO, EVA = OwnerId("ana"), OwnerId("bo"), OwnerId("eva")


@pytest.fixture
def records(location: str) -> Iterator[RecordStore]:
    opened = open_records(location, MemStoreSettings(feed_retention=1000))
    opened.claim_embedder(vectors_name(OLD))
    for owner in (ANA, BO):
        add(opened, owner, *(f"fact {number} of {owner}" for number in range(5)))
    yield opened
    opened.close()


def add(records: RecordStore, owner: OwnerId, *texts: str) -> list[Fact]:
    vectors = embed_facts(OLD, [NewFact(text) for text in texts], batch=9)
    drafts = [Draft(NewFact(text), rows) for text, rows in zip(texts, vectors, strict=True)]
    return [insertion.fact for insertion in records.apply(owner, Batch(drafts=drafts), embedder=vectors_name(OLD))[0]]


class Watched:
    """A store that tells which facts were looked for, and calls back when a round is over."""

    def __init__(self, records: RecordStore, at_the_end: Sequence[Callable[[], object]] = ()) -> None:
        self._records = records
        self._at_the_end = list(at_the_end)
        self.looked_for: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._records, name)

    def unindexed(self, owner: OwnerId, *, embedder: str, limit: int, after_seq: int = 0) -> list[Fact]:
        found = self._records.unindexed(owner, embedder=embedder, limit=limit, after_seq=after_seq)
        self.looked_for.append((owner, after_seq))
        return found

    def adopt_embedder(self, fingerprint: str) -> bool:
        if self._at_the_end:
            self._at_the_end.pop(0)()
        return self._records.adopt_embedder(fingerprint)


def test_each_look_begins_where_the_last_one_ended(records: RecordStore) -> None:
    watched = Watched(records)
    assert reindex(watched, NEW, batch=2)[2:] == (10, 10)  # type: ignore[arg-type]
    assert watched.looked_for == [
        ("ana", 0),
        ("ana", 2),
        ("ana", 4),
        ("ana", 5),
        ("bo", 0),
        ("bo", 7),
        ("bo", 9),
        ("bo", 10),
    ]
    assert records.claim_embedder("x") == vectors_name(NEW)


def test_after_the_first_round_only_owners_with_changes_are_visited(records: RecordStore) -> None:
    watched = Watched(records, [lambda: add(records, EVA, "new"), lambda: add(records, ANA, "newer")])
    assert reindex(watched, NEW)[2:] == (12, 12)  # type: ignore[arg-type]
    assert watched.looked_for == [
        ("ana", 0),
        ("ana", 5),
        ("bo", 0),
        ("bo", 10),
        ("eva", 0),
        ("eva", 11),
        ("ana", 0),
        ("ana", 12),
    ]


def test_all_owners_are_visited_where_the_feed_has_been_trimmed(location: str, tmp_path: Path) -> None:
    records = open_records(location, MemStoreSettings(feed_retention=1))
    records.claim_embedder(vectors_name(OLD))
    add(records, BO, "one")

    def much() -> None:
        for number in range(5):
            add(records, ANA, f"fact {number}")

    watched = Watched(records, [much])
    assert reindex(watched, NEW)[2:] == (6, 6)  # type: ignore[arg-type]
    assert {owner for owner, _ in watched.looked_for[2:]} == {"ana", "bo"}
    records.close()


def test_vectors_that_a_check_removed_meanwhile_are_made_again(records: RecordStore) -> None:
    def remove_one() -> None:
        # What is damaged is removed, which no feed tells.
        damaged = VectorUpdate(1, 1, NEW.embed(["x"])[:, :3])
        assert records.put_vectors(ANA, [damaged], embedder=vectors_name(NEW), is_reindex=True) == 1
        problems = records.check(embedder=vectors_name(NEW), dimension=48, repair=True)
        assert [problem.kind for problem in problems if problem.repaired] == ["damaged-vector"]

    assert reindex(Watched(records, [remove_one]), NEW)[2:] == (11, 10)  # type: ignore[arg-type]


def test_vectors_that_cannot_be_stored_end_a_reindex(records: RecordStore) -> None:
    class Deaf(Watched):
        def put_vectors(self, owner: OwnerId, updates: Sequence[VectorUpdate], **options: object) -> int:
            return 0

    with pytest.raises(StoreDamaged, match="verify --repair"):
        reindex(Deaf(records), NEW)  # type: ignore[arg-type]
    assert records.claim_embedder("x") == vectors_name(OLD)
