"""``python -m locomo run`` against a real server: killed and gone on with, and a server that ends with its harness."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from engines import RunningServer
from redis_server import wait_until

pytestmark = pytest.mark.engine

_DATA = Path(__file__).parents[1] / "locomo" / "data" / "synthetic.json"
_ARMS = "none,text/tail@3,splice/ladder:0+4/tail@3,splice/window:16/tail@3,floor/shuffled@3"
_QUESTIONS = 5
_PATIENCE_S = 300.0


def command(step: str, out: Path, *options: object) -> list[str]:
    own = ["--data", str(_DATA)] if step != "report" else []
    return [sys.executable, "-m", "locomo", step, str(out), *own, *map(str, options)]


def run_options(server: RunningServer, model_dir: Path) -> list[object]:
    size = ["--questions", _QUESTIONS, "--max-tokens", 4, "--no-choices"]
    return ["--model", model_dir, "--url", server.url, "--arms", _ARMS, "--allow-data-changes", *size]


def num_rows(out: Path) -> int:
    rows = out / "rows.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def without_times(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
    for row in kept:
        timed = ("ttft_ms", "ms")
        row["arms"] = [
            {name: value for name, value in arm.items() if name not in timed} for arm in row["arms"].values()
        ]
    return kept


@pytest.mark.timeout(900)  # three runs
def test_a_run_that_is_killed_and_gone_on_with_gives_the_same_rows_and_figures(
    server: RunningServer, model_dir: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command("run", whole, *run_options(server, model_dir)), check=True, capture_output=True)

    draw = random.Random(5)
    for expected in (2, 4):
        with subprocess.Popen(command("run", broken, *run_options(server, model_dir)), stderr=subprocess.PIPE) as run:
            wait_until(
                lambda run=run, wanted=expected: run.poll() is not None or num_rows(broken) >= wanted,
                f"row {expected}",
                deadline_s=_PATIENCE_S,
            )
            assert run.poll() is None, run.communicate()
            time.sleep(draw.uniform(0, 1.5))  # the moment of the kill, somewhere in the question that follows
            run.kill()
        assert run.returncode == -signal.SIGKILL, run.returncode
        assert num_rows(broken) < _QUESTIONS, "it ended before it was killed"
    subprocess.run(command("run", broken, *run_options(server, model_dir)), check=True, capture_output=True)

    assert len(rows_of(whole)) == _QUESTIONS
    arms = [arm for row in rows_of(whole) for arm in row["arms"].values() if arm["arm"].startswith("splice/")]
    assert [arm["tier"] for arm in arms] == ["spliced"] * 2 * _QUESTIONS, "answers and golds alike"
    assert len((broken / "starts.jsonl").read_text().splitlines()) == 3
    assert without_times(rows_of(broken)) == without_times(rows_of(whole))
    figures = []
    for out in (whole, broken):
        subprocess.run(command("score", out, "--json", out / "bars.json"), check=True, capture_output=True)
        subprocess.run(command("report", out), check=True, capture_output=True)
        assert (out / "report.html").stat().st_size > 10_000
        figures.append(json.loads((out / "bars.json").read_text())["bars"])
    assert figures[0] == figures[1]
    assert figures[0]["kl_over_shuffle_floor"] > 0


def test_a_server_ends_with_the_process_that_started_it(model_dir: Path, tmp_path: Path) -> None:
    start = (
        "import sys; from pathlib import Path; from locomo.server import ServerProcess\n"
        "model, folder = map(Path, sys.argv[1:])\n"
        "flags = ['--max-total-tokens', '2000']\n"
        "ServerProcess(model, folder / 'memory', flags=flags, log=folder / 'log').__enter__()"
    )
    with subprocess.Popen([sys.executable, "-c", start, str(model_dir), str(tmp_path)]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        wait_until(lambda: bool(children.read_text()), "the start of a server", deadline_s=_PATIENCE_S)
        [server] = children.read_text().split()
        parent.kill()
    wait_until(lambda: not is_running(server), "the end of the server", deadline_s=_PATIENCE_S)


def is_running(pid: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # nobody may be left to wait for it
