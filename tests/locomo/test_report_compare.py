import io
from pathlib import Path
from typing import Any

import pytest
from report_samples import ReadPage
from rich.console import Console

from locomo.errors import ReportInputError
from locomo.reporting import Measured, Run, compare, render, write_comparison

ARM = "splice/window:2/tail@10"

# By question: KL, and whether the gold won. The second run lacks conv-b/1 and has one question more; six are shared.
FIRST = {
    ("conv-a", 0): (0.10, 1),
    ("conv-a", 1): (0.20, 1),
    ("conv-b", 0): (0.30, 1),
    ("conv-b", 1): (9.00, 1),
    ("conv-c", 0): (0.40, 0),
    ("conv-d", 0): (0.40, 1),
    ("conv-e", 0): (0.40, 1),
}
SECOND = {
    ("conv-a", 0): (0.05, 0),
    ("conv-a", 1): (0.05, 0),
    ("conv-b", 0): (0.20, 1),
    ("conv-c", 0): (0.20, 1),
    ("conv-d", 0): (0.40, 1),
    ("conv-e", 0): (0.30, 1),
    ("conv-f", 0): (7.00, 1),
}


def run(name: str, found: dict[tuple[str, int], tuple[float, int]], **config: object) -> Run:
    at = {key: Measured(*key, ARM) for key in found}
    measures = {
        "kl_answer": {at[key]: kl for key, (kl, _) in found.items()},
        "nll_per_token": {at[key]: 1 + kl for key, (kl, _) in found.items()},
        "forced_choice": {at[key]: float(right) for key, (_, right) in found.items()},
    }
    return Run(name, score(**config), measures)


def score(**config: object) -> dict[str, Any]:
    return {"arms": {ARM: {}, "full": {}}, "config": config, "header": {"commit": "c0ffee"}}


@pytest.fixture
def pair() -> list[Run]:
    return [run("before", FIRST, k=10, seed=0), run("after", SECOND, k=10, seed=1)]


def test_differences_are_of_the_shared_questions(pair: list[Run]) -> None:
    [compared] = compare(pair)
    found = {difference.metric.title: difference for difference in compared.differences}
    kl = found["KL, answer tokens (nats)"]
    assert kl.n == 6
    assert kl.first == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.4 + 0.4) / 6)
    assert kl.second == pytest.approx((0.05 + 0.05 + 0.2 + 0.2 + 0.4 + 0.3) / 6)
    assert kl.interval.estimate == pytest.approx(kl.difference) == pytest.approx(-0.1)
    # Sums by conversation -.2 of two, -.1, -.2, 0 and -.1, less their questions' mean of -.1: 0, 0, -.1, .1, 0.
    half = 2.77645 * (5 / 4 * 0.02) ** 0.5 / 6
    assert (kl.interval.low, kl.interval.high) == pytest.approx((-0.1 - half, -0.1 + half), rel=1e-4)
    assert (kl.interval.over, kl.interval.groups) == ("conversations", 5)
    assert kl.discordant is None
    assert found["NLL (nats per token)"].difference == pytest.approx(-0.1)


def test_right_and_wrong_have_their_discordant_counts(pair: list[Run]) -> None:
    [compared] = compare(pair)
    [choice] = [found for found in compared.differences if found.metric.title == "forced choice"]
    assert (choice.first, choice.second) == (pytest.approx(5 / 6), pytest.approx(4 / 6))
    assert choice.discordant is not None
    # Two of three discordant pairs on one side: p = 2 (C(3,0) + C(3,1)) / 8, capped at 1.
    assert tuple(choice.discordant) == (2, 1, 1.0)


def test_mcnemar_p_by_hand() -> None:
    def judged(name: str, rights: list[int]) -> Run:
        measures = {"judge": {Measured("c", index, ARM): float(right) for index, right in enumerate(rights)}}
        return Run(name, score(), measures)

    [compared] = compare([judged("one", [0] * 6 + [1]), judged("two", [1] * 6 + [1])])
    [judge] = [found for found in compared.differences if found.metric.title == "judge accuracy"]
    assert judge.discordant is not None
    assert tuple(judge.discordant) == (0, 6, pytest.approx(2 / 2**6))
    assert judge.interval.over == "questions"


def test_without_a_question_in_common_nothing_is_compared(pair: list[Run]) -> None:
    [compared] = compare([pair[0], run("elsewhere", {("conv-z", 0): (0.1, 1)}, k=10, seed=0)])
    assert compared.differences == []
    terminal = io.StringIO()
    Console(file=terminal, width=220).print(render([compared]))
    assert "no arm with a metric of the same question in common" in terminal.getvalue()


def test_settings_that_differ_are_named(pair: list[Run]) -> None:
    [compared] = compare(pair)
    assert compared.settings == [("config.seed", "0", "1")]


def test_arms_of_one_run_alone_are_left_out(pair: list[Run]) -> None:
    measures = {"official_f1": {Measured("conv-a", 0, "text/tail@10"): 0.2}}
    [compared] = compare([pair[0], Run("other", score(), measures)])
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
        "before": "0.3000",
        "after": "0.2000",
        "Difference, 95 %": "−0.1000 [−0.1732, −0.0268]",
        "n": "6",
        "Groups": "5",
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
