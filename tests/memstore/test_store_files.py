"""What damage, missing permission and a full disk look like to a store in a directory."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bigrams import BigramEmbedder

from memstore import MemStore, StoreDamaged, StoreError, StoreFull, StoreTooNew
from memstore.records import SQLiteRecords
from memstore.records.sqlite import FILE_NAME

OPEN = "from memstore.records import SQLiteRecords\nfrom pathlib import Path\nrecords = SQLiteRecords(Path({!r}))\n"
REPORT = """
from memstore import StoreError
try:
    {}
except StoreError as error:
    print(type(error).__name__)
"""


def filled(path: Path, facts: int = 200) -> None:
    from memstore import NewFact

    with MemStore(path, embedder=BigramEmbedder()) as store:
        store.add_many("ana", [NewFact(f"fact number {i} of ana") for i in range(facts)])
        store.add("bo", "fact of bo")


def test_a_failed_start_frees_the_directory(tmp_path: Path) -> None:
    class Unusable(BigramEmbedder):
        fingerprint = property()  # type: ignore[assignment]

    with pytest.raises(AttributeError):
        MemStore(tmp_path, embedder=Unusable())
    MemStore(tmp_path, embedder=BigramEmbedder()).close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    db.close()
    with pytest.raises(StoreTooNew, match="schema version 99"):
        SQLiteRecords(tmp_path)


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("CREATE TABLE bookmarks (url TEXT)")
    db.close()
    with pytest.raises(StoreDamaged, match="another program"):
        SQLiteRecords(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a database, but long enough to be one" * 40])
def test_what_is_no_database_is_refused_and_left(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(StoreDamaged):
        SQLiteRecords(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == content


@pytest.mark.parametrize("left", [0, 0.05, 0.3, 0.9])
def test_cut_off_records_are_refused(tmp_path: Path, left: float) -> None:
    """Case M16: never a fact of another owner, never silence."""
    filled(tmp_path)
    path = tmp_path / FILE_NAME
    os.truncate(path, int(path.stat().st_size * left) // 4096 * 4096)
    with pytest.raises(StoreDamaged):
        MemStore(tmp_path, embedder=BigramEmbedder())


def test_a_damaged_vector_is_made_anew(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("UPDATE vectors SET data = x'00000000' WHERE id / 256 = 2")
    db.close()
    with MemStore(tmp_path, embedder=BigramEmbedder()) as store:
        best = store.search("ana", "fact number 1 of ana", k=3)
        assert len(best) == 3
        assert (best[0].fact.seq, best[0].score) == (2, pytest.approx(1.0))
        assert store.search("bo", "fact", k=1)[0].fact.owner == "bo"


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        SQLiteRecords(tmp_path / "file")


def test_no_permission_to_make_the_store(read_only_directory: Path, run_unprivileged: Callable[[str], str]) -> None:
    for path in (read_only_directory, read_only_directory / "inside"):
        assert run_unprivileged(REPORT.format(OPEN.format(str(path)).replace("\n", "; "))) == "StoreReadOnly"


def test_no_permission_to_write_the_records(read_only_directory: Path, run_unprivileged: Callable[[str], str]) -> None:
    read_only_directory.chmod(0o777)
    SQLiteRecords(read_only_directory).close()
    (read_only_directory / FILE_NAME).chmod(0o444)
    code = OPEN.format(str(read_only_directory)).replace("\n", "; ") + "records.purge('ana')"
    assert run_unprivileged(REPORT.format(code)) == "StoreReadOnly"


def test_a_full_database_keeps_what_it_has(tmp_path: Path) -> None:
    from memstore import NewFact

    with MemStore(tmp_path, embedder=BigramEmbedder()) as store:
        kept = store.add("ana", "kept")
        records = store.records
        assert isinstance(records, SQLiteRecords)
        # SQLite's own quota: the same SQLITE_FULL as from a full disk.
        pages = records._db._writer.execute("PRAGMA page_count").fetchone()[0]
        records._db._writer.execute(f"PRAGMA max_page_count = {pages + 3}").fetchall()
        with pytest.raises(StoreFull, match="free some"):
            store.add_many("ana", [NewFact(f"fact {i} " + "x" * 1000) for i in range(100)])
        assert store.list("ana") == [kept]
        assert [hit.fact for hit in store.search("ana", "fact", k=9)] == [kept]
        records._db._writer.execute("PRAGMA max_page_count = 100000").fetchall()
        store.add("ana", "goes on")
        assert store.count("ana") == 2


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    code = f"""
import resource
{OPEN.format(str(tmp_path))}
records.purge("ana")
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
from memstore import StoreError
try:
    for i in range(10_000):
        records.claim_embedder("x")
        records.purge(str(i) * 1000)
except StoreError as error:
    print(type(error).__name__, records.head("ana").epoch)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["StoreError", "1"], done.stderr


def test_acknowledged_facts_survive_a_kill(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from bigrams import BigramEmbedder
from memstore import MemStore
store = MemStore({str(tmp_path)!r}, embedder=BigramEmbedder())
for i in range(100_000):
    print(store.add("ana", f"fact {{i}}").id, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged = [child.stdout.readline().strip() for _ in range(30)]
    child.send_signal(signal.SIGKILL)
    acknowledged += [line.strip() for line in child.stdout if line.endswith("\n")]
    child.wait()
    child.stdout.close()
    with MemStore(tmp_path, embedder=BigramEmbedder()) as store:
        assert [fact.id for fact in store.get_many("ana", acknowledged)] == acknowledged
        assert len(store.search("ana", "fact 7", k=10**6)) == store.count("ana") >= 30
