"""Which sessions hold a locked prefix of the radix tree, and how many cells that is.

A pin is a tree lock on the node where the session's tokens end; the tree evicts nothing between that node and its
root. Sessions that begin alike share nodes, so cells are counted by slot: one that several pins cover counts once.
What is pinned of a session besides (``Hold.entry``) has a pin of its own, which goes with the session's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_stateful.sessions.hold import Hold, entry_pin

REMEMBERED = 1 << 16  # fences and lost sessions that are kept in mind


class LockableTree(Protocol):
    """What a pin needs of the radix cache."""

    def lock(self, node_id: Any) -> Any:
        """Keep the path from the root to a node from eviction."""
        ...

    def unlock(self, lock: Any) -> None:
        """Undo one ``lock``."""
        ...

    def path_device_indices(self, node: Any) -> Any:
        """Slots ``[num_tokens]`` of the path from the root to a node, as a tensor."""
        ...


@dataclass(slots=True)
class Pin:
    """One session's lock.

    Attributes
    ----------
    node
        Where its tokens end; a node that is split keeps its id for the deeper part.
    slots
        ``[num_tokens]`` slots of the path; those of a locked path stay where they are.
    used
        Counter value of the last request that used it.
    """

    node: Any
    lock: Any
    slots: npt.NDArray[np.int64]
    priority: int
    fence: int
    used: int

    @property
    def tokens(self) -> int:
        """How many tokens are pinned."""
        return len(self.slots)


@dataclass(slots=True)
class PinCounts:
    """What has happened to pins since the start."""

    released: int = 0  # given up because memory ran out
    flushed: int = 0  # lost with the tree
    stale: int = 0  # refused: the request was older than what its session last said
    failures: int = 0  # something went wrong at the serving boundary


@dataclass(slots=True)
class PinTable:
    """The pins of one scheduler, by session; used from its thread alone.

    Parameters
    ----------
    tree
        The radix cache.
    num_slots
        One past the highest slot of the pool.
    """

    tree: LockableTree
    num_slots: int
    pinned_cells: int = 0  # slots under at least one pin
    counts: PinCounts = field(default_factory=PinCounts)
    _pins: dict[str, Pin] = field(default_factory=dict)
    _lost: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _fences: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _clock: int = 0
    _references: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self._references = np.zeros(self.num_slots, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._pins)

    def hold(self, hold: Hold, node: Any, tokens: int) -> str | None:
        """Pin the path to ``node``, which is ``tokens`` long, in the place of what the session had pinned.

        A request that is older than the session's pin, or than its last unpin, changes nothing.

        Returns
        -------
        str or None
            Why the session's former pin was lost, where it was and has now been made anew.
        """
        name = hold.pin_name
        former = self._pins.get(name)
        fence = max(self._fences.get(one, hold.fence) for one in (name, hold.session_id))
        if hold.fence < fence or (former is not None and hold.fence < former.fence):
            self.counts.stale += 1
            return None
        self._clock += 1
        if former is not None and former.node == node and former.tokens == tokens:
            former.priority, former.fence, former.used = hold.priority, hold.fence, self._clock
            return None
        if tokens == 0:
            self._remove(name)
            return None
        slots = self._slots(node, tokens)
        # The new lock before the old one goes: what both cover must not be evictable in between.
        lock = self.tree.lock(node)
        self._count(slots)
        self._pins[name] = Pin(node, lock, slots, hold.priority, hold.fence, self._clock)
        if former is not None:
            self._give_back(former)
        return self._lost.pop(name, None)

    def unpin(self, name: str, fence: int) -> bool:
        """Release what requests before ``fence`` pinned, and let none of them pin again; whether there was a pin.

        With a session's pin goes what else is pinned of the session.
        """
        self._lost.pop(name, None)
        self._fences[name] = max(fence, self._fences.pop(name, fence))
        _forget_oldest(self._fences)
        of_session = entry_pin(name, "")
        for other in [one for one, pin in self._pins.items() if one.startswith(of_session) and pin.fence < fence]:
            self._remove(other)
        pin = self._pins.get(name)
        return pin is not None and pin.fence < fence and self._remove(name)

    def release_one(self, reason: str, *, last: str | None = None) -> bool:
        """Give up the pin of the lowest priority, of those the least recently used; False where there is none.

        The session ``last`` loses its pin only after all others.
        """
        if not self._pins:
            return False
        session_id = min(self._pins, key=lambda i: (i == last, self._pins[i].priority, self._pins[i].used))
        self._remove(session_id)
        self._mark_lost(session_id, reason)
        self.counts.released += 1
        return True

    def lost_all(self, reason: str) -> int:
        """Forget every pin, because the tree is gone and its locks with it; how many there were."""
        for session_id in self._pins:
            self._mark_lost(session_id, reason)
        lost = len(self._pins)
        self._pins.clear()
        self._references.fill(0)
        self.pinned_cells = 0
        self.counts.flushed += lost
        return lost

    def tokens_of(self, session_id: str) -> int:
        """Tokens that a session has pinned."""
        pin = self._pins.get(session_id)
        return 0 if pin is None else pin.tokens

    def tokens(self, session_ids: Iterable[str] | None = None) -> dict[str, int]:
        """Tokens pinned by session; of all that have a pin, or of those among ``session_ids``."""
        wanted = self._pins if session_ids is None else session_ids
        return {i: self._pins[i].tokens for i in wanted if i in self._pins}

    def lost(self, session_ids: Iterable[str] | None = None) -> dict[str, str]:
        """Why sessions have no pin any more, of those that have lost one and have not been pinned or unpinned since."""
        wanted = self._lost if session_ids is None else session_ids
        return {i: self._lost[i] for i in wanted if i in self._lost}

    def stats(self) -> Mapping[str, int]:
        """Counts since the start, and what is pinned now."""
        return {
            "sessions": len(self._pins),
            "pinned_cells": self.pinned_cells,
            "released": self.counts.released,
            "flushed": self.counts.flushed,
            "stale": self.counts.stale,
            "failures": self.counts.failures,
        }

    def _slots(self, node: Any, tokens: int) -> npt.NDArray[np.int64]:
        slots: npt.NDArray[np.int64] = self.tree.path_device_indices(node).cpu().numpy()
        assert len(slots) == tokens, f"a path of {len(slots)} slots for {tokens} tokens"
        return slots.astype(np.int64)

    def _count(self, slots: npt.NDArray[np.int64]) -> None:
        # No slot is on a path twice, so fancy indexing adds one to each.
        self.pinned_cells += int(np.count_nonzero(self._references[slots] == 0))
        self._references[slots] += 1

    def _remove(self, session_id: str) -> bool:
        pin = self._pins.pop(session_id, None)
        if pin is not None:
            self._give_back(pin)
        return pin is not None

    def _give_back(self, pin: Pin) -> None:
        self._references[pin.slots] -= 1
        self.pinned_cells -= int(np.count_nonzero(self._references[pin.slots] == 0))
        self.tree.unlock(pin.lock)

    def _mark_lost(self, session_id: str, reason: str) -> None:
        self._lost[session_id] = reason
        self._lost.move_to_end(session_id)
        _forget_oldest(self._lost)


def _forget_oldest(table: OrderedDict[str, Any]) -> None:
    while len(table) > REMEMBERED:
        table.popitem(last=False)
