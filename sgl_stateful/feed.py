"""Following the store's change feed: what other processes do to facts reaches this server's KV.

::

    ADDED                                    encode
    UPDATED, SUPERSEDED, DELETED, PURGED     drop the KV, encode anew what saw it
    FeedGap, or a feed that was reset        drop the KV of what is gone, look at every owner

How far the KV directory has followed is kept in it, so that what happens while no server runs is made up for. While
something is still to be dropped, the place that is kept stays behind.
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

from memstore import (
    BlobStoreError,
    Change,
    ChangeKind,
    Fact,
    FactId,
    FeedGap,
    KVBlobs,
    MemStore,
    MemStoreError,
    OwnerId,
    StoreDamaged,
    VersionConflict,
)
from memstore.kv.session_files import drop_orphan_files
from memstore.validation import is_reserved
from sgl_stateful.forgetting import Forgetting, Gone
from sgl_stateful.outage import OUTAGES, Outage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAGE = 1000
_LONGEST_WAIT_S = 5.0
_REMEMBERED = 100_000
_REMEMBERED_S = 60.0
_FIRST_VERIFY_WAIT_S = 1.0
_LONGEST_VERIFY_WAIT_S = 600.0


def nobody_cares(owner: str, fact_id: str | None) -> None:
    """Of a fact that was changed or is gone, or of new ones (None)."""


class OwnChanges:
    """What this process has changed and seen to itself, so that the feed need not do it again. Of the event loop.

    For a minute: what the feed has not shown by then never happened, or is seen to twice.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: OrderedDict[tuple[ChangeKind, FactId | None, int | None], float] = OrderedDict()

    def note(self, kind: ChangeKind, fact_id: FactId, version: int) -> None:
        """A change that has been seen to."""
        self._noted[kind, fact_id, version] = self._clock()
        self._noted.move_to_end((kind, fact_id, version))
        self._forget()

    def take(self, change: Change) -> bool:
        """Whether the change has been seen to; True once."""
        self._forget()
        return self._noted.pop((change.kind, change.fact_id, change.version), None) is not None

    def _forget(self) -> None:
        before = self._clock() - _REMEMBERED_S
        while self._noted and (len(self._noted) > _REMEMBERED or next(iter(self._noted.values())) < before):
            self._noted.popitem(last=False)


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
    changed
        Told of an owner's fact that another process has changed or removed; None: of new ones.
    """

    def __init__(
        self,
        *,
        store: MemStore,
        blobs: KVBlobs,
        threads: Executor,
        own: OwnChanges,
        forgetting: Forgetting,
        notify: Callable[[str], None],
        forget: Callable[[str], None],
        sweep: Callable[[], Awaitable[None]],
        poll_s: float,
        expire_every_s: float,
        changed: Callable[[str, str | None], None] = nobody_cares,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._threads = threads
        self._own = own
        self._forgetting = forgetting
        self._notify = notify
        self._forget = forget
        self._sweep = sweep
        self._tell = changed
        self._poll_s = poll_s
        self._expire_every_s = expire_every_s
        self._bookmark = Bookmark(blobs.path, store.records.location)
        self.position = self._kept = self._bookmark.read()
        self._must_verify = False
        self._verify_at = 0.0
        self._verify_wait_s = _FIRST_VERIFY_WAIT_S
        self._not_expired: set[OwnerId] = set()
        self.outage = Outage("the change feed cannot be read, trying again", logger)
        self._kv_outage = Outage("the KV store cannot be looked through, trying again", logger)

    async def run(self) -> None:
        """Follow until cancelled."""
        wait_s, expire_at = self._poll_s, 0.0
        while True:
            try:
                is_behind = await self.step()
                if time.monotonic() >= expire_at:
                    try:
                        await self._expire()
                        await self._notice_a_reset()
                    finally:
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
        if self._forgetting.owes and await self._in_thread(self._forgetting.settle):
            await self._sweep()
        changes = await self._next_page()
        if changes:
            await self._take_in(changes)
            self.position = changes[-1].position
        if self._forgetting.has_lost_count():
            self._must_verify = True
        if self._must_verify and time.monotonic() >= self._verify_at:
            await self._verify()
        await self._keep()
        return len(changes) == _PAGE

    async def _next_page(self) -> Sequence[Change]:
        if self.position is not None:
            try:
                return await self._in_thread(self._store.changes, self.position, limit=_PAGE)
            except FeedGap as gap:
                logger.warning("%s", gap)
        await self._start_anew()
        return ()

    async def _take_in(self, changes: Sequence[Change]) -> None:
        foreign = [change for change in changes if not self._own.take(change)]
        for change in foreign:
            self._tell(change.owner, None if change.kind is ChangeKind.ADDED else change.fact_id)
        gone = [change for change in foreign if change.kind is not ChangeKind.ADDED]
        if gone:
            for change in gone:
                if change.kind is ChangeKind.PURGED:
                    self._forget(change.owner)
            await self._in_thread(self._forgetting.drop, [Gone.after(change) for change in gone])
            await self._sweep()
        for owner in dict.fromkeys(change.owner for change in foreign):
            self._notify(owner)

    async def _start_anew(self) -> None:
        """Go on from the feed's end, once every fact and every encoding has been looked at."""
        position = await self._in_thread(self._store.records.last_position)
        for owner in await self._in_thread(self._store.owners):
            self._notify(owner)
        self.position, self._must_verify, self._verify_at = position, True, 0.0

    async def _verify(self) -> None:
        """Drop the KV of what the store does not have; whoever fails at that is not asked again for a while."""
        self._verify_at = time.monotonic() + self._verify_wait_s
        self._verify_wait_s = min(2 * self._verify_wait_s, _LONGEST_VERIFY_WAIT_S)
        try:
            report = await self._in_thread(self._blobs.verify, alive=self._alive, repair=True)
        except BlobStoreError as error:
            # Whoever follows the feed meanwhile misses nothing.
            self._kv_outage.failed(error)
            return
        try:
            orphans = await self._in_thread(drop_orphan_files, self._blobs.path, lambda: self._store.session_log)
        except (MemStoreError, OSError) as error:
            self._kv_outage.failed(error)
            return
        self._kv_outage.worked()
        self._must_verify, self._verify_wait_s = False, _FIRST_VERIFY_WAIT_S
        if orphans:
            logger.warning("dropped the KV of %d sessions that are gone", orphans)
        if report.repaired:
            logger.warning("dropped %d encodings of facts that are gone, or damaged", report.repaired)
            await self._sweep()

    def _alive(self, owner: OwnerId, facts: Sequence[tuple[FactId, int]]) -> Collection[FactId]:
        if is_reserved(owner):  # KV of a server's own, which it drops itself
            return {fact_id for fact_id, _ in facts}
        stored = {fact.id: fact.version for fact in self._readable(owner, [fact_id for fact_id, _ in facts])}
        return {fact_id for fact_id, version in facts if stored.get(fact_id) == version}

    def _readable(self, owner: OwnerId, fact_ids: Sequence[FactId]) -> list[Fact]:
        """The facts that are there; a damaged one is as good as gone."""
        try:
            return self._store.get_many(owner, fact_ids)
        except StoreDamaged:
            if len(fact_ids) == 1:
                return []
            return [fact for fact_id in fact_ids for fact in self._readable(owner, [fact_id])]

    async def _expire(self) -> None:
        """Remove what has expired, of every owner of whom it can be removed."""
        failed: set[OwnerId] = set()
        for owner in await self._in_thread(self._store.records.owners_with_expired, now=time.time()):
            try:
                await self._in_thread(self._store.expire, owner)
            except MemStoreError as error:
                if isinstance(error, OUTAGES) and not isinstance(error, VersionConflict):
                    raise
                failed.add(owner)
                if owner not in self._not_expired:
                    logger.warning("expired facts of an owner cannot be removed: %s", error)
        self._not_expired = failed

    async def _notice_a_reset(self) -> None:
        last = await self._in_thread(self._store.records.last_position)
        if self.position is not None and last < self.position:
            logger.warning("the store's feed begins anew: it was emptied, or restored from a copy")
            self.position = None

    async def _keep(self) -> None:
        """Keep the place, unless somebody who began there would miss what is still to be dropped."""
        if self.position is None or self.position == self._kept or self._must_verify or self._forgetting.owes:
            return
        position = self.position
        try:
            await self._in_thread(self._bookmark.write, position)
        except OSError:
            logger.warning("how far the feed has been followed was not kept", exc_info=True)
        self._kept = position

    async def _in_thread(self, call: Callable[..., T], *args: object, **kwargs: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args, **kwargs))
