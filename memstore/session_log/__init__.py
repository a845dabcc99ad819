"""Sessions' token logs, beside the facts: on SQLite, on Redis, or in this process alone."""

from memstore.session_log.base import (
    LogEntry,
    OnFull,
    Segment,
    SegmentKind,
    SessionHeader,
    SessionId,
    SessionLog,
    TokenIds,
)

__all__ = ["LogEntry", "OnFull", "Segment", "SegmentKind", "SessionHeader", "SessionId", "SessionLog", "TokenIds"]
