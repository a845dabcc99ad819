"""Event times against Unix seconds worked out from the calendar, and texts that name no one day; case M23."""

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.event_time import Period, parse_event_time, parse_period

DAY_S = 86_400
# From 1970 to 2023 there are 53 years with 13 leap days (1972 to 2020); 31 + 28 + 31 + 30 + 7 days later it is 8 May.
MAY_8_2023 = ((53 * 365 + 13) + (31 + 28 + 31 + 30 + 7)) * DAY_S


def at(hour: int, minute: int = 0, second: float = 0) -> float:
    return MAY_8_2023 + hour * 3600 + minute * 60 + second


def test_the_day_worked_out_by_hand_is_that_day() -> None:
    assert MAY_8_2023 == 1_683_504_000  # date -ud 2023-05-08 +%s


@pytest.mark.parametrize(
    "text",
    [
        "2023-05-08", "20230508", "2023/5/8", "2023.05.08", "2023-W19-1", "2023W191", " 2023-05-08\n",
        "8 May, 2023", "8 May 2023", "8th of May 2023", "May 8 2023", "May 8th, 2023", "Monday, 8 May 2023",
        "on 8 May, 2023", "8 MAY 2023", "8-May-2023", "2023 May 8",
    ],
)  # fmt: skip
def test_a_date_is_the_whole_day(text: str) -> None:
    assert parse_event_time(text) == MAY_8_2023
    assert parse_period(text) == Period(MAY_8_2023, MAY_8_2023 + DAY_S)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1:56 pm on 8 May, 2023", at(13, 56)),
        ("12:05 am on 8 May, 2023", at(0, 5)),
        ("12:05 pm on 8 May, 2023", at(12, 5)),
        ("8 May 2023 00:00", at(0)),
        ("8 May 2023 at 1 am", at(1)),
        ("2023-05-08T10:30", at(10, 30)),
        ("2023-05-08 10:30 pm", at(22, 30)),
        ("2023-05-08T10:30:15.25Z", at(10, 30, 15.25)),
        ("2023-05-08t10:30z", at(10, 30)),
        ("20230508T103000Z", at(10, 30)),
        ("2023-W19-1T10:30", at(10, 30)),
        ("2023-05-08T10:30:00+02:00", at(8, 30)),
        ("2023-05-08T10:30:00-0700", at(17, 30)),
        ("2023-05-08 10:30:00 UTC", at(10, 30)),
        ("Mon, 08 May 2023 10:00:00 +0200", at(8)),
        ("Mon, 8 May 2023 10:00:00 -0400 (EDT)", at(14)),
        ("8 May 2023 10:00 EST", at(15)),
        ("8 May 2023 10:00 PDT", at(17)),
        ("8 May 2023 10:00 GMT", at(10)),
        ("8 May 2023 10:00 GMT+3", at(7)),
        ("8 May 2023 10:30 UTC-0500", at(15, 30)),
        ("8 May 2023 10:30 pm -0500", at(27, 30)),
        ("8 May 2023 10:00 XYZ", at(10)),
    ],
)
def test_a_time_of_day_is_one_instant(text: str, right: float) -> None:
    assert parse_event_time(text) == right
    assert parse_period(text) == Period(right, math.nextafter(right, math.inf))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1970-01-01", 0),
        ("1969-12-31T23:59:59Z", -1),
        ("25/12/2023", MAY_8_2023 + (23 + 30 + 31 + 31 + 30 + 31 + 30 + 25) * DAY_S),
        ("12/25/2023", MAY_8_2023 + (23 + 30 + 31 + 31 + 30 + 31 + 30 + 25) * DAY_S),
        ("05/05/2023", MAY_8_2023 - 3 * DAY_S),
        ("8 May, 2024", MAY_8_2023 + 366 * DAY_S),
        ("29 Feb 2024", MAY_8_2023 + 297 * DAY_S),
        ("0001-01-01", -719_162 * DAY_S),
        ("9999-12-31T23:59:59Z", 253_402_300_799),
    ],
)
def test_other_days(text: str, right: float) -> None:
    assert parse_event_time(text) == right


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "yesterday", "last Monday", "Monday", "10:30", "1 pm", "2023", "2023-05", "May 2023", "May 8", "8 May",
        "8 May 23", "Monday 2023", "2023-W19", "2023-128",
        "03/04/2023", "5-8-2023", "8.5.2023", "08/05/23", "202305081030", "2023-05/08", "2023508", "202358",
        "2023-02-29", "2023-13-05", "2023/02/30", "31 April 2023", "0000-01-01", "10000-01-01", "8 May 20235",
        "8-10 May 2023", "8 May 2023 - 10 May 2023", "2023-05-08/2023-05-10", "2023-05-08 - 2023-05-10",
        "20 23 May 2023", "8 May 2023 - 2024", "8 May 2023 at 1", "8 May 2023 or so", "8 May 2023 BC",
        "8 May 2023 1e9", "May 8 2023 1030",
        "2023-05-08+02:00", "2023-05-08-10", "2023-05-08T24:30", "2023-05-08T10:30+25:00", "10:00 +9900 8 May 2023",
        "0001-01-01T00:00+14:00", "9999-12-31T23:00-05:00",
        "1683504000", "1683504000000", "99999999999999", "1e5", "8" * 128, "\ud800", "8\0", "nan", "Infinity",
    ],
)  # fmt: skip
def test_no_one_day(text: str) -> None:
    assert parse_event_time(text) is None
    assert parse_period(text) is None


def test_a_megabyte_is_refused_before_it_is_read() -> None:
    assert parse_event_time("8 May 2023" + " " * 2**20) is None
    assert parse_event_time("8" * 2**20) is None


@pytest.fixture
def zone_of_the_computer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "XYZ-9")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("zone_of_the_computer")
def test_the_zone_of_the_computer_changes_nothing() -> None:
    assert time.tzname[0] == "XYZ"
    assert parse_event_time("8 May 2023 11:00 XYZ") == at(11)
    assert parse_event_time("8 May 2023 11:01") == at(11, 1)
    assert parse_event_time("2023-05-08T11:00") == at(11)


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=130) | st.text(alphabet="0123456789 :-/.,+TZWamp\0", max_size=40))
def test_no_text_raises(text: str) -> None:
    period = parse_period(text)
    assert parse_event_time(text) == (period and period.start)
    if period:
        assert period.start < period.end


@settings(max_examples=200, deadline=None)
@given(st.datetimes(min_value=datetime(1000, 1, 1), timezones=st.just(UTC)), st.sampled_from(["", ", "]))
def test_every_format_of_a_moment_is_that_moment(moment: datetime, comma: str) -> None:
    minute = moment.replace(second=0, microsecond=0)
    right = (minute - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    for written in (
        minute.isoformat(),
        f"{minute:%Y-%m-%d %H:%M}",
        f"{minute:%I:%M %p} on {minute.day} {minute:%B}{comma} {minute:%Y}",
        f"{minute:%a, %d %b %Y %H:%M:%S} +0000",
    ):
        assert parse_event_time(written) == right, written


def test_the_day_of_the_session_and_not_of_the_import() -> None:
    # M23: "we went yesterday", said in a session of 8 May 2023 and imported in 2026.
    assert parse_event_time("1:56 pm on 8 May, 2023") == at(13, 56)
    assert parse_event_time("yesterday") is None
