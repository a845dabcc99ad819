"""The whole command, on invented conversations and, where it is there, on the published file."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bigrams import BigramEmbedder

from locomo.dataset import Category, Conversation, demo_conversation_path, file_sha256, load
from locomo.errors import ScoringError
from locomo.retrieval.cache import CachedEmbedder
from locomo.retrieval.command import measure_units
from locomo.retrieval.reference import PUBLISHED_SHA256, points_off
from locomo.retrieval.units import UnitKind, UnitText
from memstore import SentenceTransformerEmbedder
from memstore.embedding import Embedder

REPOSITORY = Path(__file__).resolve().parents[2]
LOCOMO_DATA = os.environ.get("LOCOMO_DATA", "")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(REPOSITORY / part) for part in (".", "kernels", "eval"))
    return subprocess.run(
        [sys.executable, "-m", "locomo.retrieval", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def measured(conversations: list[Conversation], kind: UnitKind, embedder: Embedder) -> list[dict[str, Any]]:
    return measure_units(
        conversations,
        kind,
        embedder=embedder,
        text=UnitText.DATED,
        captions=False,
        timed=0,
        rounds=1,
        track=lambda title, total: lambda steps: None,
    )


def test_the_demo_conversation_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("--data", demo_conversation_path(), "--cache", tmp_path / "cache", "--json", out, "--timed", "1")
    assert done.returncode == 0, done.stderr
    assert "observations" in done.stdout
    assert "plain hybrid + neighbour 0.2" in done.stdout
    record: dict[str, Any] = json.loads(out.read_text())
    rows = {(row["units"], row["variant"]): row for row in record["rows"] if "variant" in row}
    served, plain = rows["observations", "served"], rows["observations", "plain hybrid"]
    assert record["bars"] == {
        "recall_all_at_10": served["recall"]["all"]["10"],
        "recall_all_at_10_reference": rows["observations", "vector"]["recall"]["all"]["10"],
    }
    [conversation] = load(demo_conversation_path())
    counted = [question for question in conversation.questions if question.category != 5 and question.evidence]
    assert {row["n"] for row in rows.values()} == {len(counted)}
    assert plain["difference"]["10"]["over"] == "questions"  # there is one conversation
    assert served["baseline"] == "plain hybrid"
    # What the store adds is what the harness adds to its plain search.
    for kind in UnitKind:
        assert rows[kind, "served"]["recall"] == rows[kind, "plain hybrid + month 0.1 + neighbour 0.2"]["recall"]
    for row in rows.values():
        shares = [row["recall"][field][k] for field in ("all", "share", "any") for k in ("5", "10", "20", "50")]
        assert all(0 <= share <= 1 for share in shares)
        assert row["recall"]["all"]["10"] <= row["recall"]["share"]["10"] <= row["recall"]["any"]["10"]
    said = out.read_text() + done.stdout
    assert not [text for text in (turn.utterance for turn in conversation.turns) if len(text) > 20 and text in said]


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    absent = run("--data", tmp_path / "absent.json", "--cache", tmp_path)
    homeless = run("--data", demo_conversation_path(), "--cache", tmp_path, "--json", tmp_path / "absent" / "out.json")
    for done, said in ((absent, "no LoCoMo file at "), (homeless, "there is no directory ")):
        assert done.returncode == 1
        assert done.stderr.startswith(f"retrieval: {said}")
        assert len(done.stderr.splitlines()) == 1


def test_questions_without_evidence_have_no_recall() -> None:
    [conversation] = load(demo_conversation_path())
    adversarial = [question for question in conversation.questions if question.category is Category.ADVERSARIAL]
    assert adversarial
    with pytest.raises(ScoringError, match="nothing to recall"):
        measured([replace(conversation, questions=tuple(adversarial))], UnitKind.TURNS, BigramEmbedder())


def test_the_distance_from_the_reference_is_the_greatest() -> None:
    recall = {
        "all": {"5": 0.345, "10": 0.426, "20": 0.513, "50": 0.656},
        "any": {"5": 0.441, "10": 0.547, "20": 0.641, "50": 0.792},  # 64.1 against 64.6
    }
    row = {"units": "turns", "evidence": "repaired", "recall": recall}
    assert points_off([row, {**row, "evidence": "strict", "recall": {}}]) == pytest.approx(0.5)


@pytest.mark.locomo
@pytest.mark.timeout(1200)  # thousands of texts are embedded on one thread, which takes minutes
@pytest.mark.skipif(not LOCOMO_DATA, reason="LOCOMO_DATA does not name LoCoMo's data file")
@pytest.mark.parametrize("kind", list(UnitKind))
def test_the_reference_is_met_on_the_published_file(kind: UnitKind, tmp_path: Path) -> None:
    data = Path(LOCOMO_DATA)
    assert file_sha256(data) == PUBLISHED_SHA256
    torch.set_num_threads(1)
    rows = measured(load(data), kind, CachedEmbedder(SentenceTransformerEmbedder(), tmp_path))
    assert {row["n"] for row in rows if row.get("evidence") == "repaired"} == {1536}
    assert points_off(rows) <= 0.3
