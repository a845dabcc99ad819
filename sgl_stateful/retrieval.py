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
        async with self._turns:
            started = time.perf_counter()
            if not self._breaker.may_call():
                return self._failed(params.owner, "timeout", started)
            found = None
            try:
                async with asyncio.timeout(self._timeout_s):
                    loop = asyncio.get_running_loop()
                    found = await loop.run_in_executor(self._threads, self.find_here, params, query)
            except TimeoutError:
                self._breaker.failed()
                self._outage.failed(f"the store took longer than {self._timeout_s:g} s")
                return self._failed(params.owner, "timeout", started)
            except BaseException:
                # Refused by name, or the caller has gone: the store is not to blame.
                self._breaker.succeeded()
                raise
            self._breaker.succeeded()
            return found

    def find_here(self, params: MemoryParams, query: str) -> Retrieved:
        """Return the facts that a request asks for, in this thread, for as long as the store takes."""
        started = time.perf_counter()
        hits: list[SearchHit] = []
        try:
            salt = self._salts.of(params.owner, self._epoch(params.owner))
            if params.mode != "off" and params.k > 0:
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
        except OUTAGES as error:
            self._outage.failed(error)
            return self._failed(params.owner, type(error).__name__, started)
        except MemStoreError as error:
            logger.exception("retrieval failed; serving without facts")
            return self._failed(params.owner, type(error).__name__, started)
        self._outage.worked()
        return Retrieved(salt, hits, None, 1e3 * (time.perf_counter() - started))

    def forget(self, owner: str) -> None:
        """The owner's epoch is over."""
        self._epochs.pop(owner, None)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

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
