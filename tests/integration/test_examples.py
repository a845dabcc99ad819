"""The examples, as somebody who has just read them runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from engines import RunningServer

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).parents[2] / "examples"
# What each must have printed, whatever the model says.
PRINTED = {
    "session_monitor": [
        r"version 7: \d+ tokens appended",
        r"\[version 4\] Which bed needs water\? '",
        r"\[version 7\]",
    ],
    "agent_memory": [r"3 facts, all encoded: True", r"spliced: \d+ tokens spliced", r"session version 3", r"Faro"],
    "frontend_program": [r"urgent, [1-9][0-9]? hours; \['.*', '.*'\]", r"version 2: \d+ tokens", r"newest: '"],
    "frontend_flash": [
        r"open: '.*', served from flash",
        r"next: '.*', version 2, served from flash",
    ],
    "flash_questions": [
        r"\[version 4\] warmest: '",
        r"\[version 4\] dry: '",
        r"served from flash",
        r"decoded for real: True, served from engine",
        r"warmest: \d+ evaluations, 1 hits, fresh",
    ],
    "fork_and_compare": [
        r"3 forks of version 1",
        r"(version 3, \d+ tokens: She .*\n){3}",
        r"the session itself: version 1",
    ],
    "openai_client": [r"memory: spliced, session: version 2", r"\|", r"the turn made version 3"],
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_and_is_short(server: RunningServer, name: str) -> None:
    path = FOLDER / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    run = subprocess.run([sys.executable, path, server.url], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    for pattern in PRINTED[name]:
        assert re.search(pattern, run.stdout), run.stdout
