"""Waiting for a server to have encoded what it was given."""

from __future__ import annotations

import time
from collections.abc import Callable

from locomo.errors import ServerFailed

_POLL_S = 0.5
_STALLED_S = 120.0


def wait_for_encodings(pending: Callable[[], int], on_progress: Callable[[int, int], None]) -> None:
    """Return once nothing is pending; ``on_progress`` is told how many are done, and of how many.

    Raises
    ------
    ServerFailed
        Some are missing and none was made for two minutes.
    """
    total, last, moved_at = 0, -1, time.monotonic()
    while left := pending():
        if left != last:
            last, moved_at = left, time.monotonic()
        elif time.monotonic() - moved_at > _STALLED_S:
            raise ServerFailed(f"{left} encodings are missing and none was made for {_STALLED_S:.0f} s")
        total = max(total, left)
        on_progress(total - left, total)
        time.sleep(_POLL_S)
    on_progress(total, total)
