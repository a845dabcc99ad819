"""One session as the server has it in memory, and a change to it that has not happened yet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from memstore.session_log import LogEntry, SessionHeader
from sgl_stateful.errors import PinNumbers

from .chain import Head, num_tokens, root_key, token_ids

State = Literal["open", "closed", "expired"]
PinState = Literal["pinned", "lost", "unpinned"]


@dataclass(slots=True)
class Session:
    """A session.

    Attributes
    ----------
    version
        Of what it holds now.
    versions
        What it held at each version that can be reached, the oldest first.
    demoted
        Why it is not pinned although it is to be; None: it is, or nobody asked.
    lost
        Why its KV has left the pool although it is pinned, as far as that is known; the next use prefills it.
    is_dormant
        Whether it came from the log and has not been used here: its cells are not counted yet.
    fence
        Of its queries: grows with every change, so that one that began before does not move the pin back.
    uses
        Queries and turns that are being answered.
    turning
        Whether one of them is a turn.
    changing
        Whether a change is planned and neither committed nor abandoned.
    waiting
        Appends that wait or are under way.
    logged
        Entries of the log.
    """

    header: SessionHeader
    version: int
    head: Head
    versions: OrderedDict[int, Head]
    state: State = "open"
    demoted: PinNumbers | None = None
    lost: str | None = None
    is_dormant: bool = False
    fence: int = 0
    uses: int = 0
    turning: bool = False
    changing: bool = False
    waiting: int = 0
    logged: int = 0
    queue_dropped: int = 0
    dropped_messages: int = 0
    dropped_tokens: int = 0
    _ids: list[int] | None = field(default=None, repr=False)
    _ids_of: Head = field(default=None, repr=False)

    @property
    def is_pinned(self) -> bool:
        """Whether its cells are counted, and its KV is to be in the pool."""
        return self.header.is_pinned and self.demoted is None and not self.is_dormant

    @property
    def pin_state(self) -> PinState:
        """As callers see it."""
        if self.is_dormant and self.header.is_pinned:
            return "lost"
        if not self.is_pinned:
            return "unpinned"
        return "lost" if self.lost is not None else "pinned"

    @property
    def is_busy(self) -> bool:
        """Whether something runs on it; then it does not count as idle."""
        return self.uses > 0 or self.changing or self.waiting > 0

    @property
    def num_tokens(self) -> int:
        """Tokens it holds."""
        return num_tokens(self.head)

    @property
    def group(self) -> str:
        """Shared by all sessions that begin alike."""
        return root_key(self.head).hex()

    def token_ids(self) -> list[int]:
        """The ids of what it holds now; not to be changed."""
        if self._ids is None or self._ids_of is not self.head:
            self._ids, self._ids_of = token_ids(self.head).tolist(), self.head
        return self._ids

    def expires_at(self) -> float | None:
        """When it ends unless it is used: seconds since 1970; None: never."""
        return self.header.ends_at()

    def ended_by(self, now: float) -> Literal["idle", "age"] | None:
        """What has ended its life by now. Whoever is busy is not idle."""
        header = self.header
        if header.max_age_s is not None and now >= header.created_at + header.max_age_s:
            return "age"
        if header.ttl_s is not None and not self.is_busy and now >= header.used_at + header.ttl_s:
            return "idle"
        return None

    def as_dict(self, *, cells: int) -> dict[str, Any]:
        """As the API shows it."""
        header = self.header
        reason = None
        if self.demoted is not None:
            reason = {name: getattr(self.demoted, name) for name in PinNumbers.__dataclass_fields__}
        window, parent = None, None
        if header.window_tokens is not None:
            window = {
                "tokens": header.window_tokens,
                "dropped_messages": self.dropped_messages,
                "dropped_tokens": self.dropped_tokens,
            }
        if header.parent is not None:
            parent = {"id": header.parent, "version": header.parent_version}
        return {
            "id": header.id,
            "owner": header.owner,
            "state": self.state,
            "version": self.version,
            "tokens": self.num_tokens,
            "pin": {"state": self.pin_state, "cells": cells, "reason": reason or self.lost},
            "ttl_s": header.ttl_s,
            "max_age_s": header.max_age_s,
            "created_at": header.created_at,
            "used_at": header.used_at,
            "expires_at": self.expires_at(),
            "priority": header.priority,
            "reserve_tokens": header.reserve_tokens,
            "on_full": header.on_full,
            "window": window,
            "queue": {"waiting": self.waiting, "dropped": self.queue_dropped},
            "parent": parent,
        }


@dataclass(slots=True)
class Change:
    """The next version of a session: its cells are claimed, and nothing else has happened.

    Attributes
    ----------
    entry
        As it is written to the log.
    head
        What the session holds afterwards.
    demoted
        Why it will not be pinned.
    gives_way
        Whether the former content has to leave the pool first: both at once do not fit.
    appended_tokens
        New ones, those that are prefilled once more at other positions not included.
    """

    session: Session
    entry: LogEntry
    head: Head
    demoted: PinNumbers | None
    gives_way: bool = False
    appended_tokens: int = 0
    dropped_messages: int = 0
    dropped_tokens: int = 0

    @property
    def pin(self) -> bool:
        """Whether the change is to be pinned."""
        return self.session.header.is_pinned and self.demoted is None

    def token_ids(self) -> list[int]:
        """The ids of what the session holds afterwards."""
        ids = self.session.token_ids()
        if self.head is not None and self.head.parent is self.session.head:
            return [*ids, *np.asarray(self.head.segment.token_ids).tolist()]
        return list(token_ids(self.head).tolist())


class Made(NamedTuple):
    """A change that was made, and what it took."""

    session: Session
    change: Change
    prefilled_tokens: int
    cached_tokens: int
    ms: float
