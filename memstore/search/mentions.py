"""What a query says about when: the months that it names."""

import re
from collections.abc import Set
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

LOOKED_AT_CHARACTERS = 2000
"""Months are looked for in so much of a query, from its beginning."""

_NAMES = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_NUMBERS = {name[:3].lower(): number for number, name in enumerate(_NAMES, start=1)}
_SPELLINGS = {form for name in (*_NAMES, "Sept") for long in (name, name[:3]) for form in (long, long.upper())}
# Behind a number, a lower-case word that is none of these is what the number counts.
_JOINING = (
    "a about after an and as at because before but by during for from if in of on or since so than that the through"
    " till to until when where while with"
)
_YEAR = rf"""
    ,?\s+(?:of\s+)?(?P<year>19\d\d|20\d\d|2100)\b (?![.,:]\d)
    (?!\s+(?!(?:{_JOINING.replace(" ", "|")})\b)[a-z])
"""
_DAY = r"(?:0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
_FRONT = "[(\\[{\"'“”‘’„«]"
_MONTH = re.compile(
    rf"""
    (?:(?<={_FRONT})|(?<=[\s-])|\A)
    (?P<name>{"|".join(sorted(_SPELLINGS, key=lambda form: (-len(form), form)))})\b\.?
    (?P<day>\s+(?:the\s+)?{_DAY}\b(?![.,:]\d))?
    (?:{_YEAR})?
    """,
    re.VERBOSE,
)
# Of a month that has neither a day nor a year behind it; the window holds the longest of these and some spaces.
_BEFORE = re.compile(
    rf"""
    (?:
        \b(?:in|on|of|since|until|till|by|during|last|next|this|early|mid|late|from|to|through|between)[\s-]+
        |(?<![\w.,:]){_DAY}\s+
    ){_FRONT}*\Z
    """,
    re.VERBOSE | re.IGNORECASE,
)
_BEFORE_CHARACTERS = 24
_AND = re.compile(r"\s+(?:and|or)\s+", re.IGNORECASE)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Month(NamedTuple):
    """A month, of any year where the year is None."""

    number: int
    """1 to 12."""

    year: int | None

    @classmethod
    def of(cls, event_at: float) -> "Month":
        """Return the month of UTC that a moment, in Unix seconds, is in."""
        # Not fromtimestamp(), which knows no time before 1970 on some platforms.
        moment = _EPOCH + timedelta(seconds=event_at)
        return cls(moment.month, moment.year)

    def is_among(self, named: Set["Month"]) -> bool:
        """Whether `named` has this month, or that of any year."""
        return self in named or Month(self.number, None) in named


def named_months(query: str) -> tuple[Month, ...]:
    """Return the months that the first `LOOKED_AT_CHARACTERS` of `query` name in English, in its order.

    Many months are names of people or verbs too. One counts, capitalised or in capitals, in full or by its first three
    letters or as "Sept", with or without a dot,

    * with a day or a year beside it: "8 May", "May 8", "May 2024", "8th May, 2024";
    * behind a word of time: in, on, of, since, until, till, by, during, last, next, this, early, mid, late, from, to,
      through, between;
    * behind "and" or "or" after another month that counts.

    A year is of 1900 to 2100. A number with a lower-case word behind it ("in May 2000 people came") is no year, unless
    that word is an article or a common preposition or conjunction. "A letter to June" names a month, too: words are not
    understood.
    """
    text = query[:LOOKED_AT_CHARACTERS]
    months: list[Month] = []
    end_of_last: int | None = None
    for found in _MONTH.finditer(text):
        start = found.start("name")
        counts = (
            found["day"] is not None
            or found["year"] is not None
            or _BEFORE.search(text, max(0, start - _BEFORE_CHARACTERS), start) is not None
            or (end_of_last is not None and _AND.fullmatch(text, end_of_last, start) is not None)
        )
        if counts:
            end_of_last = found.end()
            year = found["year"]
            months.append(Month(_NUMBERS[found["name"][:3].lower()], None if year is None else int(year)))
    return tuple(months)
