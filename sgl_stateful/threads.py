"""Threads that wait for the stores, in groups that do not hold each other up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

_BACKGROUND = 4
_WRITES = 4


class StoreThreads:
    """The threads of one server.

    Attributes
    ----------
    requests
        For what a caller waits for and is answered soon.
    background
        For the feed and the encoder: whatever callers do, both go on.
    writes
        For what may take half a minute: purges, and many facts to embed.
    """

    def __init__(self, requests: int) -> None:
        self.requests = ThreadPoolExecutor(requests, thread_name_prefix="sgl-stateful store")
        self.background = ThreadPoolExecutor(_BACKGROUND, thread_name_prefix="sgl-stateful background")
        self.writes = ThreadPoolExecutor(_WRITES, thread_name_prefix="sgl-stateful writes")

    def close(self) -> None:
        """Begin nothing more, and wait for what has begun."""
        for threads in (self.requests, self.background, self.writes):
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in (self.requests, self.background, self.writes):
            threads.shutdown(wait=True)
