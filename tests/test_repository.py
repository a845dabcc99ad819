import ast
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from locomo.dataset import Category, demo_conversation_path, load

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    ".ci/run": "bash",
    "scripts/bench_encode": "bash",
    "scripts/bench_fidelity": "bash",
    "scripts/bench_selection": "bash",
    "scripts/bench_memstore": "bash",
    "scripts/bench_sessions": "bash",
    "scripts/bench_splice": "python",
    "scripts/bench_streaming": "bash",
    "scripts/bench_throughput": "bash",
    "scripts/bench_ttft": "bash",
    "scripts/check": "bash",
    "scripts/demo": "bash",
    "scripts/device_check": "python",
    "scripts/get_models": "bash",
    "scripts/setup": "bash",
    "scripts/test": "bash",
}
PACKAGES = {"sgl_stateful": ROOT, "memstore": ROOT, "kv_splice": ROOT / "kernels", "locomo": ROOT / "eval"}


def parse_date(text: str) -> datetime.datetime:
    return datetime.datetime.strptime(text, "%I:%M %p on %d %B, %Y")


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


@pytest.mark.parametrize(("script", "interpreter"), SCRIPTS.items())
def test_scripts_are_executable(script: str, interpreter: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text(encoding="utf-8").startswith(f"#!/usr/bin/env {interpreter}\n")


def test_no_script_is_left_out() -> None:
    there = {str(path.relative_to(ROOT)) for folder in ("scripts", ".ci") for path in (ROOT / folder).glob("*")}
    folders = {name for name in there if (ROOT / name).is_dir()}
    assert there - folders == set(SCRIPTS)


def test_the_readme_names_the_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("scripts/test", "scripts/demo", "memstore facts add", "docs/cli.md", "docs/store.md"):
        assert name in readme


def test_ci_runs_what_a_developer_runs() -> None:
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert 0 < ci.index("scripts/check") < ci.index("scripts/test")


@pytest.fixture
def bare_ci(tmp_path: Path) -> Path:
    """`.ci/run` where the steps do nothing but say their name, and `bin` has only what the script itself needs."""
    for folder in (".ci", "scripts", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    for name in ("setup", "check", "test"):
        write_script(tmp_path / "scripts" / name, f"echo ran {name}")
    for name in ("bash", "chmod", "dirname", "rm", "timeout"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is absent"))
    return tmp_path


def write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def run_ci(folder: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(folder / "bin")}
    return subprocess.run([folder / ".ci/run"], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("absent", ["redis-server", "openssl"])
@pytest.mark.parametrize("apt", ["absent", "useless", "not for this user"])
def test_ci_fails_where_tests_would_be_skipped(bare_ci: Path, absent: str, apt: str) -> None:
    for name in {"redis-server", "openssl"} - {absent}:
        write_script(bare_ci / "bin" / name, "")
    write_script(bare_ci / "bin/id", f"echo {1000 if apt == 'not for this user' else 0}")
    if apt != "absent":
        write_script(bare_ci / "bin/apt-get", "exit 100" if apt == "useless" else "echo asked")
    run = run_ci(bare_ci)
    assert run.returncode == 1
    assert f"ci: the tests need {absent}, which cannot be installed here" in run.stderr
    assert "ran setup" not in run.stdout
    assert "asked" not in run.stdout


def test_ci_installs_what_the_tests_need(bare_ci: Path) -> None:
    write_script(bare_ci / "bin/id", "echo 0")
    installs = 'for name in "$@"; do echo "#!/bin/sh" >"$HERE/$name"; chmod +x "$HERE/$name"; done'
    body = f"HERE={bare_ci / 'bin'}\n[[ $2 == install ]] || exit 0\nshift 4\n{installs}"
    write_script(bare_ci / "bin/apt-get", body)
    run = run_ci(bare_ci)
    assert (run.returncode, run.stderr) == (0, "")
    assert {"redis-server", "openssl"} <= {path.name for path in (bare_ci / "bin").iterdir()}
    assert [line for line in run.stdout.splitlines() if line.startswith("ran")] == [
        "ran setup",
        "ran check",
        "ran test",
    ]


def imported_by(folder: Path) -> set[str]:
    """The first part of every name of a module that the code in a folder imports."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names}


def test_whatever_is_imported_is_declared_and_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [Requirement(text) for text in project["dependencies"]]
    of_eval = [Requirement(text) for text in project["optional-dependencies"]["eval"]]
    for requirement in [*declared, *of_eval]:
        assert requirement.specifier.contains(version(requirement.name)), requirement
    distributions = packages_distributions()
    for package, parent in PACKAGES.items():
        # Only the evaluation may need more than what every server has installed.
        allowed = [*declared, *of_eval] if package == "locomo" else declared
        names = {canonicalize_name(requirement.name) for requirement in allowed}
        foreign = imported_by(parent / package) - set(sys.stdlib_module_names) - set(PACKAGES)
        undeclared = [name for name in foreign if not names & set(map(canonicalize_name, distributions.get(name, [])))]
        assert undeclared == [], package


def test_setup_installs_what_the_evaluation_needs() -> None:
    """`scripts/setup` installs an extra that has `eval` in it, and `.ci/run` runs `scripts/setup`."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [command] = re.findall(r"pip install .* -e '([^']*)'", (ROOT / "scripts/setup").read_text(encoding="utf-8"))
    installed = set(Requirement(f"sgl-stateful{command.removeprefix('.')}").extras)
    included = {
        extra
        for name in installed
        for text in extras[name]
        if canonicalize_name((requirement := Requirement(text)).name) == "sgl-stateful"
        for extra in requirement.extras
    }
    assert "eval" in installed | included


def test_no_package_shadows_the_kernels_that_sglang_imports() -> None:
    assert not (ROOT / "kernels/__init__.py").exists()


def test_the_demo_conversation_is_long_and_dated() -> None:
    [sample] = json.loads(demo_conversation_path().read_text(encoding="utf-8"))
    sessions = {key: value for key, value in sample["conversation"].items() if re.fullmatch(r"session_\d+", key)}
    dates = [
        parse_date(sample["conversation"][f"session_{number}_date_time"]) for number in range(1, len(sessions) + 1)
    ]
    assert 8 <= len(sessions) <= 10
    assert all(earlier < later for earlier, later in pairwise(dates))
    assert sum(map(len, sessions.values())) >= 130
    assert {item["speaker"] for items in sessions.values() for item in items} == {"Ines", "Tobias"}
    words = [len(item["text"].split()) for items in sessions.values() for item in items]
    assert 20 <= sum(words) / len(words) <= 30


def test_the_demo_conversation_asks_every_category_and_names_its_evidence() -> None:
    [conversation] = load(demo_conversation_path())
    ids = {turn.dia_id for turn in conversation.turns}
    assert len(ids) == len(conversation.turns)
    assert len(conversation.questions) >= 29
    assert {question.category for question in conversation.questions} == set(Category)
    for question in conversation.questions:
        assert question.evidence_raw
        assert set(question.evidence_raw) <= ids
        if question.category is Category.MULTI_HOP:
            assert len(question.evidence) >= 2


def test_an_installed_package_is_whole() -> None:
    """An editable install would hide a folder that is missing from the list, or a data file."""
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join(module.parent.relative_to(parent).parts): module.parent
        for name, parent in PACKAGES.items()
        for module in (parent / name).rglob("__init__.py")
    }
    assert set(configured["packages"]) == set(folders)
    for name, folder in folders.items():
        shipped = [path for pattern in configured["package-data"].get(name, []) for path in folder.glob(pattern)]
        data = {
            path
            for path in folder.rglob("*")
            if path.is_file()
            and path.suffix != ".py"
            and path.parent.name != "__pycache__"
            and folders.get(".".join([name, *path.parent.relative_to(folder).parts]), folder) == folder
        }
        assert data == set(shipped), name
