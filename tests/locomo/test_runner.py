"""A run over a system whose answers are arithmetic: what is asked, in which order, and what a row says."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from locomo.arms.base import Answer, OnProgress, Scored, Served
from locomo.dataset import Category, Conversation, Question, load
from locomo.errors import ConfigError, RequestRefused, ServerFailed
from locomo.reporting.arm_names import ArmName
from locomo.retrieval.units import Unit
from locomo.runs.config import RunConfig
from locomo.runs.folder import RunFolder
from locomo.runs.runner import Progress, Runner
from locomo.scores.rows import read_rows

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
        Policies whose prompts are refused, None among them for text, with facts.
    refuses_all
        Whether every prompt is refused, however short.
    tiers
        Of the gold's request, by policy, where it is not that of the answer.
    encoded
        Facts encoded since the server started; each costs 10 tokens, and 20 to prefill.
    """

    def __init__(
        self,
        *,
        fails_at: int | None = None,
        refuses: Sequence[str | None] = (),
        refuses_all: bool = False,
        tiers: Mapping[str, str] | None = None,
    ) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails_at = fails_at
        self.refuses = refuses
        self.refuses_all = refuses_all
        self.tiers = tiers or {}
        self.is_dead = False
        self.encoded = 0
        self._units: list[str] = []

    def why_not(self, arm: ArmName) -> str | None:
        return "there is no such policy" if arm.policy == "window:9" else None

    def describe(self) -> dict[str, Any]:
        return {"model": {"fingerprint": "arithmetic"}, "embedder": "none"}

    def check(self) -> None:
        self.calls.append(("check", None))
        if self.refuses_all:
            raise ServerFailed("it refuses any prompt")

    def encodings(self) -> dict[str, dict[str, float]]:
        count = self.encoded
        costs = {"facts": count, "fact_tokens": 10 * count, "tokens_prefilled": 20 * count, "bytes": 640 * count}
        return {"anchor:4": {**costs, "seconds": 0.5}}

    def open(self, conversation: Conversation, units: Sequence[Unit], on_progress: OnProgress) -> None:
        self.calls.append(("open", conversation.sample_id))
        self._units = [unit.id for unit in units]
        self.encoded += len(units)
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
        if self.refuses_all or (served.units and served.policy in self.refuses):
            raise RequestRefused("the prompt is too long")
        tier = "none" if not served.units else "text" if served.policy is None else "spliced"
        tokens = {"prompt": 10 + len(served.units), "prefilled": 10, "spliced": len(served.units)}
        return Answer(question[::-1], served.units, tier, None, tokens, 5.0, {"splice": 1.0}, (1, 2))

    def score(
        self, question: str, served: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored] | None:
        # Two tokens: the gold's with probability (1 + units) / 8, spliced 1 / 16 less, and all the rest as one.
        p = (1 + len(served.units)) / 8 - (1 / 16 if served.policy else 0)
        step = {7: math.log(p), 8: math.log(1 - p)}
        tier = self.tiers.get(served.policy or "", prompt.tier)
        reason = None if tier == prompt.tier else f"not as asked: {tier}"
        gold = Scored((math.log(p), math.log(p)), (step, step), tier, reason, {"prompt": 12})
        return [gold, *(replace(gold, tier=prompt.tier, reason=None) for _ in continuations[1:])]


class PreciseSystem:
    """The same arithmetic with other figures: the gold has probability 1/4 whatever the prompt is."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self.is_dead = is_dead
        self.prompts: list[tuple[int, ...]] = []

    def score_ids(self, prompt_ids: Sequence[int], continuation: str, *, top: int) -> Scored:
        if self.is_dead:
            raise ServerFailed("the server in fp32 has gone")
        self.prompts.append(tuple(prompt_ids))
        step = {7: math.log(0.25), 8: math.log(0.75)}
        return Scored((math.log(0.25), math.log(0.25)), (step, step), "text", None, {"prompt": 4})


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
            assert figures[name]["unlisted"] == pytest.approx(0, abs=1e-12)
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


def test_where_every_prompt_is_refused_a_server_that_would_answer_a_short_one_goes_on(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=("text/tail@3",))
    folder, system = begun(tmp_path, config), ArithmeticSystem(refuses=[None])
    assert Runner(config, system, folder, precise=None, progress=QUIET).run(load(DATA)) == 4
    assert [row["arms"]["text/tail@3"]["error"] for row in rows(folder)] == ["the prompt is too long"] * 4
    assert [name for name, _ in system.calls].count("check") == 4


@pytest.mark.parametrize("arms", [ARMS, ("none", "text/tail@3"), ("text/tail@3",)])
def test_a_server_that_refuses_everything_ends_the_run_without_a_row(tmp_path: Path, arms: tuple[str, ...]) -> None:
    config = replace(CONFIG, arms=arms)
    folder = begun(tmp_path, config)
    with pytest.raises(ServerFailed, match="refuses any prompt"):
        Runner(config, ArithmeticSystem(refuses_all=True), folder, precise=None, progress=QUIET).run(load(DATA))
    assert folder.done() == set()


def test_the_tier_of_an_arm_is_the_weakest_of_its_requests(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=(*ARMS, "splice/window:0/tail@3"), choices=True)
    folder = begun(tmp_path, config)
    system = ArithmeticSystem(tiers={"anchor:4": "text", "window:0": "partial"})
    Runner(config, system, folder, precise=None, progress=QUIET).run(load(DATA))
    for row in rows(folder):
        for name, tier in (("splice/anchor:4/tail@3", "text"), ("splice/window:0/tail@3", "partial")):
            arm = row["arms"][name]
            assert (arm["answer_tier"], arm["tier"], arm["reason"]) == ("spliced", tier, f"not as asked: {tier}")
            gold, *others = arm["scored"]
            assert gold == {"tier": tier, "reason": f"not as asked: {tier}", "tokens": {"prompt": 12}}
            assert {other["tier"] for other in others} == {"spliced"}
        assert (row["arms"]["none"]["tier"], row["arms"]["text/tail@3"]["tier"]) == ("none", "text")
    # Neither was wholly spliced: a score takes no figure of them.
    scored = {arm.key: arm.measured for arm in read_rows(folder, config, load(DATA)).arms}
    assert (scored["splice/anchor:4/tail@3"], scored["splice/window:0/tail@3"]) == ({}, {})
    assert len(scored["text/tail@3"]) == 4


def test_the_floor_in_fp32_is_figures_alone(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=("text/tail@3", "floor/fp32@3"))
    folder, system, precise = begun(tmp_path, config), ArithmeticSystem(), PreciseSystem()
    Runner(config, system, folder, precise=precise, progress=QUIET).run(load(DATA))
    assert sum(name == "answer" for name, _ in system.calls) == 4, "of the text arm alone"
    assert precise.prompts == [(1, 2)] * 4, "the text arm's very prompt"
    for row in rows(folder):
        floor = row["arms"]["floor/fp32@3"]
        assert floor["prediction"] is None
        assert floor.keys().isdisjoint({"ttft_ms", "ms", "tokens", "answer_tier", "used"})
        assert (floor["tier"], floor["error"]) == ("text", None)
        kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
        assert floor["fidelity"]["kl_answer"] == pytest.approx(kl, abs=1e-12)


def test_a_dead_server_in_fp32_ends_the_run_without_a_row(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=("none", "text/tail@3", "floor/fp32@3"))
    folder = begun(tmp_path, config)
    with pytest.raises(ServerFailed, match="fp32 has gone"):
        Runner(config, ArithmeticSystem(), folder, precise=PreciseSystem(is_dead=True), progress=QUIET).run(load(DATA))
    assert folder.done() == set()


def test_the_floor_in_fp32_of_a_refused_prompt_has_no_figure(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=("none", "text/tail@3", "floor/fp32@3"))
    folder = begun(tmp_path, config)
    system = ArithmeticSystem(refuses=[None])
    Runner(config, system, folder, precise=PreciseSystem(), progress=QUIET).run(load(DATA))
    for row in rows(folder):
        floor = row["arms"]["floor/fp32@3"]
        assert (floor["fidelity"], floor["error"]) == (None, "the prompt of its text arm was refused")


def test_a_floor_that_would_be_the_text_arm_has_no_part_in_the_row(tmp_path: Path) -> None:
    config = replace(CONFIG, arms=("text/tail@1", "floor/shuffled@1"))
    folder = begun(tmp_path, config)
    Runner(config, ArithmeticSystem(), folder, precise=None, progress=QUIET).run(load(DATA))
    for row in rows(folder):
        assert list(row["arms"]) == ["text/tail@1"]
        assert row["not_served"] == {"floor/shuffled@1": "1 retrieved: there is no other order"}


def test_what_encoding_cost_is_summed_over_conversations_and_starts(tmp_path: Path) -> None:
    data = load(DATA)
    config = replace(CONFIG, conversations=("conv-901", "conv-902"))
    folder = begun(tmp_path, config)
    first = ArithmeticSystem(fails_at=1)
    first.encoded = 1000  # before this run
    with pytest.raises(ServerFailed):
        Runner(config, first, folder, precise=None, progress=QUIET).run(data)
    one, both = len(data[0].turns), len(data[0].turns) + len(data[1].turns)
    assert folder.encodings()["anchor:4"] == {
        "facts": one,
        "fact_tokens": 10 * one,
        "tokens_prefilled": 20 * one,
        "bytes": 640 * one,
    }
    # The second server has nothing encoded, and encodes both conversations.
    Runner(config, ArithmeticSystem(), folder, precise=None, progress=QUIET).run(data)
    assert json.loads((tmp_path / "encoding.json").read_text())["anchor:4"]["facts"] == one + both


def test_an_answer_without_a_word_is_neither_asked_nor_a_choice(tmp_path: Path) -> None:
    [sample, *_] = load(DATA)
    asked = Question("conv-901", 0, "Which colour?", "blue", None, (), (), Category.SINGLE_HOP)
    others = [replace(asked, index=1, answer=" "), replace(asked, index=2, answer="red")]
    data = [replace(sample, questions=(asked, *others))]
    config = replace(CONFIG, questions=0, choices=True)
    folder, system = begun(tmp_path, config), Forcing()
    Runner(config, system, folder, precise=None, progress=QUIET).run(data)
    assert [row["index"] for row in rows(folder)] == [0, 2]
    assert set(system.forced) == {("blue", "red"), ("red", "blue")}


class Forcing(ArithmeticSystem):
    """Keeps what was forced."""

    def __init__(self) -> None:
        super().__init__()
        self.forced: list[tuple[str, ...]] = []

    def score(
        self, question: str, served: Served, continuations: Sequence[str], *, prompt: Answer, top: int
    ) -> list[Scored] | None:
        self.forced.append(tuple(continuations))
        return super().score(question, served, continuations, prompt=prompt, top=top)


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (("text/tail@3", "splice/window:9/tail@3"), "window:9/tail@3 cannot be served: there is no such policy"),
        (("text/tail@3", "floor/fp32@3"), "needs a second server"),
        (("text/tail@3", "floor/shuffled/head@3"), "compared with text/head@3, which the run lacks"),
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
