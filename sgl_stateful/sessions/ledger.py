"""Admission by cells: which pins fit into the KV pool, decided before anything is prefilled.

A cell is one token slot of the pool. What sessions have in common is counted once, as it is stored once. The ledger
never counts less than the pool holds for them: sessions may share more than their segments show, but not less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sgl_stateful.errors import PinNumbers, PinRefused

from .chain import Head, Link, links


@dataclass(frozen=True, slots=True)
class _Claim:
    owner: str
    heads: tuple[Head, ...]
    reserve_tokens: int
    spare: int = 0  # of the reserve, cells that nothing is in yet


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
        before, owner_before = self.pinned, self._by_owner[owner]
        former = self._claims.get(name)
        self.release(name)
        self._add(name, _Claim(owner, heads, reserve_tokens))
        needed = self.pinned - before
        if needed <= 0 or (self.pinned <= self.budget and self._by_owner[owner] <= self.quota):
            return
        self.release(name)
        if former is not None:
            self._add(name, former)
        raise PinRefused(
            PinNumbers(
                needed=needed,
                pinned=before,
                budget=self.budget,
                owner_pinned=owner_before,
                quota=self.quota,
            )
        )

    def release(self, name: str) -> None:
        """Give up what ``name`` has claimed, if anything."""
        if (claim := self._claims.pop(name, None)) is None:
            return
        self._count(claim.owner, -claim.spare)
        for link in _union(claim.heads):
            self._uses[link.key] -= 1
            if self._uses[link.key] == 0:
                del self._uses[link.key]
                self._count(claim.owner, -len(link.segment))

    def cells(self, name: str) -> int:
        """Cells that ``name`` has claimed, those that it shares included."""
        claim = self._claims.get(name)
        return 0 if claim is None else claim.spare + sum(len(link.segment) for link in _union(claim.heads))

    @property
    def reserved(self) -> int:
        """Cells that are counted without holding anything yet."""
        return sum(claim.spare for claim in self._claims.values())

    @property
    def by_owner(self) -> Mapping[str, int]:
        """Cells of each owner who has any."""
        return dict(self._by_owner)

    def _add(self, name: str, claim: _Claim) -> None:
        union = _union(claim.heads)
        spare = max(0, claim.reserve_tokens - sum(len(link.segment) for link in union))
        self._claims[name] = replace(claim, spare=spare)
        self._count(claim.owner, spare)
        for link in union:
            self._uses[link.key] += 1
            if self._uses[link.key] == 1:
                self._count(claim.owner, len(link.segment))

    def _count(self, owner: str, cells: int) -> None:
        self.pinned += cells
        self._by_owner[owner] += cells
        if self._by_owner[owner] == 0:
            del self._by_owner[owner]


def _union(heads: Iterable[Head]) -> list[Link]:
    """Every link of the contents, once."""
    found: dict[bytes, Link] = {}
    for head in heads:
        for link in links(head):
            if link.key in found:
                break  # and all before it
            found[link.key] = link
    return list(found.values())
