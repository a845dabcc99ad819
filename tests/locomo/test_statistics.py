from itertools import product

import numpy as np
import pytest
from scipy import stats

from locomo.errors import ScoringError
from locomo.scoring.statistics import (
    Interval,
    interval_json,
    interval_of_difference,
    interval_of_mean,
    interval_of_ratio,
    mcnemar,
)

T4 = 2.7764451  # 97.5 % point of Student's t with four degrees of freedom, from a printed table
FIVE = ["a", "b", "c", "d", "e"]


def test_with_as_many_questions_each_it_is_the_t_interval_of_the_conversations_means() -> None:
    # Means 1, 2, 3, 4, 5: their standard deviation is the root of 2.5, the error of their mean that of 0.5.
    interval = interval_of_mean([0, 2, 1, 3, 2, 4, 3, 5, 4, 6], sorted(FIVE * 2))
    half = T4 * 0.5**0.5
    assert interval[:3] == pytest.approx((3.0, 3 - half, 3 + half))
    assert interval[3:] == ("conversations", 5)
    assert interval_json(interval) == pytest.approx([3 - half, 3 + half])


def test_a_mean_is_over_questions_where_conversations_differ_in_size() -> None:
    # Sums 1, 0, 0, 0, 4 of 1, 1, 1, 1, 4 questions: mean 5/8; residuals 3/8, -5/8, -5/8, -5/8, 12/8.
    interval = interval_of_mean([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], [*FIVE, "e", "e", "e"])
    half = T4 * (5 / 4 * (9 + 25 + 25 + 25 + 144) / 64) ** 0.5 / 8
    assert interval[:3] == pytest.approx((5 / 8, 5 / 8 - half, 5 / 8 + half))


def test_an_interval_is_cut_to_what_a_mean_can_be() -> None:
    values = [0.0, 0.0, 0.0, 0.0, 1.0]  # mean 0.2, half width 2.776 * 0.2
    assert interval_of_mean(values, FIVE)[1] == pytest.approx(0.2 - T4 * 0.2)
    assert interval_of_mean(values, FIVE, within=(0.0, 0.5))[1:3] == (0.0, 0.5)


def test_a_paired_difference_keeps_the_pairs() -> None:
    # differences 1, 2, 3, 4, 5
    interval = interval_of_difference([11, 22, 33, 44, 55], [10, 20, 30, 40, 50], FIVE)
    assert interval[:2] == pytest.approx((3.0, 3 - T4 * 0.5**0.5))


def test_a_ratio_is_fiellers() -> None:
    above, below = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 2.0, 3.0, 3.0, 5.0]
    interval = interval_of_ratio(above, below, FIVE)
    assert interval.estimate == pytest.approx(15 / 15)
    # By its definition: at either end the t test of above - r * below has p = 0.05, and inside p is larger.
    for end in interval[1:3]:
        assert stats.ttest_1samp(np.subtract(above, np.multiply(end, below)), 0).pvalue == pytest.approx(0.05)
    inside = np.subtract(above, np.multiply(0.5 * (interval.estimate + interval.high), below))
    assert stats.ttest_1samp(inside, 0).pvalue > 0.05


def test_a_ratio_whose_denominator_may_be_zero_has_no_interval() -> None:
    # Denominators of mean 0.2 and standard deviation 1.1: t = 0.41.
    assert interval_of_ratio([1.0, 2.0, 1.0, 2.0, 1.0], [1.0, -1.0, 1.0, -1.0, 1.0], FIVE) == Interval(
        pytest.approx(7.0), None, None, "conversations", 5
    )
    with pytest.raises(ScoringError, match="denominators"):
        interval_of_ratio([1.0, 1.0], [1.0, -1.0], ["a", "b"])


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_few_groups_have_no_interval(groups: int) -> None:
    values, names = [1.0, 1.4, 0.3, 2.0], FIVE
    assert interval_of_mean(values[:groups], names[:groups])[1:3] == (None, None)
    assert interval_of_ratio(values[:groups], values[::-1][:groups], names[:groups])[1:3] == (None, None)
    assert interval_json(interval_of_mean(values[:groups], names[:groups])) is None
    assert interval_of_mean([1.2], ["a"]) == Interval(1.2, None, None, "questions", 1)


def test_without_any_difference_there_is_no_interval() -> None:
    assert interval_of_mean([0.2] * 10, sorted(FIVE * 2))[1:3] == (None, None)
    assert interval_of_ratio([0.3] * 5, [0.1] * 5, FIVE) == Interval(pytest.approx(3.0), None, None, "conversations", 5)


def test_one_conversation_varies_by_question_and_says_so() -> None:
    values = np.random.default_rng(5).normal(size=300)
    interval = interval_of_mean(values, ["a"] * 300)
    assert interval[3:] == ("questions", 300)
    reference = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval[1:3] == pytest.approx((reference.low, reference.high))


@pytest.mark.parametrize("groups", [5, 10])
def test_intervals_hold_the_truth_as_often_as_they_say(groups: int) -> None:
    # Conversations of 10 to 30 questions that share an effect; questions are skewed, as divergences are.
    rng = np.random.default_rng(20260301)
    draws, held, held_ratio = 1500, 0, 0
    for _ in range(draws):
        sizes = rng.integers(10, 31, size=groups)
        samples = np.repeat([f"conv-{number}" for number in range(groups)], sizes)
        first, second = (np.repeat(np.exp(rng.normal(-0.02, 0.2, size=groups)), sizes) for _ in range(2))
        above = 1.5 * first * rng.exponential(size=len(samples))  # of mean 1.5: exp of N(-s²/2, s) has mean 1
        below = second * rng.exponential(size=len(samples))
        mean, ratio = interval_of_mean(above, samples), interval_of_ratio(above, below, samples)
        held += mean.low <= 1.5 <= mean.high
        held_ratio += ratio.low is None or ratio.low <= 1.5 <= ratio.high  # none: any ratio may be
    assert 0.92 <= held / draws <= 0.98
    assert 0.92 <= held_ratio / draws <= 0.98


@pytest.mark.parametrize(
    ("values", "samples", "message"),
    [
        ([], [], "no question"),
        ([1.0], ["a", "b"], "for 2 questions"),
        ([1.0, float("nan")], ["a", "b"], "1 of 2 values are not finite"),
    ],
)
def test_what_has_no_mean_is_named(values: list[float], samples: list[str], message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        interval_of_mean(values, samples)


def test_mcnemar_counts_discordant_pairs_and_is_exact() -> None:
    pairs = [(True, False)] * 10 + [(False, True)] * 2 + [(True, True)] * 5 + [(False, False)] * 3
    result = mcnemar([mine for mine, _ in pairs], [other for _, other in pairs])
    # 2 * (C(12, 0) + C(12, 1) + C(12, 2)) / 2 ** 12
    assert result == (10, 2, pytest.approx(2 * (1 + 12 + 66) / 4096))
    assert mcnemar([True, False], [True, False]) == (0, 0, 1.0)
    assert mcnemar([True, False], [False, True]) == (1, 1, 1.0)


@pytest.mark.parametrize(("first", "second"), [*product((0, 3, 17), (1, 17, 40)), (900, 800)])
def test_mcnemar_is_scipys_binomial_test(first: int, second: int) -> None:
    mine = [True] * first + [False] * second
    result = mcnemar(mine, [not value for value in mine])
    assert result.p_value == pytest.approx(stats.binomtest(first, first + second).pvalue, rel=1e-9)
