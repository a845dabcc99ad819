import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import pytest
from memory_bench.fidelity import (
    BARS,
    Arm,
    Bench,
    Case,
    Measured,
    arms_of,
    bars_of,
    bytes_over_bf16_of,
    cases_of,
    rows_of,
    served,
)
from memory_bench.fidelity_plot import draw
from memory_bench.gate import RedGate
from memory_bench.subject import Subject

from locomo.arms.base import Answer, Scored, Served
from locomo.dataset import demo_conversation_path, load
from locomo.retrieval.units import UnitKind, units_of

POLICY = "ladder:0+4"
ARMS = arms_of([POLICY, "anchor:4"], ["first:4"])
TEXT, FLOOR, NOTHING, PLAIN, OTHER, AS_SERVED, REPAIRED = ARMS
UNITS = tuple(f"D1:{n}" for n in range(12))
CASE = Case("conv-a", 3, "Where does Ana live?", "Lisbon", UNITS[:10])
# Of the first token; the second is the same everywhere.
HALF, QUARTER, EIGHTH = ({1: log(p), 2: log(1 - p)} for p in (0.5, 0.25, 0.125))


@dataclass
class Known:
    """A system whose distributions depend on how it is asked, and which keeps what it is asked."""

    tiers: dict[str, str] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)
    units: list[str] = field(default_factory=lambda: list(UNITS))

    def retrieve(self, question: str, k: int) -> list[str]:
        return self.units[:k]

    def forget(self) -> None:
        self.asked.append("forget")

    def _tier(self, what: Served) -> str:
        if not what.units:
            return "none"
        if what.policy is None:
            return "text"
        return self.tiers.get(str(what.repair), "repaired" if what.repair == "first:4" else "spliced")

    def answer(self, question: str, what: Served) -> Answer:
        self.asked.append((question, what))
        tier = self._tier(what)
        prompt = 50 + 10 * len(what.units)
        prefilled = {"text": prompt, "none": 50, "spliced": 50, "repaired": 58}[tier]
        tokens = {"prompt": prompt, "prefilled": prefilled, "spliced": prompt - prefilled}
        ttft_ms = {"text": 1000.0, "none": 60.0, "spliced": 100.0, "repaired": 150.0}[tier]
        return Answer("", what.units, tier, None, tokens, ttft_ms, {})

    def score(
        self, question: str, what: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored]:
        assert (continuations, top) == ([CASE.gold], 1000)
        self.asked.append((question, what))
        first = HALF if what.policy is None and what.units == CASE.units else QUARTER
        if not what.units or what.policy == "anchor:4":
            first = EIGHTH
        return [Scored((first[1], -2.0), (first, HALF), tier=self._tier(what))]


def taken_of(*systems: Known) -> dict[tuple[Arm, int], dict[tuple[str, int], Measured]]:
    taken = defaultdict(dict)
    for number, system in enumerate(systems):
        Bench(system, ARMS, taken).take(CASE._replace(sample=f"conv-{number}"), 10, number)
    return taken


def row(arm: Arm, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    [found] = [entry for entry in rows if entry["arm"] == arm.name]
    return found


def test_figures_are_those_worked_out_by_hand() -> None:
    rows = rows_of(taken_of(*(Known() for _ in range(5))))
    spliced = row(PLAIN, rows)
    # KL of (1/2, 1/2) from (1/4, 3/4) is ln(4/3) / 2, and half of it where the second token adds nothing.
    assert spliced["kl"]["mean"] == pytest.approx(0.143841 / 2, abs=1e-6)
    assert spliced["kl_start"]["mean"] == pytest.approx(0.143841, abs=1e-6)
    assert spliced["kl_over_floor"]["mean"] == pytest.approx(1.0)
    assert row(OTHER, rows)["kl_over_floor"]["mean"] == pytest.approx(0.413339 / 0.143841, rel=1e-5)
    # Full prefill of HALF lists token 1 first, and max takes the first of equals.
    assert (row(TEXT, rows)["top1"]["mean"], spliced["top1"]["mean"]) == (1.0, 0.0)
    assert spliced["dnll"]["mean"] == pytest.approx(log(2) / 2)
    assert (spliced["ttft_ms"]["p50"], spliced["ttft_over_text"]) == (100.0, 0.1)
    assert (spliced["share_computed"], row(TEXT, rows)["share_computed"]) == (0.0, 1.0)
    assert row(REPAIRED, rows)["share_computed"] == pytest.approx(8 / 100)
    assert {entry["questions"] for entry in rows} == {5}


def test_every_arm_begins_with_empty_caches_and_a_warm_header() -> None:
    system = Known()
    Bench(system, ARMS, defaultdict(dict)).take(CASE, 10, turn=4)
    per_arm = [system.asked[at : at + 4] for at in range(0, len(system.asked), 4)]
    for arm, (flush, hello, answer, score) in zip([*ARMS[4:], *ARMS[:4]], per_arm, strict=True):
        assert flush == "forget"
        assert hello == ("Hello?", Served(("D1:10",), "tail", None))  # a fact that the case does not have
        assert answer == score == (CASE.question, served(arm, CASE))


def test_what_arms_serve() -> None:
    assert served(TEXT, CASE) == Served(CASE.units, "tail", None)
    assert served(NOTHING, CASE) == Served((), "tail", None)
    assert served(PLAIN, CASE) == Served(CASE.units, "tail", POLICY, "none")
    assert served(AS_SERVED, CASE) == Served(CASE.units, "tail", POLICY, None)
    assert served(REPAIRED, CASE) == Served(CASE.units, "tail", POLICY, "first:4")
    shuffled = served(FLOOR, CASE)
    assert shuffled == served(FLOOR, CASE)
    assert sorted(shuffled.units) == sorted(CASE.units)
    assert shuffled.units != CASE.units


@pytest.mark.parametrize("tiers", [{"none": "text"}, {"none": "repaired"}, {"first:4": "spliced"}, {"None": "text"}])
def test_facts_that_were_served_otherwise_end_the_measurement(tiers: dict[str, str]) -> None:
    with pytest.raises(RedGate, match="was served as"):
        Bench(Known(tiers), ARMS, defaultdict(dict)).take(CASE, 10, 0)


def test_the_server_may_repair_by_itself() -> None:
    Bench(Known({"None": "repaired"}), ARMS, defaultdict(dict)).take(CASE, 10, 0)


def test_only_questions_that_all_arms_have_count() -> None:
    taken = taken_of(Known(), Known())
    del taken[FLOOR, 10]["conv-1", 3]
    assert {entry["questions"] for entry in rows_of(taken)} == {1}


def test_questions_come_from_all_over_a_conversation() -> None:
    conversation = load(demo_conversation_path())[0]
    asked = tuple(q.question for q in conversation.questions if q.answer)
    subject = Subject(conversation, tuple(units_of(conversation, UnitKind.TURNS)), asked, Path("m"), True, {})
    cases = cases_of(subject, Known(), 10, 3)
    assert [case.question for case in cases] == [asked[n * len(asked) // 3] for n in range(3)]
    assert cases[0].units == tuple(reversed(UNITS[:10]))  # the best nearest the question


def test_bars_are_of_the_first_policy_and_the_first_repair() -> None:
    rows = rows_of(taken_of(*(Known() for _ in range(5))))
    bars, intervals = bars_of(rows, policy=POLICY, repair="first:4", bytes_over_bf16=1.07)
    assert bars.keys() == set(BARS)
    assert bars["kl_over_floor_k10"] == bars["kl_over_floor_k10_repaired"] == pytest.approx(1.0)
    assert bars["bytes_over_bf16"] == 1.07
    assert bars["kl_over_floor_k50"] is bars["top1_k50"] is bars["ttft_default_over_plain"] is None
    assert intervals == {}  # five conversations that do not differ
    at_50 = [entry | {"k": 50} for entry in rows]
    bars, _ = bars_of(at_50, policy=POLICY, repair="first:4", bytes_over_bf16=1.07)
    assert (bars["top1_k50"], bars["ttft_default_over_plain"]) == (0.0, 1.0)


def test_bytes_are_those_of_all_rungs_over_one_in_bf16(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 3, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # One bf16 token: keys and values, of 2 layers, 3 heads and 8 dimensions, 2 bytes each: 192 bytes.
    counts = {"window:0": {"bytes": 1920, "fact_tokens": 10}, "anchor:4": {"bytes": 1030, "fact_tokens": 10}}
    assert bytes_over_bf16_of({"encoder": {"policies": counts}}, POLICY, tmp_path) == pytest.approx(295 / 192)


def test_the_plot_has_a_panel_for_every_k(tmp_path: Path) -> None:
    rows = rows_of(taken_of(*(Known() for _ in range(5))))
    draw(rows, tmp_path / "one.png")
    draw([*rows, *(entry | {"k": 50} for entry in rows)], tmp_path / "two.png")
    heights = [int.from_bytes((tmp_path / name).read_bytes()[20:24], "big") for name in ("one.png", "two.png")]
    assert heights[1] == 2 * heights[0]
