"""Sessions for tests: headers, segments, a clock, and cells counted from their definition."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from memstore import OwnerId
from memstore.session_log import Segment, SegmentKind, SessionHeader, SessionId
from sgl_stateful.sessions.ledger import Ledger
from sgl_stateful.sessions.table import SessionTable

ANA, BO = "ana", "bo"


class Clock:
    """Seconds, as a test sets them."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def header(name: str, owner: str = ANA, *, clock: Clock | None = None, **more: Any) -> SessionHeader:
    now = (clock or Clock()).now
    return SessionHeader(SessionId(name), OwnerId(owner), "model", created_at=now, used_at=now, **more)


def segment(*token_ids: int, kind: SegmentKind = "data") -> Segment:
    return Segment(np.array(token_ids, dtype=np.int32), kind)


def table(*, budget: int = 1000, quota: int | None = None, clock: Clock | None = None, **more: Any) -> SessionTable:
    values: dict[str, Any] = {"max_tokens": 500, "versions": 100, **more}
    ledger = Ledger(budget=budget, quota=budget if quota is None else quota)
    return SessionTable(ledger=ledger, clock=clock or Clock(), **values)


Contents = Iterable[tuple[str, Sequence[tuple[int, ...]], int]]


def cells_of(contents: Contents) -> int:
    """Cells of contents ``(owner, segments, reserve_tokens)``, those in common counted once."""
    seen: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()
    spare = 0
    for owner, segments, reserve in contents:
        for end in range(1, len(segments) + 1):
            seen.add((owner, tuple(segments[:end])))
        spare += max(0, reserve - sum(map(len, segments)))
    return spare + sum(len(path[-1]) for _, path in seen)
