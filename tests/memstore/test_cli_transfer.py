"""The command line on files: exports, imports, and what other programs wrote."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bigrams import BigramEmbedder
from cli_runs import CommandLine, as_json, bigrams, in_process_of_its_own
from exports import record, sealed

from memstore import MemStore
from memstore.records.sqlite import FILE_NAME

MEM0 = {
    "results": [
        {"id": "1", "memory": "Rex is a beagle", "user_id": "ana", "created_at": "2024-05-08T10:00:00Z"},
        {"id": "1", "memory": "Rex is a beagle", "user_id": "ana", "created_at": "2024-05-08T10:00:00Z"},
        {"id": "3", "memory": "Tom is a cat", "user_id": "bob", "metadata": {"kind": "pet"}},
    ]
}
LOCOMO = [
    {
        "sample_id": "conv-1",
        "conversation": {
            "session_1_date_time": "1:56 pm on 8 May, 2023",
            "session_1": [
                {"speaker": "Ana", "dia_id": "D1:1", "text": "I have a dog."},
                {"speaker": "Bob", "dia_id": "D1:2", "text": "I have a cat."},
            ],
        },
    }
]


@pytest.fixture
def facts(location: str) -> Iterator[MemStore]:
    with MemStore(location, embedder=BigramEmbedder()) as store:
        yield store


@pytest.fixture
def cli(facts: MemStore, location: str) -> CommandLine:
    return bigrams(location)


@pytest.fixture
def exported(cli: CommandLine, facts: MemStore, tmp_path: Path) -> Path:
    """A file with two facts of ana, one of them superseded, and one of bob."""
    facts.supersede("ana", facts.add("ana", "Rex is two").id, "Rex is three")
    facts.add("bob", "Tom is a cat", metadata={"legs": 4})
    assert cli("export", "--output", str(tmp_path / "facts.jsonl")).code == 0
    return tmp_path / "facts.jsonl"


def written(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def without_seq(store: MemStore, owner: str) -> list[dict[str, object]]:
    return [{**as_json(fact), "seq": 0} for fact in store.list(owner, superseded=True)]


def test_an_export_says_what_it_wrote(cli: CommandLine, facts: MemStore, exported: Path, tmp_path: Path) -> None:
    header, *lines = exported.read_text().splitlines()
    assert (json.loads(header)["facts"], len(lines)) == (3, 3)
    of_bob = cli("export", "--owner", "bob", "--output", str(tmp_path / "bob.jsonl"), "--json").json
    assert {**of_bob, "sha256": ""} == {
        "output": str(tmp_path / "bob.jsonl"),
        "owners": 1,
        "facts": 1,
        "former_versions": 0,
        "sha256": "",
    }
    assert json.loads((tmp_path / "bob.jsonl").read_text().splitlines()[0])["sha256"] == of_bob["sha256"]
    to_stdout = cli("export", "--owner", "bob", "--json")
    assert to_stdout.stdout.splitlines()[1:] == (tmp_path / "bob.jsonl").read_text().splitlines()[1:]
    assert to_stdout.stderr == "memstore: exported 1 facts and 0 former versions of 1 owners\n"


def test_an_export_of_a_mistyped_owner_leaves_the_file_as_it_is(
    cli: CommandLine, exported: Path, tmp_path: Path
) -> None:
    before, names = exported.read_bytes(), sorted(tmp_path.iterdir())
    for owners in (["Ana"], ["ana", "Bob"]):
        options = [word for owner in owners for word in ("--owner", owner)]
        run = cli("export", *options, "--output", str(exported), "--json")
        assert (run.code, run.stdout) == (3, "")
        assert run.stderr == f"memstore: there is no owner {owners[-1]!r} in this store\n"
        assert cli("export", *options).stdout == ""
    assert (exported.read_bytes(), sorted(tmp_path.iterdir())) == (before, names)


def test_an_export_comes_back_into_an_empty_store(exported: Path, facts: MemStore, tmp_path: Path) -> None:
    empty = bigrams(str(tmp_path / "empty"))
    would = empty("import", str(exported), "--dry-run", "--json").json
    assert would == {"imported": False, "format": "memstore", "owners": 2, "facts": 3, "already_there": 0}
    assert not (tmp_path / "empty").exists()
    did = empty("import", str(exported), "--json").json
    assert did == {"imported": True, "format": "memstore", "created": 3, "already_there": 0, "skipped": []}
    with MemStore(tmp_path / "empty", embedder=BigramEmbedder()) as restored:
        assert restored.owners() == ["ana", "bob"]
        for owner in ("ana", "bob"):
            assert without_seq(restored, owner) == without_seq(facts, owner)
    assert empty("import", str(exported), "--dry-run", "--json").json["already_there"] == 3
    assert empty("import", "-", "--json", stdin=exported.read_bytes()).json["already_there"] == 3


def test_what_an_import_skips_is_told(cli: CommandLine, facts: MemStore, exported: Path) -> None:
    [his] = facts.list("bob")
    facts.update("bob", his.id, text="Tom is a dog")
    run = cli("import", str(exported), "--json")
    assert (run.json["created"], run.json["already_there"]) == (0, 2)
    assert run.json["skipped"] == [{"owner": "bob", "fact_id": his.id, "reason": "other version"}]
    told = cli("import", str(exported))
    assert told.stdout == "imported 0 facts, 2 were there, 1 were skipped\n"
    assert told.stderr == f"memstore: skipped {his.id} of bob: other version\n"


def test_memories_of_mem0_are_imported(cli: CommandLine, facts: MemStore, tmp_path: Path) -> None:
    path = written(tmp_path / "mem0.json", MEM0)
    would = cli("import", path, "--dry-run", "--json").json
    assert would == {"imported": False, "format": "mem0", "owners": 2, "facts": 3, "already_there": 1}
    assert facts.owners() == []
    did = cli("import", path, "--json").json
    assert did == {"imported": True, "format": "mem0", "created": 2, "already_there": 1, "skipped": []}
    [hers], [his] = facts.list("ana"), facts.list("bob")
    assert (hers.text, hers.time, his.metadata["kind"]) == ("Rex is a beagle", "2024-05-08T10:00:00Z", "pet")
    assert cli("import", path, "--dry-run", "--json").json["already_there"] == 3
    assert cli("import", path, "--owner", "carl", "--json").json["created"] == 2
    assert facts.count("carl") == 2


def test_conversations_of_locomo_are_imported(cli: CommandLine, facts: MemStore, tmp_path: Path) -> None:
    path = written(tmp_path / "locomo.json", LOCOMO)
    would = cli("import", path, "--dry-run", "--json").json
    assert would == {"imported": False, "format": "locomo", "owners": 1, "facts": 2, "already_there": 0}
    assert cli("import", path, "--format", "locomo").stdout == "imported 2 facts, 0 were there\n"
    spoken = [(fact.speaker, fact.text, fact.time) for fact in facts.list("conv-1")]
    when = "1:56 pm on 8 May, 2023"
    assert spoken == [("Ana", "I have a dog.", when), ("Bob", "I have a cat.", when)]


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_file_that_is_not_whole_changes_nothing(
    cli: CommandLine, facts: MemStore, exported: Path, tmp_path: Path, dry_run: list[str]
) -> None:
    content = exported.read_bytes()
    position = facts.records.last_position()
    ownerless = [{"id": "1", "memory": "Rex is a beagle"}]
    (tmp_path / "cut").write_bytes(content[:-10])
    (tmp_path / "changed").write_bytes(content.replace(b"three", b"seven"))
    (tmp_path / "text").write_bytes(b"Rex is a beagle")
    (tmp_path / "empty").write_bytes(b"")
    written(tmp_path / "ownerless", ownerless)
    written(tmp_path / "other", {"facts": []})
    for name in ("cut", "changed", "text", "empty", "ownerless", "other", "absent", "."):
        run = cli("import", str(tmp_path / name), *dry_run, "--json")
        assert (run.code, run.stdout) == (2, ""), name
        assert run.stderr.startswith("memstore: ")
        assert run.stderr.count("\n") == 1
    assert cli("import", str(exported), "--owner", "ana", *dry_run).code == 2
    assert cli("import", str(exported), "--format", "mem0", *dry_run).code == 2
    assert facts.records.last_position() == position


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_an_id_of_another_owner_is_refused(
    cli: CommandLine, facts: MemStore, tmp_path: Path, dry_run: list[str]
) -> None:
    fact = facts.add("ana", "Rex is a beagle")
    position = facts.records.last_position()
    (tmp_path / "bobs").write_bytes(sealed([record(1, owner="bob"), record(2, id=fact.id, owner="bob")]))
    run = cli("import", str(tmp_path / "bobs"), *dry_run, "--json")
    assert (run.code, run.stdout) == (2, "")
    assert run.stderr.startswith(f"memstore: line 3: the id {fact.id!r} is that of a fact of another owner")
    assert facts.records.last_position() == position


def test_an_import_in_a_pipe(tmp_path: Path, exported: Path) -> None:
    with MemStore(tmp_path / "empty", embedder=BigramEmbedder()):
        pass
    store = ["--store", str(tmp_path / "empty")]
    run = in_process_of_its_own(["import", "-", "--dry-run", "--json", *store], input=exported.read_text())
    assert (run.json["facts"], run.stderr) == (3, "")
    assert (tmp_path / "empty" / FILE_NAME).exists()
