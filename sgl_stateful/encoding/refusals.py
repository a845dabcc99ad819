"""Facts whose KV cannot be kept, because int8 does not hold it: planned anew, they would only be refused again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from memstore import EncodingId, Fact, FactId

from .codec import FactCodec


class Refusals:
    """The refused facts of one server, by owner and policy.

    A fact is refused as it was: once it says something else, or the model's weights have changed, it is tried again.
    What stands before it may change without that.
    """

    def __init__(self, codec: FactCodec) -> None:
        self._codec = codec
        self._addresses: dict[tuple[str, str], dict[FactId, EncodingId]] = {}
        self._looked_at: dict[str, float] = {}

    def add(self, owner: str, policy: str, facts: Iterable[Fact]) -> None:
        """Facts have been refused under a policy."""
        for fact in facts:
            self._addresses.setdefault((owner, policy), {})[fact.id] = self._address(fact, policy)
            self._looked_at[owner] = time.monotonic()

    def still(self, owner: str, policy: str, facts: Sequence[Fact]) -> set[FactId]:
        """Those that are as they were when they were refused of ``facts``, all that the owner has; forgets the rest."""
        known = self._addresses.pop((owner, policy), None)
        if known is None:
            return set()
        same = {f.id: known[f.id] for f in facts if f.id in known and known[f.id] == self._address(f, policy)}
        if same:
            self._addresses[owner, policy] = same
            self._looked_at[owner] = time.monotonic()
        elif not any(name == owner for name, _ in self._addresses):
            self._looked_at.pop(owner, None)
        return set(same)

    def among(self, owner: str) -> set[FactId]:
        """The owner's facts that have been refused under any policy."""
        return {i for (name, _), known in list(self._addresses.items()) if name == owner for i in known}

    def since_look_s(self, owner: str) -> float | None:
        """Seconds since the owner's refused facts were last refused or left out of a plan; None without any."""
        looked_at = self._looked_at.get(owner)
        return None if looked_at is None else time.monotonic() - looked_at

    def _address(self, fact: Fact, policy: str) -> EncodingId:
        return self._codec.encoding_id(self._codec.encode_fact(fact), policy=policy, saw=(), saw_ids=())
