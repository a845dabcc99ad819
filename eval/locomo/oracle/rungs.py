"""Which policy's encoding is served for a fact, by its rank in the prompt.

Written down anew from the description of the server's option, so that a server that serves from another rung than it
says is found out.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import NamedTuple

from locomo.errors import OracleError

_PLAIN = re.compile(r"window:[0-9]+|anchor:0*[1-9][0-9]*")
_LADDER = re.compile(r"ladder:([0-9]+|live[+][0-9]+)([+][0-9]+)*")


class Rung(NamedTuple):
    """Encodings of ``policy``, for facts from rank ``first_rank`` on; None where they are computed, not spliced."""

    first_rank: int
    policy: str | None


def rungs_of(name: str) -> tuple[Rung, ...]:
    """The rungs of a server's policy, by rank: ``ladder:0+4`` has two, a plain policy one.

    A list of length `b` begins at rank ``ceil(sqrt(a b))`` behind one of length `a`, and at 1 behind the bare header,
    which is ``window:0``; ``live`` stands for it where the first fact is computed with the prompt.

    Raises
    ------
    OracleError
        No policy that a server has.
    """
    if _PLAIN.fullmatch(name):
        return (Rung(0, name),)
    parts = name.removeprefix("ladder:").split("+") if _LADDER.fullmatch(name) else []
    lengths = [0 if part == "live" else int(part) for part in parts]
    if not lengths or any(a >= b for a, b in pairwise(lengths)):
        raise OracleError(f"no policy {name!r}: use 'anchor:N', 'window:W', or 'ladder:N+N+...' with ascending numbers")
    firsts = [0, *(math.ceil(math.sqrt(a * b)) if a else 1 for a, b in pairwise(lengths))]
    of_header = None if parts[0] == "live" else "window:0"
    return tuple(Rung(first, f"anchor:{n}" if n else of_header) for first, n in zip(firsts, lengths, strict=True))


def policies_for_rank(rungs: tuple[Rung, ...], rank: int) -> list[str]:
    """The rung's own policy, then the others by distance, the longer list first: for a fact that lacks the former.

    None where the fact is computed.
    """
    own = max(i for i, rung in enumerate(rungs) if rung.first_rank <= rank)
    if rungs[own].policy is None:
        return []
    order = sorted(range(len(rungs)), key=lambda i: (abs(i - own), -i))
    return [policy for i in order if (policy := rungs[i].policy) is not None]


def policies_of(name: str) -> list[str]:
    """Every policy that facts are encoded under for ``name``."""
    return [rung.policy for rung in rungs_of(name) if rung.policy is not None]
