import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_server import RedisServer, free_port
from typer.testing import CliRunner
from words import WordEmbedder

from memstore import MemStore
from sgl_stateful import cli


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """`serve` writes its options into the environment, for SGLang's subprocesses."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("SGL_STATEFUL_", "MEMSTORE_")) and name != "SGL_STATEFUL_CACHE":
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments of the SGLang servers that would have been started."""
    calls: list[list[str]] = []
    monkeypatch.setattr(cli, "_launch", calls.append)
    return calls


def refusal(launched: list[list[str]], *arguments: str) -> str:
    """The one line on stderr with which `serve` refuses."""
    result = CliRunner().invoke(cli.app, ["serve", "--model", "m", *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert launched == []
    (line,) = result.stderr.splitlines()
    assert line.startswith("sgl-stateful: ")
    return line


@pytest.mark.parametrize("arguments", [["--policy", "list:4"], ["--also-encode", "window:2,list:4"]])
def test_a_bad_policy(launched: list[list[str]], tmp_path: Path, arguments: list[str]) -> None:
    line = refusal(launched, "--memory", str(tmp_path / "store"), *arguments)
    assert "'list:4'" in line
    assert "anchor:N" in line
    assert not (tmp_path / "store").exists()


def test_a_store_of_another_embedder(launched: list[list[str]], tmp_path: Path) -> None:
    with MemStore(tmp_path, embedder=WordEmbedder()):
        line = refusal(launched, "--memory", f"sqlite:///{tmp_path}")
    assert WordEmbedder.fingerprint in line
    assert "`memstore reindex`" in line


def test_a_redis_that_nobody_runs(launched: list[list[str]]) -> None:
    port = free_port()
    line = refusal(launched, "--memory", f"redis://ana:open-sesame@127.0.0.1:{port}/0")
    assert f"127.0.0.1:{port}" in line
    assert "open-sesame" not in line


@pytest.mark.parametrize("given", ["open-sesame", None])
def test_a_redis_that_refuses_the_password(launched: list[list[str]], has_redis: None, given: str | None) -> None:
    if given is not None:
        os.environ["MEMSTORE_REDIS_PASSWORD"] = given
    with RedisServer(password="another") as server:
        line = refusal(launched, "--memory", server.url)
    assert "refused" in line
    assert "open-sesame" not in line


def test_a_redis_that_runs(launched: list[list[str]], has_redis: None, tmp_path: Path) -> None:
    os.environ["SGL_STATEFUL_CACHE"] = str(tmp_path)
    with RedisServer(password="another") as server:
        url = server.url.replace("//", "//:another@")
        result = CliRunner().invoke(cli.app, ["serve", "--model", "m", "--memory", url])
    assert result.exit_code == 0, result.output
    assert len(launched) == 1
    assert "another" not in result.output + repr(cli.StatefulSettings())
    assert cli.StatefulSettings().kv_path().is_relative_to(tmp_path)
    assert cli.StatefulSettings().kv_path().is_dir()


@pytest.mark.parametrize(
    "memory", ["mongodb://ana:open-sesame@db/0", "sqlite://ana:open-sesame@db", "redis://ana:open-sesame@db:port", ""]
)
def test_a_location_that_is_none(launched: list[list[str]], memory: str) -> None:
    assert "open-sesame" not in refusal(launched, "--memory", memory)


def test_a_bad_setting_of_the_store(launched: list[list[str]], tmp_path: Path) -> None:
    os.environ["MEMSTORE_BUSY_TIMEOUT_S"] = "never"
    assert "MEMSTORE_busy_timeout_s" in refusal(launched, "--memory", str(tmp_path / "store"))


def test_a_file_instead_of_a_directory(launched: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a store")
    assert str(tmp_path / "file") in refusal(launched, "--memory", str(tmp_path / "file"))


def test_a_directory_with_something_else_where_the_records_are(launched: list[list[str]], tmp_path: Path) -> None:
    with MemStore(tmp_path, embedder=WordEmbedder()):
        pass
    (database,) = [path for path in tmp_path.iterdir() if path.suffix in {".db", ".sqlite", ".sqlite3"}]
    database.write_bytes(b"not a database at all" * 500)
    assert str(tmp_path) in refusal(launched, "--memory", str(tmp_path))


def test_a_bad_setting_in_the_environment(launched: list[list[str]]) -> None:
    os.environ["SGL_STATEFUL_ENCODE_CONCURRENCY"] = "0"
    assert "encode_concurrency" in refusal(launched).lower()


def test_options_reach_sglang_and_its_subprocesses(launched: list[list[str]], tmp_path: Path) -> None:
    memory = tmp_path / "new" / "store"
    arguments = ["--memory", str(memory), "--policy", "window:2", "--arena-mib", "7", "--port", "1234", "--tp-size=2"]
    result = CliRunner().invoke(cli.app, ["serve", "--model", "m", *arguments])
    assert result.exit_code == 0, result.output
    assert launched == [["--model-path", "m", "--radix-cache-backend", "stateful", "--port", "1234", "--tp-size=2"]]
    assert memory.is_dir()
    settings = cli.StatefulSettings()
    assert (settings.memory, settings.policy, settings.arena_mib) == (str(memory), "window:2", 7)


def test_the_memory_is_released_before_sglang_starts(launched: list[list[str]], tmp_path: Path) -> None:
    CliRunner().invoke(cli.app, ["serve", "--model", "m", "--memory", str(tmp_path)])
    with MemStore(tmp_path, embedder=WordEmbedder()):
        assert len(launched) == 1


def test_settings_of_the_environment_hold_where_no_option_is_given(launched: list[list[str]]) -> None:
    os.environ["SGL_STATEFUL_POLICY"] = "window:3"
    CliRunner().invoke(cli.app, ["serve", "--model", "m"])
    assert cli.StatefulSettings().policy == "window:3"


def test_an_option_out_of_range_is_refused_by_name(launched: list[list[str]]) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--model", "m", "--arena-mib", "0"])
    assert result.exit_code == 2
    assert "arena-mib" in result.stderr
    assert launched == []


def test_how_kv_is_stored_reaches_the_settings(launched: list[list[str]]) -> None:
    assert cli.StatefulSettings().kv_storage == "int8"
    result = CliRunner().invoke(cli.app, ["serve", "--model", "m", "--kv-storage", "native"])
    assert result.exit_code == 0, result.output
    assert cli.StatefulSettings().kv_storage == "native"
    result = CliRunner().invoke(cli.app, ["serve", "--model", "m", "--kv-storage", "int4"])
    assert result.exit_code == 2
    assert "kv-storage" in result.stderr


def test_a_storage_that_is_not_known_is_refused(launched: list[list[str]]) -> None:
    os.environ["SGL_STATEFUL_KV_STORAGE"] = "fp8"
    assert "kv_storage" in refusal(launched)


@pytest.mark.parametrize("target", ["off", "floor", "strict", "fast"])
def test_the_target_of_faithfulness_reaches_the_settings(launched: list[list[str]], target: str) -> None:
    assert cli.StatefulSettings().faithfulness == "fast"
    result = CliRunner().invoke(cli.app, ["serve", "--model", "m", "--faithfulness", target])
    assert result.exit_code == 0, result.output
    assert cli.StatefulSettings().faithfulness == target


def test_a_target_that_is_not_known_is_refused(launched: list[list[str]]) -> None:
    os.environ["SGL_STATEFUL_FAITHFULNESS"] = "perfect"
    assert "faithfulness" in refusal(launched)


def test_a_header_that_does_not_end_its_line_is_refused(launched: list[list[str]]) -> None:
    os.environ["SGL_STATEFUL_HEADER"] = "Facts:"
    assert "header" in refusal(launched).lower()


def test_what_sessions_may_have_reaches_the_settings(launched: list[list[str]]) -> None:
    arguments = ["--session-budget-tokens", "3000", "--session-quota-tokens", "0"]
    result = CliRunner().invoke(cli.app, ["serve", "--model", "m", *arguments])
    assert result.exit_code == 0, result.output
    assert launched == [["--model-path", "m", "--radix-cache-backend", "stateful"]]
    settings = cli.StatefulSettings()
    assert (settings.session_budget_tokens, settings.session_quota_tokens) == (3000, 0)


@pytest.mark.parametrize("option", ["--session-budget-tokens", "--session-quota-tokens"])
def test_sessions_cannot_have_less_than_nothing(launched: list[list[str]], option: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--model", "m", option, "-1"])
    assert result.exit_code == 2
    assert option in result.stderr
    assert launched == []


def test_the_help_names_every_repair() -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "400", "TERM": "dumb"})
    assert "'none', 'first:M', 'share:P%', 'last:N', 'last:P%', or several with a plus between" in result.output
