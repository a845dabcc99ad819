"""Scores of a small invented run against figures worked out by hand; comments show the arithmetic."""

import json
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
from judge_endpoint import Answer, completion, serve
from score_samples import ARMS, CONFIG, FLOOR, LADDER, NONE, SYNTHETIC, TEXT, WINDOW, sample_rows, write_run

from locomo.dataset import load
from locomo.errors import ConfigError, RunError
from locomo.judging.judge import JudgeSettings, open_judge
from locomo.reporting import write_report
from locomo.reporting.arm_names import parse_arm
from locomo.reporting.measures import Measured
from locomo.runs.config import reference_of
from locomo.scores import score_run
from locomo.scores.files import read_scored
from locomo.scoring.audited import Audit

CONVERSATIONS = load(SYNTHETIC)


@pytest.fixture(scope="module")
def score(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_run(tmp_path_factory.mktemp("run"), sample_rows())
    return score_run(folder, CONVERSATIONS)


def estimate(score: dict[str, Any], arm: str, figure: str) -> tuple[float, list[float] | None, str, int]:
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
    # Two questions of conv-901 and one of conv-902: two conversations are too few for an interval.
    assert estimate(score, WINDOW, "kl_answer") == (pytest.approx(0.3), None, "conversations", 3)
    assert score["arms"][WINDOW]["kl_answer"]["groups"] == 2
    assert estimate(score, WINDOW, "kl_first")[0] == pytest.approx(0.2)
    assert estimate(score, WINDOW, "unlisted_probability")[::3] == (pytest.approx((0.01 + 0.03 + 0.05) / 3), 3)
    assert estimate(score, WINDOW, "top1_first")[::3] == (pytest.approx(2 / 3), 3)
    assert estimate(score, WINDOW, "forced_choice")[::3] == (pytest.approx(2 / 3), 3)
    assert score["arms"][WINDOW]["tiers"] == {"exact": 1, "spliced": 4, "text": 1}
    assert score["arms"][WINDOW]["fidelity_measured"] == 3
    assert estimate(score, LADDER, "kl_answer")[::3] == (pytest.approx(0.2), 4)
    assert score["arms"][TEXT]["tiers"] == {"text": 5}


def test_the_floor_is_averaged_over_the_same_questions(score: dict[str, Any]) -> None:
    # (0.3 + 0.5 + 0.1) / (0.2 + 0.1 + 0.3)
    assert estimate(score, WINDOW, "kl_over_shuffle_floor")[::3] == (pytest.approx(1.5), 3)
    # 4 · 0.2 / (0.2 + 0.1 + 0.3 + 5.0)
    assert estimate(score, LADDER, "kl_over_shuffle_floor")[::3] == (pytest.approx(1 / 7), 4)
    assert estimate(score, FLOOR, "kl_over_shuffle_floor")[0] == 1
    assert score["arms"][TEXT]["kl_over_shuffle_floor"] is None


def test_there_is_no_share_of_what_may_be_nothing(score: dict[str, Any]) -> None:
    # (4 - 1)·5, (3 - 2)·10 and (5 - 1)·4 nats of the text, of two conversations: no interval, so perhaps none.
    assert estimate(score, WINDOW, "information_in_text") == (pytest.approx(41 / 3), None, "conversations", 3)
    assert score["arms"][WINDOW]["share_of_information_kept"] is None


def test_nll_difference_is_per_token_and_question(score: dict[str, Any]) -> None:
    assert estimate(score, WINDOW, "nll_per_token_difference")[0] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert estimate(score, NONE, "nll_per_token_difference")[::3] == (pytest.approx((3 + 1 + 4 + 1) / 4), 4)


def test_differences_are_over_the_questions_that_both_arms_have(score: dict[str, Any]) -> None:
    less_text, less_shuffled = (score["arms"][WINDOW][name] for name in ("less_text", "less_shuffled"))
    # The text arm did not answer the last question, the window was spliced for the first three alone.
    assert (less_text["official_f1"]["mean"], less_text["official_f1"]["n"]) == (0.0, 5)
    assert (less_text["kl_answer"]["mean"], less_text["kl_answer"]["n"]) == (pytest.approx(0.3), 3)
    # 0.3 - 0.2, 0.5 - 0.1, 0.1 - 0.3; the floor's fourth, of 5.0, is no part of it.
    assert (less_shuffled["kl_answer"]["mean"], less_shuffled["kl_answer"]["n"]) == (pytest.approx(0.1), 3)
    assert less_shuffled["nll_per_token"]["mean"] == pytest.approx((0.4 + 0.5 + 1.0) / 3)
    assert score["arms"][LADDER]["less_shuffled"]["kl_answer"]["n"] == 4
    assert score["arms"][TEXT]["less_text"] is None
    assert (score["arms"][FLOOR]["less_shuffled"], score["arms"][NONE]["less_shuffled"]) == (None, None)


def test_times_are_left_to_the_benchmarks(score: dict[str, Any]) -> None:
    assert not [name for name in score["arms"][TEXT] if "ttft" in name]


def test_recall_is_of_the_evidence_that_the_retrieved_observations_cover(score: dict[str, Any]) -> None:
    assert score["recall"] == {
        "observations": {
            "all": pytest.approx({"5": 2 / 5, "10": 3 / 5}),
            "any": pytest.approx({"5": 3 / 5, "10": 4 / 5}),
            "share": pytest.approx({"5": 2.5 / 5, "10": 3.5 / 5}),
            "n": 5,
        }
    }


def test_the_bars_are_of_the_splice_arm_with_the_least_divergence(score: dict[str, Any]) -> None:
    assert score["best_arm"] == LADDER
    # Over the three questions that both have: 0.2 each against 0.3, 0.5, 0.1.
    assert score["best_of"] == {"arms": [WINDOW, LADDER], "n": 3}
    assert score["bars"] == {
        "kl_over_shuffle_floor": pytest.approx(1 / 7),
        "share_of_information_kept": None,
        "recall_all_at_10": pytest.approx(0.6),
        "kl_over_shuffle_floor_interval": None,
        "share_of_information_kept_interval": None,
        "recall_all_at_10_interval": None,
    }
    assert score["k"] == 10
    assert list(score["arms"]) == list(ARMS)


def test_bars_are_of_the_runs_only_k_or_the_one_asked_for(tmp_path: Path) -> None:
    def at(k: int) -> list[dict[str, Any]]:
        rows = sample_rows()
        for row in rows:
            row["arms"] = {name.replace("@10", f"@{k}"): entry for name, entry in row["arms"].items()}
        return rows

    fifty = replace(CONFIG, arms=tuple(name.replace("@10", "@50") for name in ARMS))
    score = score_run(write_run(tmp_path / "fifty", at(50), config=fifty), CONVERSATIONS)
    assert (score["k"], score["best_arm"]) == (50, LADDER.replace("@10", "@50"))
    assert score["bars"]["kl_over_shuffle_floor"] == pytest.approx(1 / 7)
    assert score["bars"]["recall_all_at_10"] == pytest.approx(0.6)  # 50 were asked for: the first 10 are there
    both = replace(CONFIG, arms=(*ARMS, *fifty.arms[1:]))
    rows = at(50)
    for row, other in zip(rows, sample_rows(), strict=True):
        row["arms"] |= other["arms"]
    folder = write_run(tmp_path / "both", rows, config=both)
    assert score_run(folder, CONVERSATIONS)["best_arm"] == LADDER
    assert score_run(folder, CONVERSATIONS, k=50)["best_arm"] == LADDER.replace("@10", "@50")
    with pytest.raises(ConfigError, match="no arm at k = 20"):
        score_run(folder, CONVERSATIONS, k=20)


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
        row["arms"] = {arm: row["arms"][arm] for arm in config.arms}
    score = score_run(write_run(tmp_path, rows, config=config), CONVERSATIONS)
    figures = score["arms"][WINDOW]
    absent = ("kl_answer", "kl_first", "top1_first", "nll_per_token_difference", "information_in_text")
    absent += ("share_of_information_kept", "forced_choice", "forced_choice_chance", "kl_over_shuffle_floor", "judge")
    assert [figures[name] for name in absent] == [None] * len(absent)
    assert (figures["official_f1"]["1"], figures["official_f1"]["5"]) == (None, 1.0)
    assert (score["best_arm"], score["best_of"], score["audit"], score["audited"]) == (None, None, None, None)
    assert (score["judge"], score["judge_refused"]) == (None, None)
    found = {name: value for name, value in score["bars"].items() if value is not None}
    assert found == {"recall_all_at_10": 0.0}


def test_a_floor_without_any_distance_gives_no_ratio(tmp_path: Path) -> None:
    rows = sample_rows()[:4]
    for row in rows:
        row["arms"][FLOOR]["fidelity"]["kl_answer"] = 0.0
    assert score_run(write_run(tmp_path, rows), CONVERSATIONS)["arms"][WINDOW]["kl_over_shuffle_floor"] is None


def test_one_conversation_alone_varies_by_question(tmp_path: Path) -> None:
    score = score_run(write_run(tmp_path, sample_rows()[:2]), CONVERSATIONS)
    assert estimate(score, WINDOW, "kl_answer") == (pytest.approx(0.4), None, "questions", 2)
    assert score["questions"] == {"scored": 2, "wanted": 6, "conversations": 1, "data_sha256": None}


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


def test_every_figure_is_there_without_the_audited_questions_too(tmp_path: Path, score: dict[str, Any]) -> None:
    audit = Audit(frozenset({("conv-901", 0), ("conv-902", 0)}), kept=1)
    found = score_run(write_run(tmp_path, sample_rows()), CONVERSATIONS, audit=audit)
    assert found["audit"] == {"excluded": 1, "listed": 2, "gold_is_right": 1}
    assert {name: found[name] for name in ("bars", "arms", "recall", "best_arm")} == {
        name: score[name] for name in ("bars", "arms", "recall", "best_arm")
    }
    # The sample's second question is left out: F1 4/9, a divergence of 0.5 for the window and 0.1 for the floor.
    text, window = (found["audited"]["arms"][arm] for arm in (TEXT, WINDOW))
    assert (text["n"], text["official_f1"]["all"]) == (5, pytest.approx((0.8 + 1 + 1 + 1) / 4))
    assert text["official_f1"]["1"] is None
    assert (window["kl_answer"]["mean"], window["kl_answer"]["n"]) == (pytest.approx(0.2), 2)
    assert window["kl_over_shuffle_floor"]["mean"] == pytest.approx(0.4 / 0.5)
    assert window["less_shuffled"]["kl_answer"]["mean"] == pytest.approx((0.1 - 0.2) / 2)
    assert found["audited"]["best_of"] == {"arms": [WINDOW, LADDER], "n": 2}
    # Its recall was none of all, half of the share: of the other four, three have all.
    assert found["audited"]["recall"]["observations"]["all"]["10"] == pytest.approx(3 / 4)
    assert found["audited"]["bars"]["recall_all_at_10"] == pytest.approx(3 / 4)


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


def test_each_answers_figures_are_kept_for_comparisons(tmp_path: Path) -> None:
    folder = write_run(tmp_path, sample_rows())
    score_run(folder, CONVERSATIONS)
    measures = read_scored(folder)
    figures = {"official_f1", "kl_answer", "kl_first", "top1_first", "nll_per_token", "forced_choice"}
    assert set(measures) == figures
    # As in the score: of the six questions of the window three were spliced and have a fidelity.
    assert {at: value for at, value in measures["kl_answer"].items() if at.arm == WINDOW} == {
        Measured("conv-901", 5, WINDOW): 0.3,
        Measured("conv-901", 0, WINDOW): 0.5,
        Measured("conv-902", 2, WINDOW): 0.1,
    }
    assert measures["forced_choice"][Measured("conv-901", 0, LADDER)] == 0.0
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


def test_a_score_and_its_report_hold_no_text_of_the_data(tmp_path: Path) -> None:
    def repeats(body: dict[str, Any], number: int) -> Answer:
        return 400, {}, json.dumps(body).encode()  # an endpoint that quotes what it refuses

    folder = write_run(tmp_path, sample_rows())
    audit = Audit(frozenset({("conv-901", 0)}), kept=0)
    with (
        serve(repeats) as endpoint,
        open_judge(JudgeSettings(endpoint.url, "judge"), folder / "verdicts.jsonl") as judge,
    ):
        score = score_run(folder, CONVERSATIONS, judge=judge, audit=audit)
    assert set(score["judge"]["missing"]) == {"refused with 400", "not asked: 20 requests in a row had no answer"}
    write_report(score, out=folder)
    written = "".join((folder / name).read_text() for name in ("score.json", "scored.jsonl", "report.html"))
    for question in (question for conversation in CONVERSATIONS for question in conversation.questions):
        assert question.question not in written
        # Shorter golds are numbers and words such as "no", which a page may hold for reasons of its own.
        assert len(question.answer or "") < 6 or question.answer not in written
    assert not [word for word in ("harbour", "pottery", "Nils", "July") if word in written]


def test_a_judge_that_refuses_in_the_middle_leaves_a_score_without_verdicts(tmp_path: Path) -> None:
    def runs_dry(body: dict[str, Any], number: int) -> Answer:
        return completion('{"verdict": "correct"}') if number < 3 else (402, {}, b"no credit left")

    folder = write_run(tmp_path, sample_rows())
    settings = JudgeSettings("", "judge", parallel=1)
    with serve(runs_dry) as endpoint, open_judge(replace(settings, base_url=endpoint.url), folder / "v.jsonl") as judge:
        score = score_run(folder, CONVERSATIONS, judge=judge)
    assert (score["judge"], score["judge_refused"]) == (None, "the judge refused with 402")
    assert {values["judge"] for values in score["arms"].values()} == {None}
    assert score["arms"][LADDER]["kl_answer"]["mean"] == pytest.approx(0.2)
    assert json.loads((folder / "score.json").read_text()) == score
    assert len((folder / "v.jsonl").read_text().splitlines()) == 3


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


def test_a_floor_without_anything_to_serve_is_counted_and_no_part_of_it(tmp_path: Path) -> None:
    rows = sample_rows()
    for row in rows[1:3]:
        del row["arms"][FLOOR]
        row["not_served"] = {FLOOR: "there is no other order"}
    audit = Audit(frozenset({("conv-901", 0)}), kept=0)  # the second question
    score = score_run(write_run(tmp_path, rows), CONVERSATIONS, audit=audit)
    assert score["audited"]["arms"][FLOOR]["not_served"] == 1
    assert (score["arms"][FLOOR]["n"], score["arms"][FLOOR]["not_served"]) == (4, 2)
    assert estimate(score, FLOOR, "kl_answer")[::3] == (pytest.approx((0.2 + 5.0) / 2), 2)
    # Of the window's three spliced questions the floor has the first alone: 0.3 / 0.2.
    assert estimate(score, WINDOW, "kl_over_shuffle_floor")[::3] == (pytest.approx(1.5), 1)
    assert score["arms"][WINDOW]["not_served"] == 0


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
