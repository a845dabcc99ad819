import json
import math
from dataclasses import replace

import pytest
from scipy.stats import t as student

from sgl_stateful.faithfulness.choice import Target
from sgl_stateful.faithfulness.shown import table_json, table_text
from sgl_stateful.faithfulness.table import FLOOR, WITHOUT, Row, Table, excess, ratio_of

ROWS = (
    Row(5, WITHOUT, (2.0, 2.0, 2.0)),
    Row(5, FLOOR, (0.2, 0.1, 0.3)),
    Row(5, "none", (0.1, 0.2, 0.3)),
    Row(5, "last:32", (0.1, 0.1, 0.1), recomputed=0.25),
    Row(5, "first:4", (0.1, 0.1, 0.1), recomputed=0.15),
    Row(20, WITHOUT, (1.0, 1.0)),
    Row(20, FLOOR, (0.4, 0.4)),
    Row(20, "none", (0.5, 0.3)),
    Row(20, "last:32", (0.1, 0.1), recomputed=0.05),
    Row(20, "first:4", (0.1, 0.1), recomputed=0.17),
)
TABLE = Table("ladder:0+4", ROWS, "2024-05-01T10:00:00+00:00", skipped=(50,))


def test_rows_are_found_by_size_and_way() -> None:
    assert TABLE.sizes == [5, 20]
    assert TABLE.row(20, "none").mean == pytest.approx(0.4)
    with pytest.raises(KeyError):
        TABLE.row(50, "none")


def test_repairs_come_by_the_share_that_they_compute_anew() -> None:
    assert TABLE.repairs == ["none", "last:32", "first:4"]  # on the mean 0, 0.15 and 0.16


def test_a_table_survives_json() -> None:
    assert Table.from_json(TABLE.to_json()) == TABLE


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": 1}', json.dumps({"rows": [{"k": 1}], "skipped": []})], ids=str
)
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no table of faithfulness"):
        Table.from_json(text)


def test_the_excess_is_a_paired_mean_with_students_interval() -> None:
    # Differences 1, 3 and 5: the mean is 3, the standard deviation 2, and t at two degrees of freedom 4.303.
    mean, half = excess(Row(5, "none", (2.0, 5.0, 8.0)), Row(5, FLOOR, (0.5, 1.0, 1.5)), times=2.0)
    assert mean == pytest.approx(3.0)
    assert half == pytest.approx(4.303 * 2 / math.sqrt(3))


def test_one_question_has_no_interval() -> None:
    one = Row(5, "none", (0.4,))
    assert excess(one, Row(5, FLOOR, (0.1,)), times=1.0) == (pytest.approx(0.3), 0.0)
    assert ratio_of(one, Row(5, FLOOR, (0.1,))) == (pytest.approx(4.0), None, None)


@pytest.mark.parametrize("count", [2, 6, 12, 31])
def test_quantiles_are_students(count: int) -> None:
    values = tuple(float(i % 3) for i in range(count))
    mean = sum(values) / count
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    _, half = excess(Row(5, "none", values), Row(5, FLOOR, (0.0,) * count), times=1.0)
    assert half == pytest.approx(student.ppf(0.975, count - 1) * deviation / math.sqrt(count), rel=1e-3)


def test_more_questions_than_are_listed_have_an_interval_that_is_a_little_wide() -> None:
    values = tuple(float(i % 2) for i in range(400))
    _, half = excess(Row(5, "none", values), Row(5, FLOOR, (0.0,) * 400), times=1.0)
    exact = student.ppf(0.975, 399) * math.sqrt(0.25 * 400 / 399) / 20
    assert exact < half < 1.05 * exact


def test_fiellers_interval_ends_where_the_excess_is_no_longer_by_chance() -> None:
    row, floor = Row(5, "none", (0.3, 0.1, 0.5, 0.2, 0.4, 0.3)), Row(5, FLOOR, (0.2, 0.1, 0.3, 0.3, 0.2, 0.2))
    ratio = ratio_of(row, floor)
    assert ratio.estimate == pytest.approx(1.8 / 1.3)
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < ratio.estimate < ratio.high
    for end in (ratio.low, ratio.high):
        mean, half = excess(row, floor, times=end)
        assert abs(mean) == pytest.approx(half, rel=1e-9)


def test_a_floor_that_cannot_be_told_from_zero_bounds_no_ratio() -> None:
    row = Row(5, "none", (1.0, 1.0, 1.0))
    assert ratio_of(row, Row(5, FLOOR, (0.0, 0.0, 9.0))) == (pytest.approx(1 / 3), None, None)
    assert ratio_of(row, Row(5, FLOOR, (0.0, 0.0, 0.0))) == (math.inf, None, None)
    nothing = Row(5, "none", (0.0, 0.0, 0.0))
    assert ratio_of(nothing, Row(5, FLOOR, (0.0, 0.0, 0.0))).estimate == 1.0


def test_the_status_shows_every_row_with_its_verdict() -> None:
    shown = table_json(TABLE, Target.FLOOR)
    assert [(row["k"], row["served"], row["verdict"]) for row in shown] == [
        (5, WITHOUT, None),
        (5, FLOOR, None),
        (5, "none", "within"),  # as far as the floor on the mean: 0.2
        (5, "last:32", "within"),
        (5, "first:4", "within"),
        (20, WITHOUT, None),
        (20, FLOOR, None),
        (20, "none", "within"),
        (20, "last:32", "within"),
        (20, "first:4", "within"),
    ]
    assert shown[3] == {
        "k": 5,
        "served": "last:32",
        "questions": 3,
        "kl": 0.1,
        "of_floor": 0.5,
        "of_floor_interval": None,  # a t interval of three floors between 0.1 and 0.3 reaches below zero
        "recomputed": 0.25,
        "verdict": "within",
    }
    json.dumps(shown, allow_nan=False)


def test_the_status_is_json_where_the_floor_is_zero() -> None:
    rows = (Row(5, WITHOUT, (1.0, 1.0)), Row(5, FLOOR, (0.0, 0.0)), Row(5, "none", (0.5, 0.5)))
    [_, _, spliced] = table_json(replace(TABLE, rows=rows), Target.FLOOR)
    assert spliced["of_floor"] is None
    json.dumps(spliced, allow_nan=False)


def test_the_log_has_a_line_for_every_row() -> None:
    lines = table_text(TABLE, Target.FLOOR).splitlines()
    assert len(lines) == 1 + len(ROWS)
    assert lines[2].split()[:2] == ["5", "text,"]
    assert lines[4].split() == ["5", "spliced,", "last:32", "3", "0.1000", "0.50", "25%", "within"]
