"""The command line on facts, against the store that it works on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bigrams import BigramEmbedder
from cli_runs import CommandLine, as_json, bigrams
from small_kv import encoding, kv

from memstore import FactState, KVBlobs, MemStore

LONG_AFTER = "2100-01-01T00:00:00Z"
LONG_AFTER_S = 4_102_444_800.0


@pytest.fixture
def facts(location: str) -> Iterator[MemStore]:
    with MemStore(location, embedder=BigramEmbedder()) as store:
        yield store


@pytest.fixture
def cli(facts: MemStore, location: str) -> CommandLine:
    return bigrams(location)


@pytest.fixture
def kv_of_a_fact(facts: MemStore, tmp_path: Path) -> tuple[str, str]:
    """The directory of a KV cache with an encoding of one fact, and the fact's id."""
    fact = facts.add("ana", "Rex is a beagle")
    with KVBlobs(tmp_path / "cache") as blobs:
        blobs.put(encoding(7, owner=fact.owner, fact_id=fact.id), *kv(7))
    return str(tmp_path / "cache"), fact.id


def encodings(path: str) -> int:
    with KVBlobs(path) as blobs:
        return blobs.stats().encodings


# ---- adding ----


def test_a_fact_is_added_with_every_field(cli: CommandLine, facts: MemStore) -> None:
    added = cli(
        *("facts", "add", "Rex is a beagle", "--owner", "ana", "--stream", "chat-1", "--speaker", "Ana"),
        *("--time", "2023-05-08", "--metadata", '{"mood": ["glad", 3]}', "--expires-at", LONG_AFTER, "--json"),
    ).json
    fact = facts.get("ana", added["fact"]["id"])
    assert (fact.text, fact.stream, fact.speaker, fact.time) == ("Rex is a beagle", "chat-1", "Ana", "2023-05-08")
    assert (fact.metadata, fact.expires_at) == ({"mood": ["glad", 3]}, LONG_AFTER_S)
    assert added == {"fact": as_json(fact), "created": True, "near_duplicates": [], "chunks": 1}


def test_adding_twice_adds_once(cli: CommandLine, facts: MemStore) -> None:
    first = cli("facts", "add", "Rex is a beagle", "--owner", "ana", "--json").json
    again = cli("facts", "add", "Rex is a beagle", "--owner", "ana", "--json").json
    assert (again["created"], again["fact"]["id"]) == (False, first["fact"]["id"])
    assert cli("facts", "add", "Rex is a beagle", "--owner", "ana").stdout == f"already there: {first['fact']['id']}\n"
    assert facts.count("ana") == 1


def test_an_idempotency_key_is_for_one_content(cli: CommandLine, facts: MemStore) -> None:
    arguments = ("--owner", "ana", "--idempotency-key", "k1", "--json")
    first = cli("facts", "add", "Rex is a beagle", *arguments).json
    assert cli("facts", "add", "Rex is a beagle", *arguments).json["fact"] == first["fact"]
    other = cli("facts", "add", "Tom is a cat", *arguments)
    assert (other.code, other.stdout) == (2, "")
    assert facts.count("ana") == 1


def test_near_duplicates_and_parts_are_told(location: str, facts: MemStore) -> None:
    # Bigram counts of the two texts differ in one of thirty.
    held = facts.add("ana", "Rex the beagle sleeps on the sofa all day long")
    cli = bigrams(location)
    said = cli("facts", "add", "Rex the beagle sleeps on the sofa all day long.", "--owner", "ana", "--json").json
    assert [near["fact"]["id"] for near in said["near_duplicates"]] == [held.id]
    [hit] = [h for h in facts.search("ana", said["fact"]["text"], k=2) if h.fact.id == held.id]
    assert said["near_duplicates"][0]["score"] == pytest.approx(hit.score, abs=1e-6)
    told = cli("facts", "add", "Rex the beagle sleeps on the sofa all day long!", "--owner", "ana")
    assert told.code == 0
    assert "almost the same" in told.stderr
    assert held.id in told.stderr


def test_text_comes_from_stdin_or_a_file(cli: CommandLine, facts: MemStore, tmp_path: Path) -> None:
    piped = cli("facts", "add", "-", "--owner", "ana", "--json", stdin="two\nlines\n\n").json
    assert piped["fact"]["text"] == "two\nlines\n"
    (tmp_path / "fact.txt").write_text("Пёс по имени Рекс", encoding="utf-8")
    from_file = cli("facts", "add", "--file", str(tmp_path / "fact.txt"), "--owner", "ana", "--json").json
    assert facts.get("ana", from_file["fact"]["id"]).text == "Пёс по имени Рекс"


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (["add", "--owner", "ana"], None),
        (["add", "a text", "--file", "fact.txt", "--owner", "ana"], None),
        (["add", "-", "--owner", "ana"], b"\xff\xfe"),
        (["add", "  ", "--owner", "ana"], None),
        (["add", "a text", "--owner", ""], None),
        (["add", "a text", "--owner", "ana", "--metadata", "[1]"], None),
        (["add", "a text", "--owner", "ana", "--metadata", "{"], None),
        (["add", "a text", "--owner", "ana", "--metadata", "[" * 100_000], None),
        (["add", "a text", "--owner", "ana", "--metadata", '{"a": NaN}'], None),
        (["add", "a text", "--owner", "ana", "--expires-at", "soon"], None),
        (["add", "a text", "--owner", "ana", "--expires-at", "1999-01-01"], None),
        (["add", "a text"], None),
        (["add", "--file", "there-is-none.txt", "--owner", "ana"], None),
        (["list", "--owner", "ana", "--limit", "0"], None),
        (["search", "dog", "--owner", "ana", "--where", '{"colour": "red"}'], None),
        (["search", "dog", "--owner", "ana", "--mode", "guess"], None),
        (["search", "dog", "--owner", "ana", "--min-score", "nan"], None),
        (["sing", "--owner", "ana"], None),
    ],
)
def test_invalid_input_is_refused_in_one_line(
    cli: CommandLine, facts: MemStore, arguments: list[str], stdin: bytes | None
) -> None:
    run = cli("facts", *arguments, stdin=stdin)
    assert (run.code, run.stdout) == (2, "")
    assert run.stderr.startswith("memstore: ")
    assert run.stderr.count("\n") == 1
    assert facts.owners() == []


# ---- reading ----


def test_facts_are_listed_in_pages(cli: CommandLine, facts: MemStore) -> None:
    stored = [facts.add("ana", f"fact {number}", stream="s" if number % 2 else "") for number in range(5)]
    facts.add("bob", "none of hers")
    assert cli("facts", "list", "--owner", "ana", "--json").json == [as_json(fact) for fact in stored]
    page = cli("facts", "list", "--owner", "ana", "--limit", "2", "--after", str(stored[0].seq), "--json").json
    assert page == [as_json(fact) for fact in stored[1:3]]
    of_stream = cli("facts", "list", "--owner", "ana", "--stream", "s", "--json").json
    assert of_stream == [as_json(stored[1]), as_json(stored[3])]
    assert cli("facts", "list", "--owner", "carl", "--json").json == []


def test_in_a_pipe_rows_are_tab_separated(cli: CommandLine, facts: MemStore) -> None:
    one = facts.add("ana", "Rex\tis\na \x1b[31mbeagle [bold]", speaker="Ana")
    two = facts.add("ana", "and Tom")
    run = cli("facts", "list", "--owner", "ana", "--limit", "1")
    names, row = run.stdout.splitlines()
    assert names.split("\t") == ["id", "seq", "stream", "speaker", "time", "state", "text"]
    assert row.split("\t") == [
        *(one.id, str(one.seq), "", "Ana", "", "current"),
        r"Rex\tis\na \x1b[31mbeagle [bold]",
    ]
    assert run.stderr == f"memstore: there are more: --after {one.seq}\n"
    rest = cli("facts", "list", "--owner", "ana", "--after", str(one.seq))
    assert (rest.stdout.splitlines()[1].split("\t")[0], rest.stderr) == (two.id, "")


def test_a_fact_of_another_owner_is_an_unknown_one(cli: CommandLine, facts: MemStore) -> None:
    hers, unknown = facts.add("ana", "Rex is a beagle"), "01890000-0000-7000-8000-000000000000"
    assert cli("facts", "get", hers.id, "--owner", "ana", "--json").json == as_json(hers)
    for command in (["get"], ["history"], ["delete"], ["delete", "--dry-run"], ["update", "--text", "x"]):
        other = cli("facts", *command, hers.id, "--owner", "bob")
        absent = cli("facts", *command, unknown, "--owner", "bob")
        assert (other.code, absent.code) == (3, 3)
        assert other.stderr.replace(hers.id, unknown) == absent.stderr
    assert facts.get("ana", hers.id) == hers


def test_history_shows_every_version(cli: CommandLine, facts: MemStore) -> None:
    fact = facts.add("ana", "Rex is two")
    facts.update("ana", fact.id, text="Rex is three")
    successor = facts.supersede("ana", fact.id, "Rex is four")
    shown = cli("facts", "history", successor.id, "--owner", "ana", "--json").json
    assert shown == [as_json(version) for version in facts.history("ana", successor.id)]
    assert [version["text"] for version in shown] == ["Rex is two", "Rex is three", "Rex is three", "Rex is four"]


@pytest.mark.parametrize("mode", ["vector", "keyword", "hybrid"])
def test_search_finds_what_the_store_finds(cli: CommandLine, facts: MemStore, mode: str) -> None:
    for speaker, text in [("Ana", "Rex is a beagle"), ("Bob", "Rex barks"), ("Ana", "Tom is a cat")]:
        facts.add("ana", text, speaker=speaker)
    found = cli("facts", "search", "Rex", "--owner", "ana", "-k", "2", "--mode", mode, "--json").json
    hits = facts.search("ana", "Rex", k=2, mode=mode)
    assert [hit["fact"] for hit in found] == [as_json(hit.fact) for hit in hits]
    assert [hit["score"] for hit in found] == pytest.approx([hit.score for hit in hits])
    assert [hit["unboosted"] for hit in found] == pytest.approx([hit.unboosted for hit in hits])
    where = ("--where", '{"speaker": "Ana"}')
    found = cli("facts", "search", "Rex", "--owner", "ana", "--mode", mode, *where, "--json").json
    assert {hit["fact"]["speaker"] for hit in found} == {"Ana"}
    assert cli("facts", "search", "Rex", "--owner", "ana", "--mode", mode, "--min-score", "1.5", "--json").json == []


# ---- changing ----


def test_update_changes_what_is_given(cli: CommandLine, facts: MemStore) -> None:
    fact = facts.add("ana", "Rex is two", speaker="Ana", time="2023-05-08", expires_at=LONG_AFTER_S)
    changed = cli("facts", "update", fact.id, "--owner", "ana", "--text", "Rex is three", "--json").json
    assert changed == as_json(facts.get("ana", fact.id))
    assert (changed["text"], changed["speaker"], changed["version"]) == ("Rex is three", "Ana", 2)
    cleared = ("--clear-time", "--clear-speaker", "--clear-expires-at")
    cli("facts", "update", fact.id, "--owner", "ana", *cleared, "--stream", "chat-2")
    now = facts.get("ana", fact.id)
    assert (now.time, now.speaker, now.expires_at, now.stream) == (None, None, None, "chat-2")
    contradiction = cli("facts", "update", fact.id, "--owner", "ana", "--time", "2024", "--clear-time")
    nothing = cli("facts", "update", fact.id, "--owner", "ana")
    assert (contradiction.code, nothing.code) == (2, 2)
    assert facts.get("ana", fact.id) == now


def test_supersede_keeps_the_old_one_as_history(cli: CommandLine, facts: MemStore) -> None:
    old = facts.add("ana", "Rex is two", speaker="Ana", time="2023")
    new = cli("facts", "supersede", old.id, "Rex is three", "--owner", "ana", "--time", "2024", "--json").json
    assert (new["supersedes"], new["speaker"], new["time"]) == (old.id, "Ana", "2024")
    assert facts.get("ana", old.id).state is FactState.SUPERSEDED
    listed = cli("facts", "list", "--owner", "ana", "--superseded", "--json").json
    assert [fact["id"] for fact in listed] == [old.id, new["id"]]
    again = cli("facts", "supersede", old.id, "Rex is four", "--owner", "ana")
    assert (again.code, again.stdout) == (2, "")


def test_delete_removes_a_fact_and_its_kv(cli: CommandLine, facts: MemStore, kv_of_a_fact: tuple[str, str]) -> None:
    kv_path, fact_id = kv_of_a_fact
    fact = facts.get("ana", fact_id)
    would = cli("facts", "delete", fact_id, "--owner", "ana", "--kv", kv_path, "--dry-run", "--json").json
    assert would == {"deleted": False, "fact": as_json(fact)}
    assert (facts.get("ana", fact_id), encodings(kv_path)) == (fact, 1)
    did = cli("facts", "delete", fact_id, "--owner", "ana", "--kv", kv_path, "--json").json
    assert did == {"deleted": True, "fact": as_json(fact)}
    assert (facts.count("ana"), encodings(kv_path)) == (0, 0)
    assert cli("facts", "delete", fact_id, "--owner", "ana").code == 3


@pytest.mark.parametrize("command", ["update", "supersede"])
def test_what_changes_a_fact_drops_its_kv(cli: CommandLine, kv_of_a_fact: tuple[str, str], command: str) -> None:
    kv_path, fact_id = kv_of_a_fact
    new_text = ["--text", "Rex is a poodle"] if command == "update" else ["Rex is a poodle"]
    assert cli("facts", command, fact_id, *new_text, "--owner", "ana", "--kv", kv_path).code == 0
    assert encodings(kv_path) == 0


# ---- owners ----


def test_owners_are_listed_and_counted(cli: CommandLine, facts: MemStore) -> None:
    old = facts.add("ana", "Rex is two")
    facts.supersede("ana", old.id, "Rex is three")
    facts.add("bob", "Пёс")
    assert cli("owners", "list", "--json").json == [{"owner": "ana", "facts": 1}, {"owner": "bob", "facts": 1}]
    hers = {"owner": "ana", "current": 1, "superseded": 1, "history": 1, "text_bytes": 12, "epoch": 0}
    his = {"owner": "bob", "current": 1, "superseded": 0, "history": 0, "text_bytes": 6, "epoch": 0}
    assert cli("owners", "stats", "--json").json == [hers, his]
    assert cli("owners", "stats", "bob", "--json").json == [his]
    unknown = cli("owners", "stats", "carl")
    assert (unknown.code, unknown.stdout) == (3, "")


def test_purge_removes_one_owner(cli: CommandLine, facts: MemStore, kv_of_a_fact: tuple[str, str]) -> None:
    kv_path, _ = kv_of_a_fact
    his = facts.add("bob", "Tom is a cat")
    would = cli("owners", "purge", "ana", "--kv", kv_path, "--dry-run", "--json").json
    assert (would["purged"], would["current"], facts.count("ana"), encodings(kv_path)) == (False, 1, 1, 1)
    refused = cli("owners", "purge", "ana", "--kv", kv_path, stdin="ana\n")
    assert (refused.code, refused.stdout, facts.count("ana")) == (2, "", 1)
    receipt = cli("owners", "purge", "ana", "--kv", kv_path, "--yes", "--json").json
    assert (receipt["purged"], receipt["owner"], receipt["encodings"]) == (True, "ana", 1)
    assert (receipt["records"]["facts"], receipt["records"]["vectors"], receipt["records"]["epoch"]) == (1, 1, 1)
    assert (facts.owners(), encodings(kv_path)) == (["bob"], 0)
    assert facts.get("bob", his.id) == his


def test_a_purge_of_nobody_writes_nothing(cli: CommandLine, facts: MemStore) -> None:
    facts.add("ana", "Rex is a beagle")
    position = facts.records.last_position()
    for options in (["--yes"], ["--dry-run"], []):
        run = cli("owners", "purge", "Ana", *options)
        assert (run.code, run.stdout) == (3, "")
        assert run.stderr == "memstore: there is no owner 'Ana' in this store\n"
    assert (facts.records.last_position(), facts.epoch("Ana")) == (position, 0)
    assert cli("owners", "stats", "Ana").code == 3


def test_a_purge_can_be_repeated(cli: CommandLine, facts: MemStore) -> None:
    facts.add("ana", "Rex is a beagle")
    assert cli("owners", "purge", "ana", "--yes", "--json").json["records"]["facts"] == 1
    again = cli("owners", "purge", "ana", "--yes", "--json").json
    assert (again["purged"], again["records"]["facts"]) == (True, 0)
