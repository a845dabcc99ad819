"""The data region: which of a session's messages leave when new ones come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memstore.session_log import Segment
from sgl_stateful.errors import SessionTooLong


class Moved(NamedTuple):
    """What stays of a session.

    ``keep`` counts the segments in front whose KV stays valid; ``again`` are those that stay behind a gap, whose
    positions change, so that they are prefilled once more.
    """

    keep: int
    again: list[Segment]
    dropped_messages: int
    dropped_tokens: int


def move(present: Sequence[Segment], new: Sequence[Segment], *, window_tokens: int) -> Moved:
    """Make room for ``new`` by dropping the oldest data.

    Where something has to go, half of the window is emptied: what stays has to be prefilled at its new positions, and
    moving the window with every message would prefill all of it every time. So each token is prefilled about twice.

    Raises
    ------
    SessionTooLong
        The new data alone is longer than the window.
    """
    data = [segment for segment in present if segment.kind == "data"]
    prefix = len(present) - len(data)
    coming = sum(map(len, new))
    held = sum(map(len, data))
    if held + coming <= window_tokens:
        return Moved(len(present), [], 0, 0)
    if coming > window_tokens:
        raise SessionTooLong(f"{coming} tokens at once do not fit a window of {window_tokens}")
    room = max(window_tokens // 2, coming)
    dropped = dropped_tokens = 0
    while held - dropped_tokens + coming > room:
        dropped_tokens += len(data[dropped])
        dropped += 1
    return Moved(prefix, data[dropped:], dropped, dropped_tokens)
