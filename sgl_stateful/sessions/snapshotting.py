"""Snapshots of a server's sessions: which are to be written, which can be read back, and which have to go."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from memstore import MemStoreError
from memstore.kv.session_files import session_file, session_of
from memstore.session_log import SessionHeader, SessionId
from sgl_stateful.engine_port import EnginePort

from .chain import Head
from .hold import Readback
from .metrics import SessionMetrics
from .session import Session
from .snapshot_file import SnapshotHeader, tokens_digest
from .snapshots import MIN_TOKENS, Rates, SnapshotFolder

if TYPE_CHECKING:
    from .keeper import SessionKeeper

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_WRITTEN_YET_S = 0.1
_QUIET_S = 5.0
_AGAIN_S = 60.0  # after it could not be
_REWRITE_SHARE = 8  # a snapshot that lacks one in so many tokens is made anew: the whole of it is written

_UNREADABLE = ("absent", "damaged", "other_tokens", "other_fingerprint", "failed")


class SessionSnapshots:
    """Of the event loop; the disk is waited for on threads, and written by the scheduler process.

    Parameters
    ----------
    folder
        None: there are no snapshots.
    fingerprint
        Of the model and the pool's layout.
    bytes_per_token
        Of keys and values.
    quiet_s
        A session that has not changed for so long is written.
    look_every_s
        How often that is looked at.
    """

    def __init__(
        self,
        folder: SnapshotFolder | None,
        engine: EnginePort,
        metrics: SessionMetrics,
        *,
        fingerprint: str = "",
        bytes_per_token: int = 0,
        quiet_s: float = _QUIET_S,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self.rates = Rates()
        self._folder = folder
        self._engine = engine
        self._metrics = metrics
        self._fingerprint = fingerprint
        self._bytes_per_token = bytes_per_token
        self._quiet_s = quiet_s
        self._look_every_s = look_every_s
        self._epoch = 0  # counts changes of the weights
        self._headers: dict[SessionId, SnapshotHeader] = {}
        self._covered: dict[SessionId, tuple[Head, int]] = {}
        self._unchanged: dict[SessionId, tuple[Head, float]] = {}
        self._not_before: dict[SessionId, float] = {}

    async def start(self) -> None:
        """Find the snapshots that there are."""
        if self._folder is None:
            return
        try:
            self._headers = await asyncio.to_thread(self._folder.scan, self._fingerprint)
        except OSError as error:
            logger.warning("there are no snapshots of sessions: %s", error)

    # ---- reading ----

    def covered(self, session: Session) -> int:
        """How many of its first tokens the session's snapshot holds."""
        name = session.header.id
        if (header := self._headers.get(name)) is None:
            return 0
        head, tokens = self._covered.get(name, (None, 0))
        if head is not session.head:
            ids = session.token_ids()[: header.num_tokens]
            tokens = header.num_tokens if tokens_digest(ids) == header.tokens_digest else 0
            self._covered[name] = (session.head, tokens)
        return tokens

    def readback(self, session: Session) -> Readback | None:
        """What the scheduler is told of the session's snapshot."""
        if not (tokens := self.covered(session)):
            return None
        least = self.rates.least_tokens(tokens * self._bytes_per_token)
        return None if least > tokens else Readback(_file_of(session.header), tokens, least)

    def prefilled(self, tokens: int, *, seconds: float) -> None:
        """So many tokens were prefilled, and none read."""
        if tokens >= MIN_TOKENS:
            self.rates.prefilled_tokens.saw(tokens, seconds)

    def saw(self, session: Session, report: Mapping[str, Any] | None) -> Literal["snapshot", "prefill"] | None:
        """Take what the scheduler says of a request of the session; returns what has brought back KV that was lost."""
        if report is None:
            return None
        if (snapshot := report.get("snapshot")) is not None:
            self._saw_snapshot(session, snapshot)
            if snapshot["state"] == "read":
                return "snapshot"
        return None if session.lost is None and report.get("lost") is None else "prefill"

    def _saw_snapshot(self, session: Session, snapshot: Mapping[str, Any]) -> None:
        self._metrics.snapshot(snapshot["state"])
        if snapshot["state"] == "read":
            self.rates.read_bytes.saw(snapshot["bytes"], 1e-3 * snapshot["ms"])
            with suppress(OSError):
                assert self._folder is not None, "a snapshot was read without a folder"
                self._folder.touch(_file_of(session.header), session.header.used_at)
        elif snapshot["reason"] in _UNREADABLE:
            logger.warning("the snapshot of session %s is of no use: %s", session.header.id, snapshot["reason"])
            self._forget([session.header.id])

    # ---- ending ----

    async def forget(self, headers: Iterable[SessionHeader]) -> None:
        """Remove the snapshots of sessions that have ended, also one that is being written; nothing is left then."""
        files = {header.id: _file_of(header) for header in headers}
        if files and self._folder is not None:
            self._forget(files)
            await self._engine.control("snapshot_drop", {"names": list(files.values())})
            try:
                await asyncio.to_thread(self._folder.remove, files.values())
            except OSError as error:
                logger.error("snapshots of sessions that have ended cannot be removed: %s", error)

    async def weights_changing(self) -> None:
        """From now on no snapshot is right."""
        if self._folder is None:
            return
        self._epoch += 1
        self._forget(list(self._headers))
        await self._engine.control("snapshot_fence", {"weights": None})

    async def weights_changed(self, sessions: Iterable[Session]) -> None:
        """Snapshots from before go; those from now on are of weights of which only this server knows."""
        if self._folder is None:
            return
        self._epoch += 1
        self._forget(list(self._headers))
        await self.forget([session.header for session in sessions])
        await self._engine.control("snapshot_fence", {"weights": f"+{secrets.token_hex(8)}"})

    def _forget(self, names: Iterable[SessionId]) -> None:
        for name in names:
            for table in (self._headers, self._covered, self._unchanged, self._not_before):
                table.pop(name, None)

    # ---- writing ----

    async def run(self, keeper: SessionKeeper) -> None:
        """Remove what belongs to no session, then write snapshots when nothing else is to be done; until cancelled."""
        if self._folder is None:
            return
        await self._clean(keeper, self._folder)
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                if (session := self._next(keeper)) is not None:
                    await self._write(keeper, self._folder, session)
            except (MemStoreError, OSError, RuntimeError) as error:
                logger.warning("writing a snapshot failed: %s", error)

    async def _clean(self, keeper: SessionKeeper, folder: SnapshotFolder) -> None:
        try:
            # First the files: a session that begins meanwhile must not lose its own.
            names = await asyncio.to_thread(folder.names)
            alive: set[SessionId] = set()
            last: SessionId | None = None
            while page := await keeper.in_thread(partial(keeper.log.headers, after=last)):
                alive.update(header.id for header in page)
                last = page[-1].id
            removed = await asyncio.to_thread(folder.remove_orphans, names, alive)
        except (MemStoreError, OSError, RuntimeError) as error:
            logger.warning("snapshots without a session are not looked for: %s", error)
            return
        if removed:
            logger.info("%d snapshots of sessions that have ended were removed", removed)

    def _next(self, keeper: SessionKeeper) -> Session | None:
        """The session used last of those that are to be written; None while callers' requests are in flight."""
        now, sessions = time.monotonic(), keeper.table.sessions()
        due: list[Session] = []
        for session in sessions:
            name = session.header.id
            head, since = self._unchanged.get(name, (None, now))
            if head is not session.head:
                since = now
                self._unchanged[name] = (session.head, now)
            if (
                session.is_pinned
                and session.lost is None
                and not session.is_busy
                and now - since >= self._quiet_s
                and now >= self._not_before.get(name, now)
                and self._lacks(session)
            ):
                due.append(session)
        if self._engine.foreground_requests() or self._engine.is_closing():
            return None
        return max(due, key=lambda session: session.header.used_at, default=None)

    def _lacks(self, session: Session) -> bool:
        missing = session.num_tokens - self.covered(session)
        return missing >= max(MIN_TOKENS, session.num_tokens // _REWRITE_SHARE)

    async def _write(self, keeper: SessionKeeper, folder: SnapshotFolder, session: Session) -> None:
        header, epoch = session.header, self._epoch
        name = _file_of(header)
        self._not_before[header.id] = time.monotonic() + _AGAIN_S
        size = session.num_tokens * self._bytes_per_token
        used = {other.header.id: other.header.used_at for other in keeper.table.sessions()}
        room = partial(folder.make_room, name, size, used_at=header.used_at, used=used)
        if (displaced := await asyncio.to_thread(room)) is None:
            return
        self._forget([session_id for file in displaced if (session_id := session_of(file)) is not None])
        salt = await keeper.salt(header.owner)
        payload = {"name": name, "token_ids": session.token_ids(), "salt": salt, "least_tokens": MIN_TOKENS}
        if session.state != "open" or epoch != self._epoch:
            return
        state = await self._engine.control("snapshot_write", payload)
        while state["state"] == "writing":
            await asyncio.sleep(_WRITTEN_YET_S)
            state = await self._engine.control("snapshot_state", {"name": name})
        if state["state"] == "failed":
            logger.warning("no snapshot of session %s was written: %s", header.id, state["error"])
        if state["state"] != "written":
            return
        if session.state != "open" or epoch != self._epoch:
            await self.forget([header])
            return
        self._forget([header.id])
        shape = tuple(state["shape"])
        self._headers[header.id] = SnapshotHeader(state["fingerprint"], state["tokens_digest"], shape, state["dtype"])
        self._metrics.snapshot("written")
        with suppress(OSError):
            folder.touch(name, header.used_at)


def _file_of(header: SessionHeader) -> str:
    return session_file(header.owner, header.id)
