"""No read of a few facts goes through all facts of an owner, or of all owners."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from memstore.records import Batch, Draft, SQLiteRecords
from memstore.records.sqlite.connection import SQLiteConnections
from memstore.types import NewFact, OwnerId

ANA = OwnerId("ana")


class _Recording(SQLiteConnections):
    """Keeps the queries that it runs."""

    def read(self, query: str, *arguments: object) -> list[object]:
        self.queries = [*getattr(self, "queries", []), (query, arguments)]
        return super().read(query, *arguments)


@pytest.fixture
def records(tmp_path: Path) -> SQLiteRecords:
    opened = SQLiteRecords(tmp_path)
    opened.close()
    opened._db = _Recording(opened.path, busy_timeout_s=1.0)
    opened.claim_embedder("e")
    row = np.ones((1, 4), dtype=np.float32) / 2
    drafts = [Draft(NewFact(f"fact {i}", stream=f"s{i % 3}"), row) for i in range(100)]
    opened.apply(ANA, Batch(drafts=drafts), embedder="e")
    opened._db.queries = []
    return opened


def plans(records: SQLiteRecords) -> list[str]:
    db = sqlite3.connect(records.path)
    found = [
        step[3]
        for query, arguments in records._db.queries
        for step in db.execute(f"EXPLAIN QUERY PLAN {query}", arguments)
    ]
    db.close()
    assert found, "no query"
    return [step for step in found if "facts" in step or "vectors" in step or "changes" in step or "B-TREE" in step]


@pytest.mark.parametrize("stream", [None, "s1"])
@pytest.mark.parametrize("superseded", [False, True])
def test_a_page_begins_where_the_last_one_ended(records: SQLiteRecords, stream: str | None, superseded: bool) -> None:
    records.page(ANA, stream=stream, limit=5, after_seq=50, superseded=superseded)
    found = plans(records)
    assert found
    assert all("rowid>?" in plan for plan in found), found


def test_few_facts_are_looked_up_one_by_one(records: SQLiteRecords) -> None:
    [fact] = records.page(ANA, stream=None, limit=1, after_seq=50)
    records._db.queries = []
    records.get_many(ANA, [fact.id])
    records.get_by_seqs(ANA, [fact.seq])
    records.find_identical(ANA, [NewFact("fact 1", stream="s1")])
    records.vectors_of(ANA, [fact.seq], embedder="e", dimension=4)
    records.history(ANA, fact.id)
    for plan, key in zip(plans(records), ["id=?", "rowid=?", "digest=?", "rowid=?", "rowid=?"], strict=True):
        assert plan.startswith("SEARCH"), plan
        assert key in plan, plan


def test_who_has_something_expired_is_in_an_index(records: SQLiteRecords) -> None:
    records.owners_with_expired(now=5.0)
    records.expired(ANA, now=5.0)
    of_all, distinct, of_one, ordering = plans(records)
    assert "COVERING INDEX facts_due (expires_at" in of_all
    assert "facts_by_expiry (owner=? AND expires_at" in of_one
    assert "B-TREE" in distinct, "of what has expired"
    assert "B-TREE" in ordering, "of what has expired"


def test_the_last_position_is_in_no_table_of_owners(records: SQLiteRecords) -> None:
    assert records.last_position() == 100
    [(query, _)] = records._db.queries
    assert "FROM sqlite_sequence" in query


def test_a_page_of_what_lacks_vectors_begins_where_the_last_one_ended(records: SQLiteRecords) -> None:
    records.unindexed(ANA, embedder="e", limit=5, after_seq=50)
    assert "rowid>?" in plans(records)[0]


def test_a_look_at_the_head_or_the_feed_reads_no_facts(records: SQLiteRecords) -> None:
    records.head(ANA)
    records.changes(90, owner=ANA)
    records.changes(90)
    found = plans(records)
    assert len(found) == 3
    for plan in found:
        assert "expires_at>?" in plan or "rowid>?" in plan, plan
