"""When something happened, read from how a source wrote it."""

import math
import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import NamedTuple

from dateutil import parser as dateutil_parser  # type: ignore[import-untyped, unused-ignore]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_S = 86_400.0
# Longer than any date-time with its zone and a comment; what is longer is prose.
_MAX_CHARACTERS = 128

# Year first means year, month, day also where the custom is day first or month first, unlike in dateutil.
_YEAR_FIRST = re.compile(r"(\d{4})([-/.]?)((?<!\d)\d{1,2}|(?<=\d)\d\d)\2((?<!\d)\d{1,2}|(?<=\d)\d\d)(?!\d)", re.ASCII)
_WEEK_DATE = re.compile(r"\d{4}(-?)W\d\d\1\d(?!\d)", re.ASCII)
# dateutil reads "GMT+3" as POSIX does, three hours behind; whoever writes it means three hours ahead.
_OFFSET_PREFIX = re.compile(r"\b(?:GMT|UTC)\s?(?=[+-]\d)", re.IGNORECASE)
_OFFSET = re.compile(r"(:\d\d(?:\.\d+)?\s?(?:[ap]m\s?)?)[+-]\d{4}(?!\d)", re.ASCII | re.IGNORECASE)
_FOUR_DIGITS = re.compile(r"(?<!\d)\d{4}(?!\d)", re.ASCII)

_MONTHS = [names[0] for names in dateutil_parser.parserinfo.MONTHS]
# RFC 2822, section 4.3, obs-zone: the only abbreviations besides UTC and GMT that it gives a meaning.
_ZONE_HOURS = {"EST": -5, "EDT": -4, "CST": -6, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7}

# They differ in year, month, day and hour: a part that the text leaves out shows as a difference.
_FILL, _OTHER_FILL = datetime(1904, 1, 1), datetime(1908, 2, 2, 1)


class Period(NamedTuple):
    """The Unix seconds that a text stands for, `start <= t < end`.

    A whole day of UTC where the text gives no time of day, else the one float that the instant is.
    """

    start: float
    end: float


def parse_event_time(text: str) -> float | None:
    """Return when `text` says that something happened, in Unix seconds, or None; no string raises.

    Understood are ISO 8601 calendar and week dates with or without a time, RFC 2822, and what dateutil reads of
    English: "1:56 pm on 8 May, 2023", "May 8 2024", "25/12/2023". A date without a time of day is its midnight.
    Without a zone, or with an abbreviation that RFC 2822 does not define, the time is in UTC.

    None where the year in four digits, the month or the day is missing or could be read in two ways: "yesterday",
    "May 2023", "10:30", "8 May 23", "03/04/2023".
    """
    period = parse_period(text)
    return None if period is None else period.start


def parse_period(text: str) -> Period | None:
    """Return all of the time that `text` may mean, or None where `parse_event_time` returns None."""
    return _parse(text.strip()) if len(text) <= _MAX_CHARACTERS else None


@lru_cache(maxsize=4096)
def _parse(text: str) -> Period | None:
    try:
        moment, has_time = _moment(text)
        utc = moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
        start = (utc - _EPOCH) / timedelta(seconds=1)
    # ValueError is what dateutil and datetime document; the others are what odd input has been seen to raise.
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
        return None
    return Period(start, math.nextafter(start, math.inf) if has_time else start + _DAY_S)


def _moment(text: str) -> tuple[datetime, bool]:
    """Return what `text` says, and whether that has a time of day; ValueError where it says no one day."""
    week_date = _WEEK_DATE.match(text)
    date = week_date or _YEAR_FIRST.match(text)
    if not date:
        return _read(text)
    rest = text[date.end() :]
    if rest.startswith(("+", "-")):
        raise ValueError("a zone, or more, right behind the date")
    try:
        return datetime.fromisoformat(text), bool(rest)
    except ValueError:
        if week_date:
            raise
        year, month, day = (int(part) for part in date.group(1, 3, 4))
        date_of = datetime(year, month, day)  # ValueError where there is no such day
        return _read(f"{day} {_MONTHS[date_of.month - 1]} {year:04} {rest}")


def _read(text: str) -> tuple[datetime, bool]:
    text = _OFFSET_PREFIX.sub("", text)
    month_first = dateutil_parser.parse(text, default=_FILL, dayfirst=False, tzinfos=_zone)
    day_first = dateutil_parser.parse(text, default=_OTHER_FILL, dayfirst=True, tzinfos=_zone)
    # dateutil puts a shorter year into a century that depends on today, and takes a second year, as that of
    # "2023-05-08/2023-05-10", for a time of day.
    one_year = _FOUR_DIGITS.findall(_OFFSET.sub(r"\1", text)) == [f"{month_first.year:04}"]
    if month_first.date() != day_first.date() or not one_year:
        raise ValueError("the date is incomplete or can be read in two ways")
    return month_first, month_first.hour == day_first.hour


def _zone(name: str | None, offset_s: int | None) -> tzinfo | None:
    # A function, as dateutil otherwise takes an abbreviation that this computer's zone has for that zone.
    if offset_s is not None:
        return timezone(timedelta(seconds=offset_s))
    hours = _ZONE_HOURS.get(name or "")
    return None if hours is None else timezone(timedelta(hours=hours))
