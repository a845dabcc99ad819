"""docs/cli.md, and what the command line says of itself."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from cli_runs import CommandLine

from memstore.cli.reference import reference

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_reference_is_what_the_commands_say() -> None:
    assert DOCS.read_text(encoding="utf-8") == reference(), "run `python -m memstore.cli.reference > docs/cli.md`"


def test_every_command_has_a_store_and_json() -> None:
    sections = reference().split("\n## memstore ")[1:]
    names = {section.splitlines()[0] for section in sections}
    assert {"facts add", "facts search", "owners purge", "export", "verify", "watch", "doctor"} <= names
    for section in sections:
        assert "- `--store URL`" in section
        assert "- `--json`" in section


def test_help_and_version_load_no_model() -> None:
    code = (
        "import sys\nfrom memstore.cli import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit as exit:\n    code = exit.code\n"
        "print(code, [name for name in ('torch', 'faiss', 'redis', 'rich', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert CommandLine(None, embedder=None)("--version").stdout == f"memstore {version('sgl-stateful')}\n"


def test_without_a_command_there_is_help() -> None:
    for arguments in ([], ["facts"]):
        run = CommandLine(None, embedder=None)(*arguments)
        assert (run.code, run.stdout) == (2, "")
        assert "Commands:" in run.stderr
