"""Admission by cells: which pins fit into the KV pool, decided before anything is prefilled.

A cell is one token slot of the pool. What sessions have in common is counted once, as it is stored once. The ledger
never counts less than the pool holds for them: sessions may share more than their segments show, but not less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sgl_stateful.errors import PinNumbers, PinRefused

from .chain import Head, Link, beyond


@dataclass(frozen=True, slots=True)
class _Claim:
    owner: str
    heads: tuple[Head, ...]
    content: int  # cells of the heads, those in common once
    spare: int  # of the reserve, cells that nothing is in yet


class Ledger:
    """Cells of pinned sessions.

    Parameters
    ----------
    budget, quota
        Cells that all sessions, and that those of one owner, may have.
    """

    def __init__(self, *, budget: int, quota: int) -> None:
        self.budget = budget
        self.quota = quota
        self.pinned = 0
        self.reserved = 0  # of these, cells that are counted without holding anything yet
        self._claims: dict[str, _Claim] = {}
        self._uses: Counter[bytes] = Counter()  # claims on each link, by its key
        self._by_owner: Counter[str] = Counter()

    def claim(self, name: str, owner: str, *heads: Head, reserve_tokens: int = 0) -> None:
        """Count the contents, or ``reserve_tokens`` if that is more, in the place of what ``name`` has claimed.

        Raises
        ------
        PinRefused
            It needs more cells than there are; the former claim stands. What needs no more is never refused.
        """
        former = self._claims.get(name, _Claim(owner, (), 0, 0))
        assert former.owner == owner, (name, former.owner, owner)
        # Only what the two do not have in common: a long session is not counted anew with every append.
        added, removed = list(beyond(heads, former.heads)), list(beyond(former.heads, heads))
        content = former.content + sum(len(link.segment) for link in added) - sum(len(link.segment) for link in removed)
        spare = max(0, reserve_tokens - content)
        needed = spare - former.spare
        needed += sum(len(link.segment) for link in added if link.key not in self._uses)
        needed -= sum(len(link.segment) for link in removed if self._uses[link.key] == 1)
        owner_pinned = self._by_owner[owner]
        if needed > 0 and (self.pinned + needed > self.budget or owner_pinned + needed > self.quota):
            raise PinRefused(
                PinNumbers(
                    needed=needed,
                    pinned=self.pinned,
                    budget=self.budget,
                    owner_pinned=owner_pinned,
                    quota=self.quota,
                )
            )
        self._uses.update(link.key for link in added)
        for link in removed:
            self._let_go(link)
        self._claims[name] = _Claim(owner, heads, content, spare)
        self.reserved += spare - former.spare
        self._count(owner, needed)

    def release(self, name: str) -> None:
        """Give up what ``name`` has claimed, if anything."""
        if (claim := self._claims.pop(name, None)) is None:
            return
        self.reserved -= claim.spare
        self._count(claim.owner, -claim.spare - sum(self._let_go(link) for link in beyond(claim.heads, ())))

    def cells(self, name: str) -> int:
        """Cells that ``name`` has claimed, those that it shares included."""
        claim = self._claims.get(name)
        return 0 if claim is None else claim.content + claim.spare

    @property
    def by_owner(self) -> Mapping[str, int]:
        """Cells of each owner who has any."""
        return dict(self._by_owner)

    def _let_go(self, link: Link) -> int:
        """Have one claim less on it; returns the cells that nobody claims any more."""
        self._uses[link.key] -= 1
        if self._uses[link.key] > 0:
            return 0
        del self._uses[link.key]
        return len(link.segment)

    def _count(self, owner: str, cells: int) -> None:
        self.pinned += cells
        self._by_owner[owner] += cells
        if self._by_owner[owner] == 0:
            del self._by_owner[owner]
