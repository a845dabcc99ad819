"""A run's score: the figures of all its arms, its recall, and the bars that it is held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from locomo.dataset import Category, Conversation
from locomo.errors import RunError
from locomo.judging.judge import Judge
from locomo.judging.report import JudgeItem, JudgeReport
from locomo.judging.verdict import Verdict
from locomo.reporting.arm_names import parse_arm
from locomo.runs.config import RunConfig, sample
from locomo.runs.folder import RunFolder
from locomo.scores.answers import answers_of, official_of
from locomo.scores.fidelity import fidelity_of
from locomo.scores.files import QuestionScores, write_scored
from locomo.scores.retrieval import recall_of
from locomo.scores.rows import Arm, Figures, Rows, read_rows
from locomo.scoring.audited import Audit

BAR_K = 10


def score_run(
    folder: Path,
    conversations: Sequence[Conversation],
    *,
    judge: Judge | None = None,
    judge_runs: int = 3,
    audit: Audit | None = None,
    data_sha256: str | None = None,
) -> dict[str, Any]:
    """Score what a run has so far, and write ``score.json`` and ``scored.jsonl`` into its folder.

    The same rows, data and verdicts give the same bytes, in whatever order the rows were written. An answer that is
    missing, failed or unjudged is counted and enters no mean.

    Parameters
    ----------
    folder
        The run's, with ``config.json`` and ``rows.jsonl``.
    conversations
        The data file that the run was asked from: the golds are read from it.
    judge, judge_runs
        Who judges the answers, and how often each; without one the arms' ``judge`` is null.
    audit
        Questions whose gold is known to be wrong; without one the audited figures are null.
    data_sha256
        Of the data file in hex, kept in the score.

    Returns
    -------
    dict
        ``{"bars", "best_arm", "arms", "recall", "judge", "questions", "audit", "config", "header"}``. The first two
        bars are those of ``best_arm``: of the splice arms of retrieved facts at k = 10 the one with the least mean
        ``kl_answer``.

    Raises
    ------
    RunError, ConfigError
        The folder holds no run, or rows that do not fit the data.
    JudgeError
        The judge cannot be asked; nothing is written, and the verdicts had so far are kept.
    """
    run = RunFolder(folder)
    stored = run.read_config()
    if not {"config", "header"} <= stored.keys():
        raise RunError(f"{folder}/config.json is no run's config")
    config = RunConfig.from_json(stored["config"])
    rows = read_rows(run, config, conversations)
    official = {arm.key: official_of(arm) if config.answers else {} for arm in rows.arms}
    judged = None if judge is None else _judged(judge, rows, official, conversations, runs=judge_runs)
    excluded = None if audit is None else audit.excluded
    verdicts = None if judged is None else judged.as_json(excluded=excluded or ())
    arms = {
        arm.key: {
            "n": len(arm.entries),
            **answers_of(arm, official[arm.key], excluded=excluded),
            "judge": None if verdicts is None else verdicts["arms"].get(arm.key),
            **fidelity_of(arm, rows),
            **_counts(arm),
        }
        for arm in rows.arms
    }
    recall = recall_of(rows, conversations)
    best = best_splice_arm(arms)
    score: dict[str, Any] = {
        "bars": {
            "kl_over_shuffle_floor": _mean_of(arms, best, "kl_over_shuffle_floor"),
            "share_of_information_kept": _mean_of(arms, best, "share_of_information_kept"),
            "recall_all_at_10": recall.overall[BAR_K].all if recall and BAR_K in recall.overall else None,
        },
        "best_arm": best,
        "arms": arms,
        "recall": {config.units: recall.as_json()} if recall and recall.n else {},
        "judge": None if verdicts is None else {key: value for key, value in verdicts.items() if key != "arms"},
        "questions": {
            "scored": len(rows.retrieved),
            "wanted": len(sample(conversations, config)),
            "recall": recall.n if recall else 0,
            "data_sha256": data_sha256,
        },
        "audit": None if audit is None else _audit(audit, rows),
        "config": stored["config"],
        "header": stored["header"],
    }
    return write_scored(folder, score, _by_question(rows, official, judged))


def best_splice_arm(arms: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Of the splice arms of retrieved facts at k = 10 the one with the least mean ``kl_answer``; None without any."""
    distances = {
        key: figures["kl_answer"]["mean"]
        for key, figures in arms.items()
        if (name := parse_arm(key)).kind == "splice" and not name.oracle and name.k == BAR_K and figures["kl_answer"]
    }
    return min(distances, key=lambda key: (distances[key], key)) if distances else None


def _judged(
    judge: Judge,
    rows: Rows,
    official: Mapping[str, Figures],
    conversations: Sequence[Conversation],
    *,
    runs: int,
) -> JudgeReport:
    items = [
        JudgeItem(arm.key, arm.entries[key].question, arm.entries[key].prediction or "")
        for arm in rows.arms
        for key in official[arm.key]
    ]
    return judge.judge(items, runs=runs, pool=[item for sample in conversations for item in sample.questions])


def _counts(arm: Arm) -> dict[str, Any]:
    """Times and tiers of what was served, and what was not."""
    entries = arm.entries.values()
    times = [entry.ttft_ms for entry in entries if entry.ttft_ms is not None]
    p50, p95 = (float(value) for value in np.percentile(times, [50, 95])) if times else (None, None)
    return {
        "ttft_ms": {"p50": p50, "p95": p95, "n": len(times)},
        "tiers": dict(sorted(Counter(entry.tier for entry in entries if entry.tier is not None).items())),
        "errors": sum(entry.error is not None for entry in entries),
        "without_prediction": sum(entry.prediction is None for entry in entries),
        "fidelity_measured": len(arm.measured),
    }


def _mean_of(arms: Mapping[str, Mapping[str, Any]], arm: str | None, figure: str) -> float | None:
    estimate = None if arm is None else arms[arm][figure]
    return None if estimate is None else estimate["mean"]


def _audit(audit: Audit, rows: Rows) -> dict[str, int]:
    asked = {(question.sample_id, question.index) for question, _ in rows.retrieved}
    return {"excluded": len(asked & audit.excluded), "listed": len(audit.excluded), "gold_is_right": audit.kept}


def _by_question(rows: Rows, official: Mapping[str, Figures], judged: JudgeReport | None) -> list[QuestionScores]:
    """What the score knows of each answer alone; whether the judge found it right, as far as it has a verdict."""
    right = {
        (answer.item.arm, answer.item.question.sample_id, answer.item.question.index): answer.verdict is Verdict.CORRECT
        for answer in (judged.answers if judged else ())
        if answer.verdict is not Verdict.UNJUDGED and answer.item.question.category is not Category.ADVERSARIAL
    }
    return [
        QuestionScores(
            question.sample_id,
            question.index,
            {
                arm.key: {"official_f1": official[arm.key][key], "judge": right.get((arm.key, *key))}
                for arm in rows.arms
                if (key := (question.sample_id, question.index)) in official[arm.key]
            },
        )
        for question, _ in rows.retrieved
    ]
