"""The gate against decisions whose right threshold can be counted by hand, and intervals against their formula."""

from math import inf
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given
from session_values import Clock

from sgl_stateful.flash.audit import Audit
from sgl_stateful.flash.gate import Gate
from sgl_stateful.flash.interval import wilson
from sgl_stateful.flash.pacing import Pacer


def test_wilson_against_values_worked_out_elsewhere() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)


def observed(*decisions: tuple[float, bool], target: float = 0.75) -> Gate:
    gate = Gate(target)
    for gap, agreed in decisions:
        gate.observe(gap, agreed=agreed)
    return gate


def test_nothing_fires_before_enough_was_seen() -> None:
    # (n + 1) / (n + 2) reaches 0.95 at n = 18.
    gate = observed(*[(2.0, True)] * 17, target=0.95)
    assert (gate.threshold, gate.fires(100.0), gate.coverage()) == (inf, False, 0.0)
    gate.observe(2.0, agreed=True)
    assert (gate.threshold, gate.fires(2.0), gate.fires(1.9)) == (2.0, True, False)


def test_the_threshold_is_the_least_that_meets_the_target() -> None:
    # From the top: 1/1 2/2 3/3 3/4 4/5 5/6 with (hits + 1) / (n + 2): .67 .75 .8 .67 .71 .75
    gate = observed((9, True), (8, True), (7, True), (6, False), (5, True), (4, True))
    assert gate.threshold == 4
    assert gate.precision() == (5, 6)
    # One more that disagrees: 5/7, then .67 below it; those above are as they were.
    gate.observe(3, agreed=False)
    assert gate.threshold == 4


def test_decisions_with_one_gap_fire_together_or_not_at_all() -> None:
    gate = observed((5, True), (5, True), (5, False), (5, False))
    assert gate.threshold == inf


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]), st.booleans()), max_size=40))
def test_the_threshold_by_trying_all(decisions: list[tuple[float, bool]]) -> None:
    gate = observed(*decisions, target=0.7)
    right = inf
    for gap in {gap for gap, _ in decisions}:
        above = [agreed for other, agreed in decisions if other >= gap]
        if (sum(above) + 1) / (len(above) + 2) >= 0.7:
            right = min(right, gap)
    assert gate.threshold == right


def test_the_reliability_curve_is_of_all_that_was_seen() -> None:
    gate = observed(*[(float(gap), gap >= 5) for gap in range(20)])
    curve = gate.curve(bins=4)
    assert [(one.low, one.high, one.n, one.agreed) for one in curve] == [
        (0, 4, 5, 0),
        (5, 9, 5, 5),
        (10, 14, 5, 5),
        (15, 19, 5, 5),
    ]
    assert curve[0].interval == wilson(0, 5)


def test_confidence_is_of_decisions_with_about_that_gap() -> None:
    gate = observed(*[(float(gap), gap >= 10) for gap in range(20)])
    assert gate.confidence(0.0) == 0.25  # a bin of two, neither of which agreed
    assert gate.confidence(50.0) == 0.75
    assert Gate().confidence(1.0) is None


def test_a_gate_keeps_its_target_on_what_it_has_not_seen() -> None:
    """Decisions agree the more often the greater the gap; half of them calibrate, the others are held out."""
    rng = Random(7)

    def draw() -> tuple[float, bool]:
        gap = rng.uniform(0, 5)
        return gap, rng.random() < 1 - 0.5 * 2 ** (-2 * gap)

    gate = observed(*[draw() for _ in range(1000)], target=0.95)
    fired = [agreed for gap, agreed in (draw() for _ in range(1000)) if gate.fires(gap)]
    assert wilson(sum(fired), len(fired)).high >= 0.95
    assert len(fired) > 500


def test_an_audit_retires_when_chance_is_ruled_out() -> None:
    audit = Audit(target=0.9)
    assert not audit.has_failed
    for agreed in [True] * 3 + [False]:
        audit.saw(agreed=agreed)
    assert (audit.false_accepts, audit.has_failed) == (1, False)  # 3 of 4: [0.30, 0.95]
    audit.saw(agreed=False)
    assert audit.interval() == pytest.approx((0.2307, 0.8824), abs=5e-5)  # 3 of 5
    assert audit.has_failed


# ---- pacing ----


def test_no_busy_time_is_spent_by_default() -> None:
    clock = Clock(0.0)
    pacer = Pacer(0.0, clock)
    assert (pacer.wait_s(), pacer.left_s()) == (0.0, None)
    pacer.busy(True)
    clock.now = 100.0
    assert (pacer.wait_s(), pacer.left_s()) == (None, 0.0)
    pacer.busy(False)
    assert (pacer.wait_s(), pacer.left_s()) == (0.0, None)


def test_a_share_of_busy_time_is_saved_up_and_spent() -> None:
    clock = Clock(0.0)
    pacer = Pacer(0.1, clock)
    pacer.busy(True)
    assert pacer.wait_s() == pytest.approx(1.0)  # until 0.1 s are saved
    clock.now = 1.0
    assert pacer.wait_s() == 0.0
    assert pacer.left_s() == pytest.approx(0.1 / 0.9)
    pacer.running(True)
    clock.now += 0.1 / 0.9
    assert pacer.left_s() == pytest.approx(0.0, abs=1e-9)
    pacer.running(False)
    assert pacer.wait_s() == pytest.approx(1.0)
    assert pacer.used_s == pytest.approx(0.1 / 0.9)


def test_the_share_holds_however_long_it_goes_on() -> None:
    clock = Clock(0.0)
    pacer = Pacer(0.25, clock)
    pacer.busy(True)
    for _ in range(200):
        wait_s = pacer.wait_s()
        assert wait_s is not None
        clock.now += wait_s
        left_s = pacer.left_s()
        assert left_s is not None
        pacer.running(True)
        clock.now += left_s
        pacer.running(False)
    assert pacer.used_s / clock.now == pytest.approx(0.25, rel=0.01)


def test_a_long_rush_is_not_followed_by_a_long_burst() -> None:
    clock = Clock(0.0)
    pacer = Pacer(0.5, clock)
    pacer.busy(True)
    clock.now = 3600.0
    assert pacer.left_s() == pytest.approx(2.0)  # 1 s saved, and 0.5 s earned with each that is spent


def test_a_pause_between_two_requests_is_no_idle_time() -> None:
    clock = Clock(0.0)
    pacer = Pacer(0.0, clock, rest_s=2.0)
    assert pacer.wait_s() == 0.0
    pacer.busy(True)
    clock.now = 5.0
    pacer.busy(False)
    assert pacer.wait_s() == 2.0
    clock.now = 6.5
    assert pacer.wait_s() == 0.5
    pacer.busy(True)
    pacer.busy(False)
    assert pacer.wait_s() == 2.0
    clock.now = 9.0
    assert pacer.wait_s() == 0.0


def test_idle_time_is_free() -> None:
    clock = Clock(0.0)
    pacer = Pacer(0.5, clock)
    pacer.busy(True)
    clock.now = 1.0
    pacer.busy(False)
    pacer.running(True)
    clock.now = 61.0
    pacer.running(False)
    pacer.busy(True)
    assert pacer.used_s == 60.0
    assert pacer.left_s() == pytest.approx(1.0)  # 0.5 s saved before
