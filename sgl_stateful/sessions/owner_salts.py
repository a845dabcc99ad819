"""Cache salts of owners, until the owner is purged or the weights change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from .weights import Weights


class OwnerSalts:
    """Of the event loop.

    Parameters
    ----------
    salt
        The salt of an owner, whatever the weights; may ask a store, and is called by ``in_thread``.
    """

    def __init__(
        self,
        salt: Callable[[str], str],
        weights: Weights,
        in_thread: Callable[[Callable[[str], str], str], Awaitable[str]],
    ) -> None:
        self._salt = salt
        self._weights = weights
        self._in_thread = in_thread
        self._salts: dict[tuple[str, str], str] = {}  # by owner and weights
        self._purges: Counter[str] = Counter()  # of each owner, while this process lives

    async def of(self, owner: str) -> str:
        """The salt of an owner; raises ``StoreError`` where the store cannot be asked."""
        weights, purges = self._weights.name, self._purges[owner]
        if (salt := self._salts.get((owner, weights))) is None:
            salt = await self._in_thread(self._salt, owner) + weights
            if (weights, purges) == (self._weights.name, self._purges[owner]):
                self._salts[owner, weights] = salt
        return salt

    def purged(self, owner: str) -> None:
        """The owner has another salt from now on."""
        self._purges[owner] += 1
        self._salts.pop((owner, self._weights.name), None)

    def purges(self, owner: str) -> int:
        """How often the owner has been purged: what was begun before the last time is not to be kept."""
        return self._purges[owner]

    def weights_changed(self) -> None:
        """Forget all of them."""
        self._salts.clear()
