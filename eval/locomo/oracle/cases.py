"""Which prompts are held against the reference, and which control must be rejected."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from locomo.errors import OracleError

from .serving import Placement

DEFAULT_POLICIES = ("ladder:0+4", "window:0", "window:2", "window:5", "anchor:4", "anchor:8")
DEFAULT_PLACEMENTS: tuple[Placement, ...] = ("system", "tail")
DEFAULT_KS = (1, 5, 20)


def conversations_path() -> Path:
    """The short invented conversations that ship with this package; two, of 24 turns each, one of them undated."""
    return Path(__file__).parent / "conversations.json"


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt: the turns of a conversation, by number, that stand in it as facts, in this order."""

    policy: str
    placement: Placement
    conversation: int
    turns: tuple[int, ...]

    @property
    def k(self) -> int:
        """Number of facts."""
        return len(self.turns)


def cases_of(
    policies: Sequence[str],
    placements: Sequence[Placement],
    ks: Sequence[int],
    *,
    lengths: Sequence[int],
    seed: int,
) -> list[Case]:
    """Every policy, placement and number of facts, on one conversation after the other.

    Facts are drawn and ordered at random, so that few stand where they were encoded, or behind what they saw. Both
    placements of a policy have the same facts; the next policy has other ones.

    Parameters
    ----------
    lengths
        Turns of each conversation.

    Raises
    ------
    OracleError
        A conversation has fewer turns than a prompt is to have facts.
    """
    if not lengths or min(lengths) < max(ks):
        raise OracleError(f"prompts of {max(ks)} facts need conversations of as many turns; these have {list(lengths)}")
    cases = []
    for number, policy in enumerate(policies):
        for at, k in enumerate(ks):
            conversation = (number + at) % len(lengths)
            turns = tuple(random.Random(f"{seed} {policy} {k}").sample(range(lengths[conversation]), k))
            cases += [Case(policy, placement, conversation, turns) for placement in placements]
    return cases
