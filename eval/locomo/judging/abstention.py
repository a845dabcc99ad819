"""Answers that decline to answer, told by their wording alone: what a judge's count of them is held against."""

from __future__ import annotations

import re

_TELLS = r"(?:mention|specif|stat|provid|discuss|indicat|contain|includ|say|said|tell|told|give)\w*"
_PATTERNS = re.compile(
    "|".join(
        (
            r"\b(?:no|not enough|insufficient|lacks?|without)\s+(?:\w+\s+)?(?:information|mention|evidence|record)\b",
            rf"\bnot\s+(?:\w+ly\s+)?(?:{_TELLS}|known|clear|available)\b",
            rf"\b(?:does|do|did|is|was)n't\s+(?:\w+ly\s+)?(?:{_TELLS}|known|clear|available)\b",
            r"\b(?:i|we)\s+(?:do not|don't|did not|didn't)\s+(?:know|have|recall|remember|find|see)\b",
            r"\b(?:cannot|can not|can't|could not|couldn't|unable to)\s+(?:be\s+)?"
            r"(?:determin|answer|tell|find|say|know)",
            r"^\W*(?:unknown|unanswerable|not sure|unsure|none mentioned|n/a)\W*$",
        )
    ),
    re.IGNORECASE,
)


def abstains(prediction: str) -> bool:
    """Tell whether the wording of an answer says that it does not know, or that nothing was said of the matter."""
    return bool(_PATTERNS.search(prediction.replace("’", "'")))
