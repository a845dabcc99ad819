"""Which months a query names."""

import pytest

from memstore.search.mentions import Month, named_months


@pytest.mark.parametrize(
    ("query", "months"),
    [
        ("What did she do in May 2021?", [(5, 2021)]),
        ("What did she do on May 3, 2021 and in June?", [(5, 2021), (6, None)]),
        ("What did she do on 12 August?", [(8, None)]),
        ("What did she do on March 3rd?", [(3, None)]),
        ("What did she do on the third of May of 2021?", [(5, 2021)]),
        ("Whom may she meet?", []),
        ("May she march?", []),
        ("Who was in Maynooth?", []),
    ],
)
def test_months_are_named_alone_or_in_a_date(query: str, months: list[tuple[int, int | None]]) -> None:
    assert [tuple(month) for month in named_months(query)] == months


def test_a_month_without_a_year_is_that_of_any_year() -> None:
    [month] = named_months("What happened in May?")
    assert (month.matches(5, 2020), month.matches(5, 2021), month.matches(6, 2021)) == (True, True, False)
    [month] = named_months("What happened in May 2021?")
    assert (month.matches(5, 2020), month.matches(5, 2021)) == (False, True)


@pytest.mark.parametrize(
    ("event_at", "month"),
    [
        (0.0, Month(1, 1970)),
        (-0.5, Month(12, 1969)),
        (1709164800.0, Month(2, 2024)),  # 29 February 2024
        (1709251199.5, Month(2, 2024)),
        (1709251200.0, Month(3, 2024)),
        (-62135596800.0, Month(1, 1)),  # the first moment that there is
    ],
)
def test_a_moment_is_in_one_month_of_utc(event_at: float, month: Month) -> None:
    held = [Month(number, month.year) for number in range(1, 13) if Month(number, month.year).holds(event_at)]
    assert held == [month]
    assert Month(month.number, None).holds(event_at)
    assert not Month(month.number, 1999).holds(event_at)
