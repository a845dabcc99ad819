"""Following the store's change feed: what other processes do to facts reaches this server's KV.

::

    ADDED                                    encode
    UPDATED, SUPERSEDED, DELETED, PURGED     drop the KV, encode anew what saw it
    FeedGap, or a feed that was reset        drop the KV of facts that are gone, look at every owner

How far the KV directory has followed is kept in it, so that what happens while no server runs is made up for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TypeVar

from memstore import Change, ChangeKind, FactId, FeedGap, KVBlobs, MemStore, MemStoreError, OwnerId
from sgl_stateful.outage import OUTAGES, Outage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAGE = 1000
_LONGEST_WAIT_S = 5.0
_REMEMBERED = 100_000


class OwnChanges:
    """What this process has changed and seen to itself, so that the feed need not do it again. Of the event loop."""

    def __init__(self) -> None:
        self._noted: OrderedDict[tuple[ChangeKind, FactId | None, int | None], None] = OrderedDict()

    def note(self, kind: ChangeKind, fact_id: FactId, version: int) -> None:
        """A change that has been seen to."""
        self._noted[kind, fact_id, version] = None
        while len(self._noted) > _REMEMBERED:
            self._noted.popitem(last=False)

    def take(self, change: Change) -> bool:
        """Whether the change has been seen to; True once."""
        return self._noted.pop((change.kind, change.fact_id, change.version), change) is None


class Bookmark:
    """How far a KV directory has followed a store; lives in the directory."""

    def __init__(self, directory: Path, location: str) -> None:
        self._path = directory / "feed.json"
        self._location = location

    def read(self) -> int | None:
        """The position; None where the directory has not followed this store."""
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            return int(kept["position"]) if kept["location"] == self._location else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, position: int) -> None:
        """Keep the position; raise ``OSError`` where the directory takes no file."""
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"location": self._location, "position": position}), encoding="utf-8")
        draft.replace(self._path)


class FeedFollower:
    """Polls the feed, and removes what has expired.

    Parameters
    ----------
    threads
        Where the store and the KV store are waited for.
    notify
        Lets the encoder look at an owner.
    forget
        Called for an owner that was purged.
    sweep
        Makes the scheduler drop from its memory what the KV store no longer has.
    """

    def __init__(
        self,
        *,
        store: MemStore,
        blobs: KVBlobs,
        threads: Executor,
        own: OwnChanges,
        notify: Callable[[str], None],
        forget: Callable[[str], None],
        sweep: Callable[[], Awaitable[None]],
        poll_s: float,
        expire_every_s: float,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._threads = threads
        self._own = own
        self._notify = notify
        self._forget = forget
        self._sweep = sweep
        self._poll_s = poll_s
        self._expire_every_s = expire_every_s
        self._bookmark = Bookmark(blobs.path, store.records.location)
        self.position = self._bookmark.read()
        self.outage = Outage("the change feed cannot be read, trying again", logger)

    async def run(self) -> None:
        """Follow until cancelled."""
        wait_s, expire_at = self._poll_s, 0.0
        while True:
            try:
                is_behind = await self.step()
                if time.monotonic() >= expire_at:
                    await self._in_thread(self._store.expire)
                    await self._notice_a_reset()
                    expire_at = time.monotonic() + self._expire_every_s
            except MemStoreError as error:
                self.outage.failed(error)
                if not isinstance(error, OUTAGES):
                    logger.debug("following the feed failed", exc_info=True)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            except Exception:
                logger.exception("following the feed failed")
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                self.outage.worked()
                wait_s = 0.0 if is_behind else self._poll_s
            await asyncio.sleep(wait_s)
            wait_s = max(wait_s, self._poll_s)

    async def step(self) -> bool:
        """Take in one page of changes; return whether there are more."""
        if self.position is None:
            await self._start_anew()
            return False
        try:
            changes = await self._in_thread(self._store.changes, self.position, limit=_PAGE)
        except FeedGap as gap:
            logger.warning("%s", gap)
            await self._start_anew()
            return False
        if changes:
            await self._take_in(changes)
            await self._keep(changes[-1].position)
        return len(changes) == _PAGE

    async def _take_in(self, changes: Sequence[Change]) -> None:
        foreign = [change for change in changes if not self._own.take(change)]
        gone = [change for change in foreign if change.kind is not ChangeKind.ADDED]
        if gone:
            for change in gone:
                if change.kind is ChangeKind.PURGED:
                    self._forget(change.owner)
            await self._in_thread(self._drop, gone)
            await self._sweep()
        for owner in dict.fromkeys(change.owner for change in foreign):
            self._notify(owner)

    def _drop(self, changes: Sequence[Change]) -> None:
        for owner, fact_id in dict.fromkeys((change.owner, change.fact_id) for change in changes):
            try:
                if fact_id is None:
                    self._blobs.drop_owner(owner)
                else:
                    self._blobs.drop_fact(owner, fact_id)
            except MemStoreError:
                # Nobody asks for the KV of a version that the store no longer has.
                logger.exception("the KV of a changed fact was not dropped")

    async def _start_anew(self) -> None:
        position = await self._in_thread(self._store.records.last_position)
        report = await self._in_thread(self._blobs.verify, alive=self._alive, repair=True)
        if report.repaired:
            logger.warning("dropped %d encodings of facts that are gone, or damaged", report.repaired)
            await self._sweep()
        for owner in await self._in_thread(self._store.owners):
            self._notify(owner)
        await self._keep(position)

    def _alive(self, owner: OwnerId, facts: Sequence[tuple[FactId, int]]) -> Collection[FactId]:
        stored = {fact.id: fact.version for fact in self._store.get_many(owner, [fact_id for fact_id, _ in facts])}
        return {fact_id for fact_id, version in facts if stored.get(fact_id) == version}

    async def _notice_a_reset(self) -> None:
        last = await self._in_thread(self._store.records.last_position)
        if self.position is not None and last < self.position:
            logger.warning("the store's feed begins anew: it was emptied, or restored from a copy")
            self.position = None

    async def _keep(self, position: int) -> None:
        self.position = position
        try:
            await self._in_thread(self._bookmark.write, position)
        except OSError:
            logger.warning("how far the feed has been followed was not kept", exc_info=True)

    async def _in_thread(self, call: Callable[..., T], *args: object, **kwargs: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args, **kwargs))
