"""`python -m locomo.oracle` refuses what it cannot do, in one line, before it starts a server."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from locomo.oracle.__main__ import main


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--k", "0,5"], "'0,5'"),
        (["--k", "five"], "'five'"),
        (["--k", "5,25"], "25 facts"),  # the shipped conversations have 24 turns
        (["--placements", "tail,middle"], "middle"),
        (["--data", "/nowhere/at/all.json"], "/nowhere/at/all.json"),
        (["--policies", "anchor:0"], "anchor:0"),
        (["--policies", "ladder:4+0"], "ladder:4+0"),
        (["--policies", ","], "no policy"),
    ],
)
def test_what_cannot_be_asked_for_is_named(options: list[str], named: str, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    found = CliRunner().invoke(app, ["--model", str(tmp_path), *options])
    assert found.exit_code == 1
    assert named in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert "starting" not in found.stdout
