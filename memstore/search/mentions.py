"""What a query says about when: the months that it names."""

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

_NAMES = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
# Capitalised, and not the first word: "May" and "March" are also verbs.
_MONTH = re.compile(rf"(?<=\s)({'|'.join(_NAMES)})\b(?:\s+\d{{1,2}}(?:st|nd|rd|th)?\b)?(?:,?\s+(?:of\s+)?(\d{{4}})\b)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Month(NamedTuple):
    """A month, of any year where the year is None."""

    number: int
    """1 to 12."""

    year: int | None

    def matches(self, number: int, year: int) -> bool:
        """Whether that month of that year may be meant."""
        return self.number == number and self.year in (None, year)

    def holds(self, event_at: float) -> bool:
        """Whether that moment, in Unix seconds, is in such a month of UTC."""
        # Not fromtimestamp(), which knows no time before 1970 on some platforms.
        moment = _EPOCH + timedelta(seconds=event_at)
        return self.matches(moment.month, moment.year)


def named_months(query: str) -> tuple[Month, ...]:
    """Return the months that `query` names in English, alone or in a date, in its order."""
    return tuple(Month(_NAMES.index(name) + 1, int(year) if year else None) for name, year in _MONTH.findall(query))
