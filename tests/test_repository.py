import datetime
import json
import os
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from locomo.dataset import Category, demo_conversation_path, load

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("scripts/setup", "scripts/demo", "scripts/test", "scripts/check", "scripts/get_models", ".ci/run")


def parse_date(text: str) -> datetime.datetime:
    return datetime.datetime.strptime(text, "%I:%M %p on %d %B, %Y")


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_bash(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "scripts/test" in readme
    assert "scripts/demo" in readme


def test_ci_runs_what_a_developer_runs() -> None:
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert 0 < ci.index("scripts/check") < ci.index("scripts/test")


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
    roots = {"sgl_stateful": ROOT, "memstore": ROOT, "kv_splice": ROOT / "kernels", "locomo": ROOT / "eval"}
    folders = {
        ".".join(module.parent.relative_to(parent).parts): module.parent
        for name, parent in roots.items()
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
