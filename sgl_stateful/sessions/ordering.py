"""In which order waiting requests are prefilled, and which of them wait for what another is about to prefill.

Sorted by, each after the other: priority and time waited, in whole steps; arrival of the oldest waiter of the group;
arrival. Waiting raises a request by one step every ``aging_s``, so that nobody waits for ever behind others who keep
coming: what arrives later has waited less.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

WORTH_WAITING_TOKENS = 32  # a shorter shared part is computed twice rather than waited for
MAX_CANDIDATES = 128  # requests of a pass that are compared with one another; a pass rarely has room for more


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request that waits for its prefill, or one whose prefill is under way.

    Attributes
    ----------
    arrival
        Seconds, on the clock of ``now``.
    group
        Requests of one group may begin with the same tokens; None: it is alone.
    token_ids
        ``[num_tokens]``, as far as their KV can be shared.
    cached_tokens
        Leading tokens that the cache has.
    """

    arrival: float
    priority: int
    group: Hashable | None
    token_ids: npt.NDArray[np.integer[Any]]
    cached_tokens: int


class PrefillPass(NamedTuple):
    """Indices into what was given: all of them, sorted; and those that are to wait for the next pass."""

    order: list[int]
    held_back: frozenset[int]


def plan_pass(
    waiting: Sequence[Waiting], *, now: float, aging_s: float, under_way: Sequence[Waiting] = ()
) -> PrefillPass:
    """Order one pass, and hold back whoever is about to find a long shared part in the cache.

    A request is held back where one before it in this pass, or one whose prefill is under way, is going to prefill at
    least ``WORTH_WAITING_TOKENS`` that both begin with and that the cache does not have. It stands behind that one
    for this pass only: by the next, the shared part is in the cache.
    """
    oldest: dict[Hashable, float] = {}
    for request in waiting:
        if request.group is not None:
            oldest[request.group] = min(request.arrival, oldest.get(request.group, request.arrival))

    def rank(i: int) -> tuple[int, float, float, int]:
        request = waiting[i]
        step = floor(request.priority + max(now - request.arrival, 0.0) / aging_s)
        leader = request.arrival if request.group is None else oldest[request.group]
        return -step, leader, request.arrival, i

    order = sorted(range(len(waiting)), key=rank)
    ahead: dict[Hashable, list[Waiting]] = {}
    for request in under_way:
        if request.group is not None:
            ahead.setdefault(request.group, []).append(request)
    held_back = set()
    for i in order[:MAX_CANDIDATES]:
        request = waiting[i]
        if request.group is None:
            continue
        leaders = ahead.setdefault(request.group, [])
        if any(_will_share(leader, request) for leader in leaders):
            held_back.add(i)
        else:
            leaders.append(request)
    return PrefillPass(order, frozenset(held_back))


def shared_tokens(a: npt.NDArray[np.integer[Any]], b: npt.NDArray[np.integer[Any]]) -> int:
    """How many leading ids two lists have in common."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def _will_share(leader: Waiting, request: Waiting) -> bool:
    end = max(leader.cached_tokens, request.cached_tokens) + WORTH_WAITING_TOKENS
    a, b = leader.token_ids, request.token_ids
    # One id settles most pairs: those that differ right behind what is cached.
    if min(len(a), len(b)) < end or a[end - 1] != b[end - 1]:
        return False
    return shared_tokens(a[:end], b[:end]) == end
