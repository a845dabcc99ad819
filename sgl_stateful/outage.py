"""A store that does not answer: said once when it begins and once when it is over, however many calls fail between."""

from __future__ import annotations

import logging
import threading

from memstore import EmbedderMismatch, StoreBusy, StoreRefused, StoreTLSError, StoreUnreachable

OUTAGES = (StoreUnreachable, StoreRefused, StoreTLSError, StoreBusy, EmbedderMismatch)
"""Failures of the whole store, which no other request, owner or fact would do better in."""


class Outage:
    """Whether what ``what`` names fails at the moment. Thread-safe."""

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what = what
        self._logger = logger
        self._lock = threading.Lock()
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        """What is wrong now; None where nothing is."""
        return self._error

    def failed(self, error: str | Exception) -> None:
        """A call failed."""
        with self._lock:
            is_new, self._error = self._error is None, str(error)
        if is_new:
            self._logger.warning("%s: %s", self._what, error)

    def worked(self) -> None:
        """A call succeeded."""
        if self._error is None:
            return
        with self._lock:
            is_over, self._error = self._error is not None, None
        if is_over:
            self._logger.warning("%s: over", self._what)
