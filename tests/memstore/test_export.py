"""A store written to a file and read back is the same store, or nothing was read."""

import dataclasses
import io
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bigrams import BigramEmbedder, NaNEmbedder
from exports import ANA, FOREVER, ODD, all_facts, former, populate, record, record_lines, sealed

from memstore import (
    EmbedderMismatch,
    EmbeddingError,
    Fact,
    InvalidExport,
    MemStore,
    MemStoreSettings,
    NewFact,
    StoreDamaged,
)
from memstore.records import RecordStore, SQLiteRecords
from memstore.searchable import vectors_name
from memstore.transfer.export import ExportReport, export_facts
from memstore.transfer.importing import ImportReport, Skipped, SkipReason, import_facts


class CountingEmbedder(BigramEmbedder):
    texts = 0

    def embed(self, texts: Sequence[str]) -> Any:
        self.texts += len(texts)
        return super().embed(texts)


@pytest.fixture(params=["sqlite", "redis"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemStore]:
    """A second store, beside `store` on the same server where both are on one."""
    location = str(tmp_path / "target")
    if request.param == "redis":
        # The same server as the other store's: a new URL would be an emptied database.
        where = request.node.funcargs["location"]
        location = where if where.startswith("redis") else request.getfixturevalue("redis_url")
    settings = MemStoreSettings(redis_prefix="target")
    with MemStore(location, embedder=BigramEmbedder(64, name="other"), settings=settings) as opened:
        yield opened


@pytest.fixture
def local(tmp_path: Path) -> Iterator[MemStore]:
    with MemStore(tmp_path / "local", embedder=CountingEmbedder()) as opened:
        yield opened


def exported(store: MemStore, **options: Any) -> bytes:
    sink = io.BytesIO()
    export_facts(store, sink, **options)
    return sink.getvalue()


def imported(store: MemStore, export: bytes, **options: Any) -> ImportReport:
    return import_facts(store, io.BytesIO(export), **options)


def is_untouched(store: MemStore) -> bool:
    return store.records.last_position() == 0 and store.owners() == []


def test_a_store_comes_back_as_it_was(store: MemStore, target: MemStore) -> None:
    populate(store)
    export = exported(store)
    before = all_facts(store)
    report = imported(target, export, batch=7)
    assert report == ImportReport(created=len(before), already_there=0, skipped=[])
    assert all_facts(target) == before
    assert record_lines(exported(target)) == record_lines(export)
    for owner in (ANA, ODD):
        for fact in store.list(owner):
            assert target.search(owner, fact.text, k=1)[0].fact.text == fact.text
    assert target.records.check(embedder=vectors_name(target.embedder), dimension=64, repair=False) == []
    [home] = [fact for fact in target.list(ANA) if fact.text == "Ana works from home"]
    assert [fact.text.split()[-1] for fact in target.history(ANA, home.id)] == ["2", "3", "3", "5", "5", "home"]
    position = target.records.last_position()
    assert imported(target, export) == ImportReport(created=0, already_there=len(before), skipped=[])
    assert target.records.last_position() == position, "the second time changes nothing"


def test_the_file_is_what_the_format_says(store: MemStore) -> None:
    populate(store)
    export = exported(store, clock=lambda: 1234.5)
    header, *records = [json.loads(line) for line in export.split(b"\n")[:-1]]
    facts = all_facts(store)
    versions = sum(len(history) for _, history in facts)
    assert versions == 2 + 1 + 3
    assert {k: header[k] for k in header if k != "sha256"} == {
        "format": "memstore",
        "schema_version": 1,
        "owners": 2,
        "facts": 25,
        "former_versions": versions,
        "exported_at": 1234.5,
    }
    for line, (fact, history) in zip(records, facts, strict=True):
        assert line["history"] == [
            {k: v for k, v in dataclasses.asdict(one).items() if k not in ("id", "owner", "seq")} for one in history
        ]
        assert {**line, "seq": 0} == {**dataclasses.asdict(fact), "history": line["history"]}
    assert sealed(export.split(b"\n")[1:-1], exported_at=1234.5) == export, "the hash is that of the description"


def test_owners_can_be_chosen(store: MemStore, local: MemStore) -> None:
    populate(store)
    report = imported(local, exported(store, owners=[ODD, "nobody"]))
    assert (report.created, local.owners()) == (21, [ODD])
    sink = io.BytesIO()
    assert export_facts(store, sink, owners=["nobody"])[:3] == (0, 0, 0)
    assert imported(local, sink.getvalue()) == ImportReport(0, 0, [])


def test_an_export_is_of_one_moment_while_others_write(store: MemStore) -> None:
    facts = store.add_many(ANA, [NewFact(f"fact {i}") for i in range(5)])
    store.update(ANA, facts[3].id, text="before")

    class Interfering:
        """Writes once, after the first page was read: to facts on that page, and beyond."""

        def __init__(self, records: RecordStore) -> None:
            self.records, self.is_done = records, False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.records, name)

        def page(self, *arguments: Any, **options: Any) -> list[Fact]:
            page = self.records.page(*arguments, **options)
            if not self.is_done:
                self.is_done = True
                store.delete(ANA, facts[0].id)
                store.supersede(ANA, facts[1].id, "in the place of 1")
                store.update(ANA, facts[3].id, text="after", metadata={"n": 1})
                store.add(ANA, "new")
            return page

    records = store.records
    store.records = Interfering(records)  # type: ignore[assignment]
    during = exported(store)
    store.records = records
    assert record_lines(during) == record_lines(exported(store))
    assert [json.loads(line)["state"] for line in record_lines(during)].count("superseded") == 1


def test_purged_while_it_was_read(store: MemStore) -> None:
    store.add_many(ANA, [NewFact(f"fact {i}") for i in range(5)])

    class Purging:
        is_done = False

        def __getattr__(self, name: str) -> Any:
            return getattr(records, name)

        def page(self, *arguments: Any, **options: Any) -> list[Fact]:
            page = records.page(*arguments, **options)
            if not self.is_done:
                self.is_done = True
                store.purge(ANA)
                store.add(ANA, "the next epoch")
            return page

    records = store.records
    store.records = Purging()  # type: ignore[assignment]
    lines = record_lines(exported(store))
    store.records = records
    assert [json.loads(line)["text"] for line in lines] == ["the next epoch"]


def test_a_file_is_replaced_as_a_whole(local: MemStore, tmp_path: Path) -> None:
    populate(local)
    path = tmp_path / "folder" / "facts.jsonl"
    path.parent.mkdir()
    path.write_text("old")
    report = export_facts(local, path)
    assert report == ExportReport(2, 25, 6, json.loads(path.read_bytes().split(b"\n")[0])["sha256"])
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    complete = path.read_bytes()
    local.add(ANA, "one more")
    # What is set aside while reading fits, the file does not.
    limit = len(exported(local)) - 50
    code = f"""
import resource, signal
from bigrams import BigramEmbedder
from memstore import MemStore
from memstore.transfer.export import export_facts
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with MemStore({str(tmp_path / "local")!r}, embedder=BigramEmbedder()) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    try:
        export_facts(store, {str(path)!r})
    except OSError as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.stdout.strip() == "OSError", done.stderr
    assert path.read_bytes() == complete
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(OSError, match="No space left"):
        export_facts(local, "/dev/full")
    assert Path("/dev/full").is_char_device()


def environment() -> dict[str, str]:
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}


def test_a_pipe_is_read_too(store: MemStore, local: MemStore) -> None:
    populate(store)
    export = exported(store)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with open(writing, "wb") as pipe:
            pipe.write(export)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert import_facts(local, pipe).created == 25
    assert os.waitpid(child, 0)[1] == 0
    assert record_lines(exported(local)) == record_lines(export)


def test_nothing_is_embedded_twice(store: MemStore, local: MemStore) -> None:
    populate(store)
    export = exported(store)
    embedder = local.embedder
    assert isinstance(embedder, CountingEmbedder)
    imported(local, export)
    assert embedder.texts == 23, "current facts alone"
    local.delete(ODD, local.list(ODD)[5].id)
    assert imported(local, export) == ImportReport(created=1, already_there=24, skipped=[])
    assert embedder.texts == 24


def test_progress_ends_with_the_last_fact(store: MemStore, local: MemStore) -> None:
    populate(store)
    calls: list[tuple[int, int]] = []
    export = exported(store, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(2, 23), (23, 23)]
    calls.clear()
    imported(local, export, on_progress=lambda done, total: calls.append((done, total)), batch=10)
    assert calls == [(4, 25), (14, 25), (24, 25), (25, 25)]


IMPORT = """
import sys
from bigrams import BigramEmbedder
from memstore import MemStore
from memstore.transfer.importing import import_facts

def tell(done, total):
    print(done, flush=True)
    if done >= 1500:
        sys.stdin.read()  # never ends: whoever reads this kills

with MemStore({!r}, embedder=BigramEmbedder()) as store:
    import_facts(store, {!r}, on_progress=tell, batch=50)
"""


def test_an_import_that_was_killed_goes_on(store: MemStore, local: MemStore, location: str, tmp_path: Path) -> None:
    with MemStore(tmp_path / "source", embedder=BigramEmbedder()) as source:
        facts = source.add_many(ANA, [NewFact(f"fact number {i}", stream=f"s{i % 5}") for i in range(1990)])
        for fact in facts[:10]:
            source.supersede(ANA, fact.id, f"{fact.text}, corrected")
        export_facts(source, tmp_path / "facts.jsonl")
    with subprocess.Popen(
        [sys.executable, "-c", IMPORT.format(location, str(tmp_path / "facts.jsonl"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 500:
                break
        os.kill(child.pid, signal.SIGKILL)
    there = len(all_facts(store))
    assert 500 <= there <= 1500
    report = import_facts(store, tmp_path / "facts.jsonl")
    assert report == ImportReport(created=2000 - there, already_there=there, skipped=[])
    import_facts(local, tmp_path / "facts.jsonl")
    assert record_lines(exported(store)) == record_lines(exported(local))
    assert store.search(ANA, "fact number 1234", k=1)[0].fact.text == "fact number 1234"
    assert store.records.check(embedder=vectors_name(store.embedder), dimension=256, repair=False) == []


def test_what_has_expired_is_left_out(local: MemStore, tmp_path: Path) -> None:
    populate(local)
    export = exported(local)
    assert json.loads(exported(local, clock=lambda: FOREVER + 9.5).split(b"\n")[0])["facts"] == 25 - 1 - 9
    with MemStore(tmp_path / "late", embedder=BigramEmbedder(), clock=lambda: FOREVER) as late:
        report = imported(late, export, clock=lambda: FOREVER)
        assert (report.created, report.already_there) == (23, 0)
        assert [skipped.reason for skipped in report.skipped] == [SkipReason.EXPIRED] * 2
        assert {skipped.owner for skipped in report.skipped} == {ANA, ODD}


def test_what_differs_is_skipped_by_name(store: MemStore, local: MemStore) -> None:
    one, two, three = store.add_many(ANA, [NewFact("one"), NewFact("two"), NewFact("three", expires_at=FOREVER)])
    export = exported(store)
    soon = local.add(ANA, "two", expires_at=FOREVER)
    other = local.add(ANA, "three", expires_at=FOREVER + 5)
    assert imported(local, export) == ImportReport(
        1, 0, [Skipped(ANA, two.id, SkipReason.SAME_CONTENT), Skipped(ANA, three.id, SkipReason.SAME_CONTENT)]
    )
    assert local.get(ANA, soon.id).expires_at is None, "of two expiries the later one counts"
    assert local.get(ANA, other.id).expires_at == FOREVER + 5
    local.update(ANA, one.id, metadata={"edited": True})
    before = all_facts(local)
    report = imported(local, export)
    assert report.skipped[0] == Skipped(ANA, one.id, SkipReason.OTHER_VERSION)
    assert (report.created, report.already_there, len(report.skipped)) == (0, 0, 3)
    assert all_facts(local) == before


def damage(store: MemStore, fact: Fact) -> None:
    if isinstance(store.records, SQLiteRecords):
        with sqlite3.connect(store.records.path) as db:
            db.execute("UPDATE facts SET record = '1:x:{}' WHERE id = ?", [fact.id])
        db.close()
    else:
        records: Any = store.records
        records._redis.do("hset", f"{records._keys.of(fact.owner)}records", fact.id, "1:x:{}")


def test_an_export_brings_back_what_was_set_aside(store: MemStore) -> None:
    fact = store.add(ANA, "version 1")
    store.update(ANA, fact.id, text="version 2")
    export = exported(store)
    for number in range(3, 7):
        store.update(ANA, fact.id, text=f"version {number}")
    damage(store, fact)
    with pytest.raises(StoreDamaged, match=fact.id):
        exported(store)
    store.records.check(embedder=vectors_name(store.embedder), dimension=256, repair=True)
    assert store.list(ANA) == []
    assert imported(store, export) == ImportReport(1, 0, [])
    assert [version.text for version in store.history(ANA, fact.id)] == ["version 1", "version 2"]
    assert record_lines(exported(store)) == record_lines(export)
    assert store.search(ANA, "version", k=9)[0].fact == store.get(ANA, fact.id)
    assert store.records.check(embedder=vectors_name(store.embedder), dimension=256, repair=False) == []


def test_an_id_of_another_owner_is_refused(store: MemStore) -> None:
    theirs = store.add("bo", "theirs")
    export = sealed([record(1), record(2, id=theirs.id)])
    position = store.records.last_position()
    with pytest.raises(InvalidExport, match=f"line 3: the id '{theirs.id}' is that of a fact of another owner"):
        imported(store, export)
    assert store.records.last_position() == position


def test_another_embedder_and_a_text_without_direction(tmp_path: Path, local: MemStore) -> None:
    export = sealed([record(1), record(2, text="void"), record(3, owner="bo")])
    with MemStore(tmp_path / "nan", embedder=NaNEmbedder()) as store:
        with pytest.raises(EmbeddingError, match="line 3"):
            imported(store, export)
        assert is_untouched(store)
    with MemStore(tmp_path / "x", embedder=BigramEmbedder()) as store:
        store.records.adopt_embedder("x")
        with pytest.raises(EmbedderMismatch):
            imported(store, export)
        assert is_untouched(store)
    assert imported(local, export).created == 3


V2 = {"version": 2, "history": [former()]}
NOT_EXPORTS = {
    "line 1: the file is empty": b"",
    "line 1: not JSON": b"hello\n",
    "line 1: not a JSON object": b"[]\n",
    "line 1: the file was cut off": sealed([])[:-1],
    "line 1: this is no export of memstore": b'{"results": []}\n',
    "line 1: the export has schema version 2": sealed([], schema_version=2),
    "line 1: the header is not one": sealed([], schema_version="1"),
    "line 1: the header": sealed([], owners=True),
    "line 1: the header is": sealed([], more=1),
    "line 1: exported_at is no number": sealed([], exported_at=float("nan")),
    "line 1: the hash is not": sealed([record()], sha256="0" * 64),
    "line 1: the number of owners": sealed([record()], owners=2),
    "line 1: the number of": sealed([record()], former_versions=1),
    "line 3: the file ends after 1 of 2 facts": sealed([record()], facts=2),
    "line 3: there are more facts than the 1": sealed([record(1), record(2)], facts=1),
    "line 3: not JSON": sealed([record(1), b"{'id': 1}"]),
    "line 2: not JSON: 'utf-8'": sealed([b"{\xff}"]),
    "line 2: not JSON: maximum recursion": sealed([b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]),
    "line 2: not JSON: one name is given twice": sealed([json.dumps(record()).encode()[:-1] + b',"text":"y"}']),
    "line 3: fact '0190163d-8694-7000-8000-000000000001' is in line 2": sealed([record(1), record(1, text="y")]),
    "line 2: the field 'seq'": sealed([record(seq=1)]),
    "line 2: the field 'text'": sealed([{k: v for k, v in record().items() if k != "text"}]),
    "line 2: history is not a list": sealed([record(history={})]),
    "line 2: a former version has not": sealed([record(version=2, history=[record()])]),
    "line 2: the versions do not ascend": sealed([record(version=1, history=[former()])]),
    "line 2: the versions do": sealed([record(version=3, history=[former(version=2), former(version=1)])]),
    "line 2: text holds a lone surrogate": sealed([json.dumps(record(text="\ud800")).encode()]),
    "line 2: text holds a NUL": sealed([record(text="\0")]),
    "line 2: text is empty": sealed([record(version=2, history=[former(text=" ")])]),
    "line 2: text is a int": sealed([record(text=5)]),
    "line 2: owner is empty": sealed([record(owner="")]),
    "line 2: owner is a NoneType": sealed([record(owner=None)]),
    "line 2: owner has 600 bytes": sealed([record(owner="x" * 600)]),
    "line 2: stream is a NoneType": sealed([record(stream=None)]),
    "line 2: metadata is a list": sealed([record(metadata=[])]),
    "line 2: metadata is not JSON": sealed([json.dumps(record(metadata={"x": float("inf")})).encode()]),
    "line 2: version is not an integer": sealed([record(version=1.0)]),
    "line 2: version is not": sealed([record(version=True)]),
    "line 2: version is": sealed([record(version=10**15)]),
    "line 2: created_at is no number": sealed([record(created_at="now")]),
    "line 2: updated_at is no number": sealed([record(updated_at=10**400)]),
    "line 2: event_at is no number": sealed([record(time="x", event_at=False)]),
    "line 2: event_at without a time": sealed([record(event_at=1.0)]),
    "line 2: expires_at is no number": sealed([json.dumps(record(expires_at=float("nan"))).encode()]),
    "line 2: state is not one of": sealed([record(state="deleted")]),
    "line 2: state is": sealed([record(state=["current"])]),
    "line 2: id is not a UUIDv7": sealed([record(id="1\n2")]),
    "line 2: id is": sealed([record(id=record()["id"].upper())]),
    "line 2: supersedes is not": sealed([record(supersedes="")]),
    "line 2: the fact supersedes itself": sealed([record(supersedes=record()["id"])]),
}


@pytest.mark.parametrize("message", NOT_EXPORTS)
def test_what_is_no_export_is_refused_by_line(local: MemStore, message: str) -> None:
    with pytest.raises(InvalidExport, match="^" + message.replace("(", r"\(")) as caught:
        imported(local, NOT_EXPORTS[message])
    assert len(str(caught.value)) < 300
    assert is_untouched(local)


def test_a_path_that_cannot_be_read_is_refused_by_name(local: MemStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        import_facts(local, tmp_path / "absent.jsonl")
    with pytest.raises(IsADirectoryError):
        import_facts(local, tmp_path)
    assert is_untouched(local)


def test_a_file_that_changes_while_it_is_read(local: MemStore, tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_bytes(sealed([record(n, text="x" * 20_000) for n in range(1, 30)]))
    other = path.read_bytes().replace(b"xxx", b"yyy")
    with pytest.raises(InvalidExport, match="was changed while it was read"):
        import_facts(local, path, batch=1, on_progress=lambda *_: path.write_bytes(other) and None)
    assert {fact.text for fact in local.list(ANA)} == {"x" * 20_000}


def mutated(export: bytes, chance: random.Random) -> bytes:
    lines = export.split(b"\n")[:-1]
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    place = chance.randrange(len(export))
    match chance.randrange(9):
        case 0:
            return export[:place] + bytes([export[place] ^ 1 << chance.randrange(8)]) + export[place + 1 :]
        case 1:
            return export[:place]
        case 2:
            lines[one], lines[other] = lines[other], lines[one]
        case 3:
            lines.insert(other, lines[one])
        case 4:
            lines.insert(one, chance.randbytes(chance.randrange(50)))
        case 5:
            del lines[one]
        case 6:
            return export[:place] + chance.randbytes(chance.randrange(1, 9)) + export[place:]
        case 7:
            return export[:place] + export[place + chance.randrange(1, 99) :]
        case 8:
            return export + chance.choice([b"\n", b" ", b"{}\n", lines[one] + b"\n"])
    return b"\n".join(lines) + b"\n"


def test_no_byte_can_be_another(store: MemStore, local: MemStore) -> None:
    store.add_many(ODD, [NewFact(f"fact {i}", metadata={"n": i}) for i in range(4)])
    fact = store.add(ANA, "floor 2", time="8 May 2023")
    store.supersede(ANA, fact.id, "floor 5")
    export = exported(store)
    refused = 0
    for seed in range(600):
        changed = mutated(export, random.Random(seed))
        if changed != export:
            with pytest.raises(InvalidExport, match=r"^line \d+: "):
                imported(local, changed)
            refused += 1
    assert refused > 500
    assert is_untouched(local)
    assert imported(local, export).created == 6


JUNK: list[Any] = [None, True, 0, -1, 1, 2, 3, 1.5, 1e300, 10**30, "", "x", " ", "current", "superseded", [], {}, [{}]]
JUNK += [{"a": 1}, {"a": {"b": [None, 1e-7]}}, "é\u2028\x85", "a\0b", 2**53, 2**53 + 1, 3e9, ANA, ODD]


def forged(records: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    """Records with one value replaced, perhaps inside of the history."""
    copy: list[dict[str, Any]] = json.loads(json.dumps(records))
    fields = chance.choice(copy)
    if fields["history"] and chance.random() < 0.4:
        fields = chance.choice(fields["history"])
    name = chance.choice(list(fields))
    fields[name] = chance.choice([*JUNK, chance.choice(copy)["id"]])
    if chance.random() < 0.1:
        del fields[name]
    return copy


def test_a_forged_hash_brings_in_nothing_that_is_not_in_the_file(store: MemStore, tmp_path: Path) -> None:
    """The hash guards against damage; what was made by hand is held to the rules for facts."""
    history = [former(text="floor 2"), former(version=2, text="floor 3", time="8 May 2023", event_at=1683504000.0)]
    records = [
        record(1, version=3, history=history),
        record(2, owner=ODD, metadata={"a": [1, None]}, expires_at=FOREVER, stream="s", speaker="Ana"),
        record(3, state="superseded", version=2, history=[former()]),
        record(4, supersedes=record(3)["id"], time="3 May 2023", event_at=1683072000.0),
    ]
    kept = 0
    for seed in range(400):
        forgery = forged(records, random.Random(seed))
        export = sealed([json.dumps(r, ensure_ascii=False, separators=(",", ":")).encode() for r in forgery])
        owners = {r["owner"] for r in forgery if isinstance(r.get("owner"), str)}
        try:
            report = imported(store, export)
        except InvalidExport:
            assert store.owners() == []
            continue
        kept += 1
        skipped = {skipped.fact_id for skipped in report.skipped}
        assert report.created + len(skipped) == 4
        wanted = sorted((r for r in forgery if r["id"] not in skipped), key=lambda r: str(r["owner"]))
        assert [json.loads(line) for line in record_lines(exported(store))] == wanted
        for owner in owners:
            assert all(hit.fact.state == "current" for hit in store.search(owner, "fact", k=9))
            for fact in store.list(owner, superseded=True):
                store.delete(owner, fact.id)
    assert kept > 50
