"""What is known of an answer before it is asked for, and how much of it a request may begin with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .answers import Answer


@dataclass(frozen=True, slots=True)
class Ahead(Answer):
    """What was decoded behind an entry.

    Attributes
    ----------
    token_ids
        Greedy ones; one that ends an answer is not among them.
    before
        Text up to the decision point; None where it was not reached, or there are no choices.
    agreed
        Whether decoding on from the decision point said what the gate would; None: it was not decoded on.
    ends
        How the answer ended, where the engine has decoded all of it by the entry's own sampling parameters; its reply
        is what a request with the very same ones is answered.
    """

    before: str | None = None
    agreed: bool | None = None
    ends: str | None = None


class Ends(NamedTuple):
    """Where an answer that is asked for ends at the latest.

    Attributes
    ----------
    max_tokens
        Its length.
    stop, stop_ids
        Texts and token ids that end it.
    """

    max_tokens: int
    stop: Sequence[str] = ()
    stop_ids: Collection[int] = ()


def usable(token_ids: Sequence[int], ends: Ends, decode: Callable[[Sequence[int]], str]) -> int:
    """How many of the tokens a request may begin with, so that its end is still before it.

    The engine looks at each token that it decodes for an end of the answer, and at none that it is given: so it is
    given only those before the one that ends the answer, and decodes that one itself.

    Parameters
    ----------
    decode
        Text of token ids, special tokens included.
    """
    n = max(min(len(token_ids), ends.max_tokens - 1), 0)
    n = next((i for i, token_id in enumerate(token_ids[:n]) if token_id in ends.stop_ids), n)

    def stops(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(stop in text for stop in ends.stop)

    if n and ends.stop and stops(n):
        n = next(count for count in range(1, n + 1) if stops(count)) - 1
    return n
