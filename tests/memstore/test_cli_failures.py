"""Exit codes, one-line errors, and what must not be shown."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from bigrams import BigramEmbedder
from cli_runs import CommandLine, bigrams, in_process_of_its_own
from redis_server import RedisServer, free_port

from memstore import Embedder, MemStore, NewFact
from memstore.cli.secrets import secrets_of

PASSWORD = "s3cr3t-Pa55"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with one fact."""
    with MemStore(tmp_path / "store", embedder=BigramEmbedder()) as store:
        store.add("ana", "Rex is a beagle")
    return tmp_path / "store"


@pytest.fixture
def guarded_redis(has_redis: None) -> Iterator[RedisServer]:
    with RedisServer(password=PASSWORD) as server:
        yield server


def is_one_line(stderr: str) -> bool:
    return stderr.startswith("memstore: ") and stderr.endswith("\n") and stderr.count("\n") == 1


# ---- stores that are not there ----


@pytest.mark.parametrize(
    "command", [["stats"], ["facts", "list", "--owner", "ana"], ["owners", "purge", "ana", "--yes"]]
)
def test_a_mistyped_directory_stays_away(tmp_path: Path, command: list[str]) -> None:
    run = bigrams(str(tmp_path / "typo"))(*command)
    assert (run.code, run.stdout, is_one_line(run.stderr)) == (3, "", True)
    assert not (tmp_path / "typo").exists()
    assert bigrams(str(tmp_path / "typo"))("facts", "add", "Rex", "--owner", "ana").code == 0


def test_a_kv_cache_that_is_not_there_is_not_made(directory: Path, tmp_path: Path) -> None:
    run = bigrams(str(directory))("stats", "--kv", str(tmp_path / "typo"))
    assert (run.code, run.stdout, is_one_line(run.stderr)) == (3, "", True)
    assert not (tmp_path / "typo").exists()


def test_a_store_must_be_named(directory: Path) -> None:
    run = CommandLine(None, embedder=None)("stats")
    assert (run.code, run.stdout, is_one_line(run.stderr)) == (2, "", True)
    assert CommandLine(None, embedder=None, env={"MEMSTORE_URL": str(directory)})("stats", "--json").json["facts"] == 1


@pytest.mark.parametrize("content", [b"", b"this is no database" * 100])
def test_a_damaged_store_is_told_in_one_line(directory: Path, content: bytes) -> None:
    (directory / "records.sqlite3").write_bytes(content)
    for command in (["stats"], ["facts", "list", "--owner", "ana"], ["verify", "--repair"], ["doctor"]):
        run = bigrams(str(directory))(*command)
        assert (run.code, run.stdout, is_one_line(run.stderr)) == (5, "", True), run.stderr


def test_a_setting_that_is_not_valid_is_named_without_its_value(directory: Path) -> None:
    run = CommandLine(str(directory), embedder=None, env={"MEMSTORE_REDIS_TIMEOUT_S": PASSWORD})("stats")
    assert (run.code, is_one_line(run.stderr)) == (2, True)
    assert "redis_timeout_s" in run.stderr
    assert PASSWORD not in run.stderr


# ---- passwords ----


def wrong_urls(port: int) -> list[tuple[int, str]]:
    return [
        (4, f"redis://admin:{PASSWORD}@127.0.0.1:{port}/0"),
        (4, f"redis://:{PASSWORD}@127.0.0.1:{port}/0"),
        (2, f"redis://admin:{PASSWORD}@127.0.0.1:port/0"),
        (2, f"redis://admin:{PASSWORD}@127.0.0.1:{port}/zero"),
        (2, f"redos://admin:{PASSWORD}@127.0.0.1:{port}/0"),
        (2, f"redis:/admin:{PASSWORD}@127.0.0.1:{port}/0"),
        (3, f"admin:{PASSWORD}@127.0.0.1:{port}"),
        (2, f"redis://admin:{PASSWORD}@127.0.0.1:{port}/0?password={PASSWORD}"),
    ]


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.parametrize("which", range(8))
def test_no_password_is_shown_where_the_url_is_wrong(has_redis: None, which: int, debug: str) -> None:
    code, url = wrong_urls(free_port())[which]
    for command in (["stats"], ["doctor", "--json"], ["facts", "add", "Rex", "--owner", "ana", "--json"]):
        if code == 3 and "add" in command:
            # It would begin a store in a directory of that name.
            continue
        for given in ([*command, "--store", url], [*command, f"--store={url}"]):
            run = CommandLine(None, embedder=BigramEmbedder(), env={"MEMSTORE_DEBUG": debug})(*given)
            assert (run.code, run.stdout) == (code, ""), run.stderr
            assert PASSWORD not in run.stderr
            assert debug or is_one_line(run.stderr)


def test_no_password_is_shown_where_it_is_put_in_the_wrong_place() -> None:
    run = CommandLine(None, embedder=None)("stats", f"redis://admin:{PASSWORD}@127.0.0.1/0")
    assert (run.code, PASSWORD in run.stderr, is_one_line(run.stderr)) == (2, False, True)


def test_no_password_is_shown_where_it_is_wrong_or_right(guarded_redis: RedisServer) -> None:
    address = guarded_redis.url.removeprefix("redis://")
    wrong = in_process_of_its_own(["stats", "--json", "--store", f"redis://:not-{PASSWORD}@{address}"])
    assert (wrong.code, wrong.stdout, is_one_line(wrong.stderr)) == (4, "", True)
    assert PASSWORD not in wrong.stderr
    url = f"redis://:{PASSWORD}@{address}"
    right = bigrams(url)
    assert right("facts", "add", "Rex is a beagle", "--owner", "ana").code == 0
    for command in (["stats"], ["doctor"], ["owners", "list"], ["compact"], ["compact", "--dry-run"], ["verify"]):
        for json_option in ([], ["--json"]):
            run = right(*command, *json_option)
            assert run.code in (0, 1), run.stderr
            assert PASSWORD not in run.stdout + run.stderr
    from_environment = CommandLine(guarded_redis.url, embedder=None, env={"MEMSTORE_REDIS_PASSWORD": PASSWORD})
    run = from_environment("stats", "--json")
    assert (run.json["facts"], PASSWORD in run.stdout + run.stderr) == (1, False)


@pytest.mark.parametrize(
    ("argument", "hidden"),
    [
        ("redis://ana:pw@host:6379/0", {"pw"}),
        ("redis://ana:p%40w@host", {"p%40w", "p@w"}),
        ("redis://ana:p@w@host", {"p@w"}),
        ("redis://ana:p/w:x@host", {"p/w:x"}),
        ("--store=rediss://:pw@host", {"pw"}),
        ("redis:pw@host", {"pw"}),
        ("redis://ana-alone@host", {"ana-alone"}),
        ("redis://host:6379", set()),
        ("/srv/ana@home/store", set()),
    ],
)
def test_what_could_be_a_password_is_known(argument: str, hidden: set[str]) -> None:
    assert set(secrets_of([argument], {}).values) == hidden
    assert set(secrets_of([], {"MEMSTORE_URL": argument}).values) == hidden


# ---- files ----


def test_a_full_disk_is_no_defect(directory: Path) -> None:
    at = ("--store", str(directory))
    run = in_process_of_its_own(["export", "--output", "/dev/full", *at])
    assert (run.code, run.stdout, run.stderr) == (4, "", "memstore: No space left on device\n")
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "memstore.cli", "stats", *at]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (4, "memstore: No space left on device\n")


def test_a_file_that_cannot_be_read_or_written_is_named(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    names = ("absent", ".", "loop", "file/inside", "x" * 300)
    cli = bigrams(str(directory))
    for path in (str(tmp_path / name) for name in names):
        for command in (
            ["import", path],
            ["import", path, "--dry-run"],
            ["facts", "add", "--owner", "ana", "--file", path],
        ):
            run = cli(*command)
            assert (run.code, run.stdout, is_one_line(run.stderr)) == (2, "", True), run.stderr
            assert run.stderr.startswith(f"memstore: {path}: ")
    for name in ("absent/inside", ".", "file/inside"):
        run = cli("export", "--output", str(tmp_path / name))
        assert (run.code, run.stdout, is_one_line(run.stderr)) == (2, "", True), run.stderr


def test_a_file_of_somebody_else_is_named(tmp_path: Path) -> None:
    path, store = tmp_path / "facts.jsonl", tmp_path / "store"
    path.touch(mode=0)
    # The interpreter itself may be readable by root alone, so the imports come first.
    code = (
        "import os; from memstore.cli import app\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        f"app(['import', {str(path)!r}, '--store', {str(store)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, is_one_line(done.stderr)) == (2, "", True), done.stderr
    assert "Permission denied" in done.stderr


# ---- defects, pipes, terminals ----


def test_a_defect_is_told_in_one_line_with_a_hint(directory: Path) -> None:
    class Broken(BigramEmbedder):
        def embed(self, texts: object) -> NoReturn:
            raise ZeroDivisionError("of\nall things")

    def cli(**env: str) -> CommandLine:
        return CommandLine(str(directory), embedder=Broken(), env=env)

    run = cli()("facts", "search", "dog", "--owner", "ana")
    assert (run.code, run.stdout, is_one_line(run.stderr)) == (70, "", True)
    assert "ZeroDivisionError: of all things" in run.stderr
    assert "MEMSTORE_DEBUG=1" in run.stderr
    shown = cli(MEMSTORE_DEBUG="1")("facts", "search", "dog", "--owner", "ana")
    assert (shown.code, shown.stderr.startswith("Traceback")) == (70, True)


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    with MemStore(tmp_path / "store", embedder=BigramEmbedder(16)) as store:
        # More than a pipe holds.
        store.add_many("ana", [NewFact(f"{number}: {'x' * 1000}") for number in range(300)])
    command = [sys.executable, "-m", "memstore.cli", "facts", "list", "--owner", "ana", "--limit", "300", "--store"]
    for arguments in ([], ["--json"]):
        process = subprocess.Popen(
            [*command, str(tmp_path / "store"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (141, b"")


def test_ctrl_c_ends_a_watch_without_a_word(directory: Path) -> None:
    command = [sys.executable, "-m", "memstore.cli", "watch", "--since", "0", "--store", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert b"\tadded\tana\t" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, b"", b"")


@pytest.mark.parametrize(("typed", "code", "owners"), [("ana", 0, []), ("anna", 2, ["ana"]), ("\x04", 2, ["ana"])])
def test_a_purge_is_confirmed_by_the_name(directory: Path, typed: str, code: int, owners: list[str]) -> None:
    terminal, its_other_end = pty.openpty()
    command = [sys.executable, "-m", "memstore.cli", "owners", "purge", "ana", "--store", str(directory)]
    process = subprocess.Popen(command, stdin=its_other_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.write(terminal, f"{typed}\n".encode())
    stdout, stderr = process.communicate(timeout=60)
    os.close(terminal)
    os.close(its_other_end)
    assert process.returncode == code, stderr
    assert b"Type the owner's name to confirm:" in stderr
    with MemStore(directory, embedder=BigramEmbedder()) as store:
        assert store.owners() == owners
    assert bool(stdout) == (code == 0)


def test_on_a_terminal_there_is_a_table(directory: Path) -> None:
    with MemStore(directory, embedder=BigramEmbedder()) as store:
        store.add("ana", "\x1b[31mred [bold]text")
    terminal, its_other_end = pty.openpty()
    command = [sys.executable, "-m", "memstore.cli", "facts", "list", "--owner", "ana", "--store", str(directory)]
    env = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=its_other_end, stdout=its_other_end, stderr=subprocess.PIPE, env=env)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, b"")
    os.close(its_other_end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert r"\x1b[31mred [bold]text" in shown
    assert "\x1b[31m" not in shown
    assert "─" in shown


def test_a_real_process_answers_like_this_one(directory: Path) -> None:
    with MemStore(directory, embedder=BigramEmbedder()) as store:
        [fact] = store.list("ana")
    listed = in_process_of_its_own(["owners", "list", "--json", "--store", str(directory)])
    assert (listed.json, listed.stderr) == ([{"owner": "ana", "facts": 1}], "")
    absent = in_process_of_its_own(["facts", "get", "nothing", "--owner", "ana", "--store", str(directory)])
    assert (absent.code, absent.stdout, is_one_line(absent.stderr)) == (3, "", True)
    deleted = in_process_of_its_own(["facts", "delete", fact.id, "--owner", "ana", "--store", str(directory)])
    assert (deleted.code, deleted.stderr) == (0, "")


def test_the_embedder_that_ships_with_the_package(minilm: Embedder, tmp_path: Path) -> None:
    at = ("--owner", "ana", "--json", "--store", str(tmp_path / "store"))
    added = in_process_of_its_own(["facts", "add", "Rex is a beagle", *at])
    assert (added.json["created"], added.stderr) == (True, "")
    with MemStore(tmp_path / "store", embedder=minilm) as store:
        store.add("ana", "The train leaves at noon")
        [nearest] = store.search("ana", "What kind of dog?", k=1)
        [itself] = store.search("ana", "Rex is a beagle", k=1)
    assert nearest.fact.id == itself.fact.id == added.json["fact"]["id"]
    assert itself.score == pytest.approx(1.0, abs=1e-5)
