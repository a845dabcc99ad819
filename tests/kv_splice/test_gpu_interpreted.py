"""Run the tests in `interpreted/`, where Triton executes its kernels on the CPU, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = sorted(path.name for path in (HERE / "interpreted").glob("test_*.py"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", MODULES)
def test_interpreted(module: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "interpreted" / module]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^\d+ passed in", run.stdout, re.MULTILINE), run.stdout


def test_there_are_modules_to_interpret() -> None:
    assert len(MODULES) >= 3
