"""Which entries may keep cells of the KV pool: a budget, from which the least valuable give way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class CellBudget(Generic[K]):
    """Cells held by key, never more than the limit.

    Parameters
    ----------
    limit
        Cells; 0: nobody holds any.
    worth
        What a key that holds so many cells is worth, in any order.
    """

    def __init__(self, limit: int, worth: Callable[[K, int], Any]) -> None:
        self.limit = limit
        self._worth = worth
        self._held: dict[K, int] = {}

    @property
    def cells(self) -> int:
        """How many are held."""
        return sum(self._held.values())

    def of(self, key: K) -> int:
        """How many a key holds."""
        return self._held.get(key, 0)

    def __iter__(self) -> Iterator[K]:
        return iter(self._held)

    def claim(self, key: K, cells: int) -> list[K] | None:
        """Have a key hold so many at least; returns who has given way for that.

        None where they cannot be had: it would take what is worth no less. Then nothing has changed.
        """
        cells = max(cells, self.of(key))
        others = {other: held for other, held in self._held.items() if other != key}
        short = cells + sum(others.values()) - self.limit
        gone: list[K] = []
        for other in sorted(others, key=lambda one: self._worth(one, others[one])):
            if short <= 0 or not self._worth(other, others[other]) < self._worth(key, cells):
                break
            gone.append(other)
            short -= others[other]
        if short > 0:
            return None
        for other in gone:
            del self._held[other]
        self._held[key] = cells
        return gone

    def settle(self, key: K, cells: int) -> None:
        """A key that has claimed cells holds so many of them, or none."""
        assert 0 <= cells <= self.of(key), (cells, self.of(key))
        self._held[key] = cells
        if not cells:
            del self._held[key]

    def release(self, key: K) -> None:
        """A key holds none any more."""
        self._held.pop(key, None)
