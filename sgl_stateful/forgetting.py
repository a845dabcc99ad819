"""Dropping the KV of facts that have changed or gone, and of all that an owner had who was purged.

What cannot be dropped now is owed, and tried again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from memstore import BlobStoreError, Change, ChangeKind, EncodingId, FactId, KVBlobs, OwnerId
from memstore.kv.session_files import drop_session_files
from sgl_stateful.outage import Outage

logger = logging.getLogger(__name__)

_MOST_OWED = 10_000


class Gone(NamedTuple):
    """What no KV may be kept of."""

    owner: OwnerId
    fact_id: FactId | None
    """None: everything of the owner."""

    version: int | None = None
    """The one that the fact has now, which KV may be kept of; None: it has none."""

    @classmethod
    def after(cls, change: Change) -> Gone:
        """What is gone after a change that is no addition."""
        is_there = change.kind is ChangeKind.UPDATED
        return cls(change.owner, change.fact_id, change.version if is_there else None)


class Forgetting:
    """Drops KV. Thread-safe; waits for the KV store.

    Parameters
    ----------
    strict
        Whether the KV of other facts that saw a changed one goes with it. Otherwise it is served until it has been
        made anew.
    """

    def __init__(self, blobs: KVBlobs, *, strict: bool) -> None:
        self._blobs = blobs
        self.is_strict = strict
        self._lock = threading.Lock()
        self._owed: OrderedDict[Gone, None] = OrderedDict()
        self._lost_count = False
        self._outage = Outage("the KV of facts that changed cannot be dropped, trying again", logger)

    @property
    def error(self) -> str | None:
        """Why KV cannot be dropped at the moment; None where it can."""
        return self._outage.error

    @property
    def owes(self) -> bool:
        """Something is still to be dropped."""
        return bool(self._owed)

    def drop(self, gone: Iterable[Gone]) -> list[EncodingId]:
        """Drop KV, or owe it; return the encodings of other facts that went too."""
        others: list[EncodingId] = []
        for one in dict.fromkeys(gone):
            try:
                others += self._drop(one)
            except (BlobStoreError, OSError) as error:
                self._outage.failed(error)
                self._owe(one)
        return others

    def drop_owner(self, owner: OwnerId) -> int:
        """Drop all KV of an owner, that of sessions included, or owe it; return how many encodings there were."""
        try:
            return self._drop_owner(owner)
        except (BlobStoreError, OSError) as error:
            self._outage.failed(error)
            self._owe(Gone(owner, None))
            return 0

    def settle(self) -> bool:
        """Try again what is owed; return whether anything was dropped."""
        with self._lock:
            owed = list(self._owed)
        for done, one in enumerate(owed):
            try:
                self._drop(one)
            except (BlobStoreError, OSError) as error:
                self._outage.failed(error)
                return done > 0
            with self._lock:
                self._owed.pop(one, None)
        self._outage.worked()
        return bool(owed)

    def has_lost_count(self) -> bool:
        """Whether more was owed than is remembered, so that the whole KV store has to be looked through; True once."""
        with self._lock:
            lost, self._lost_count = self._lost_count, False
        return lost

    def _owe(self, gone: Gone) -> None:
        with self._lock:
            self._owed[gone] = None
            if len(self._owed) > _MOST_OWED:
                self._owed.clear()
                self._lost_count = True

    def _drop(self, gone: Gone) -> list[EncodingId]:
        owner, fact_id, version = gone
        if fact_id is None:
            self._drop_owner(owner)
            return []
        others = self._that_saw(owner, fact_id, version) if self.is_strict else []
        if version is None:
            self._blobs.drop_fact(owner, fact_id)
        else:
            self._blobs.drop_older(owner, fact_id, version)
        for encoding_id in others:
            self._blobs.drop_encoding(encoding_id)
        return others

    def _drop_owner(self, owner: OwnerId) -> int:
        try:
            return self._blobs.drop_owner(owner)
        finally:  # one that fails keeps nothing of the other
            drop_session_files(self._blobs.path, owner)

    def _that_saw(self, owner: OwnerId, fact_id: FactId, version: int | None) -> list[EncodingId]:
        return [
            encoding.id
            for encoding in self._blobs.dependents(owner, fact_id)
            if version is None or any(seen == fact_id and saw < version for seen, saw in encoding.saw)
        ]
