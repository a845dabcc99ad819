from collections import Counter

import pytest

from locomo.arms.base import Selection
from locomo.dataset import Category, Conversation, Question
from locomo.errors import ConfigError, NothingToServe
from locomo.reporting.arm_names import parse_arm
from locomo.retrieval.units import Unit
from locomo.runs.config import RunConfig, reference_of, sample, selection_of
from locomo.runs.selecting import served_by

UNITS = {
    name: Unit(name, f"about {name}", "Ada", "", (f"D1:{place}",), "1")
    for place, name in enumerate(["O0", "O1", "O2", "O3", "O4", "O5"])
}


def question(index: int, category: Category, *, answer: str | None = "yes", evidence: tuple[str, ...] = ()) -> Question:
    return Question("conv-1", index, f"question {index}?", answer, None, evidence, evidence, category)


def conversation(name: str, counts: dict[Category, int]) -> Conversation:
    categories = [category for category, n in counts.items() for _ in range(n)]
    questions = tuple(
        Question(name, index, f"question {index}?", "yes", None, (), (), category)
        for index, category in enumerate(categories)
    )
    return Conversation(name, ("Ada", "Bo"), (), questions, ())


@pytest.mark.parametrize(
    "name",
    [
        "full",
        "none",
        "text/head@5",
        "splice/ladder:0+4/tail@10",
        "splice/ladder:0+4/first:2+last:32/tail@10",
        "oracle/text/tail@3",
        "floor/fp32@10",
        "floor/shuffled/head@4",
    ],
)
def test_sound_arms_are_taken(name: str) -> None:
    [arm] = RunConfig((name,)).parsed_arms()
    assert (arm.series if arm.k is None else f"{arm.series}@{arm.k}") in (name, name.removeprefix("oracle/"))


@pytest.mark.parametrize(
    "name",
    [
        "text/tail",
        "text@5",
        "splice/tail@5",
        "full@5",
        "floor/none@5",
        "text/tail@0",
        "nonsense",
        "text/side@5",
        "",
        "floor/shuffled/tail@5",
        "oracle/floor/shuffled@5",
        "splice/anchor:4/first:0/tail@5",
        "splice/anchor:4/last:3+first:2/tail@5",
    ],
)
def test_what_cannot_be_run_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="is no arm"):
        RunConfig((name,)).parsed_arms()


@pytest.mark.parametrize("floor", ["shuffled", "swapped", "fp32"])
def test_a_floor_at_the_head_is_served_there_and_compared_with_text_at_the_head(floor: str) -> None:
    config = RunConfig(("text/tail@3", "text/head@3", f"floor/{floor}@3", f"floor/{floor}/head@3"))
    *_, tail, head = config.parsed_arms()
    assert (tail.floor, head.floor) == (floor, floor)
    assert (reference_of(tail, config), reference_of(head, config)) == ("text/tail@3", "text/head@3")
    asked = question(0, Category.SINGLE_HOP)
    placed = [
        served_by(arm, asked, retrieved=("O3", "O1", "O5", "O0"), units=UNITS, seed=0).placement for arm in (tail, head)
    ]
    assert placed == ["tail", "head"]
    assert head.label == f"{tail.label}, head"


def test_no_arm_and_an_arm_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs an arm"):
        RunConfig(()).parsed_arms()
    with pytest.raises(ConfigError, match="twice"):
        RunConfig(("none", "none")).parsed_arms()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunConfig(("none", "text/tail@3"), ids=(7, 4, 9)), "no category has the id 7, 9; there are 1 to 5"),
        (RunConfig(("none",)), "none is compared with a text arm"),
        (RunConfig(("text/tail@3", "floor/shuffled/head@3")), "compared with text/head@3, which the run lacks"),
        (RunConfig(("text/tail@3", "floor/fp32@3"), fidelity=False), "has fidelity figures alone"),
        (RunConfig(("text@3",), fidelity=False), "is no arm"),
    ],
)
def test_a_config_that_no_run_can_be_made_of_is_refused(config: RunConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.check()


def test_a_config_survives_json() -> None:
    config = RunConfig(("none", "text/tail@5"), ids=(1, 2), conversations=("conv-1",), seed=3)
    assert RunConfig.from_json(config.as_json()) == config
    with pytest.raises(ConfigError, match="no run's config"):
        RunConfig.from_json({**config.as_json(), "colour": "red"})


def test_every_stratum_gives_its_share_by_largest_remainder() -> None:
    # 60, 30 and 10 of 100: exactly 9.0, 4.5 and 1.5 of 15; the two remainders of a half go by name of the stratum.
    data = [
        conversation("a", {Category.SINGLE_HOP: 60, Category.MULTI_HOP: 30}),
        conversation("b", {Category.SINGLE_HOP: 10}),
    ]
    drawn = sample(data, RunConfig(("none",), questions=15))
    counts = Counter((q.sample_id, q.category) for q in drawn)
    assert counts == {("a", Category.SINGLE_HOP): 9, ("a", Category.MULTI_HOP): 5, ("b", Category.SINGLE_HOP): 1}
    assert drawn == sample(data, RunConfig(("none",), questions=15))
    assert drawn != sample(data, RunConfig(("none",), questions=15, seed=1))
    assert len(sample(data, RunConfig(("none",), questions=0))) == 100
    assert len(sample(data, RunConfig(("none",), questions=500))) == 100


def test_a_sample_keeps_to_its_ids_and_conversations_and_to_questions_with_a_gold() -> None:
    data = [
        conversation("a", {Category.SINGLE_HOP: 2, Category.TEMPORAL: 2}),
        conversation("b", {Category.TEMPORAL: 2}),
    ]
    found = sample(data, RunConfig(("none",), ids=(2,), conversations=("a",)))
    assert {(q.sample_id, q.category) for q in found} == {("a", Category.TEMPORAL)}
    with pytest.raises(ConfigError, match="no question"):
        sample(data, RunConfig(("none",), ids=(5,)))
    with pytest.raises(ConfigError, match="the data has no conversation typo, conv-9; it has a, b"):
        sample(data, RunConfig(("none",), conversations=("a", "typo", "conv-9")))
    blank = Conversation("c", ("Ada", "Bo"), (), (question(0, Category.TEMPORAL, answer=" "),), ())
    assert len(sample([*data, blank], RunConfig(("none",), questions=0))) == 6
    without = Conversation("c", ("Ada", "Bo"), (), (question(0, Category.TEMPORAL, answer=None),), ())
    assert len(sample([*data, without], RunConfig(("none",), questions=0))) == 6


def served(name: str, asked: Question, retrieved: tuple[str, ...] = ("O3", "O1", "O5", "O0", "O2")) -> tuple[str, ...]:
    return served_by(parse_arm(name), asked, retrieved=retrieved, units=UNITS, seed=0).units


def test_the_best_fact_stands_nearest_the_question() -> None:
    assert served("text/tail@3", question(0, Category.SINGLE_HOP)) == ("O5", "O1", "O3")
    assert served("splice/anchor:4/tail@2", question(0, Category.SINGLE_HOP)) == ("O1", "O3")
    assert served("none", question(0, Category.SINGLE_HOP)) == ()
    assert served("full", question(0, Category.SINGLE_HOP)) == tuple(UNITS)


def test_the_evidence_arms_serve_what_answers_in_the_order_of_the_conversation() -> None:
    asked = question(0, Category.MULTI_HOP, evidence=("D1:4", "D1:2"))
    assert served("oracle/text/tail@5", asked) == ("O2", "O4")
    assert served("oracle/splice/window:0/tail@1", asked) == ("O2",)


def test_the_shuffled_floor_has_the_same_facts_in_another_order_for_good() -> None:
    for index in range(20):
        asked = question(index, Category.SINGLE_HOP)
        plain, shuffled = served("text/tail@3", asked), served("floor/shuffled@3", asked)
        assert set(shuffled) == set(plain)
        assert shuffled != plain
        assert shuffled == served("floor/shuffled@3", asked)


def test_a_floor_without_anything_to_change_serves_nothing() -> None:
    with pytest.raises(NothingToServe, match="1 retrieved: there is no other order"):
        served("floor/shuffled@1", question(0, Category.SINGLE_HOP))
    everything_answers = question(0, Category.MULTI_HOP, evidence=("D1:1", "D1:3", "D1:5"))
    with pytest.raises(NothingToServe, match="everything retrieved is evidence"):
        served("floor/swapped@3", everything_answers)
    with pytest.raises(NothingToServe, match="nothing else was retrieved"):
        served("floor/swapped@3", question(0, Category.MULTI_HOP, evidence=("D1:0", "D1:2")))


def test_the_swapped_floor_replaces_one_fact_that_answers_nothing_by_the_next_that_does_not_either() -> None:
    # O0 would be next, but it answers; so O2 it is. Of the served ones O3 and O5 answer, and stay.
    asked = question(0, Category.MULTI_HOP, evidence=("D1:0", "D1:3", "D1:5"))
    assert served("floor/swapped@3", asked) == ("O5", "O2", "O3")


def test_a_repair_is_of_the_arm_and_goes_with_what_it_serves() -> None:
    arm = parse_arm("splice/anchor:4/last:32/tail@2")
    assert (arm.policy, arm.repair, arm.placement) == ("anchor:4", "last:32", "tail")
    asked, retrieved = question(0, Category.SINGLE_HOP), ("O3", "O1")
    found = served_by(arm, asked, retrieved=retrieved, units=UNITS, seed=0)
    assert (found.policy, found.repair) == ("anchor:4", "last:32")
    plain = parse_arm("splice/anchor:4/tail@2")
    assert served_by(plain, asked, retrieved=retrieved, units=UNITS, seed=0).repair == "none"


def test_selections_by_name() -> None:
    found = [selection_of(parse_arm(name)) for name in ("full", "none", "text/tail@5", "oracle/text/tail@5")]
    assert found == [Selection.EVERYTHING, Selection.NOTHING, Selection.RETRIEVED, Selection.EVIDENCE]
