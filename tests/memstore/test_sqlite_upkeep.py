"""Mending a SQLite store, and waiting for whoever writes to it."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_facts import ANA, BO, EMBEDDER, Clock, drafts

from memstore.errors import StoreBusy
from memstore.records import Batch, SQLiteRecords
from memstore.records.sqlite import FILE_NAME, upkeep
from memstore.types import Fact, OwnerId


@pytest.fixture
def records(tmp_path: Path) -> Iterator[SQLiteRecords]:
    opened = SQLiteRecords(tmp_path, clock=Clock())
    opened.claim_embedder(EMBEDDER)
    yield opened
    opened.close()


def add(records: SQLiteRecords, owner: OwnerId, *texts: str) -> list[Fact]:
    applied = records.apply(owner, Batch(drafts=drafts(*texts)), embedder=EMBEDDER)
    return [insertion.fact for insertion in applied.insertions]


def execute(folder: Path, statement: str, *arguments: object) -> None:
    db = sqlite3.connect(folder / FILE_NAME)
    with db:
        db.execute(statement, arguments)
    db.close()


def test_a_row_that_cannot_be_mended_does_not_end_a_repair(records: SQLiteRecords, tmp_path: Path) -> None:
    [lost, damaged] = add(records, ANA, "said twice", "damaged")
    execute(tmp_path, "UPDATE facts SET digest = '0' WHERE id = ?", lost.id)
    [twin] = add(records, ANA, "said twice")
    [moved] = add(records, BO, "moved")
    execute(tmp_path, "UPDATE facts SET stream = 'elsewhere' WHERE id = ?", moved.id)
    execute(tmp_path, "UPDATE facts SET record = replace(record, 'damaged', 'changed') WHERE id = ?", damaged.id)
    position = records.last_position()
    problems = records.check(embedder=EMBEDDER, dimension=4, repair=True)
    assert [(problem.kind, problem.fact_id, problem.repaired) for problem in problems] == [
        ("wrong-index", lost.id, False),
        ("damaged-record", damaged.id, True),
        ("wrong-index", moved.id, True),
    ]
    assert "cannot be mended" in problems[0].detail
    assert [(change.kind, change.fact_id) for change in records.changes(position)] == [
        ("deleted", damaged.id),
        ("updated", moved.id),
    ]
    assert [fact.id for fact in records.page(ANA, stream=None, limit=9, after_seq=0)] == [lost.id, twin.id]
    left = records.check(embedder=EMBEDDER, dimension=4, repair=False)
    assert [(problem.kind, problem.fact_id) for problem in left] == [("wrong-index", lost.id)]


def test_a_row_that_another_writer_changed_since_is_not_mended(
    records: SQLiteRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [fact, gone] = add(records, ANA, "fact", "gone")
    for damaged in (fact, gone):
        execute(tmp_path, "UPDATE facts SET stream = 'elsewhere' WHERE id = ?", damaged.id)
    mend = upkeep._mended

    def mend_late(*arguments: object) -> object:
        execute(tmp_path, "UPDATE facts SET stream = '' WHERE id = ?", fact.id)
        execute(tmp_path, "DELETE FROM facts WHERE id = ?", gone.id)
        return mend(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(upkeep, "_mended", mend_late)
    position = records.last_position()
    assert records.check(embedder=None, dimension=None, repair=True) == []
    assert records.last_position() == position


def test_a_thread_waits_no_longer_than_another_process(tmp_path: Path) -> None:
    records = SQLiteRecords(tmp_path, busy_timeout_s=0.05)
    records.claim_embedder(EMBEDDER)
    is_writing, may_end = threading.Event(), threading.Event()

    def write() -> None:
        with records._db.transaction():
            is_writing.set()
            may_end.wait()

    writer = threading.Thread(target=write)
    writer.start()
    is_writing.wait()
    with pytest.raises(StoreBusy, match="other threads"):
        add(records, ANA, "waits")
    assert records.count(ANA) == 0, "reading waits for nobody"
    may_end.set()
    writer.join()
    assert add(records, ANA, "waits")
    records.close()
