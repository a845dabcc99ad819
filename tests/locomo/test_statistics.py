from itertools import product

import numpy as np
import pytest
from scipy import stats

from locomo.errors import ScoringError
from locomo.scoring.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_paired_difference,
    bootstrap_ratio_of_means,
    bootstrap_ratio_of_sums,
    mcnemar,
    wilson,
)

# Two conversations, so a resample is AA, AB, BA or BB, each a quarter: 2.5 % falls in one extreme, 97.5 % in the other.
SAMPLES = ["a", "b", "b", "b"]


def test_a_mean_is_over_questions_and_its_interval_over_conversations() -> None:
    interval = bootstrap_mean([0.0, 1.0, 1.0, 0.4], SAMPLES)
    assert interval == Interval(pytest.approx(0.6), 0.0, pytest.approx(0.8), "conversations", 2000)


def test_a_paired_difference_keeps_the_pairs() -> None:
    # differences: a 1; b 0, 0, -3 (mean -1)
    interval = bootstrap_paired_difference([9.0, 5.0, 1.0, 0.0], [8.0, 5.0, 1.0, 3.0], SAMPLES)
    assert interval[:3] == (pytest.approx(-0.5), pytest.approx(-1.0), pytest.approx(1.0))


def test_a_ratio_of_sums_resamples_both_together() -> None:
    # a: 1 / 2; b: (1 + 2 + 3) / (2 + 3 + 3) = 0.75; all: 7 / 10
    interval = bootstrap_ratio_of_sums([1.0, 1.0, 2.0, 3.0], [2.0, 2.0, 3.0, 3.0], SAMPLES)
    assert interval[:3] == (pytest.approx(0.7), pytest.approx(0.5), pytest.approx(0.75))


def test_a_ratio_of_means_may_lack_questions_on_either_side() -> None:
    nan = float("nan")
    # numerator: a 2; b mean(4, 6) = 5; all 4. Denominator: a 1; b mean(2, 3) = 2.5, all 2.
    interval = bootstrap_ratio_of_means([2.0, 4.0, nan, 6.0], [1.0, 2.0, 3.0, nan], SAMPLES)
    assert interval[:3] == (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))
    full = [1.0, 1.0, 2.0, 3.0], [2.0, 2.0, 3.0, 3.0], SAMPLES
    assert bootstrap_ratio_of_means(*full)[:3] == pytest.approx(bootstrap_ratio_of_sums(*full)[:3])


def test_resamples_without_a_denominator_are_left_out_and_counted() -> None:
    interval = bootstrap_ratio_of_sums([1.0, 1.0], [0.0, 1.0], ["a", "b"])
    # AA is undefined (a quarter); AB gives 2, BB gives 1
    assert interval[:3] == (2.0, 1.0, 2.0)
    assert 0.7 * 2000 < interval.resamples < 0.8 * 2000


def test_one_conversation_is_resampled_by_question_and_says_so() -> None:
    values = np.random.default_rng(5).normal(size=300)
    interval = bootstrap_mean(values, ["a"] * 300)
    assert interval.over == "questions"
    # a mean of 300 is close to normal: its interval is close to 1.96 standard errors
    half = 1.96 * values.std() / 300**0.5
    assert interval[:3] == pytest.approx((values.mean(), values.mean() - half, values.mean() + half), abs=0.1 * half)


def test_the_interval_is_scipys_on_as_many_questions_in_each_conversation() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=(10, 20)) + rng.normal(size=(10, 1))
    samples = [f"conv-{row}" for row in range(10) for _ in range(20)]
    interval = bootstrap_mean(values.ravel(), samples, resamples=20_000)
    reference = stats.bootstrap(
        (values.mean(axis=1),), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    width = reference.high - reference.low
    assert interval[:3] == pytest.approx((values.mean(), reference.low, reference.high), abs=0.03 * width)


def test_a_seed_gives_the_same_interval() -> None:
    values, samples = [2.5**number for number in range(12)], [f"s{number}" for number in range(12)]
    assert bootstrap_mean(values, samples, seed=3) == bootstrap_mean(values, samples, seed=3)
    assert bootstrap_mean(values, samples, seed=3) != bootstrap_mean(values, samples, seed=4)


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
        bootstrap_mean(values, samples)


def test_a_ratio_without_a_denominator_is_named() -> None:
    with pytest.raises(ScoringError, match="denominators"):
        bootstrap_ratio_of_sums([1.0, 1.0], [1.0, -1.0], ["a", "b"])
    with pytest.raises(ScoringError, match="one side has no value"):
        bootstrap_ratio_of_means([float("nan")] * 2, [1.0, -1.0], ["a", "b"])


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


def test_wilson_of_72_of_96() -> None:
    assert wilson(72, 96) == pytest.approx((0.655, 0.826), abs=5e-4)


@pytest.mark.parametrize(("successes", "n"), [(0, 5), (5, 5), (1, 1), (50, 1540)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_is_scipys(successes: int, n: int, confidence: float) -> None:
    reference = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson(successes, n, confidence=confidence) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_wilson_of_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ScoringError, match="3 successes of 2"):
        wilson(3, 2)
