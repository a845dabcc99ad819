"""``python -m locomo run``: what is refused before anything starts, and an endpoint that comes and goes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from judge_endpoint import Answer, serve
from typer.testing import CliRunner

from locomo.cli import app
from locomo.runs.folder import RunFolder
from sgl_stateful.model_files import default_model_dir

DATA = Path(__file__).parent / "data" / "synthetic.json"
MODEL = default_model_dir(os.environ)
CLOSED = "http://127.0.0.1:9/v1"
OWN = ["--data", DATA, "--allow-data-changes"]
SMALL = ["--arms", "none,text/tail@2", "--questions", 2]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def fail(*arguments: object) -> str:
    """The last line of a failure."""
    result = invoke(*arguments)
    assert result.exit_code == 1, (result.output, result.exception)
    line = result.stderr.splitlines()[-1]
    assert line.startswith("locomo: "), result.stderr
    return line


def asking(url: str) -> list[object]:
    return ["--endpoint", url, "--endpoint-model", "m-1"]


def streamed(text: str) -> Answer:
    chunk = json.dumps({"choices": [{"delta": {"content": text}}]})
    return 200, {"Content-Type": "text/event-stream"}, f"data: {chunk}\n\ndata: [DONE]\n\n".encode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ids", "a"], "--ids 'a' is no list of category ids"),
        (["--ids", "7,4"], "no category has the id 7"),
        (["--conversations", "conv-901,typo"], "the data has no conversation typo"),
        (["--arms", "none,splice/window:0/tail@3"], "which the run lacks"),
        (["--arms", "text/tail@3,floor/shuffled/head@3"], "compared with text/head@3"),
        (["--arms", "text/side@3"], "is no arm"),
        (["--endpoint", CLOSED], "needs --endpoint-model"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts_and_leaves_no_folder(
    tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in fail("run", tmp_path / "run", *OWN, "--model", MODEL, *options)
    assert not (tmp_path / "run").exists()


def test_a_refused_run_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    out = tmp_path / "run"
    # Refused by the system itself, once it is there.
    refused = ["--arms", "text/tail@2,splice/window:0/tail@2", "--questions", 2, *asking(CLOSED)]
    assert "no memory to splice from" in fail("run", out, *OWN, *refused)
    with serve(lambda body, number: streamed("blue")) as server:
        assert invoke("run", out, *OWN, *SMALL, *asking(server.url)).exit_code == 0
    assert len(RunFolder(out).done()) == 2


def test_another_config_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with serve(lambda body, number: streamed("blue")) as server:
        assert invoke("run", tmp_path, *OWN, *SMALL, *asking(server.url)).exit_code == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    line = fail("run", tmp_path, *OWN, "--model", MODEL, "--arms", "text/tail@3")
    assert "holds another run" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_that_is_a_file_in_use_or_not_writable_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "can be no run's folder" in fail("run", tmp_path / "file", *OWN, *SMALL, *asking(CLOSED))
    with RunFolder(tmp_path / "run").locked():
        assert "another process runs there" in fail("run", tmp_path / "run", *OWN, *SMALL, *asking(CLOSED))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "server.log").symlink_to("/proc/none/server.log")
    line = fail("run", tmp_path / "full", *OWN, "--model", MODEL, "--arms", "text/tail@3")
    assert f"cannot write to {tmp_path / 'full'}" in line


def test_a_dead_endpoint_uses_up_no_question(tmp_path: Path) -> None:
    assert "ConnectError" in fail("run", tmp_path, *OWN, *SMALL, *asking(CLOSED))
    assert RunFolder(tmp_path).done() == set()

    def dies(body: dict[str, Any], number: int) -> Answer:
        return streamed("blue") if number < 3 else (500, {}, b"out of memory")

    with serve(dies) as server:
        assert "answered 500: out of memory" in fail("run", tmp_path, *OWN, *SMALL, *asking(server.url))
    assert len(RunFolder(tmp_path).done()) == 1, "two arms make a row, and the third answer is half of the next"
    with serve(lambda body, number: streamed("red")) as server:
        assert invoke("run", tmp_path, *OWN, *SMALL, *asking(server.url)).exit_code == 0
        assert len(server.bodies) == 2
    predictions = [[arm["prediction"] for arm in row["arms"].values()] for row in RunFolder(tmp_path).rows()]
    assert predictions == [["blue", "blue"], ["red", "red"]]
    header = json.loads((tmp_path / "config.json").read_text())["header"]
    assert header["model_name"] == "m-1"
    assert header["embedder"].startswith("st:")
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 3
