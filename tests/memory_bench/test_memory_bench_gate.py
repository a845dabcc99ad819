from math import nan
from typing import Any

import pytest
from distributions import FACTS, Distributions
from memory_bench.gate import Divergence, RedGate, diverge, require_near, require_served, spread
from scripted_server import report

from locomo.arms.base import Served


def test_divergences_are_those_worked_out_by_hand() -> None:
    system = Distributions()
    found = diverge(system, ["Where?", "When?"], "anchor:4")
    # sum of p ln(p / q) with p = (1/2, 1/2): q = (1/4, 3/4) gives ln(4/3) / 2, q = (1/8, 7/8) gives ln(16/7) / 2.
    assert found.spliced == pytest.approx(0.143841, abs=1e-6)
    assert found.shuffled == found.without == pytest.approx(0.413339, abs=1e-6)


def test_spliced_prompts_come_first_and_find_nothing_in_the_caches() -> None:
    system = Distributions()
    diverge(system, ["Where?"], "anchor:4")
    assert system.asked[0] == "forget"
    assert system.asked[5] == "forget"
    assert system.asked[1:5] == system.asked[6:]
    spliced, text, shuffled, without = system.asked[1:5]
    assert spliced == Served(tuple(reversed(FACTS)), "tail", "anchor:4")
    assert text == Served(spliced.units, "tail", None)
    assert sorted(shuffled.units) == sorted(FACTS)
    assert shuffled.units != text.units
    assert without == Served((), "tail", None)


@pytest.mark.parametrize(
    ("system", "said"),
    [
        (Distributions(tier="exact"), "served as 'exact': why"),
        (Distributions(scored_tier="partial"), "served as 'partial'"),
        (Distributions(ids=(1, 2, 4)), "not the same ids"),
    ],
)
def test_a_gate_measures_nothing_but_splices(system: Distributions, said: str) -> None:
    with pytest.raises(RedGate, match=said):
        diverge(system, ["Where?"], "anchor:4")


@pytest.mark.parametrize(
    ("divergence", "passes"),
    [
        (Divergence(0.08, 0.10, 1.58), True),  # the default policy, about
        (Divergence(0.20, 0.10, 1.58), True),
        (Divergence(0.21, 0.10, 1.58), False),  # more than twice another order
        (Divergence(1.62, 0.10, 1.58), False),
        (Divergence(0.49, 0.30, 1.00), True),
        (Divergence(0.50, 0.30, 1.00), False),  # nearer than no facts, by half only
        (Divergence(nan, 0.10, 1.58), False),
        (Divergence(0.10, nan, 1.58), False),
        (Divergence(0.10, 0.10, nan), False),
    ],
)
def test_the_gate_is_a_fraction_of_both_floors(divergence: Divergence, passes: bool) -> None:
    if passes:
        require_near(divergence)
    else:
        with pytest.raises(RedGate, match="nats from full prefill"):
            require_near(divergence)


@pytest.mark.parametrize(
    ("mode", "told", "said"),
    [
        ("splice", {"tier": "exact", "reason": "exact_prefix_cached"}, "'exact': exact_prefix_cached"),
        ("splice", {"tier": "text"}, "'text': no reason given"),
        ("splice", {"reason": "not_encoded:1"}, "not_encoded:1"),  # some of them were spliced
        ("splice", {"facts": [{"id": "f0"}]}, "1 facts, not 2"),
        ("text", {"tier": "spliced"}, "'spliced'"),
        ("text", {"reason": "retrieval_failed: timeout"}, "retrieval_failed"),
        ("off", {"tier": "text"}, "'text'"),
    ],
)
def test_a_request_that_was_not_served_as_asked_ends_the_run(mode: str, told: dict[str, Any], said: str) -> None:
    k = 0 if mode == "off" else 2
    require_served("Where?", report(mode, k), mode=mode, k=k)
    with pytest.raises(RedGate, match=rf"'Where\?'.*{said}"):
        require_served("Where?", report(mode, k, **told), mode=mode, k=k)


def test_questions_of_the_gate_come_from_all_over_the_conversation() -> None:
    assert spread([str(number) for number in range(32)]) == ["0", "4", "8", "12", "16", "20", "24", "28"]
    assert spread([str(number) for number in range(8)]) == [str(number) for number in range(8)]
    with pytest.raises(RedGate, match="takes 8 questions, and the conversation has 7"):
        spread(["?"] * 7)
