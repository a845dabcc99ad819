"""The sessions of one server as a state machine: what may happen to them, in which order, and what it costs.

::

                    plan ──► commit ──┐
    open ──────► open ◄──── abandon ◄─┘
                  │ │
                  │ └─ close ──► closed
                  └─── expire ─► expired

No I/O and no engine: time comes from a clock, and what is to happen to pins is handed out to be done. A change is
first planned, which claims its cells; then whoever asked for it prefills and logs it, and commits or abandons it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from memstore.session_log import LogEntry, Segment, SessionHeader, SessionId
from sgl_stateful.errors import (
    BadSessionRequest,
    PinNumbers,
    PinRefused,
    SessionClosed,
    SessionExpired,
    SessionNotFound,
    SessionTooLong,
    SessionVersionConflict,
)

from .chain import Head, extend, first, num_segments, num_tokens, segments
from .ledger import Ledger
from .session import Change, Session
from .window import Moved, move

_REMEMBERED = 10_000  # sessions that have ended, so that their callers are told how


class SessionTable:
    """Sessions by id.

    Parameters
    ----------
    max_tokens
        The longest session, tokens.
    versions
        How many of a session can be gone back to.
    clock
        Seconds since 1970.
    """

    def __init__(self, *, ledger: Ledger, max_tokens: int, versions: int, clock: Callable[[], float]) -> None:
        self.ledger = ledger
        self.max_tokens = max_tokens
        self.versions = versions
        self._clock = clock
        self._sessions: dict[SessionId, Session] = {}
        self._ended: OrderedDict[SessionId, tuple[str, Literal["closed", "expired"]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def sessions(self, owner: str | None = None) -> list[Session]:
        """All that are open, or an owner's, by id."""
        found = self._sessions.values()
        return sorted((s for s in found if owner in (None, s.header.owner)), key=lambda s: s.header.id)

    def knows(self, session_id: str) -> bool:
        """Whether the session is here, or was and has ended."""
        return session_id in self._sessions or session_id in self._ended

    def get(self, session_id: str, *, owner: str | None) -> Session:
        """The session, alive.

        Parameters
        ----------
        owner
            Who asks; None: whoever knows the id.

        Raises
        ------
        SessionNotFound
            There is none of that owner.
        SessionClosed, SessionExpired
            There was one.
        """
        name = SessionId(session_id)
        session = self._sessions.get(name)
        if session is None:
            of, how = self._ended.get(name, (None, "closed"))
            if of is None or owner not in (None, of):
                raise SessionNotFound("there is no such session of this owner")
            raise (SessionClosed if how == "closed" else SessionExpired)(f"the session has {_ENDED[how]}")
        if owner not in (None, session.header.owner):
            raise SessionNotFound("there is no such session of this owner")
        if session.ended_by(self._clock()) is not None:
            raise SessionExpired("the session has expired")
        return session

    # ---- beginning and end ----

    def open(self, header: SessionHeader, added: Sequence[Segment], *, base: Head = None) -> Change:
        """Plan a new session whose first version holds ``base`` and ``added``; its cells are claimed.

        Raises
        ------
        PinRefused
            It does not fit, and is not to be demoted.
        SessionTooLong
        """
        head = extend(base, added, owner=header.owner)
        self._check_length(head)
        session = Session(header, version=0, head=None, versions=OrderedDict())
        session.changing = True
        entry = LogEntry(1, 0, 0, tuple(segments(head)))
        demoted, _ = self._claim(session, head)
        return Change(session, entry, head, demoted, appended_tokens=sum(map(len, added)))

    def restore(self, header: SessionHeader, entries: Sequence[LogEntry]) -> Session:
        """A session from its log: its KV is not in the pool, and its cells are not counted before it is used."""
        versions: OrderedDict[int, Head] = OrderedDict()
        for entry in entries:
            base = first(versions[entry.base], entry.keep) if entry.base else None
            versions[entry.version] = extend(base, entry.segments, owner=header.owner)
        last = entries[-1].version
        while len(versions) > self.versions:
            versions.popitem(last=False)
        session = Session(header, last, versions[last], versions, lost="restarted", logged=len(entries))
        session.is_dormant = True
        self._sessions[header.id] = session
        return session

    def wake(self, session: Session) -> None:
        """Count a restored session's cells, as it is about to be used; demoted where its pin does not fit any more."""
        if not session.is_dormant:
            return
        session.is_dormant = False
        if session.header.is_pinned:
            self.pin(session, demote=True)

    def is_here(self, session: Session) -> bool:
        """Whether this very object is the session of its id."""
        return self._sessions.get(session.header.id) is session

    def close(self, session: Session, *, how: Literal["closed", "expired"] = "closed") -> None:
        """End a session; its cells are free, and changes under way can no longer be committed."""
        session.state = how
        self._sessions.pop(session.header.id, None)
        self._ended[session.header.id] = (session.header.owner, how)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self.ledger.release(session.header.id)

    def forget(self, session: Session) -> None:
        """Drop the copy of a session that goes on elsewhere."""
        self.close(session)
        self._ended.pop(session.header.id, None)

    def expired(self) -> list[tuple[Session, Literal["idle", "age"]]]:
        """Those whose life has ended and on which nothing runs any more."""
        now = self._clock()
        ended = [(session, session.ended_by(now)) for session in self._sessions.values() if not session.is_busy]
        return [(session, why) for session, why in ended if why is not None]

    # ---- changes ----

    def append(self, session: Session, added: Sequence[Segment], *, if_version: int | None = None) -> Change:
        """Plan a version with more data; the oldest leaves where there is a window.

        Raises
        ------
        SessionVersionConflict, SessionTooLong, PinRefused
        """
        self._check_version(session, if_version)
        moved = Moved(num_segments(session.head), [], 0, 0)
        if (window := session.header.window_tokens) is not None:
            moved = move(segments(session.head), added, window_tokens=window)
        change = self._plan(session, session.version, moved.keep, (*moved.again, *added))
        change.appended_tokens = sum(map(len, added))
        change.dropped_messages, change.dropped_tokens = moved.dropped_messages, moved.dropped_tokens
        return change

    def rewind(self, session: Session, version: int, *, if_version: int | None = None) -> Change:
        """Plan a version with the content of an earlier one.

        Raises
        ------
        BadSessionRequest
            That version is not kept, or never was.
        SessionVersionConflict, PinRefused
        """
        self._check_version(session, if_version)
        return self._plan(session, version, num_segments(self.at(session, version)), ())

    def forget_versions(self, session: Session) -> None:
        """Let go of all versions but the present one, which is all that the log has."""
        session.versions.clear()
        session.versions[session.version] = session.head
        session.logged = 1

    def at(self, session: Session, version: int) -> Head:
        """What the session held at a version; raises ``BadSessionRequest`` where that is not kept."""
        if version not in session.versions:
            oldest = next(iter(session.versions))
            raise BadSessionRequest(f"version {version} is not kept: there are {oldest} to {session.version}")
        return session.versions[version]

    def commit(self, change: Change) -> None:
        """Make a planned change the session's state; it is in the log.

        Raises
        ------
        SessionClosed, SessionExpired
            The session has ended meanwhile.
        """
        session = change.session
        session.changing = False
        if session.state != "open":
            self.abandon(change)
            raise (SessionClosed if session.state == "closed" else SessionExpired)(
                f"the session has {_ENDED[session.state]}"
            )
        is_new = session.version == 0
        session.version, session.head = change.entry.version, change.head
        session.versions[session.version] = change.head
        while len(session.versions) > self.versions:
            session.versions.popitem(last=False)
        session.demoted = change.demoted
        session.logged += 1
        session.dropped_messages += change.dropped_messages
        session.dropped_tokens += change.dropped_tokens
        self.settle(session)
        if is_new:
            self._sessions[session.header.id] = session
        else:
            self.touch(session)

    def abandon(self, change: Change) -> None:
        """Give a planned change up; the session is what it was."""
        change.session.changing = False
        self.settle(change.session)

    def touch(self, session: Session) -> None:
        """Begin the session's idle time anew."""
        session.header = session.header.used(max(self._clock(), session.header.used_at))

    # ---- pins ----

    def pin(self, session: Session, *, demote: bool = False) -> None:
        """Count the session's cells from now on.

        Raises
        ------
        PinRefused
            They do not fit, and it is not to be demoted; it is as before.
        """
        assert not session.changing, session.header.id
        header, was_pinned = session.header, session.is_pinned
        try:
            self.ledger.claim(header.id, header.owner, session.head, reserve_tokens=header.reserve_tokens)
            session.demoted = None
        except PinRefused as refused:
            if not demote:
                raise
            session.demoted = refused.numbers
        session.header = replace(header, is_pinned=True)
        if not was_pinned and session.lost is None:
            session.lost = "not pinned before"

    def unpin(self, session: Session) -> None:
        """Count them no longer."""
        assert not session.changing, session.header.id
        self.ledger.release(session.header.id)
        session.header = replace(session.header, is_pinned=False)
        session.demoted, session.lost = None, None

    def _plan(self, session: Session, base: int, keep: int, added: tuple[Segment, ...]) -> Change:
        assert not session.changing, f"two changes of {session.header.id} at once"
        head = extend(first(session.versions[base], keep), added, owner=session.header.owner)
        self._check_length(head)
        demoted, gives_way = self._claim(session, head)
        session.changing = True
        return Change(session, LogEntry(session.version + 1, base, keep, added), head, demoted, gives_way)

    def _claim(self, session: Session, head: Head) -> tuple[PinNumbers | None, bool]:
        """Claim the cells of the next state beside those of the present one, or alone where both do not fit.

        Returns why they are not claimed, and whether they are claimed alone.
        """
        header = session.header
        if not header.is_pinned:
            return None, False
        present = (session.head,) if session.is_pinned else ()
        try:
            self.ledger.claim(header.id, header.owner, *present, head, reserve_tokens=header.reserve_tokens)
        except PinRefused as refused:
            try:
                self.ledger.claim(header.id, header.owner, head, reserve_tokens=header.reserve_tokens)
            except PinRefused:
                if header.on_full == "refuse":
                    raise refused from None
                return refused.numbers, False
            return None, True
        return None, False

    def reserve(self, session: Session, growth: int) -> PinNumbers | None:
        """Claim cells for what a turn will add, tokens at most; returns why they are not claimed. Ends with ``settle``.

        Raises
        ------
        PinRefused
            They do not fit, and the session is not to be demoted.
        """
        header = session.header
        if not session.is_pinned:
            return None
        reserve = max(header.reserve_tokens, session.num_tokens + growth)
        try:
            self.ledger.claim(header.id, header.owner, session.head, reserve_tokens=reserve)
        except PinRefused as refused:
            if header.on_full == "refuse":
                raise
            return refused.numbers
        return None

    def settle(self, session: Session) -> None:
        """Claim what the session holds now, and nothing else."""
        header = session.header
        if not session.is_pinned or session.version == 0 or session.state != "open":
            self.ledger.release(header.id)
            return
        try:
            self.ledger.claim(header.id, header.owner, session.head, reserve_tokens=header.reserve_tokens)
        except PinRefused as refused:
            # It had given way for a change that was abandoned, and others were quicker.
            self.ledger.release(header.id)
            session.demoted = refused.numbers

    def _check_version(self, session: Session, if_version: int | None) -> None:
        if if_version not in (None, session.version):
            raise SessionVersionConflict(f"the session has version {session.version}, not {if_version}")

    def _check_length(self, head: Head) -> None:
        if (length := num_tokens(head)) > self.max_tokens:
            raise SessionTooLong(
                f"the session would have {length} tokens; the limit of this server is {self.max_tokens}"
            )


_ENDED = {"closed": "been closed", "expired": "expired"}
