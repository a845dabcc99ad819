"""Callers' requests in flight: what all of the server's own work gives way to."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[bool], None]


class Foreground:
    """Counts requests, and tells when there are some and when there are none. Of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Have a listener called: with True before the first request is sent, with False after the last."""
        self._listeners.append(listener)

    def began(self) -> None:
        """A request has come."""
        self.count += 1
        if self.count == 1:
            self._tell(is_busy=True)

    def ended(self) -> None:
        """One has come to its end."""
        assert self.count > 0, "the end of a request that has not begun"
        self.count -= 1
        if self.count == 0:
            self._tell(is_busy=False)

    def _tell(self, *, is_busy: bool) -> None:
        for listener in self._listeners:
            listener(is_busy)
