"""What a question says about where its answer is: which of the speakers, and which months."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_NAMES = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
# Capitalised, and not the first word: "May" and "March" are also verbs.
_MONTH = re.compile(rf"(?<=\s)({'|'.join(_NAMES)})\b(?:\s+\d{{1,2}}(?:st|nd|rd|th)?\b)?(?:,?\s+(?:of\s+)?(\d{{4}})\b)?")


class Month(NamedTuple):
    """A month, of any year where the year is None."""

    number: int
    year: int | None

    def matches(self, number: int, year: int) -> bool:
        """Whether that month of that year may be meant."""
        return self.number == number and self.year in (None, year)


def named_speaker(question: str, speakers: Sequence[str]) -> str | None:
    """Return the one of `speakers` that `question` names as a whole word; None where it names none or several."""
    named = [name for name in speakers if re.search(rf"\b{re.escape(name)}\b", question, re.IGNORECASE)]
    return named[0] if len(named) == 1 else None


def named_months(question: str) -> tuple[Month, ...]:
    """Return the months that `question` names, alone or in a date, in its order."""
    return tuple(Month(_NAMES.index(name) + 1, int(year) if year else None) for name, year in _MONTH.findall(question))
