"""Snapshots of a server's sessions: which are to be written, which can be read back, and which have to go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

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
from .weights import Weights

if TYPE_CHECKING:
    from .keeper import SessionKeeper

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_WRITTEN_YET_S = 0.1
_QUIET_S = 5.0
_AGAIN_S = 60.0  # after it could not be
_REWRITE_SHARE = 8  # a snapshot that lacks one in so many tokens is made anew: the whole of it is written

_UNREADABLE = ("absent", "damaged", "other_tokens", "other_fingerprint", "failed")


class Present(NamedTuple):
    """Snapshots at one moment."""

    files: Sequence[str]
    sessions: Sequence[SessionId]


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
    weights
        None: those of the start.
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
        weights: Weights | None = None,
        quiet_s: float = _QUIET_S,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self.rates = Rates()
        self.weights = weights or Weights(engine)
        self._folder = folder
        self._engine = engine
        self._metrics = metrics
        self._fingerprint = fingerprint
        self._bytes_per_token = bytes_per_token
        self._quiet_s = quiet_s
        self._look_every_s = look_every_s
        self._headers: dict[SessionId, SnapshotHeader] = {}
        self._covered: dict[SessionId, tuple[Head, int]] = {}
        self._unchanged: dict[SessionId, tuple[Head, float]] = {}
        self._not_before: dict[SessionId, float] = {}

    async def start(self) -> None:
        """Find the snapshots that there are."""
        if self._folder is None:
            return
        epoch, weights = self.weights.epoch, self.weights.current
        if weights is None:
            return
        try:
            found = await asyncio.to_thread(self._folder.scan, self._fingerprint, weights=weights)
        except OSError as error:
            logger.warning("there are no snapshots of sessions: %s", error)
            return
        if epoch == self.weights.epoch:
            self._headers = found

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
        """Remove the snapshots of sessions that have ended, also one that is being written; nothing is left then.

        Raises
        ------
        OSError, RuntimeError
            A file cannot be removed, or the scheduler not be told to write none.
        """
        files = {header.id: _file_of(header) for header in headers}
        if files and self._folder is not None:
            self._forget(files)
            await self._engine.control("snapshot_drop", {"names": list(files.values())})
            await asyncio.to_thread(self._folder.remove, files.values())

    def forget_all(self) -> None:
        """Read no snapshot any more that there is now: weights are being changed."""
        self._forget(list(self._headers))

    def left(self, name: SessionId) -> None:
        """The session goes on elsewhere; its snapshot may still hold how it begins."""
        for table in (self._covered, self._unchanged, self._not_before):
            table.pop(name, None)

    async def present(self) -> Present:
        """Which snapshots there are; raises ``OSError``."""
        names = [] if self._folder is None else await asyncio.to_thread(self._folder.names)
        return Present(names, list(self._headers))

    async def remove_orphans(self, present: Present, alive: Collection[SessionId]) -> None:
        """Remove those whose session is not alive, and what was left half-written; raises ``OSError``."""
        self._forget([name for name in present.sessions if name not in alive])
        if self._folder is None:
            return
        if removed := await asyncio.to_thread(self._folder.remove_orphans, present.files, alive):
            logger.info("%d snapshots of sessions that have ended were removed", removed)

    def _forget(self, names: Iterable[SessionId]) -> None:
        for name in names:
            for table in (self._headers, self._covered, self._unchanged, self._not_before):
                table.pop(name, None)

    # ---- writing ----

    async def run(self, keeper: SessionKeeper) -> None:
        """Write snapshots when nothing else is to be done; until cancelled."""
        while self._folder is not None:
            await asyncio.sleep(self._look_every_s)
            try:
                await self.weights.settle()
                if (session := self._next(keeper)) is not None:
                    await self._write(keeper, self._folder, session)
            except (MemStoreError, OSError, RuntimeError) as error:
                logger.warning("writing a snapshot failed: %s", error)
            except Exception:
                # The serving boundary: otherwise no snapshot would be written any more.
                logger.exception("writing a snapshot failed")

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
        return session.num_tokens - self.covered(session) >= _least_missing(session)

    async def _write(self, keeper: SessionKeeper, folder: SnapshotFolder, session: Session) -> None:
        header, epoch = session.header, self.weights.epoch
        name = _file_of(header)
        self._not_before[header.id] = time.monotonic() + _AGAIN_S
        await keeper.pins.look([session])
        if session.lost is not None:
            self._not_before.pop(header.id, None)  # its next use brings it back
            return
        least = self.covered(session) + _least_missing(session)
        salt = await keeper.salt(header.owner)
        payload = {"name": name, "token_ids": session.token_ids(), "salt": salt, "least_tokens": least}
        state = await self._engine.control("snapshot_write", {**payload, "look": True})
        if state["state"] != "in_pool" or session.state != "open" or epoch != self.weights.epoch:
            return
        size = state["tokens"] * self._bytes_per_token
        used = {other.header.id: other.header.used_at for other in keeper.table.sessions()}
        room = partial(folder.make_room, name, size, used_at=header.used_at, used=used)
        if (displaced := await asyncio.to_thread(room)) is None:
            return
        self._forget([session_id for file in displaced if (session_id := session_of(file)) is not None])
        self._not_before[header.id] = time.monotonic() + _AGAIN_S
        if session.state != "open" or epoch != self.weights.epoch:
            return
        state = await self._engine.control("snapshot_write", payload)
        while state["state"] == "writing":
            await asyncio.sleep(_WRITTEN_YET_S)
            state = await self._engine.control("snapshot_state", {"name": name})
        if state["state"] == "failed":
            logger.warning("no snapshot of session %s was written: %s", header.id, state["error"])
        if state["state"] != "written":
            return
        if session.state != "open" or epoch != self.weights.epoch:
            await self.forget([header])
            return
        self._forget([header.id])
        shape = tuple(state["shape"])
        self._headers[header.id] = SnapshotHeader(state["fingerprint"], state["tokens_digest"], shape, state["dtype"])
        self._metrics.snapshot("written")
        with suppress(OSError):
            folder.touch(name, header.used_at)


def _least_missing(session: Session) -> int:
    """How many tokens a snapshot has to lack before it is written anew."""
    return max(MIN_TOKENS, session.num_tokens // _REWRITE_SHARE)


def _file_of(header: SessionHeader) -> str:
    return session_file(header.owner, header.id)
