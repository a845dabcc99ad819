"""Gives up pins where a request would otherwise wait for ever, or be ended, for want of memory.

Everything here is called by the scheduler's loop, in front of or behind what SGLang does itself, and never raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.common import match_kv_cache

from .pins import PinTable
from .prefix_cache import StatefulRadixCache
from .request_state import state_of

logger = logging.getLogger(__name__)

RECLAIMED = "reclaimed"


def relieve_chunk(scheduler: Any) -> None:
    """Before a prefill pass: the request that is prefilled in chunks must find room for its next one.

    SGLang takes that chunk without asking for memory; what the request counted on when it began may be pinned by now.
    """
    _guarded(scheduler, _relieve_chunk)


def relieve_prefill(scheduler: Any, running_batch: Any) -> None:
    """After a pass that admitted nothing while nothing runs: the first waiting request must fit, if it ever can."""
    _guarded(scheduler, lambda s, cache, pins: _relieve_prefill(s, running_batch, cache, pins))


def relieve_decode(scheduler: Any, batch: Any) -> None:
    """Before a decode step: it must not come down to retracting all but one request, or ending the last."""
    _guarded(scheduler, lambda s, cache, pins: _relieve_decode(s, batch, cache, pins))


def _guarded(scheduler: Any, relieve: Callable[[Any, StatefulRadixCache, PinTable], None]) -> None:
    cache = scheduler.tree_cache
    if not isinstance(cache, StatefulRadixCache) or not cache.pins:
        return
    try:
        relieve(scheduler, cache, cache.pins)
    except Exception:
        # The serving boundary: an exception here would end the scheduler.
        logger.exception("looking for memory under pins failed")
        cache.pins.counts.failures += 1


def _free(cache: StatefulRadixCache) -> int:
    """Tokens that can be allocated, after evicting what nothing holds."""
    return int(cache.token_to_kv_pool_allocator.available_size() + cache.evictable_size())


def _release_until(fits: Callable[[], bool], pins: PinTable, *, request: Any = None) -> None:
    hold = None if request is None else state_of(request).hold
    before = pins.counts.released
    # The pin of the request's own session holds what it builds on: giving that up makes no room for it.
    while not fits() and pins.release_one(RECLAIMED, last=None if hold is None else hold.pin_name):
        pass
    if released := pins.counts.released - before:
        logger.warning("the KV pool is full: %d pins were given up", released)


def _relieve_chunk(scheduler: Any, cache: StatefulRadixCache, pins: PinTable) -> None:
    request = scheduler.chunked_req
    if request is None:
        return
    rest = len(request.full_untruncated_fill_ids) - request.extend_end
    need = min(rest, scheduler.chunked_prefill_size or rest) + cache.page_size
    _release_until(lambda: need <= _free(cache), pins, request=request)


def _relieve_prefill(scheduler: Any, running_batch: Any, cache: StatefulRadixCache, pins: PinTable) -> None:
    if not running_batch.is_empty() or scheduler.chunked_req is not None or not scheduler.waiting_queue:
        return
    request = scheduler.waiting_queue[0]
    tokens = len(request.origin_input_ids) + len(request.output_ids)
    answer = min(max(request.sampling_params.max_new_tokens - len(request.output_ids), 0), CLIP_MAX_NEW_TOKENS)
    beside = answer + cache.page_size  # SGLang admits whom this fits strictly
    if tokens + beside >= cache.token_to_kv_pool_allocator.size:
        return
    match_kv_cache(request, cache)

    def fits() -> bool:
        # Its own prefix cannot be evicted to make room for the rest.
        lock = cache.lock(request.last_node)
        try:
            return tokens - int(request.prefix_len) + beside < _free(cache)
        finally:
            cache.unlock(lock)

    _release_until(fits, pins, request=request)


def _relieve_decode(scheduler: Any, batch: Any, cache: StatefulRadixCache, pins: PinTable) -> None:
    if _free(cache) >= batch.new_tokens_required_next_decode() or scheduler._reqs_finishing_inflight(batch):
        return
    order = batch._get_decode_retraction_order(batch.reqs)
    kept, retracted = order[:2], order[2:]
    need = batch.new_tokens_required_next_decode(kept)
    # At least this comes back; more where nobody else holds the prompt.
    private = sum(batch.reqs[i].kv.kv_allocated_len - batch.reqs[i].kv.cache_protected_len for i in retracted)
    _release_until(lambda: need <= _free(cache) + private, pins)
