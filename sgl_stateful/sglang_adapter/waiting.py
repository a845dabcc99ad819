"""SGLang's waiting queue around one prefill pass: sorted, and without those that wait for a shared prefix."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_stateful.sessions.ordering import Waiting, plan_pass

from .prefix_cache import StatefulRadixCache
from .request_state import state_of

logger = logging.getLogger(__name__)


class HeldBack(NamedTuple):
    """What to undo after the pass.

    ``places`` are of the whole queue by ``id`` of the request: it goes back into its order of arrival.
    """

    requests: list[Any]
    places: dict[int, int]


_NOTHING = HeldBack([], {})


def prepare_pass(scheduler: Any, running_batch: Any, *, aging_s: float) -> HeldBack:
    """Sort the queue and take out whoever is to wait; leaves it alone where no request belongs to a session."""
    cache, queue = scheduler.tree_cache, scheduler.waiting_queue
    is_closed = running_batch.batch_is_full and not running_batch.is_empty() and scheduler.chunked_req is None
    if not isinstance(cache, StatefulRadixCache) or is_closed:
        return _NOTHING
    try:
        if all(state_of(request).hold is None for request in queue):
            return _NOTHING
        under_way = _under_way(scheduler)
        waiting, ahead = _described(cache, queue, under_way)
        plan = plan_pass(waiting, now=time.perf_counter(), aging_s=aging_s, under_way=ahead)
    except Exception:
        # The serving boundary: without this the queue is as SGLang has it.
        logger.exception("ordering the waiting requests failed")
        return _NOTHING
    order = plan.order if _keeps_order(scheduler) else range(len(queue))
    held = HeldBack([queue[i] for i in sorted(plan.held_back)], {id(request): i for i, request in enumerate(queue)})
    scheduler.waiting_queue = [queue[i] for i in order if i not in plan.held_back]
    return held


def restore_queue(scheduler: Any, held: HeldBack) -> None:
    """Put back who has waited; what SGLang has added meanwhile stays behind them."""
    if held.places:
        last = len(held.places)
        both = [*scheduler.waiting_queue, *held.requests]
        scheduler.waiting_queue = sorted(both, key=lambda request: held.places.get(id(request), last))


def _keeps_order(scheduler: Any) -> bool:
    """Whether SGLang admits in the order of the queue; its other policies sort it again."""
    return scheduler.policy.policy == CacheAgnosticPolicy.FCFS and not scheduler.enable_priority_scheduling


def _under_way(scheduler: Any) -> list[Any]:
    """Requests whose prefill has begun and is not, or not all, in the cache yet."""
    requests = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    for batch, _ in getattr(scheduler, "result_queue", ()):  # of the overlapped loop alone
        if batch.forward_mode.is_extend():
            requests += [request for request in batch.reqs if request is not scheduler.chunked_req]
    return requests


def _described(
    cache: StatefulRadixCache, queue: list[Any], under_way: list[Any]
) -> tuple[list[Waiting], list[Waiting]]:
    members = Counter(_group(request) for request in (*queue, *under_way))

    def described(request: Any) -> Waiting:
        state, group = state_of(request), _group(request)
        if group is not None and members[group] == 1:
            group = None
        ids = state.prompt_ids(request)
        cached = 0
        if group is not None:
            key = RadixKey(request.origin_input_ids, request.extra_key, cache_salt=request.cache_salt)
            # Read-only: neither splits nodes nor counts as a use.
            cached = min(cache.tree_core.match_full_device_prefix(key)[0], len(ids))
        priority = 0 if state.hold is None else state.hold.priority
        return Waiting(request.time_stats.wait_queue_entry_time, priority, group, ids, cached)

    return [described(request) for request in queue], [described(request) for request in under_way]


def _group(request: Any) -> Hashable | None:
    hold = state_of(request).hold
    # KV is shared under one salt alone, whatever the group says.
    return None if hold is None else (hold.group or hold.session_id, request.extra_key, request.cache_salt)
