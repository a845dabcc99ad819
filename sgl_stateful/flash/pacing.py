"""How much of the time in which callers' requests run may be spent on evaluating."""

from __future__ import annotations

from collections.abc import Callable

_QUANTUM_S = 0.1  # saved up before something begins: what is broken off after a moment was in vain
_MOST_SAVED_S = 1.0  # a long rush is not followed by a long burst


class Pacer:
    """Credit of seconds, earned and spent while callers' requests are in flight; time without them is free.

    Parameters
    ----------
    busy_share
        How much is earned in a second of that time; 0: nothing.
    clock
        Seconds.
    rest_s
        How long there have to be no callers' requests before something begins: whoever asks one question after the
        other is not met by an evaluation each time.

    Attributes
    ----------
    used_s
        Seconds in which something was evaluated, of either kind of time.
    """

    def __init__(self, busy_share: float, clock: Callable[[], float], *, rest_s: float = 0.0) -> None:
        self._share = busy_share
        self._clock = clock
        self._at = clock()
        self._rest_s = rest_s
        self._idle_at = self._at - rest_s
        self._is_busy = self._is_running = False
        self._credit_s = 0.0
        self.used_s = 0.0

    def busy(self, is_busy: bool) -> None:
        """Callers' requests are in flight from now on, or no more."""
        self._pass()
        if self._is_busy and not is_busy:
            self._idle_at = self._at
        self._is_busy = is_busy

    def running(self, is_running: bool) -> None:
        """Something is being evaluated from now on, or no more."""
        self._pass()
        self._is_running = is_running

    def wait_s(self) -> float | None:
        """How long from now until something may begin; None: not before callers' requests have ended."""
        self._pass()
        if not self._is_busy:
            return max(self._idle_at + self._rest_s - self._at, 0.0)
        if self._share <= 0:
            return None
        return max((_QUANTUM_S - self._credit_s) / self._share, 0.0)

    def left_s(self) -> float | None:
        """How long what runs may go on; None: for as long as it takes."""
        self._pass()
        if not self._is_busy or self._share >= 1:
            return None
        return max(self._credit_s / (1 - self._share), 0.0)

    def _pass(self) -> None:
        now = self._clock()
        passed, self._at = now - self._at, now
        if self._is_running:
            self.used_s += passed
        if self._is_busy:
            spent_s = passed if self._is_running else 0.0
            self._credit_s = min(self._credit_s + self._share * passed, _MOST_SAVED_S) - spent_s
