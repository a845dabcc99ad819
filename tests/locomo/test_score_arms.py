"""Figures of invented arms, each question of another conversation; comments show the arithmetic."""

from dataclasses import replace
from typing import Any

import pytest
from score_samples import CONFIG, FLOOR, LADDER, NONE, SYNTHETIC, TEXT, WINDOW

from locomo.dataset import load
from locomo.reporting.arm_names import parse_arm
from locomo.scores.distance import distance_of
from locomo.scores.rows import Arm, Entry, Rows
from locomo.scores.score import best_splice_arm

QUESTION = load(SYNTHETIC)[0].questions[0]


def rows_of(figures: dict[str, list[dict[str, Any]]], *, config: Any = CONFIG) -> Rows:
    """Arms whose questions are each of another conversation, with these fidelities; spliced where they splice."""
    arms = [
        Arm(
            name,
            parse_arm(name),
            {(f"c{i}", 0): Entry(QUESTION, "", "spliced", None, found) for i, found in enumerate(fidelities)},
        )
        for name, fidelities in figures.items()
    ]
    return Rows(replace(config, arms=tuple(figures)), [], arms)


def nats(*values: float) -> list[dict[str, Any]]:
    return [{"nll": value / 4, "answer_tokens": 4} for value in values]


def test_share_kept_is_of_nats_of_whole_answers_with_fiellers_interval() -> None:
    # The text is worth 8, 6, 4, 7, 5 nats (mean 6, standard deviation the root of 2.5), the arm 6, 5, 3, 5, 4.
    rows = rows_of(
        {
            NONE: nats(10, 10, 10, 10, 10),
            TEXT: nats(2, 4, 6, 3, 5),
            LADDER: nats(4, 5, 7, 5, 6),
        }
    )
    figures = distance_of(rows.arms[2], rows)
    assert figures["information_in_text"]["mean"] == pytest.approx(6.0)
    assert figures["information_in_text"]["interval"] == pytest.approx([6 - 2.77645 * 0.5**0.5, 6 + 2.77645 * 0.5**0.5])
    share = figures["share_of_information_kept"]
    assert (share["mean"], share["n"], share["groups"]) == (pytest.approx(23 / 30), 5, 5)
    # (5·4.6 - r·5·6)² = t²·5·(1.3 - 2·1.75 r + 2.5 r²), of variances 1.3 and 2.5 and covariance 1.75.
    t = 2.77645**2 * 5
    for r in share["interval"]:
        assert (23 - 30 * r) ** 2 == pytest.approx(t * (1.3 - 3.5 * r + 2.5 * r * r), rel=1e-4, abs=1e-6)
    assert share["interval"][0] < 23 / 30 < share["interval"][1]


def test_text_that_tells_the_model_nothing_for_sure_gives_no_share() -> None:
    # The text is worth 3, -2, 3, -2, 1 nats: mean 0.6, error of the mean 1.1.
    rows = rows_of({NONE: nats(10, 10, 10, 10, 10), TEXT: nats(7, 12, 7, 12, 9), LADDER: nats(9, 9, 9, 9, 9)})
    figures = distance_of(rows.arms[2], rows)
    assert figures["information_in_text"]["mean"] == pytest.approx(0.6)
    assert figures["information_in_text"]["interval"][0] < 0
    assert figures["share_of_information_kept"] is None


def test_guessing_in_the_forced_choice_depends_on_how_many_choices_there_are() -> None:
    choices = [[0.5, *[1.0] * 9], [0.5, 1.0, 1.0, 1.0], [2.0, 1.0]]
    rows = rows_of({LADDER: [{"choices_nll": found} for found in choices]})
    figures = distance_of(rows.arms[0], rows)
    assert figures["forced_choice"]["mean"] == pytest.approx(2 / 3)
    assert figures["forced_choice_chance"] == pytest.approx((1 / 10 + 1 / 4 + 1 / 2) / 3)


def test_a_splice_at_the_head_is_held_against_the_floor_at_the_head() -> None:
    head = "splice/window:0/head@10"
    kl = {"floor/shuffled/head@10": 0.2, FLOOR: 0.4, head: 0.3, WINDOW: 0.3}
    rows = rows_of({name: [{"kl_answer": value}] * 2 for name, value in kl.items()})
    found = {arm.key: distance_of(arm, rows)["kl_over_shuffle_floor"]["mean"] for arm in rows.arms[2:]}
    assert found == {head: pytest.approx(1.5), WINDOW: pytest.approx(0.75)}
    alone = rows_of({name: [{"kl_answer": kl[name]}] * 2 for name in (FLOOR, head)})
    assert distance_of(alone.arms[1], alone)["kl_over_shuffle_floor"] is None


def test_what_was_not_served_in_the_tier_of_its_arm_is_left_out() -> None:
    repaired = "splice/window:2/first:4/tail@10"
    tiers = ["spliced", "repaired", "partial", "text"]
    entries = {("c", at): Entry(QUESTION, "", tier, None, {"kl_answer": at}) for at, tier in enumerate(tiers)}
    assert Arm(WINDOW, parse_arm(WINDOW), entries).figure("kl_answer") == {("c", 0): 0.0}
    assert Arm(repaired, parse_arm(repaired), entries).figure("kl_answer") == {("c", 1): 1.0}


def test_the_best_arm_is_chosen_on_the_questions_that_all_have() -> None:
    def kl(*values: float | None) -> list[dict[str, Any]]:
        return [{} if value is None else {"kl_answer": value} for value in values]

    arms = {
        "splice/window:2/tail@10": kl(0.4, 0.1, None),
        "splice/window:2/head@10": kl(0.3, 9.0, 9.0),  # the least on the only question that all have
        "splice/window:4/tail@10": kl(0.9, None, 0.0),
        "splice/window:0/tail@10": kl(None, None, None),
        "oracle/splice/window:2/tail@10": kl(0.1, 0.1, 0.1),
        "splice/window:2/tail@5": kl(0.1, 0.1, 0.1),
        "splice/window:2/first:4/tail@10": kl(0.1, 0.1, 0.1),
        "floor/swapped@10": kl(0.1, 0.1, 0.1),
        "text/tail@10": kl(0.0, 0.0, 0.0),
    }
    chosen_from = {"arms": list(arms)[:3], "n": 1}
    assert best_splice_arm(rows_of(arms), 10) == ("splice/window:2/head@10", chosen_from)
    assert best_splice_arm(rows_of(arms), 5) == ("splice/window:2/tail@5", {"arms": ["splice/window:2/tail@5"], "n": 3})
    assert best_splice_arm(rows_of({"text/tail@10": kl(0.0)}), 10) == (None, None)
    apart = {WINDOW: kl(0.1, None), LADDER: kl(None, 0.1)}
    assert best_splice_arm(rows_of(apart), 10) == (None, {"arms": [WINDOW, LADDER], "n": 0})
