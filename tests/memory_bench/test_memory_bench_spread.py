from math import e, exp, sqrt

import pytest
from memory_bench.spread import interval_of_medians, interval_of_ratios


def test_the_interval_of_a_median_is_about_that_of_its_order_statistics() -> None:
    # Of 30 samples the 10th and the 21st hold the median in 95.7 % of the cases, by the binomial distribution.
    low, high = interval_of_medians([float(n) for n in range(1, 31)], [1.0] * 30)
    assert 9 <= low <= 11
    assert 20 <= high <= 22


def test_what_is_common_to_both_sides_of_a_round_is_no_spread() -> None:
    low, high = interval_of_medians([3.0, 30.0, 300.0, 3000.0], [1.0, 10.0, 100.0, 1000.0])
    assert (low, high) == pytest.approx((3.0, 3.0))


def test_the_interval_of_ratios_is_of_their_logarithms() -> None:
    # Logarithms 0, 1 and -1 around that of 2: a standard deviation of 1, and the t quantile of 2 degrees of freedom.
    half = 4.302653 / sqrt(3)
    assert interval_of_ratios([2.0, 2 * e, 2 / e]) == pytest.approx((2 * exp(-half), 2 * exp(half)), rel=1e-6)
