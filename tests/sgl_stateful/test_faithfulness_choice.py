import pytest

from sgl_stateful.faithfulness.choice import LIMITS, Choice, Choices, Target, Verdict, choose, verdict_at
from sgl_stateful.faithfulness.table import FLOOR, WITHOUT, Row, Table


def table(**kl: list[tuple[float, ...]]) -> Table:
    """Rows at 5 facts, and at 20 where a way has two; `first4` and `last8` are repairs, of a tenth and of a fifth."""
    costs = {"first4": 0.1, "last8": 0.2}
    names = {"first4": "first:4", "last8": "last:8"}
    rows = [
        Row(k, names.get(way, way), values, costs.get(way, 0.0))
        for way, by_size in kl.items()
        for k, values in zip((5, 20), by_size, strict=False)
    ]
    return Table("ladder:0+4", tuple(rows), "")


FLOORS, NO_FACTS = (0.2, 0.2, 0.2, 0.2), (2.0, 2.0, 2.0, 2.0)


# Student's t at three degrees of freedom is 3.182; of four values of which two are x and two are y, half the interval
# is 3.182 * |x - y| / 2 / sqrt(3), which is 0.919 times their distance.
@pytest.mark.parametrize(
    ("spliced", "target", "verdict"),
    [
        ((0.2, 0.2, 0.2, 0.2), Target.FLOOR, Verdict.WITHIN),  # no further than the floor
        ((0.1, 0.3, 0.1, 0.3), Target.FLOOR, Verdict.WITHIN),
        ((0.1, 0.31, 0.1, 0.31), Target.FLOOR, Verdict.UNDECIDED),  # 0.005 above, give or take 0.19
        ((0.3, 0.4, 0.3, 0.4), Target.FLOOR, Verdict.BEYOND),  # 0.15 above, give or take 0.09
        ((0.1, 0.1, 0.1, 0.1), Target.STRICT, Verdict.WITHIN),
        ((0.11, 0.11, 0.11, 0.11), Target.STRICT, Verdict.BEYOND),
        ((0.3, 0.4, 0.3, 0.4), Target.FAST, Verdict.WITHIN),
        ((1.0, 1.0, 1.0, 1.0), Target.FAST, Verdict.WITHIN),  # half of what no facts do
        ((1.1, 1.1, 1.1, 1.1), Target.FAST, Verdict.BEYOND),
        ((1.1, 1.1, 1.1, 1.1), Target.OFF, Verdict.WITHIN),
    ],
)
def test_the_mean_passes_and_the_interval_condemns(
    spliced: tuple[float, ...], target: Target, verdict: Verdict
) -> None:
    measured = table(floor=[FLOORS], without=[NO_FACTS], none=[spliced])
    assert verdict_at(measured, 5, "none", target) is verdict


def test_questions_are_paired() -> None:
    """Spliced answers are half as far as the floor on every question; means alone would leave that undecided."""
    floor = (0.02, 0.2, 0.4, 2.0)
    measured = table(floor=[floor], without=[(9.0, 9.0, 9.0, 9.0)], none=[tuple(1.9 * x for x in floor)])
    assert verdict_at(measured, 5, "none", Target.FLOOR) is Verdict.UNDECIDED
    closer = table(floor=[floor], without=[(9.0, 9.0, 9.0, 9.0)], none=[tuple(x + 0.01 for x in floor)])
    assert verdict_at(closer, 5, "none", Target.FLOOR) is Verdict.BEYOND


@pytest.mark.parametrize("target", [Target.FLOOR, Target.STRICT])
def test_being_near_the_floor_is_not_enough_where_the_floor_itself_tells_nothing(target: Target) -> None:
    measured = table(floor=[(1.9,) * 4], without=[(2.0,) * 4], none=[(1.2,) * 4])
    assert verdict_at(measured, 5, "none", target) is Verdict.BEYOND
    assert LIMITS[target][-1] == (WITHOUT, 0.5)
    assert LIMITS[target][0] == (FLOOR, 1.0 if target is Target.FLOOR else 0.5)


NEAR, UNSURE, FAR = (0.1,) * 4, (0.1, 0.32, 0.1, 0.32), (0.9,) * 4


@pytest.mark.parametrize(
    ("none", "first4", "last8", "expected"),
    [
        (NEAR, NEAR, NEAR, Choice("none", Verdict.WITHIN)),
        (FAR, NEAR, NEAR, Choice("first:4", Verdict.WITHIN)),
        (FAR, FAR, NEAR, Choice("last:8", Verdict.WITHIN)),
        (UNSURE, FAR, NEAR, Choice("last:8", Verdict.WITHIN)),
        (FAR, UNSURE, UNSURE, Choice("first:4", Verdict.UNDECIDED)),
        (UNSURE, FAR, UNSURE, Choice("none", Verdict.UNDECIDED)),
        (FAR, FAR, FAR, Choice(None, Verdict.BEYOND)),
    ],
)
def test_the_cheapest_way_within_is_chosen(
    none: tuple[float, ...], first4: tuple[float, ...], last8: tuple[float, ...], expected: Choice
) -> None:
    measured = table(floor=[FLOORS], without=[NO_FACTS], last8=[last8], first4=[first4], none=[none])
    assert choose(measured, Target.FLOOR) == Choices({5: expected})


def test_what_the_settings_name_is_the_only_choice() -> None:
    measured = table(floor=[FLOORS], without=[NO_FACTS], none=[FAR], first4=[NEAR], last8=[NEAR])
    assert choose(measured, Target.FLOOR, repairs=["last:8"]) == Choices({5: Choice("last:8", Verdict.WITHIN)})
    assert choose(measured, Target.FLOOR, repairs=["none"]) == Choices({5: Choice(None, Verdict.BEYOND)})
    assert choose(measured, Target.FAST, repairs=["none"]) == Choices({5: Choice("none", Verdict.WITHIN)})


def test_each_number_of_facts_is_decided_by_itself() -> None:
    measured = table(
        floor=[FLOORS] * 2, without=[NO_FACTS] * 2, none=[FAR, NEAR], first4=[FAR, NEAR], last8=[NEAR, FAR]
    )
    within = Verdict.WITHIN
    assert choose(measured, Target.FLOOR) == Choices({5: Choice("last:8", within), 20: Choice("none", within)})
    named = choose(measured, Target.FLOOR, repairs=["none"])
    assert named == Choices({5: Choice(None, Verdict.BEYOND), 20: Choice("none", within)})


def test_the_share_that_counts_is_that_of_the_number_of_facts() -> None:
    """A count of tokens at the end is much of five facts and little of twenty; a share of each fact is the same."""
    rows = [Row(k, way, values) for k in (5, 20) for way, values in ((FLOOR, FLOORS), (WITHOUT, NO_FACTS))]
    rows += [Row(k, "none", FAR) for k in (5, 20)]
    rows += [Row(5, "first:4", NEAR, 0.1), Row(20, "first:4", NEAR, 0.1)]
    rows += [Row(5, "last:8", NEAR, 0.2), Row(20, "last:8", NEAR, 0.05)]
    chosen = choose(Table("ladder:0+4", tuple(rows), ""), Target.FLOOR)
    assert [(k, choice.repair) for k, choice in chosen.by_size.items()] == [(5, "first:4"), (20, "last:8")]


# By hand: 10 is twice 5 and half of 20, 11 is nearer to 20; 31 is 1.55 times 20, and 50 is 1.61 times 31.
@pytest.mark.parametrize(
    ("count", "size"), [(0, 5), (1, 5), (5, 5), (9, 5), (10, 5), (11, 20), (31, 20), (32, 50), (50, 50), (900, 50)]
)
def test_other_numbers_of_facts_are_served_as_the_nearest_is(count: int, size: int) -> None:
    choices = Choices({k: Choice(str(k), Verdict.WITHIN) for k in (5, 20, 50)})
    assert choices.at(count).repair == str(size)


def test_what_has_not_been_measured_is_refused() -> None:
    assert choose(Table("ladder:0+4", (), ""), Target.FLOOR).at(5) == Choice(None, Verdict.BEYOND)
