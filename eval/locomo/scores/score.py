"""A run's score: the figures of all its arms, its recall, and the bars that it is held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locomo.dataset import Category, Conversation
from locomo.errors import ConfigError, JudgeRefused, RunError
from locomo.judging.judge import Judge
from locomo.judging.report import JudgeItem, JudgeReport
from locomo.reporting.scores import usual_k
from locomo.runs.config import RunConfig, sample
from locomo.runs.folder import RunFolder
from locomo.scores import estimates
from locomo.scores.answers import answers_of, official_of
from locomo.scores.distance import distance_of
from locomo.scores.files import QuestionScores, write_scored
from locomo.scores.paired import figures_of, paired_differences
from locomo.scores.retrieval import all_evidence_at, recall_of
from locomo.scores.rows import Arm, Figures, Rows, read_rows
from locomo.scoring.audited import Audit

RECALL_K = 10
_OF_THE_BEST_ARM = ("kl_over_shuffle_floor", "share_of_information_kept")


def score_run(
    folder: Path,
    conversations: Sequence[Conversation],
    *,
    k: int | None = None,
    judge: Judge | None = None,
    judge_runs: int = 3,
    audit: Audit | None = None,
    data_sha256: str | None = None,
) -> dict[str, Any]:
    """Score what a run has so far, and write ``score.json`` and ``scored.jsonl`` into its folder.

    The same rows, data and verdicts give the same bytes, in whatever order the rows were written. An answer that is
    missing, failed or unjudged is counted and enters no mean. Times are the benchmarks' to tell: a run's prompts stand
    behind their relatives.

    Parameters
    ----------
    folder
        The run's, with ``config.json`` and ``rows.jsonl``.
    conversations
        The data file that the run was asked from: the golds are read from it.
    k
        Which arms compete for the bars; by default as of `locomo.reporting.scores.usual_k`.
    judge, judge_runs
        Who judges the answers, and how often each; without one the arms' ``judge`` is null.
    audit
        Questions whose gold is known to be wrong; without one ``audited`` is null.
    data_sha256
        Of the data file in hex, kept in the score.

    Returns
    -------
    dict
        ``{"k", "bars", "best_arm", "best_of", "arms", "recall", "judge", "judge_refused", "questions", "audit",
        "audited", "config", "header"}``. The first two bars are those of ``best_arm``, each with its
        ``<name>_interval``. ``audited`` has the same figures, from ``bars`` to ``recall``, without the questions of the
        audit. Where the judge refused in the middle, ``judge`` is null and ``judge_refused`` says why.

    Raises
    ------
    RunError, ConfigError
        The folder holds no run, rows that do not fit the data, or no arm at that k.
    JudgeError
        The prompt or the verdicts' file cannot be used; nothing is written, and the verdicts had so far are kept.
    """
    run = RunFolder(folder)
    stored = run.read_config()
    if not {"config", "header"} <= stored.keys():
        raise RunError(f"{folder}/config.json is no run's config")
    config = RunConfig.from_json(stored["config"])
    bar_k = _bar_k(config, k)
    rows = read_rows(run, config, conversations)
    official = {arm.key: official_of(arm) if config.answers else {} for arm in rows.arms}
    judged, refused = None, None
    if judge is not None:
        try:
            judged = _judged(judge, rows, official, conversations, runs=judge_runs)
        except JudgeRefused as error:
            refused = str(error)
    figures = _figures(rows, official, judged, conversations, k=bar_k)
    score: dict[str, Any] = {
        "k": bar_k,
        **figures,
        "judge": None if judged is None else judged.as_json(),
        "judge_refused": refused,
        "questions": {
            "scored": len(rows.retrieved),
            "wanted": len(sample(conversations, config)),
            "conversations": len({question.sample_id for question, _ in rows.retrieved}),
            "data_sha256": data_sha256,
        },
        "audit": None if audit is None else _audit(audit, rows),
        "audited": None
        if audit is None
        else _figures(rows.without(audit.excluded), official, judged, conversations, k=bar_k),
        "config": stored["config"],
        "header": stored["header"],
    }
    return write_scored(folder, score, _by_question(rows, official, judged))


def best_splice_arm(rows: Rows, k: int | None) -> tuple[str | None, dict[str, Any] | None]:
    """Of the splice arms of retrieved facts at `k`, without any repair, the one with the least mean ``kl_answer``.

    The means are over the questions that all these arms have, so that no arm is the best for having been spliced where
    that was easy. An arm without any such figure does not compete.

    Returns
    -------
    tuple
        The arm, None where none competes or they share no question; and ``{"arms", "n"}``, who competed on how many
        shared questions, None where nobody did.
    """
    found = {
        arm.key: figures
        for arm in rows.arms
        if arm.name.kind == "splice"
        and not arm.name.oracle
        and arm.name.repair is None
        and arm.name.k == k
        and (figures := arm.figure("kl_answer"))
    }
    if not found:
        return None, None
    shared = set.intersection(*(set(figures) for figures in found.values()))
    chosen_from = {"arms": list(found), "n": len(shared)}
    if not shared:
        return None, chosen_from
    totals = {key: sum(figures[at] for at in sorted(shared)) for key, figures in found.items()}
    return min(totals, key=lambda key: (totals[key], key)), chosen_from


def _bar_k(config: RunConfig, wanted: int | None) -> int | None:
    names = config.parsed_arms()
    if wanted is not None and wanted not in {name.k for name in names}:
        raise ConfigError(f"the run has no arm at k = {wanted}")
    return usual_k(names) if wanted is None else wanted


def _figures(
    rows: Rows,
    official: Mapping[str, Figures],
    judged: JudgeReport | None,
    conversations: Sequence[Conversation],
    *,
    k: int | None,
) -> dict[str, Any]:
    """Everything that is computed from single questions, for the questions of `rows`."""
    official = {
        arm.key: {key: value for key, value in official[arm.key].items() if key in arm.entries} for arm in rows.arms
    }
    asked = {(question.sample_id, question.index) for question, _ in rows.retrieved}
    verdicts = {} if judged is None else judged.arms_json(among=asked)
    arms = {
        arm.key: {
            "n": len(arm.entries),
            **answers_of(arm, official[arm.key]),
            "judge": verdicts.get(arm.key),
            **distance_of(arm, rows),
            **paired_differences(arm, rows, official),
            **_counts(arm),
            "not_served": sum(arm.key in arms for arms in rows.not_served.values()),
        }
        for arm in rows.arms
    }
    best, best_of = best_splice_arm(rows, k)
    recall = recall_of(rows, conversations)
    bars = {name: arms[best][name] if best else None for name in _OF_THE_BEST_ARM}
    bars[f"recall_all_at_{RECALL_K}"] = estimates.mean(
        all_evidence_at(RECALL_K, rows, conversations), within=estimates.SHARE
    )
    return {
        "bars": _bars(bars),
        "best_arm": best,
        "best_of": best_of,
        "arms": arms,
        "recall": {rows.config.units: {**recall.as_json(), "n": recall.n}} if recall and recall.n else {},
    }


def _bars(found: Mapping[str, estimates.Estimate | None]) -> dict[str, Any]:
    """Plain numbers, and each one's interval beside it."""
    return {
        **{name: estimate["mean"] if estimate else None for name, estimate in found.items()},
        **{f"{name}_interval": estimate["interval"] if estimate else None for name, estimate in found.items()},
    }


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
    """Tiers of what was served, and what was not."""
    entries = arm.entries.values()
    return {
        "tiers": dict(sorted(Counter(entry.tier for entry in entries if entry.tier is not None).items())),
        "errors": sum(entry.error is not None for entry in entries),
        "without_prediction": sum(entry.prediction is None for entry in entries),
        "fidelity_measured": len(arm.measured),
    }


def _audit(audit: Audit, rows: Rows) -> dict[str, int]:
    asked = {(question.sample_id, question.index) for question, _ in rows.retrieved}
    return {"excluded": len(asked & audit.excluded), "listed": len(audit.excluded), "gold_is_right": audit.kept}


def _by_question(rows: Rows, official: Mapping[str, Figures], judged: JudgeReport | None) -> list[QuestionScores]:
    """What the score knows of each answer alone; whether the judge found it right, as far as most runs agree."""
    right = {
        (answer.item.arm, answer.item.question.sample_id, answer.item.question.index): answer.is_correct
        for answer in (judged.answers if judged else ())
        if answer.item.question.category is not Category.ADVERSARIAL
    }
    by_arm = {arm.key: figures_of(arm, official[arm.key]) for arm in rows.arms}
    scores = []
    for question, _ in rows.retrieved:
        key = (question.sample_id, question.index)
        arms = {}
        for arm, figures in by_arm.items():
            values: dict[str, float | bool | None] = {
                name: values[key] for name, values in figures.items() if key in values
            }
            if (verdict := right.get((arm, *key))) is not None:
                values["judge"] = verdict
            if values:
                arms[arm] = values
        scores.append(QuestionScores(*key, arms))
    return scores
