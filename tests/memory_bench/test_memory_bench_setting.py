from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributions import EIGHTH, Distributions
from memory_bench import setting
from memory_bench.gate import RedGate
from memory_bench.setting import Setting, opened
from memory_bench.subject import Subject
from scripted_server import telling

from locomo.dataset import demo_conversation_path, load
from locomo.retrieval.units import UnitKind, units_of

CONVERSATION = load(demo_conversation_path())[0]
UNITS = tuple(units_of(CONVERSATION, UnitKind.TURNS))
QUESTIONS = tuple(question.question for question in CONVERSATION.questions)
SUBJECT = Subject(CONVERSATION, UNITS, QUESTIONS, Path("m"), True, {})


def open_one(
    system: Distributions, policy: str = "ladder:live+4+32", *, verified: bool = True, **counts: Any
) -> Setting:
    one = {"facts": 160, "failures": 0} | counts
    encoder = {"pending": 0, "policies": {"window:0": {"facts": 160, "failures": 0}, "anchor:4": one}}
    status = {"verified": verified, "model": {}, "policies": [policy], "encoder": encoder}
    with telling(status) as url:
        return opened(url, system, SUBJECT, policy)


def test_a_server_is_ready_when_its_facts_are_encoded_and_the_gate_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0]
    monkeypatch.setattr(setting, "time", SimpleNamespace(perf_counter=lambda: sum(passed)))
    found = open_one(Distributions(takes=passed.append))
    assert (found.owner, found.policy) == ("ana", "ladder:live+4+32")
    assert found.divergence.spliced == pytest.approx(0.143841, abs=1e-6)
    assert found.add_s == 0.02  # the facts had been added before any encoding was waited for


@pytest.mark.parametrize(
    ("system", "status", "said"),
    [
        (Distributions(), {"verified": False}, "self-test failed"),
        (Distributions(), {"facts": 159}, "anchor:4: 159 of 160 facts encoded"),
        (Distributions(), {"failures": 1}, "1 failed"),
        (Distributions(tier="text"), {}, "served as 'text'"),
        (Distributions(spliced=EIGHTH), {}, "below 0.5 times what leaving the facts out does"),
    ],
)
def test_what_is_not_right_is_not_timed(system: Distributions, status: dict[str, Any], said: str) -> None:
    with pytest.raises(RedGate, match=said):
        open_one(system, **status)


def test_how_far_another_policy_is_is_measured_and_not_judged() -> None:
    found = open_one(Distributions(spliced=EIGHTH), "window:0")
    assert found.divergence.spliced == found.divergence.without == pytest.approx(0.413339, abs=1e-6)
    with pytest.raises(RedGate, match="served as 'exact'"):
        open_one(Distributions(tier="exact"), "window:0")
