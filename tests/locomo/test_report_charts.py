import random

import pytest

from locomo.reporting.arm_names import parse_arm
from locomo.reporting.charts import Line, Row, forest, lines, sparse
from locomo.reporting.contents import format_number
from locomo.reporting.drawing import canvas
from locomo.reporting.palette import DARK, LIGHT, colour_of
from locomo.reporting.scores import Estimate, arms_of, at_k, main_k


@pytest.mark.parametrize(
    ("text", "label", "k", "length"),
    [
        ("full", "full context", None, None),
        ("none@0", "no memory", 0, None),
        ("text/head@5", "text, head", 5, None),
        ("splice/window:20/tail@50", "splice, window 20, tail", 50, 20),
        ("splice/anchor:8/head@1", "splice, anchor 8, head", 1, 8),
        ("splice/ladder:0+4/tail@10", "splice, ladder 0+4, tail", 10, None),
        ("splice/anchor:8/first:2+last:9/tail@5", "splice, anchor 8, first 2 and last 9 anew, tail", 5, 8),
        ("splice/tail", "splice, tail", None, None),
        ("oracle/text/tail@10", "evidence as text, tail", 10, None),
        ("floor/shuffled@10", "floor: facts in another order", 10, None),
        ("something/else@x", "something", None, None),
    ],
)
def test_names_of_arms(text: str, label: str, k: int | None, length: int | None) -> None:
    name = parse_arm(text)
    assert (name.label, name.k, name.length) == (label, k, length)


def test_tables_go_from_context_to_floors() -> None:
    wanted = [
        "full",
        "text/head@10",
        "text/tail@10",
        "splice/window:2/tail@10",
        "splice/window:20/tail@10",
        "splice/anchor:4/tail@10",
        "splice/ladder:0+4/tail@10",
        "splice/ladder:0+4/tail@50",
        "none@10",
        "oracle/splice/ladder:0+4/tail@10",
        "floor/shuffled@10",
        "floor/swapped@10",
        "floor/fp32@10",
    ]
    assert sorted(random.Random(3).sample(wanted, len(wanted)), key=parse_arm) == wanted


def test_charts_of_one_k_show_the_scores_or_10_or_the_one_that_most_arms_have() -> None:
    score = {"arms": {name: {} for name in ["full", "a@5", "b@5", "a@20", "b@20", "a@50"]}}
    assert main_k(score) == 5  # 5 and 20 have two arms each; 5 is nearer to 10
    shown = {(arm.name.series, arm.name.k) for arm in at_k(arms_of(score), 5)}
    assert shown == {("full", None), ("a", 5), ("b", 5)}
    assert main_k({**score, "k": 20}) == 20
    assert main_k({"arms": {**score["arms"], "a@10": {}}}) == 10
    assert main_k({}) is None


def test_ways_to_give_facts_differ_in_colour_and_placements_do_not() -> None:
    names = ("text/tail", "splice/window:2/tail", "splice/anchor:4/tail", "splice/ladder:0+4/tail", "none", "full")
    assert len({colour_of(parse_arm(name)) for name in names}) == len(names)
    assert colour_of(parse_arm("text/head")) == colour_of(parse_arm("text/tail"))


def luminance(colour: str) -> float:
    """Relative luminance as of WCAG 2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_paper(palette: dict[str, str]) -> None:
    assert contrast(palette["ink"], palette["surface"]) >= 7
    assert contrast(palette["muted"], palette["surface"]) >= 4.5
    for name in ("blue", "green", "vermillion", "purple", "grey"):
        assert contrast(palette[name], palette["surface"]) >= 3, name
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)  # each is replaced by its name


def test_a_forest_draws_means_and_intervals_where_they_are() -> None:
    rows = [
        Row(parse_arm("text/tail@10"), "one", Estimate(0.5, 0.25, 0.75)),
        Row(parse_arm("none@10"), "two", Estimate(2.0)),
    ]
    with canvas(2) as drawn:
        axes = drawn.subplots()
        forest(axes, rows, floors=[Estimate(0.1, 0.05, 0.2)], log=True)
        drawn_x = [list(map(float, line.get_xdata())) for line in axes.lines]
        assert [0.25, 0.75] in drawn_x
        assert [0.5] in drawn_x
        assert [2.0] in drawn_x
        assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
        assert {text.get_text() for text in axes.texts} == {"0.500 [0.250, 0.750]", "2.000"}
        low, high = axes.get_xlim()
        assert low <= 0.05
        assert high >= 2.0
        [band] = axes.patches
        assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((0.05, 0.2))
        assert axes.yaxis_inverted()


def test_what_is_zero_lies_on_the_edge_of_a_logarithmic_axis() -> None:
    with canvas(2) as drawn:
        axes = drawn.subplots()
        forest(axes, [Row(parse_arm("none@1"), "zero", Estimate(0.0, 0.0, 0.4))], log=True)
        low, _ = axes.get_xlim()
        assert low > 0
        assert [low] in [list(map(float, line.get_xdata())) for line in axes.lines]


def test_lines_carry_their_intervals_and_their_names() -> None:
    series = [
        Line(parse_arm("splice/window:2/tail"), "near", [5, 10], [Estimate(0.2, 0.1, 0.4), Estimate(0.3, 0.2, 0.5)]),
        Line(parse_arm("splice/window:5/tail"), "same", [5, 10], [Estimate(0.2), Estimate(0.3)]),
    ]
    with canvas(3) as drawn:
        axes = drawn.subplots()
        lines(axes, series)
        assert axes.get_ylim()[0] == 0
        [first, second] = axes.containers
        segments = first[2][0].get_segments()
        assert [[float(y) for _, y in segment] for segment in segments] == [
            pytest.approx([0.1, 0.4]),
            pytest.approx([0.2, 0.5]),
        ]
        assert first[0].get_marker() != second[0].get_marker()
        placed = {text.get_text(): text.xy[1] for text in axes.texts}
        assert set(placed) == {"● near", "■ same"}
        assert abs(placed["● near"] - placed["■ same"]) > 0.05  # not on each other, although the lines are


def test_ticks_that_would_touch_are_left_out() -> None:
    assert sparse([0, 1, 5, 10, 20, 50]) == [0, 5, 10, 20, 50]
    assert sparse([]) == []


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (0.06543, 3, "0.065"),
        (-0.5, 2, "−0.50"),
        (-0.0001, 3, "0.000"),
        (1234567, 0, "1\N{NARROW NO-BREAK SPACE}234\N{NARROW NO-BREAK SPACE}567"),
    ],
)
def test_numbers_as_shown(value: float, digits: int, shown: str) -> None:
    assert format_number(value, digits) == shown
