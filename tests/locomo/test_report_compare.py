import io
import json
from pathlib import Path
from typing import Any

import pytest
from report_samples import ReadPage
from rich.console import Console

from locomo.errors import ReportInputError
from locomo.reporting import Measured, Run, compare, read_run, render, write_comparison

ARM = "splice/window:2/tail@10"
GOLD_WINS = [0.1] + [1.0] * 9
GOLD_LOSES = [1.0] + [0.1] * 9


def row(sample_id: str, index: int, *, kl: float, right: bool, agrees: bool = True) -> dict[str, Any]:
    fidelity = {
        "kl_first": kl / 2,
        "top1_first": agrees,
        "kl_answer": kl,
        "nll": 1.0 + kl,
        "answer_tokens": 4,
        "choices_nll": GOLD_WINS if right else GOLD_LOSES,
    }
    failed = {"arm": "full", "k": None, "prediction": None, "fidelity": None, "error": "server ended"}
    return {"sample_id": sample_id, "index": index, "arms": {ARM: {"fidelity": fidelity}, "full": failed}}


# The second run lacks conv-b/1 and has one question more; four are shared.
FIRST = [
    row("conv-a", 0, kl=0.10, right=True),
    row("conv-a", 1, kl=0.20, right=True),
    row("conv-b", 0, kl=0.30, right=True),
    row("conv-b", 1, kl=9.00, right=True),
    row("conv-b", 2, kl=0.40, right=False),
]
SECOND = [
    row("conv-a", 0, kl=0.05, right=False),
    row("conv-a", 1, kl=0.10, right=False),
    row("conv-b", 0, kl=0.20, right=True),
    row("conv-b", 2, kl=0.25, right=True),
    row("conv-c", 0, kl=7.00, right=True),
]


def score(kl: float, **config: object) -> dict[str, Any]:
    arm = {"n": 5, "kl_answer": {"mean": kl, "interval": [0, 1]}, "official_f1": {"all": kl / 10}}
    return {"arms": {ARM: arm, "full": {}}, "config": config, "header": {"commit": "c0ffee"}}


def folder(path: Path, found: dict[str, Any], rows: list[dict[str, Any]] | None, *, tail: str = "") -> Path:
    path.mkdir()
    (path / "score.json").write_text(json.dumps(found), encoding="utf-8")
    if rows is not None:
        (path / "rows.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows) + tail, encoding="utf-8")
    return path


@pytest.fixture
def pair(tmp_path: Path) -> list[Run]:
    first = folder(tmp_path / "before", score(0.5, k=10, seed=0), FIRST)
    second = folder(tmp_path / "after", score(0.4, k=10, seed=1), SECOND)
    return [read_run(first), read_run(second)]


def test_differences_are_of_the_shared_questions(pair: list[Run]) -> None:
    [compared] = compare(pair)
    found = {difference.metric.title: difference for difference in compared.differences}
    kl = found["KL, answer tokens (nats)"]
    assert kl.n == 4
    assert kl.first == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)
    assert kl.second == pytest.approx((0.05 + 0.1 + 0.2 + 0.25) / 4)
    assert kl.interval is not None
    assert kl.interval.estimate == pytest.approx(kl.difference) == pytest.approx(-0.1)
    # Two conversations: each resample has one twice, or both. Their means are -.075 and -.125.
    assert (kl.interval.low, kl.interval.high) == pytest.approx((-0.125, -0.075))
    assert kl.interval.over == "conversations"
    assert kl.discordant is None
    assert found["NLL (nats per token)"].difference == pytest.approx(-0.1)


def test_right_and_wrong_have_their_discordant_counts(pair: list[Run]) -> None:
    [compared] = compare(pair)
    [choice] = [found for found in compared.differences if found.metric.title == "forced choice"]
    assert (choice.first, choice.second) == (0.75, 0.5)
    assert choice.discordant is not None
    # Two of three discordant pairs on one side: p = 2 (C(3,0) + C(3,1)) / 8, capped at 1.
    assert tuple(choice.discordant) == (2, 1, 1.0)


def test_mcnemar_p_by_hand() -> None:
    def run(name: str, rights: list[int]) -> Run:
        measures = {"judge": {Measured("c", index, ARM): float(right) for index, right in enumerate(rights)}}
        return Run(name, score(0.1), measures)

    [compared] = compare([run("one", [0] * 6 + [1]), run("two", [1] * 6 + [1])])
    [judge] = [found for found in compared.differences if found.metric.title == "judge accuracy"]
    assert judge.discordant is not None
    assert tuple(judge.discordant) == (0, 6, pytest.approx(2 / 2**6))
    assert judge.interval is not None
    assert judge.interval.over == "questions"


def test_without_rows_the_scores_means_are_set_side_by_side(tmp_path: Path, pair: list[Run]) -> None:
    bare = read_run(folder(tmp_path / "bare", score(0.4), None), name="no rows")
    [compared] = compare([pair[0], bare])
    kl, f1 = compared.differences
    assert (kl.first, kl.second, kl.n, kl.interval) == (0.5, 0.4, None, None)
    assert (f1.metric.title, f1.first, f1.second) == ("official F1", 0.05, 0.04)


def test_settings_that_differ_are_named(pair: list[Run]) -> None:
    [compared] = compare(pair)
    assert compared.settings == [("config.seed", "0", "1")]


def test_arms_of_one_run_alone_are_left_out(pair: list[Run]) -> None:
    other = Run("other", {"arms": {"text/tail@10": {"official_f1": {"all": 0.2}}}})
    [compared] = compare([pair[0], other])
    assert compared.differences == []


def test_more_than_two_are_each_compared_with_the_first(pair: list[Run]) -> None:
    pairs = compare([*pair, pair[0]])
    assert [(one.first.name, one.second.name) for one in pairs] == [("before", "after"), ("before", "before")]
    assert all(found.difference == 0 for found in pairs[1].differences)


def test_one_run_is_no_comparison(pair: list[Run]) -> None:
    with pytest.raises(ReportInputError, match="two runs or more"):
        compare(pair[:1])


def test_page_and_terminal_show_the_same(pair: list[Run], tmp_path: Path) -> None:
    pairs = compare(pair)
    target = write_comparison(pairs, tmp_path / "out/compare.html")
    page = ReadPage(target.read_text(encoding="utf-8"))
    assert page.unbalanced == []
    assert page.row("Settings that differ", Setting="config.seed") == {
        "Setting": "config.seed",
        "before": "0",
        "after": "1",
    }
    shown = page.row("after less before", Metric="KL, answer tokens (nats)")
    assert shown == {
        "Arm": "splice, window 2, tail",
        "k": "10",
        "Metric": "KL, answer tokens (nats)",
        "before": "0.2500",
        "after": "0.1500",
        "Difference, 95 %": "−0.1000 [−0.1250, −0.0750]",
        "n": "4",
        "Only before right": "–",
        "Only after right": "–",
        "p": "–",
    }
    choice = page.row("after less before", Metric="forced choice")
    assert (choice["Only before right"], choice["Only after right"], choice["p"]) == ("2", "1", "1.0000")
    terminal = io.StringIO()
    Console(file=terminal, width=220).print(render(pairs))
    for table in page.tables.values():
        for cells in table:
            [line] = [line for line in terminal.getvalue().splitlines() if all(cell in line for cell in cells.values())]
            assert list(cells.values()) == [cell.strip() for cell in line.strip("│").split("│")]
    assert "McNemar" in terminal.getvalue()


def test_names_of_runs_are_escaped_and_are_no_markup(pair: list[Run], tmp_path: Path) -> None:
    hostile = Run("[bold]<b>x", pair[1].score, pair[1].measures)
    pairs = compare([pair[0], hostile])
    source = write_comparison(pairs, tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "<b>" not in source
    terminal = io.StringIO()
    Console(file=terminal, width=220).print(render(pairs))
    assert "[bold]<b>x" in terminal.getvalue()


def test_a_last_row_cut_short_is_passed_over(tmp_path: Path) -> None:
    run = read_run(folder(tmp_path / "killed", score(0.1), FIRST[:2], tail='{"sample_id": "conv-a", "ind'))
    assert len(run.measures["kl_answer"]) == 2


def test_a_broken_row_in_the_middle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportInputError, match="line 2 is not JSON"):
        read_run(folder(tmp_path / "broken", score(0.1), FIRST[:1], tail='{"sample_id"\n'))
    with pytest.raises(ReportInputError, match="line 1 is no row of a run"):
        read_run(folder(tmp_path / "other", score(0.1), [], tail='{"a": 1}\n'))


def test_a_question_that_stands_twice_counts_once(tmp_path: Path) -> None:
    again = [row("conv-a", 0, kl=0.9, right=True), row("conv-a", 0, kl=0.3, right=True)]
    run = read_run(folder(tmp_path / "again", score(0.1), again))
    assert run.measures["kl_answer"] == {Measured("conv-a", 0, ARM): 0.3}
