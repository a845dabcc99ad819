import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_bench import encode, throughput, ttft
from memory_bench.command import integers, rates, run
from memory_bench.output import Output
from memory_bench.subject import Subject

from locomo.dataset import demo_conversation_path, file_sha256
from locomo.errors import RunError

ROOT = Path(__file__).parents[2]
SYNTHETIC = ROOT / "tests/locomo/data/synthetic.json"
ROWS = [{"arm": "none", "k": 0}]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("LOCOMO_DATA", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "invented-1B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def finish(args: object, subject: Subject, output: Output) -> None:
    output.finish(ROWS, {"ratio": 2.0})


def bench(measure, *argv: object) -> None:
    run(measure, program="bench_x", doc="Times.", bars=["ratio"], options={}, argv=[str(part) for part in argv])


@pytest.mark.parametrize("main", [ttft.main, throughput.main, encode.main])
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--data", "/nope.json"], "no LoCoMo file at /nope.json"),
        (["--data", str(SYNTHETIC)], "is not the published locomo10.json"),
        (["--conversation", "99"], "there is no conversation 99"),
        (["--conversation", "-1"], "there is no conversation -1"),
        (["--model", "/nope"], "there is no model in /nope"),
        (["--json", "/dev/null"], "cannot write /dev/null: it is no file"),
        (["--json", "/proc/nope/out.json"], "cannot write /proc/nope/out.json"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    main, argv: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--model", str(model), *argv])
    assert exited.value.code == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("bench_")
    assert said in last


@pytest.mark.parametrize(
    ("main", "argv", "said"),
    [
        (ttft.main, ["--repeats", "33"], "--repeats 33 needs 33 different questions, and demo-1 has 32"),
        (ttft.main, ["--k", "0,500"], "500 facts are asked for, and demo-1 has 160"),
        (ttft.main, ["--k", ","], "--k names no number of facts"),
        (throughput.main, ["--users", "17"], "the load of 17 users needs 34 different questions"),
        (throughput.main, ["--users", "0"], "at least one user"),
        (throughput.main, ["--users", "", "--rates", ""], "at least one user"),
        (encode.main, ["--policies", ""], "--policies names none"),
    ],
)
def test_what_the_conversation_does_not_have_is_refused_before_a_server_starts(
    main, argv: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--model", str(model), *argv])
    assert exited.value.code == 1
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (ttft.main, ["--k", "a"]),
        (ttft.main, ["--k", "-1"]),
        (ttft.main, ["--repeats", "0"]),
        (throughput.main, ["--rates", "0"]),
        (throughput.main, ["--rates", "inf"]),
        (throughput.main, ["--arrivals", "0"]),
        (encode.main, ["--policies", "nonsense"]),
    ],
)
def test_an_option_that_is_none_is_the_parsers_to_refuse(
    main, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(argv)
    assert exited.value.code == 2
    assert "invalid" in capsys.readouterr().err


def test_the_shipped_conversation_has_no_bars(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out.json"
    bench(finish, "--model", model, "--json", out)
    printed = capsys.readouterr()
    assert "warning: no --data: this is the small conversation that ships with the package" in printed.err
    assert json.loads(printed.out) == {"ratio": None}
    found = json.loads(out.read_text())
    assert (found["bars"], found["rows"]) == ({"ratio": None}, ROWS)
    assert found["meta"]["data"] == "the conversation that ships with the package"
    assert found["meta"]["data_is_published"] is False


def test_another_file_is_taken_where_that_is_allowed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "own file.json", tmp_path / "out.json"
    shutil.copy(demo_conversation_path(), data)
    bench(finish, "--model", model, "--json", out, "--data", data, "--allow-data-changes")
    assert "is not the published locomo10.json" in capsys.readouterr().err
    found = json.loads(out.read_text())
    assert found["bars"] == {"ratio": 2.0}
    meta = found["meta"]
    expected = {
        "model": "invented-1B",
        "data": "own file.json",
        "data_sha256": file_sha256(data),
        "data_is_published": False,
        "conversation": 0,
        "units": "turns",
        "finished": True,
        "command": f"scripts/bench_x --model {model} --json {out} --data '{data}' --allow-data-changes",
    }
    assert {name: meta[name] for name in expected} == expected
    assert {"commit", "cpu", "sglang", "torch"} <= meta.keys()


def test_an_interrupted_run_says_what_is_kept(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: object, subject: Subject, output: Output) -> None:
        output.write(ROWS)
        raise KeyboardInterrupt

    out = tmp_path / "out.json"
    with pytest.raises(SystemExit) as exited:
        bench(interrupted, "--model", model, "--json", out)
    assert exited.value.code == 130
    assert f"ended before it was done: 1 rows are in {out}" in capsys.readouterr().err
    assert json.loads(out.read_text())["rows"] == ROWS


def test_a_full_disk_is_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(args: object, subject: Subject, output: Output) -> None:
        with Path("/dev/full").open("w") as full:
            full.write("x" * 100_000)

    with pytest.raises(SystemExit) as exited:
        bench(fails, "--model", model)
    assert exited.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("bench_x: OSError: [Errno 28]")


def test_a_terminated_run_leaves_in_the_ordinary_way(model: Path, tmp_path: Path) -> None:
    # What stands where a server is entered and left.
    program = """
import sys, time
from contextlib import contextmanager
from pathlib import Path
from memory_bench.command import run

@contextmanager
def server(log):
    try:
        yield
    finally:
        log.write_text("left")

def measure(args, subject, output):
    with server(Path(sys.argv[1])):
        output.write([{"k": 0}])
        print("ready", flush=True)
        time.sleep(60)

run(measure, program="bench_x", doc="Times.", bars=[], options={}, argv=sys.argv[2:])
"""
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", program, str(tmp_path / "log"), "--model", str(model), "--json", str(out)]
    path = ":".join(str(ROOT / part) for part in ("scripts", "eval", "kernels", "."))
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(30) == 143
    assert (tmp_path / "log").read_text() == "left"
    assert json.loads(out.read_text())["rows"] == [{"k": 0}]


def test_a_result_of_before_stands_until_there_are_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("of before")
    output = Output(out, bars=["ratio"], meta={}, official=True)
    assert out.read_text() == "of before"
    output.write(ROWS)
    found = json.loads(out.read_text())
    assert (found["rows"], found["bars"], found["meta"]["finished"]) == (ROWS, {"ratio": None}, False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_file_that_cannot_be_written_any_more_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    output = Output(folder / "out.json", bars=[], meta={}, official=True)
    folder.rmdir()
    folder.write_text("a file now")
    with pytest.raises(RunError, match=r"cannot write .*results/out\.json"):
        output.write(ROWS)


def test_numbers_of_an_option_are_taken_once() -> None:
    assert integers("0,5, 50,5") == (0, 5, 50)
    assert rates("0.5,2") == (0.5, 2.0)
    assert rates("") == ()
