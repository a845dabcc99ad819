"""Finding the facts of a request without ever holding it up for long.

Requests wait on threads of their own, so that a store that hangs takes none of those on which SGLang converts every
request, and they wait for a bounded time. While the store does not answer, they go without.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from memstore import InvalidInput, MemStore, MemStoreError, SearchHit
from memstore.breaker import Breaker
from sgl_stateful.errors import BadMemoryRequest
from sgl_stateful.outage import OUTAGES, Outage
from sgl_stateful.params import MemoryParams
from sgl_stateful.salts import Salts

logger = logging.getLogger(__name__)

_REST_S = 5.0
_EPOCHS = 10_000


class Retrieved(NamedTuple):
    """What the store had for one request."""

    salt: str
    hits: Sequence[SearchHit]
    failure: str | None
    """Why there are no hits although the request asked for some; None where nothing failed."""

    ms: float


class Retriever:
    """Searches the store for requests.

    Parameters
    ----------
    threads
        Searches at once.
    timeout_s
        How long one may take.
    """

    def __init__(self, store: MemStore, salts: Salts, *, threads: int, timeout_s: float) -> None:
        self._store = store
        self._salts = salts
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="sgl-stateful retrieval")
        self._turns = asyncio.Semaphore(threads)
        self._breaker = Breaker(_REST_S)
        self._outage = Outage("retrieval fails, requests are served without facts", logger)
        self._epochs: OrderedDict[str, int] = OrderedDict()

    async def find(self, params: MemoryParams, query: str) -> Retrieved:
        """Return the facts that a request asks for, or none after `timeout_s`; to be called on the event loop.

        Raises
        ------
        BadMemoryRequest
            An owner, query or filter that the store refuses.
        """
        started = time.perf_counter()
        asked_at: float | None = None
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                if not self._breaker.may_call():
                    return self._failed(params.owner, "timeout", started)
                asked_at = time.perf_counter()
                loop = asyncio.get_running_loop()
                found, error = await loop.run_in_executor(self._threads, self._search, params, query)
        except TimeoutError:
            self._timed_out(asked_at)
            return self._failed(params.owner, "timeout", started)
        except BaseException:
            # Refused by name, or the caller has gone: that says nothing about the store.
            if asked_at is not None:
                self._breaker.released()
            raise
        # Not in the thread: what comes after the time is up must not count as an answer.
        self._breaker.succeeded()
        self._note(error)
        return found._replace(ms=1e3 * (time.perf_counter() - started))

    def _timed_out(self, asked_at: float | None) -> None:
        """Hold the store to be slow where most of the time went by after it was asked, not while others were served."""
        if asked_at is None:
            return
        if time.perf_counter() - asked_at >= self._timeout_s / 2:
            self._breaker.failed()
            self._outage.failed(f"the store took longer than {self._timeout_s:g} s")
        else:
            self._breaker.released()

    def find_here(self, params: MemoryParams, query: str) -> Retrieved:
        """Return the facts that a request asks for, in this thread, for as long as the store takes."""
        found, error = self._search(params, query)
        self._note(error)
        return found

    def _note(self, error: MemStoreError | None) -> None:
        if error is None:
            self._outage.worked()
        elif isinstance(error, OUTAGES):
            self._outage.failed(error)
        else:
            logger.error("retrieval failed; serving without facts", exc_info=error)

    def _search(self, params: MemoryParams, query: str) -> tuple[Retrieved, MemStoreError | None]:
        started = time.perf_counter()
        hits: list[SearchHit] = []
        try:
            salt = self._salts.of(params.owner, self._epoch(params.owner))
            if params.mode == "off":
                pass
            elif params.facts is not None:
                named = self._store.get_many(params.owner, tuple(dict.fromkeys(params.facts)))
                hits = [SearchHit(fact, 0.0, 0.0) for fact in named]
            elif params.k > 0:
                hits = self._store.search(
                    params.owner,
                    params.query or query,
                    k=params.k,
                    min_score=params.min_score,
                    where=params.where,
                    mode=params.search,
                )
        except InvalidInput as error:
            raise BadMemoryRequest(f"custom_params.memory: {error}") from error
        except MemStoreError as error:
            return self._failed(params.owner, type(error).__name__, started), error
        return Retrieved(salt, hits, None, 1e3 * (time.perf_counter() - started)), None

    def forget(self, owner: str) -> None:
        """The owner's epoch is over."""
        self._epochs.pop(owner, None)

    def close(self) -> None:
        """Wait for the searches under way, which may write to the stores, and begin no more."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _epoch(self, owner: str) -> int:
        epoch = self._epochs[owner] = self._store.epoch(owner)
        while len(self._epochs) > _EPOCHS:
            self._epochs.popitem(last=False)
        return epoch

    def _failed(self, owner: str, failure: str, started: float) -> Retrieved:
        # The epoch last seen, so that a conversation stays cached while the store is away.
        epoch = self._epochs.get(owner)
        salt = self._salts.named(f"degraded:{owner}") if epoch is None else self._salts.of(owner, epoch)
        return Retrieved(salt, (), failure, 1e3 * (time.perf_counter() - started))
