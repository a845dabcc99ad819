"""What is left to encode of one owner's facts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from memstore import FactId

ATTEMPTS = 3


@dataclass(slots=True)
class OwnerWork:
    """Facts of one owner that lack KV, as the last plan found them.

    ``wanted`` and ``planned`` count notifications, of all owners: that of the last one, and that of the last one before
    the plan was begun. A plan stays good for what it knew of while the next one is awaited.
    """

    wanted: int = 0
    planned: int = 0
    missing: Mapping[str, set[FactId]] = field(default_factory=dict)  # by policy
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    attempts: int = 0
    given_up_at: float = 0.0

    @property
    def is_given_up(self) -> bool:
        """It has been tried often enough."""
        return self.attempts >= ATTEMPTS

    @property
    def is_open(self) -> bool:
        """There is something to do, and trying has not been given up."""
        return not self.is_given_up and (self.planned < self.wanted or any(self.missing.values()))

    @property
    def pending(self) -> int:
        """Encodings known to be missing; one at least where nobody has looked since the last notification."""
        return max(sum(map(len, self.missing.values())), self.planned < self.wanted)

    def begin(self, missing: Mapping[str, set[FactId]], *, planned: int) -> None:
        """A plan has been made."""
        self.missing, self.planned = missing, planned
        self.changed.set()

    def done(self, policy: str, fact_ids: Collection[FactId]) -> None:
        """Facts have KV under a policy, or have been refused for good."""
        self.missing.get(policy, set()).difference_update(fact_ids)
        self.changed.set()

    def left(self, fact_ids: Sequence[FactId], *, wanted: int) -> list[FactId]:
        """Those that have no KV yet, as far as a plan knows that was made after the notification ``wanted``."""
        if self.planned < wanted:
            return list(fact_ids)
        return [fact_id for fact_id in fact_ids if any(fact_id in ids for ids in self.missing.values())]
