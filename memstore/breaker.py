"""A circuit breaker: while something does not answer, callers are told at once instead of waiting for it in turn."""

import threading
import time
from collections.abc import Callable


class Breaker:
    """Lets calls through until one fails, then none for `rest_s`, then one at a time until one succeeds.

    ::

        closed ── failed() ──> open until now + rest_s ── may_call() after that ──> probing
          ^                      ^                                                   │  │
          └──────────────────────┼──────────────────── succeeded() ──────────────────┘  │
                                 └───────────────────── failed() ───────────────────────┘

    Thread-safe. Whoever got True from `may_call` reports `succeeded` or `failed`, or `released` where the call ended
    without showing which: then the next one may probe.
    """

    def __init__(self, rest_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest_s = rest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._opens_at: float | None = None
        self._probing = False

    def may_call(self) -> bool:
        """Return whether to try; False means that a call would most likely wait for nothing."""
        with self._lock:
            if self._opens_at is None:
                return True
            if self._probing or self._clock() < self._opens_at:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        """Let all calls through again."""
        with self._lock:
            self._opens_at = None
            self._probing = False

    def released(self) -> None:
        """Leave everything as it is, but for the probe, which somebody else may make."""
        with self._lock:
            self._probing = False

    def failed(self) -> None:
        """Let none through for `rest_s`, counted from now."""
        with self._lock:
            self._opens_at = self._clock() + self._rest_s
            self._probing = False
