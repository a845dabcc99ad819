"""What a question says about whom its answer is of."""

from __future__ import annotations

import re
from collections.abc import Sequence


def named_speaker(question: str, speakers: Sequence[str]) -> str | None:
    """Return the one of `speakers` that `question` names as a whole word; None where it names none or several."""
    named = [name for name in speakers if re.search(rf"\b{re.escape(name)}\b", question, re.IGNORECASE)]
    return named[0] if len(named) == 1 else None
