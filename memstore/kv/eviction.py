"""What may be evicted from a KV cache, and what first: holds, and the time of last use."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from memstore.types import EncodingId


class Holds:
    """Counted holds on encodings, of one process. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[EncodingId] = Counter()
        self._lock = threading.Lock()

    def acquire(self, encoding_ids: Iterable[EncodingId]) -> None:
        """Hold each once more."""
        with self._lock:
            self._counts.update(encoding_ids)

    def release(self, encoding_ids: Iterable[EncodingId]) -> None:
        """Hold each once less."""
        less = Counter(encoding_ids)
        with self._lock:
            for encoding_id, count in less.items():
                held = self._counts[encoding_id]
                assert held >= count, f"{encoding_id} is held {held} times, and released {count} times"
            self._counts -= less

    def __contains__(self, encoding_id: EncodingId) -> bool:
        return encoding_id in self._counts

    def __len__(self) -> int:
        return len(self._counts)


class Recency:
    """Stamps of last use that only grow, kept in memory until a write transaction takes them along. Thread-safe.

    A stamp is the time in nanoseconds, or one more than the newest stamp known where the clock was set back: so the
    stamps of several processes are in order, and in one process strictly.
    """

    def __init__(self, newest: int, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._newest = newest
        self._clock = clock
        self._pending: dict[EncodingId, int] = {}
        self._lock = threading.Lock()

    def stamp(self, newest: int = 0) -> int:
        """Return the stamp of a use right now, newer than every other one of this process, and than `newest`."""
        with self._lock:
            self._newest = max(self._clock(), self._newest + 1, newest + 1)
            return self._newest

    def use(self, encoding_id: EncodingId) -> None:
        """Stamp an encoding in memory."""
        stamp = self.stamp()
        with self._lock:
            self._pending[encoding_id] = stamp

    def pending(self) -> dict[EncodingId, int]:
        """Return the stamps that are in memory alone."""
        with self._lock:
            return dict(self._pending)

    def settle(self, written: Mapping[EncodingId, int]) -> None:
        """Forget stamps that are on disk now, but not of what was used again meanwhile."""
        with self._lock:
            for encoding_id, stamp in written.items():
                if self._pending.get(encoding_id) == stamp:
                    del self._pending[encoding_id]
