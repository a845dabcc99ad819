"""Scores of a small invented run against figures worked out by hand; comments show the arithmetic."""

import json
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
from score_samples import ARMS, CONFIG, FLOOR, LADDER, NONE, SYNTHETIC, TEXT, WINDOW, sample_rows, write_run

from locomo.dataset import load
from locomo.errors import RunError
from locomo.reporting.arm_names import parse_arm
from locomo.reporting.measures import Measured
from locomo.runs.config import reference_of
from locomo.scores import score_run
from locomo.scores.files import read_scored
from locomo.scores.score import best_splice_arm
from locomo.scoring.audited import Audit

CONVERSATIONS = load(SYNTHETIC)


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_run(tmp_path_factory.mktemp("run"), sample_rows())
    return score_run(folder, CONVERSATIONS)


def estimate(score: dict[str, Any], arm: str, figure: str) -> tuple[float, list[float], str, int]:
    found = score["arms"][arm][figure]
    return found["mean"], found["interval"], found["over"], found["n"]


def test_official_f1_is_a_mean_over_the_answers_that_there_are(score: dict[str, Any]) -> None:
    # "harbour school" against "at harbour school": 2·2 / (2 + 3). "swimming pottery" against each of the three parts:
    # 2/3, 0, 2/3. The question of id 2 is right; the last one, of id 4, failed.
    assert score["arms"][TEXT]["official_f1"] == pytest.approx(
        {"all": (0.8 + 4 / 9 + 1 + 1 + 1) / 5, "1": 4 / 9, "2": 1.0, "3": 1.0, "4": 0.8, "5": 1.0}
    )
    assert score["arms"][NONE]["official_f1"]["4"] == pytest.approx((0.8 + 1) / 2)
    assert (score["arms"][TEXT]["n"], score["arms"][TEXT]["errors"]) == (6, 1)
    assert score["arms"][TEXT]["without_prediction"] == 1
    assert (score["arms"][NONE]["errors"], score["arms"][NONE]["without_prediction"]) == (0, 0)


def test_mem0s_figures_leave_adversarial_questions_out(score: dict[str, Any]) -> None:
    # Sets of {the, harbour, school} and {at, the, harbour, school}: 2·3 / 7; {swimming, and, pottery} and the gold
    # without its commas: 2·2 / 6.
    assert score["arms"][TEXT]["mem0_f1"] == pytest.approx((6 / 7 + 2 / 3 + 1 + 1) / 4)
    # Precision 3/3 at 3 tokens of 4; 2/3 at 3 of 5, commas counted.
    bleus = exp(1 - 4 / 3) + 2 / 3 * exp(1 - 5 / 3) + 1 + 1
    assert score["arms"][TEXT]["mem0_bleu1"] == pytest.approx(bleus / 4)


def test_fidelity_of_a_splice_arm_is_of_what_was_spliced(score: dict[str, Any]) -> None:
    # Two questions of conv-901 and one of conv-902: resamples are 901 twice, either, or 902 twice.
    mean, interval, over, n = estimate(score, WINDOW, "kl_answer")
    assert (mean, over, n) == (pytest.approx(0.3), "conversations", 3)
    assert interval == pytest.approx([0.1, 0.4])
    assert estimate(score, WINDOW, "kl_first")[0] == pytest.approx(0.2)
    mean, interval, _, n = estimate(score, WINDOW, "top1_first")
    assert (mean, n) == (pytest.approx(2 / 3), 3)
    assert interval == pytest.approx([0.5, 1.0])
    assert estimate(score, WINDOW, "forced_choice")[::3] == (pytest.approx(2 / 3), 3)
    assert score["arms"][WINDOW]["tiers"] == {"exact": 1, "spliced": 4, "text": 1}
    assert score["arms"][WINDOW]["fidelity_measured"] == 3
    assert estimate(score, LADDER, "kl_answer")[::3] == (pytest.approx(0.2), 4)
    assert score["arms"][TEXT]["tiers"] == {"text": 5}


def test_the_floor_is_averaged_over_the_same_questions(score: dict[str, Any]) -> None:
    # (0.3 + 0.5 + 0.1) / (0.2 + 0.1 + 0.3); of conv-901 alone 0.8 / 0.3, of conv-902 alone 0.1 / 0.3
    mean, interval, _, n = estimate(score, WINDOW, "kl_over_shuffle_floor")
    assert (mean, n) == (pytest.approx(1.5), 3)
    assert interval == pytest.approx([1 / 3, 8 / 3])
    # 4 · 0.2 / (0.2 + 0.1 + 0.3 + 5.0)
    assert estimate(score, LADDER, "kl_over_shuffle_floor")[::3] == (pytest.approx(1 / 7), 4)
    assert estimate(score, FLOOR, "kl_over_shuffle_floor")[0] == 1
    assert score["arms"][TEXT]["kl_over_shuffle_floor"] is None


def test_share_kept_is_of_nats_of_whole_answers(score: dict[str, Any]) -> None:
    # ((4 - 1.5)·5 + (3 - 2.5)·10 + (5 - 2)·4) / ((4 - 1)·5 + (3 - 2)·10 + (5 - 1)·4); by conversation 17.5/25 and 12/16
    mean, interval, _, n = estimate(score, WINDOW, "share_of_information_kept")
    assert (mean, n) == (pytest.approx(29.5 / 41), 3)
    assert interval == pytest.approx([0.7, 0.75])
    assert estimate(score, LADDER, "share_of_information_kept")[0] == pytest.approx(39 / 43)
    assert estimate(score, TEXT, "share_of_information_kept")[0] == 1
    assert estimate(score, NONE, "share_of_information_kept")[0] == 0


def test_nll_difference_is_per_token_and_question(score: dict[str, Any]) -> None:
    assert estimate(score, WINDOW, "nll_difference")[0] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert estimate(score, NONE, "nll_difference")[::3] == (pytest.approx((3 + 1 + 4 + 1) / 4), 4)


def test_times_are_percentiles_of_what_was_served(score: dict[str, Any]) -> None:
    # 10 to 50 ms: the 95th percentile lies 0.8 of the way from the fourth to the fifth.
    assert score["arms"][TEXT]["ttft_ms"] == pytest.approx({"p50": 30.0, "p95": 48.0, "n": 5})


def test_recall_is_of_the_evidence_that_the_retrieved_observations_cover(score: dict[str, Any]) -> None:
    assert score["recall"] == {
        "observations": {
            "all": pytest.approx({"5": 2 / 5, "10": 3 / 5}),
            "any": pytest.approx({"5": 3 / 5, "10": 4 / 5}),
            "share": pytest.approx({"5": 2.5 / 5, "10": 3.5 / 5}),
        }
    }
    assert score["questions"]["recall"] == 5


def test_the_bars_are_of_the_splice_arm_with_the_least_divergence(score: dict[str, Any]) -> None:
    assert score["best_arm"] == LADDER
    assert score["bars"] == pytest.approx(
        {"kl_over_shuffle_floor": 1 / 7, "share_of_information_kept": 39 / 43, "recall_all_at_10": 0.6}
    )
    assert list(score["arms"]) == list(ARMS)


def test_no_other_arm_competes_for_the_bars() -> None:
    def figures(mean: float | None) -> dict[str, Any]:
        return {"kl_answer": None if mean is None else {"mean": mean}}

    arms = {
        "splice/window:2/tail@10": figures(0.4),
        "splice/window:2/head@10": figures(0.3),
        "splice/window:0/tail@10": figures(None),
        "oracle/splice/window:2/tail@10": figures(0.1),
        "splice/window:2/tail@5": figures(0.1),
        "floor/swapped@10": figures(0.1),
        "text/tail@10": figures(0.0),
    }
    assert best_splice_arm(arms) == "splice/window:2/head@10"
    assert best_splice_arm({"text/tail@10": figures(0.0)}) is None


def test_each_arm_has_its_facts_as_text_for_reference() -> None:
    config = replace(CONFIG, arms=("none", "text/tail@20", "text/tail@10", "text/head@5", "splice/window:0/head@5"))
    names = ("splice/window:0/head@5", "oracle/splice/window:0/tail@20", "floor/fp32@10", "none", "full")
    assert [reference_of(parse_arm(name), config) for name in names] == [
        "text/head@5",
        "oracle/text/tail@20",
        "text/tail@10",
        "text/tail@20",
        "text/tail@20",
    ]


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=(TEXT, WINDOW))
    rows = sample_rows()[4:]
    for row in rows:
        row["arms"] = {arm: row["arms"][arm] | {"ttft_ms": None} for arm in config.arms}
    score = score_run(write_run(tmp_path, rows, config=config), CONVERSATIONS)
    figures = score["arms"][WINDOW]
    absent = ("kl_answer", "kl_first", "top1_first", "nll_difference", "share_of_information_kept", "forced_choice")
    assert [figures[name] for name in (*absent, "kl_over_shuffle_floor", "judge", "official_f1_audited")] == [None] * 9
    assert figures["ttft_ms"] == {"p50": None, "p95": None, "n": 0}
    assert (figures["official_f1"]["1"], figures["official_f1"]["5"]) == (None, 1.0)
    assert (score["best_arm"], score["audit"], score["judge"]) == (None, None, None)
    assert score["bars"] == {"kl_over_shuffle_floor": None, "share_of_information_kept": None, "recall_all_at_10": 0.0}


def test_a_floor_without_any_distance_gives_no_ratio(tmp_path: Path) -> None:
    rows = sample_rows()[:4]
    for row in rows:
        row["arms"][FLOOR]["fidelity"]["kl_answer"] = 0.0
    assert score_run(write_run(tmp_path, rows), CONVERSATIONS)["arms"][WINDOW]["kl_over_shuffle_floor"] is None


def test_one_conversation_alone_is_resampled_by_question(tmp_path: Path) -> None:
    score = score_run(write_run(tmp_path, sample_rows()[:2]), CONVERSATIONS)
    mean, interval, over, n = estimate(score, WINDOW, "kl_answer")
    assert (mean, over, n) == (pytest.approx(0.4), "questions", 2)
    assert interval == pytest.approx([0.3, 0.5])
    assert (score["questions"]["scored"], score["questions"]["wanted"]) == (2, 6)


def test_recall_is_not_told_beyond_what_was_retrieved(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=("none", "text/tail@7", "text/tail@3"))
    rows = sample_rows()
    for row in rows:
        row["retrieved"] = row["retrieved"][:7]
        row["arms"] = {"none": row["arms"]["none"]}
    score = score_run(write_run(tmp_path, rows, config=config), CONVERSATIONS)
    assert score["recall"]["observations"]["all"] == pytest.approx({"3": 2 / 5, "5": 2 / 5, "7": 3 / 5})
    assert score["bars"]["recall_all_at_10"] is None


def test_turns_as_units_stand_for_themselves(tmp_path: Path) -> None:
    rows = sample_rows()[:1]
    rows[0]["retrieved"] = ["D1:2", "D1:1"]
    score = score_run(write_run(tmp_path, rows, config=replace(CONFIG, units="turns")), CONVERSATIONS)
    assert score["recall"]["turns"]["all"] == {"5": 1.0, "10": 1.0}


def test_audited_questions_are_left_out_of_the_audited_f1_alone(tmp_path: Path, score: dict[str, Any]) -> None:
    audit = Audit(frozenset({("conv-901", 0), ("conv-902", 0)}), kept=1)
    audited = score_run(write_run(tmp_path, sample_rows()), CONVERSATIONS, audit=audit)
    assert audited["arms"][TEXT]["official_f1_audited"] == pytest.approx((0.8 + 1 + 1 + 1) / 4)
    assert audited["arms"][TEXT]["official_f1"] == score["arms"][TEXT]["official_f1"]
    assert audited["audit"] == {"excluded": 1, "listed": 2, "gold_is_right": 1}
    assert score["arms"][TEXT]["official_f1_audited"] is None


def test_answers_that_were_not_decoded_to_their_end_have_no_f1(tmp_path: Path) -> None:
    folder = write_run(tmp_path, sample_rows(), config=replace(CONFIG, answers=False))
    figures = score_run(folder, CONVERSATIONS)["arms"][TEXT]
    assert (figures["official_f1"]["all"], figures["mem0_f1"], figures["mem0_bleu1"]) == (None, None, None)
    assert figures["kl_answer"]["n"] == 4


def test_the_same_rows_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    rows = sample_rows()
    folders = [write_run(tmp_path / "one", rows), write_run(tmp_path / "two", [*rows[3:], *rows[2::-1]])]
    written = []
    for folder in [*folders, folders[0]]:
        score = score_run(folder, CONVERSATIONS)
        assert json.loads((folder / "score.json").read_text()) == score
        written.append(((folder / "score.json").read_bytes(), (folder / "scored.jsonl").read_bytes()))
    assert written[0] == written[1] == written[2]
    assert sorted(path.name for path in folders[0].iterdir()) == [
        "config.json",
        "rows.jsonl",
        "score.json",
        "scored.jsonl",
    ]


def test_each_answers_f1_is_kept_for_comparisons(tmp_path: Path) -> None:
    folder = write_run(tmp_path, sample_rows())
    score_run(folder, CONVERSATIONS)
    measures = read_scored(folder)
    assert set(measures) == {"official_f1"}
    of_text = {at: f1 for at, f1 in measures["official_f1"].items() if at.arm == TEXT}
    assert of_text == pytest.approx(
        {
            Measured("conv-901", 0, TEXT): 4 / 9,
            Measured("conv-901", 5, TEXT): 0.8,
            Measured("conv-902", 2, TEXT): 1.0,
            Measured("conv-903", 4, TEXT): 1.0,
            Measured("conv-903", 8, TEXT): 1.0,
        }
    )
    (folder / "scored.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match="score the run again"):
        read_scored(folder)


def test_a_score_holds_no_text_of_the_data(tmp_path: Path) -> None:
    folder = write_run(tmp_path, sample_rows())
    score_run(folder, CONVERSATIONS)
    written = (folder / "score.json").read_text() + (folder / "scored.jsonl").read_text()
    assert not [word for word in ("harbour", "pottery", "Nils", "July") if word in written]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.clear(), "no row yet"),
        (lambda rows: rows.append(rows[0]), "question 5 of conv-901 has a row already"),
        (lambda rows: rows[0].update(index=77), "the data has no question 77 of conv-901"),
        (lambda rows: rows[0].update(category=2), "the data has no question 5 of conv-901 with its category"),
        (lambda rows: rows[0].pop("arms"), "row 1 is no row of a run"),
        (lambda rows: rows[0]["arms"].update({TEXT: "x"}), "is no answer"),
        (lambda rows: rows[1]["retrieved"].append("O99"), "O99, retrieved for conv-901, is none of the data's obs"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    rows = sample_rows()
    change(rows)
    with pytest.raises(RunError, match=message):
        score_run(write_run(tmp_path, rows), CONVERSATIONS)
    assert not (tmp_path / "score.json").exists()


def test_a_row_that_was_cut_short_is_not_scored(tmp_path: Path) -> None:
    folder = write_run(tmp_path, sample_rows())
    content = (folder / "rows.jsonl").read_bytes()
    (folder / "rows.jsonl").write_bytes(content[:-40])
    assert score_run(folder, CONVERSATIONS)["questions"]["scored"] == 5


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        score_run(tmp_path, CONVERSATIONS)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match="no run's config"):
        score_run(tmp_path, CONVERSATIONS)


def test_a_score_that_cannot_be_written_is_told_and_leaves_no_draft(tmp_path: Path) -> None:
    folder = write_run(tmp_path, sample_rows())
    (folder / "score.json").mkdir()  # in the way of the file
    with pytest.raises(RunError, match=r"cannot write .*score\.json"):
        score_run(folder, CONVERSATIONS)
    assert not list(folder.glob(".*"))
