"""A run over a system whose answers are arithmetic: what is asked, in which order, and what a row says."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from locomo.arms.base import Answer, OnProgress, Scored, Served
from locomo.dataset import Conversation, load
from locomo.errors import ConfigError, ServerFailed
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.units import Unit
from locomo.runs.config import RunConfig
from locomo.runs.folder import RunFolder
from locomo.runs.runner import Progress, Runner

DATA = Path(__file__).parent / "data" / "synthetic.json"
ARMS = ("none", "text/tail@3", "splice/anchor:4/tail@3", "floor/shuffled@3")
CONFIG = RunConfig(ARMS, units="turns", questions=4, choices=False)
QUIET = Progress(lambda name, done, total: None, lambda done, total: None)


class ArithmeticSystem:
    """Every unit in the prompt makes the gold likelier, spliced ones a little less; keeps what was called.

    Attributes
    ----------
    fails_at
        Number of the answer that ends the server.
    refuses
        Policies whose prompts are refused.
    """

    def __init__(self, *, fails_at: int | None = None, refuses: Sequence[str | None] = ()) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails_at = fails_at
        self.refuses = refuses
        self.is_dead = False
        self._units: list[str] = []

    def why_not(self, arm: ArmName) -> str | None:
        return "there is no such policy" if arm.policy == "window:9" else None

    def describe(self) -> dict[str, Any]:
        if self.is_dead:
            raise ServerFailed("the server has gone")
        return {"model": {"fingerprint": "arithmetic"}}

    def open(self, conversation: Conversation, units: Sequence[Unit], on_progress: OnProgress) -> None:
        self.calls.append(("open", conversation.sample_id))
        self._units = [unit.id for unit in units]
        on_progress(len(units), len(units))

    def retrieve(self, question: str, k: int) -> list[str]:
        start = len(question) % len(self._units)
        return [*self._units[start:], *self._units[:start]][:k]

    def forget(self) -> None:
        self.calls.append(("forget", None))

    def answer(self, question: str, served: Served) -> Answer:
        self.calls.append(("answer", served))
        answers = sum(name == "answer" for name, _ in self.calls)
        if self.is_dead or answers == self.fails_at:
            self.is_dead = True
            raise ServerFailed("the server has gone")
        if served.units and served.policy in self.refuses:
            raise ServerFailed("the prompt is too long")
        tier = "none" if not served.units else "text" if served.policy is None else "spliced"
        tokens = {"prompt": 10 + len(served.units), "prefilled": 10, "spliced": len(served.units)}
        return Answer(question[::-1], served.units, tier, None, tokens, 5.0, {"splice": 1.0}, (1, 2))

    def score(
        self, question: str, served: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored] | None:
        # Two tokens: the gold's with probability (1 + units) / 8, spliced 1 / 16 less, and all the rest as one.
        p = (1 + len(served.units)) / 8 - (1 / 16 if served.policy else 0)
        step = {7: math.log(p), 8: math.log(1 - p)}
        return [Scored((math.log(p), math.log(p)), (step, step)) for _ in continuations]


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    """What a run says, its times apart."""
    found = []
    for row in folder.rows():
        del row["seconds"]
        for arm in row["arms"].values():
            arm.pop("ttft_ms", None)
            arm.pop("ms", None)
        found.append(row)
    return found


def begun(tmp_path: Path, config: RunConfig = CONFIG) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.begin(config, {"data_sha256": "ab"})
    return folder


def test_spliced_prompts_go_first_behind_an_empty_cache(tmp_path: Path) -> None:
    system = ArithmeticSystem()
    assert Runner(CONFIG, system, begun(tmp_path), precise=None, progress=QUIET).run(load(DATA)) == 4
    asked = [call for call in system.calls if call[0] != "open"]
    assert len(asked) == 4 * (1 + len(ARMS))
    for start in range(0, len(asked), 1 + len(ARMS)):
        (first, _), *answers = asked[start : start + 1 + len(ARMS)]
        assert first == "forget"
        assert [served.policy for _, served in answers] == ["anchor:4", None, None, None]
        units = [served.units for _, served in answers]
        spliced = units[0]
        assert spliced in units[1:], "the text arm has the same facts in the same order"
        assert sorted(map(len, units)) == [0, 3, 3, 3]


def test_fidelity_is_against_the_text_arm_and_as_by_hand(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    Runner(CONFIG, ArithmeticSystem(), folder, precise=None, progress=QUIET).run(load(DATA))
    for row in rows(folder):
        figures = {name: arm["fidelity"] for name, arm in row["arms"].items()}
        # Text: p = 1/2. Spliced: 7/16. Without facts: 1/8.
        expected = {"text/tail@3": 0.5, "splice/anchor:4/tail@3": 7 / 16, "floor/shuffled@3": 0.5, "none": 0.125}
        for name, p in expected.items():
            kl = 0.5 * math.log(0.5 / p) + 0.5 * math.log(0.5 / (1 - p))
            assert figures[name]["kl_first"] == pytest.approx(kl, abs=1e-12)
            assert figures[name]["kl_answer"] == pytest.approx(kl, abs=1e-12)
            assert figures[name]["nll"] == pytest.approx(-math.log(p), abs=1e-12)
            assert figures[name]["answer_tokens"] == 2
        assert figures["text/tail@3"]["top1_first"] is True
        assert row["arms"]["splice/anchor:4/tail@3"]["tier"] == "spliced"
        assert len(row["retrieved"]) == 3


@pytest.mark.parametrize("fails_at", range(1, 4 * len(ARMS) + 1))
def test_a_run_that_ends_anywhere_goes_on_to_the_same_rows(tmp_path: Path, fails_at: int) -> None:
    whole = begun(tmp_path / "whole")
    Runner(CONFIG, ArithmeticSystem(), whole, precise=None, progress=QUIET).run(load(DATA))
    broken = begun(tmp_path / "broken")
    with pytest.raises(ServerFailed, match="has gone"):
        Runner(CONFIG, ArithmeticSystem(fails_at=fails_at), broken, precise=None, progress=QUIET).run(load(DATA))
    assert len(broken.done()) == (fails_at - 1) // len(ARMS)
    broken.begin(CONFIG, {"data_sha256": "ab"})
    asked = Runner(CONFIG, ArithmeticSystem(), broken, precise=None, progress=QUIET).run(load(DATA))
    assert asked == 4 - (fails_at - 1) // len(ARMS)
    assert rows(broken) == rows(whole)
    assert Runner(CONFIG, ArithmeticSystem(), broken, precise=None, progress=QUIET).run(load(DATA)) == 0


def test_what_one_arm_cannot_serve_is_its_own_error(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    system = ArithmeticSystem(refuses=["anchor:4"])
    Runner(CONFIG, system, folder, precise=None, progress=QUIET).run(load(DATA))
    for row in rows(folder):
        refused = row["arms"]["splice/anchor:4/tail@3"]
        assert (refused["prediction"], refused["fidelity"]) == (None, None)
        assert refused["error"] == "the prompt is too long"
        assert row["arms"]["text/tail@3"]["error"] is None


def test_a_run_in_which_no_arm_gets_its_facts_ends(tmp_path: Path) -> None:
    system = ArithmeticSystem(refuses=["anchor:4", None])
    with pytest.raises(ServerFailed, match="every arm with facts failed; the last: the prompt is too long"):
        Runner(CONFIG, system, begun(tmp_path), precise=None, progress=QUIET).run(load(DATA))


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (("text/tail@3", "splice/window:9/tail@3"), "window:9/tail@3 cannot be served: there is no such policy"),
        (("text/tail@3", "floor/fp32@3"), "needs a second server"),
        (("none", "splice/anchor:4/tail@3"), "which the run lacks"),
        (("text/tail@3", "splice/anchor:4/head@3"), "compared with text/head@3, which the run lacks"),
    ],
)
def test_arms_that_cannot_be_run_are_refused_before_the_first_question(
    tmp_path: Path, arms: tuple[str, ...], message: str
) -> None:
    config = replace(CONFIG, arms=arms)
    with pytest.raises(ConfigError, match=message):
        Runner(config, ArithmeticSystem(), begun(tmp_path, config), precise=None, progress=QUIET)


def test_without_fidelity_nothing_is_forced(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=("splice/anchor:4/tail@3",), fidelity=False)
    folder = begun(tmp_path, config)
    Runner(config, ArithmeticSystem(), folder, precise=None, progress=QUIET).run(load(DATA))
    assert {json.dumps(arm["fidelity"]) for row in rows(folder) for arm in row["arms"].values()} == {"null"}
