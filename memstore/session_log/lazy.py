"""A store's token log, opened when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from memstore.errors import StoreClosed
from memstore.session_log import SessionLog, may_have_sessions, open_session_log
from memstore.settings import MemStoreSettings
from memstore.types import OwnerId


class LazySessionLog:
    """Opens the token log of the store at `location` once, whichever thread is the first to ask for it."""

    def __init__(self, location: str | Path, settings: MemStoreSettings) -> None:
        # Inside functions, where no repr shows a password.
        self._open: Callable[[], SessionLog] = lambda: open_session_log(location, settings)
        self._may_have_sessions: Callable[[], bool] = lambda: may_have_sessions(location)
        self._lock = threading.Lock()
        self._log: SessionLog | None = None
        self._closed = False

    def get(self) -> SessionLog:
        """Return the log; raise `StoreClosed` after `close`, or what opening it raises."""
        with self._lock:
            if self._closed:
                raise StoreClosed("the store has been closed: open a new one")
            if self._log is None:
                self._log = self._open()
            return self._log

    def purge(self, owner: OwnerId) -> int:
        """Remove every session of an owner; return how many. Begins no log."""
        if self._log is None and not self._may_have_sessions():
            return 0
        return self.get().purge(owner)

    def close(self) -> None:
        """Close the log where it is open; may be called twice."""
        with self._lock:
            self._closed = True
            if self._log is not None:
                self._log.close()
