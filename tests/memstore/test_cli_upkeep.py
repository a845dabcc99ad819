"""The command line on a store as a whole: what it holds, how it is, what happens to it."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from bigrams import BigramEmbedder
from cli_runs import CommandLine, bigrams
from small_kv import encoding, kv

from memstore import KVBlobs, MemStore, MemStoreSettings, NewFact
from memstore.searchable import vectors_name

OTHER = BigramEmbedder(64, name="other")


@pytest.fixture
def facts(location: str) -> Iterator[MemStore]:
    with MemStore(location, embedder=BigramEmbedder()) as store:
        yield store


@pytest.fixture
def cli(facts: MemStore, location: str) -> CommandLine:
    return bigrams(location)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[CommandLine, MemStore, Path]]:
    """A store in a directory: the command line on it, itself, and its database."""
    with MemStore(tmp_path / "disk", embedder=BigramEmbedder()) as store:
        yield bigrams(str(tmp_path / "disk")), store, tmp_path / "disk" / "records.sqlite3"


def change(database: Path, statement: str, *arguments: object) -> None:
    with sqlite3.connect(database) as db:
        assert db.execute(statement, arguments).rowcount == 1
    db.close()


# ---- verify ----


def test_a_sound_store_is_sound(cli: CommandLine, facts: MemStore) -> None:
    facts.add("ana", "Rex is a beagle")
    expected = {"facts": 1, "problems": [], "blobs": None, "kv_replaced": False, "is_sound": True}
    assert cli("verify", "--json").json == expected
    assert cli("verify").stdout == "1 facts, sound\n"


def test_damage_is_found_and_mended_when_asked(on_disk: tuple[CommandLine, MemStore, Path]) -> None:
    cli, store, database = on_disk
    damaged, whole = store.add("ana", "Rex is a beagle"), store.add("ana", "Tom is a cat")
    change(database, "UPDATE facts SET record = replace(record, 'beagle', 'poodle') WHERE seq = ?", damaged.seq)
    change(database, "DELETE FROM vectors WHERE id / 256 = ?", whole.seq)
    before = database.read_bytes()
    for arguments in ([], ["--repair", "--dry-run"]):
        run = cli("verify", *arguments, "--json")
        assert (run.code, run.json["is_sound"]) == (1, False)
        found = [(problem["kind"], problem["fact_id"], problem["repaired"]) for problem in run.json["problems"]]
        assert found == [("damaged-record", damaged.id, False), ("missing-vector", whole.id, False)]
    assert database.read_bytes() == before
    assert cli("facts", "get", damaged.id, "--owner", "ana").code == 5
    run = cli("verify", "--repair", "--json")
    assert (run.code, run.json["is_sound"], run.json["facts"]) == (0, True, 1)
    assert cli("verify").code == 0
    assert [hit.fact.id for hit in store.search("ana", "Tom", k=5)] == [whole.id]


def test_orphaned_kv_is_found_and_dropped(cli: CommandLine, facts: MemStore, tmp_path: Path) -> None:
    fact = facts.add("ana", "Rex is a beagle")
    with KVBlobs(tmp_path / "cache") as blobs:
        blobs.put(encoding(1, owner=fact.owner, fact_id=fact.id), *kv(1))
        blobs.put(encoding(2, owner=fact.owner, fact_id="gone"), *kv(2))
    at = ("--kv", str(tmp_path / "cache"))
    found = cli("verify", *at, "--json")
    assert (found.code, found.json["blobs"]["encodings"], found.json["blobs"]["orphans"]) == (1, 2, 1)
    mended = cli("verify", *at, "--repair", "--json")
    assert (mended.code, mended.json["blobs"]["repaired"]) == (0, 1)
    assert cli("verify", *at, "--json").json["blobs"]["encodings"] == 1


@pytest.fixture(params=["damaged", "of another release"])
def unreadable_kv(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The directory of a KV cache that cannot be used as a whole."""
    with KVBlobs(tmp_path / "cache") as blobs:
        blobs.put(encoding(1), *kv(1))
        if request.param == "of another release":
            with blobs._env.transaction(write=True) as txn:
                txn.put(b"format", b"1")
    data = tmp_path / "cache" / "data.mdb"
    if request.param == "damaged":
        data.write_bytes(b"\xa5" * data.stat().st_size)
    return tmp_path / "cache"


def test_only_a_repair_replaces_a_kv_cache(on_disk: tuple[CommandLine, MemStore, Path], unreadable_kv: Path) -> None:
    cli, store, _ = on_disk
    fact = store.add("ana", "Rex is a beagle")
    at = ("--kv", str(unreadable_kv), "--json")
    before = {path.name: path.read_bytes() for path in unreadable_kv.iterdir()}

    def stays() -> bool:
        return {path.name: path.read_bytes() for path in unreadable_kv.iterdir()} == before

    changes = (["facts", "delete", fact.id, "--owner", "ana"], ["owners", "purge", "ana", "--yes"])
    for command in (["stats"], ["compact"], *changes):
        run = cli(*command, *at)
        assert (run.code, stays()) == (5, True), run.stderr
        assert "memstore verify --repair" in run.stderr
    assert store.get("ana", fact.id) == fact
    assert cli("watch", "--since", "0", "--once", *at).code == 0
    doctor = cli("doctor", *at)
    assert (doctor.code, doctor.json[-1]["level"], doctor.json[-1]["subject"], stays()) == (
        1,
        "error",
        "KV cache",
        True,
    )
    for arguments in ([], ["--dry-run"], ["--repair", "--dry-run"]):
        run = cli("verify", *arguments, *at)
        assert (run.code, run.json["is_sound"], run.json["kv_replaced"], stays()) == (1, False, False, True)
        [problem] = run.json["problems"]
        assert (problem["kind"], problem["repaired"]) == ("damaged-kv-cache", False)
    run = cli("verify", "--repair", *at)
    assert (run.code, run.json["is_sound"], run.json["kv_replaced"]) == (0, True, True)
    [problem] = run.json["problems"]
    assert (problem["kind"], problem["repaired"]) == ("damaged-kv-cache", True)
    assert cli("verify", *at).json["problems"] == []
    assert cli("stats", *at).json["kv"]["encodings"] == 0


# ---- reindex, compact ----


def test_reindex_moves_the_store_to_another_embedder(cli: CommandLine, facts: MemStore) -> None:
    for owner in ("ana", "bob"):
        facts.add(owner, "Rex is a beagle")
    of_other = cli.with_embedder(OTHER)
    refused = of_other("facts", "add", "Tom", "--owner", "ana")
    assert (refused.code, refused.stdout) == (5, "")
    assert "reindex" in refused.stderr
    names = {"previous": vectors_name(facts.embedder), "embedder": vectors_name(OTHER)}
    would = of_other("reindex", "--dry-run", "--json").json
    assert would == {"reindexed": False, **names, "embedded": 2, "facts": 2}
    assert cli("facts", "search", "Rex", "--owner", "ana").code == 0
    assert of_other("reindex", "--json").json == {"reindexed": True, **names, "embedded": 2, "facts": 2}
    assert of_other("facts", "search", "Rex", "--owner", "ana").code == 0
    assert cli("facts", "search", "Rex", "--owner", "ana").code == 5
    assert of_other("reindex", "--dry-run", "--json").json["embedded"] == 0


def test_reindex_takes_a_model_by_name(on_disk: tuple[CommandLine, MemStore, Path], tmp_path: Path) -> None:
    cli, store, _ = on_disk
    store.add("ana", "Rex is a beagle")
    asked: list[str | None] = []

    def load(settings: MemStoreSettings) -> BigramEmbedder:
        asked.append(settings.embedder_model)
        return OTHER

    assert cli.with_loader(load)("reindex", "--model", "/models/other").code == 0
    assert asked == ["/models/other"]


def test_compact_gives_space_back(on_disk: tuple[CommandLine, MemStore, Path], tmp_path: Path) -> None:
    cli, store, database = on_disk
    store.add_many("ana", [NewFact(f"fact {number}") for number in range(300)])
    store.purge("ana")
    with KVBlobs(tmp_path / "cache"):
        pass
    at = ("--kv", str(tmp_path / "cache"))
    before = database.read_bytes()
    would = cli("compact", *at, "--dry-run", "--json").json
    assert would == {"compacted": False, "records": f"sqlite:///{database.parent}", "kv": at[1]}
    assert database.read_bytes() == before
    did = cli("compact", *at, "--json").json
    assert did["compacted"]
    assert did["records"]["after_bytes"] < did["records"]["before_bytes"]
    assert did["kv"]["after_bytes"] <= did["kv"]["before_bytes"]


def test_what_was_compacted_is_told_where_the_rest_could_not_be(
    on_disk: tuple[CommandLine, MemStore, Path], tmp_path: Path
) -> None:
    cli, _, _ = on_disk
    with KVBlobs(tmp_path / "cache"):
        run = cli("compact", "--kv", str(tmp_path / "cache"), "--json")
    assert run.code == 4
    document = json.loads(run.stdout)
    assert (document["kv"], set(document["records"])) == (None, {"before_bytes", "after_bytes"})
    assert run.stderr.startswith("memstore: the KV cache")


# ---- stats, doctor ----


def test_stats_count_everything(cli: CommandLine, facts: MemStore, tmp_path: Path) -> None:
    old = facts.add("ana", "Rex is two")
    facts.supersede("ana", old.id, "Rex is three")
    facts.add("bob", "Tom")
    counts = {"facts": 2, "superseded": 1, "history": 1, "text_bytes": 15, "owners": 2}
    said = cli("stats", "--json").json
    assert said == {
        "store": facts.records.location,
        **counts,
        "feed_position": facts.records.last_position(),
        "embedder": vectors_name(facts.embedder),
        "kv": None,
    }
    with KVBlobs(tmp_path / "cache") as blobs:
        blobs.put(encoding(1), *kv(1))
        size = blobs.stats()
    held = cli("stats", "--kv", str(tmp_path / "cache"), "--json").json["kv"]
    assert (held["path"], held["encodings"], held["blob_bytes"]) == (str(tmp_path / "cache"), 1, size.blob_bytes)


def test_the_kv_cache_beside_a_store_is_found(on_disk: tuple[CommandLine, MemStore, Path]) -> None:
    cli, _, database = on_disk
    assert cli("stats", "--json").json["kv"] is None
    beside = database.parent / "kv"
    with KVBlobs(beside):
        pass
    assert cli("stats", "--json").json["kv"]["path"] == str(beside)


def test_doctor_compares_the_embedder(cli: CommandLine, facts: MemStore, tmp_path: Path) -> None:
    facts.add("ana", "Rex is a beagle")
    with KVBlobs(tmp_path / "cache"):
        pass
    run = cli("doctor", "--kv", str(tmp_path / "cache"), "--json")
    of_records = [finding._asdict() for finding in facts.records.doctor()]
    assert [f["subject"] for f in run.json] == [*(f["subject"] for f in of_records), "embedder", "KV cache"]
    assert run.json[-2] == {"level": "ok", "subject": "embedder", "message": vectors_name(facts.embedder)}
    assert run.code == int(any(finding["level"] == "error" for finding in of_records))
    other = cli.with_embedder(OTHER)("doctor", "--json")
    [embedder] = [finding for finding in other.json if finding["subject"] == "embedder"]
    assert (other.code, embedder["level"]) == (1, "error")
    assert OTHER.fingerprint in embedder["message"]


def test_doctor_says_that_no_model_can_be_loaded(cli: CommandLine) -> None:
    def load(settings: MemStoreSettings) -> BigramEmbedder:
        raise OSError("no such model")

    run = cli.with_loader(load)("doctor", "--json")
    [embedder] = [finding for finding in run.json if finding["subject"] == "embedder"]
    assert (run.code, embedder["level"]) == (1, "error")
    assert "no such model" in embedder["message"]


# ---- watch ----


def test_watch_prints_one_change_a_line(cli: CommandLine, facts: MemStore) -> None:
    fact = facts.add("ana", "Rex is two")
    facts.add("bob", "Tom")
    facts.update("ana", fact.id, text="Rex is three")
    expected = [json.loads(json.dumps(change._asdict())) for change in facts.changes(0)]
    everything = cli("watch", "--since", "0", "--once", "--json")
    assert [json.loads(line) for line in everything.stdout.splitlines()] == expected
    hers = cli("watch", "--since", "0", "--owner", "ana", "--limit", "2", "--json")
    assert [json.loads(line)["kind"] for line in hers.stdout.splitlines()] == ["added", "updated"]
    rest = cli("watch", "--since", str(expected[0]["position"]), "--limit", "1", "--json")
    assert json.loads(rest.stdout) == expected[1]
    assert "Rex" not in everything.stdout


def test_a_position_that_the_feed_has_not_reached_is_refused(cli: CommandLine, facts: MemStore) -> None:
    facts.add("ana", "Rex is a beagle")
    last = facts.records.last_position()
    assert cli("watch", "--since", str(last), "--once").code == 0
    for since in (last + 1, 2**63, 99999999999999999999):
        run = cli("watch", "--since", str(since), "--once")
        assert (run.code, run.stdout) == (2, "")
        assert run.stderr == f"memstore: --since is {since}, and the last change of this store is {last}\n"


def test_watch_goes_on_until_it_is_interrupted(cli: CommandLine, facts: MemStore) -> None:
    facts.add("ana", "before")
    looks: list[float] = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt
        facts.add("ana", f"while it waits {len(looks)}")

    run = cli.with_wait(wait)("watch", "--interval", "0.5", "--json")
    assert (run.code, run.stderr, looks) == (130, "", [0.5] * 3)
    seqs = [json.loads(line)["seq"] for line in run.stdout.splitlines()]
    assert seqs == [fact.seq for fact in facts.list("ana")[1:]]


def test_watch_says_what_was_trimmed_and_goes_on(tmp_path: Path) -> None:
    settings = MemStoreSettings(feed_retention=5)
    with MemStore(tmp_path / "store", embedder=BigramEmbedder(), settings=settings) as store:
        for number in range(400):
            store.add("ana", f"fact {number}")
        left = [change.position for change in store.changes(store.records.last_position() - 1)]
    run = bigrams(str(tmp_path / "store"))("watch", "--since", "0", "--once", "--json")
    gap, *changes = [json.loads(line) for line in run.stdout.splitlines()]
    assert (gap["kind"], gap["since"]) == ("gap", 0)
    assert [change["position"] for change in changes] == list(range(gap["floor"] + 1, left[-1] + 1))
    told = bigrams(str(tmp_path / "store"))("watch", "--since", "0", "--once")
    assert (told.code, len(told.stdout.splitlines())) == (0, len(changes))
    assert "trimmed" in told.stderr


# ---- the embedder ----


@pytest.mark.parametrize(
    "command",
    [
        ["facts", "list", "--owner", "ana"],
        ["facts", "get", "ID", "--owner", "ana"],
        ["facts", "history", "ID", "--owner", "ana"],
        ["facts", "update", "ID", "--owner", "ana", "--stream", "D1"],
        ["facts", "delete", "ID", "--owner", "ana"],
        ["owners", "list"],
        ["owners", "stats"],
        ["owners", "purge", "ana", "--yes"],
        ["export"],
        ["stats"],
        ["compact"],
        ["watch", "--since", "0", "--once"],
    ],
)
def test_no_embedder_is_loaded_for_what_embeds_nothing(cli: CommandLine, facts: MemStore, command: list[str]) -> None:
    fact = facts.add("ana", "Rex is a beagle")
    run = cli.with_embedder(None)(*(fact.id if word == "ID" else word for word in command))
    assert (run.code, run.stderr) in [(0, ""), (0, "memstore: exported 1 facts and 0 former versions of 1 owners\n")]
