"""Which months a query names."""

import pytest

from memstore.search.mentions import LOOKED_AT_CHARACTERS, Month, named_months

WORDS_OF_TIME = (
    "in", "on", "of", "since", "until", "till", "by", "during", "last", "next", "this", "early", "mid", "late", "from",
    "to", "through", "between",
)  # fmt: skip


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
        # A day or a year beside it.
        ("The May 8 meeting", [(5, None)]),
        ("The 8 May meeting", [(5, None)]),
        ("Was the 8th May, 2024 a Wednesday?", [(5, 2024)]),
        ("May 2024: who came?", [(5, 2024)]),
        ("May the 8th?", [(5, None)]),
        ("Did anything happen May 2024?", [(5, 2024)]),
        ("June 1900, June 2100, June 1899 or June 2101", [(6, 1900), (6, 2100)]),
        ("Did June 32 ring?", []),
        ("Did May 10,000 times say so at 10:30 May?", []),
        # A word of time before it.
        *((f"It was {word} April then", [(4, None)]) for word in WORDS_OF_TIME),
        ("It was mid-April then", [(4, None)]),
        ("In April", [(4, None)]),
        ("between March and April", [(3, None), (4, None)]),
        ("in March 2023 or April", [(3, 2023), (4, None)]),
        ("Did April and June meet in May?", [(5, None)]),
        # In brackets, in capitals, abbreviated.
        ("the fair (May 2024)", [(5, 2024)]),
        ('in "May" or in “June”', [(5, None), (6, None)]),
        ("in MAY 2024", [(5, 2024)]),
        ("WHO CAME IN DECEMBER?", [(12, None)]),
        ("in Sept. 2024", [(9, 2024)]),
        ("in Sep 2024, on 3 Dec. 2023 and by JAN", [(9, 2024), (12, 2023), (1, None)]),
        # Names and verbs.
        ("What does June like?", []),
        ("Did Ana meet April?", []),
        ("Hello. May I ask?", []),
        ("MAY I ASK?", []),
        ("(May I ask?)", []),
        ("June and April sing", []),
        ("Berlin May suit", []),
        ("in 8 may 2024", []),
        # A number of people is no year.
        ("in May 1500 people came", [(5, None)]),
        ("in May 2000 people came", [(5, None)]),
        ("in May 2024 and later", [(5, 2024)]),
        ("in May 2024 (all of it)", [(5, 2024)]),
        ("in May 2024, people came", [(5, 2024)]),
        ("Did June 2000 times ring?", []),
    ],
)
def test_months_are_named_alone_or_in_a_date(query: str, months: list[tuple[int, int | None]]) -> None:
    assert [tuple(month) for month in named_months(query)] == months


def test_a_month_without_a_year_is_that_of_any_year() -> None:
    months = [Month(5, 2020), Month(5, 2021), Month(6, 2021)]
    named = frozenset(named_months("What happened in May?"))
    assert [month.is_among(named) for month in months] == [True, True, False]
    named = frozenset(named_months("What happened in May 2021?"))
    assert [month.is_among(named) for month in months] == [False, True, False]


def test_a_long_query_is_looked_at_in_part() -> None:
    filler = "x" * (LOOKED_AT_CHARACTERS - len(" in May 2024"))
    assert named_months(f"{filler} in May 2024 in June") == (Month(5, 2024),)
    assert named_months(f"{filler} in June 2024") == (Month(6, None),)  # the last digit is beyond
    assert len(named_months("in May " * 100_000)) == 285  # 2000 = 285 * 7 + 5


@pytest.mark.parametrize("query", [" " * 2000, "May" + " " * 1997, "May " * 500, "in " * 667, "(" * 1990 + "May 2024"])
def test_what_is_hard_to_read_names_what_it_names(query: str) -> None:
    assert list(named_months(query)) == [Month(5, 2024)] * query.count("2024")


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
    assert Month.of(event_at) == month
