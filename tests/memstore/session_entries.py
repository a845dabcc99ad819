"""Sessions of invented people, for tests of token logs."""

from collections.abc import Sequence

import numpy as np

from memstore.session_log import LogEntry, Segment, SegmentKind, SessionHeader, SessionId, SessionLog
from memstore.types import OwnerId

ANA, BO = OwnerId("ana"), OwnerId("bo")
ONE, TWO = SessionId("5c0e"), SessionId("77aa")
# No two neighbours of these are the same, and no 4 bytes of them come up by chance.
SECRET = (2_043_210_987, 1_876_543_219, 1_987_654_323, 2_111_111_117)
SECRET_BYTES = b"".join(token.to_bytes(4, "little") for token in SECRET)


def segment(*token_ids: int, kind: SegmentKind = "data") -> Segment:
    return Segment(np.array(token_ids, dtype=np.int32), kind)


def entry(version: int, *segments: Segment, base: int | None = None, keep: int | None = None) -> LogEntry:
    """One that builds on the version before with one segment, unless it says something else."""
    base = version - 1 if base is None else base
    return LogEntry(version, base, (1 if base else 0) if keep is None else keep, segments)


def header(session_id: SessionId = ONE, owner: OwnerId = ANA, *, used_at: float = 1000.0) -> SessionHeader:
    return SessionHeader(session_id, owner, model="model-a", created_at=1000.0, used_at=used_at)


def begun(log: SessionLog, session_id: SessionId = ONE, owner: OwnerId = ANA, *token_ids: int) -> SessionHeader:
    """A session with one version of one segment."""
    new = header(session_id, owner)
    log.create(new, entry(1, segment(*(token_ids or (1, 2, 3)), kind="prefix")))
    return new


def tokens(entries: Sequence[LogEntry]) -> list[list[list[int]]]:
    """Of each entry, of each segment."""
    return [[part.token_ids.tolist() for part in one.segments] for one in entries]
