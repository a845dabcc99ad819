"""The radix cache that captures facts when a request ends and splices them when one begins.

Who owns which slots of a spliced request with tree prefix ``p`` and block end ``e``::

    [0, p)        the tree, locked by the request
    [p, e)        the request alone, written by the splice and by the forward of the holes; visible to nobody else
    [e, ...)      the request alone, written by its own prefill and decode

The request's checkpoint then publishes ``[p, ...)`` under a key in which the spliced tokens are virtual ids, so that
only the same splice finds them again. A prompt that was prefilled exactly is published under its real ids.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from memstore import BlobStoreError
from sgl_stateful.directive import Capture, Splice
from sgl_stateful.sessions.hold import Hold
from sgl_stateful.splice import virtual_ids

from .fact_kv import FactKV, FactPart
from .holes import HOLES, MAX_TOKENS, holes_of
from .pins import PinTable
from .request_state import RequestState, forget_state, state_of
from .session_kv import SessionKV, SnapshotUnusable, load_snapshot

logger = logging.getLogger(__name__)


class StatefulRadixCache(UnifiedRadixCache):
    """SGLang's radix cache, with facts spliced in through its load-back door."""

    facts: FactKV | None = None  # None: this server has no memory
    pins: PinTable | None = None  # None: not attached yet
    session_kv: SessionKV | None = None  # None: none is kept on disk
    description: Mapping[str, Any]  # of model and pool, for the HTTP process
    _active: Any = None  # the request whose checkpoint is in flight: its inserts use its key
    _loading_private = False

    def attach(self, facts: FactKV | None, description: Mapping[str, Any], *, num_slots: int) -> None:
        """Connect the cache to the facts' KV; called once, right after construction.

        ``num_slots`` is one past the highest slot of the pool.
        """
        self.facts = facts
        self.pins = PinTable(self, num_slots)
        self.description = description

    # ---- keys ----

    @staticmethod
    def _virtual_key(key: RadixKey, state: RequestState, splice: Splice) -> RadixKey:
        if state.virtual is None:
            state.virtual = array("q", bytes(8 * (splice.end - splice.start)))
            for span in splice.spans:
                at = span.start - splice.start
                state.virtual[at : at + len(span)] = virtual_ids(span.encoding_id, len(span), offset=span.offset)
        ids = array("q", key.token_ids)
        for span in splice.spans:
            if span.start >= len(ids):
                break
            end = min(span.end, len(ids))
            ids[span.start : end] = state.virtual[span.start - splice.start : end - splice.start]
        return RadixKey(ids, key.extra_key, key.is_bigram, key.limit, key.cache_salt)

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert under the key of the request whose checkpoint is in flight."""
        if self._active is not None:
            state = state_of(self._active)
            if isinstance(state.directive, Splice) and not state.exact:
                params = replace(params, key=self._virtual_key(params.key, state, state.directive))
        return super().insert(params)

    # ---- admission ----

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match real ids first; where they do not cover the facts, match the spliced key and report what is missing.

        Free of side effects on slots: policies call it as a probe.
        """
        req = params.req
        state = None if req is None else state_of(req)
        if state is None or self.facts is None or not isinstance(state.directive, Splice):
            match = super().match_prefix(params)
            return match if state is None or req.kv.holds_kv else self._with_snapshot(params, state, match)
        splice = state.directive
        if req.kv.holds_kv:  # decided at admission; a later chunk keeps the key it has
            return super().match_prefix(params if state.exact else self._spliced(params, state, splice))
        exact = super().match_prefix(params)
        try:
            match, reason = exact, state.failed
            if reason is None:
                match, reason = self._match_spliced(self.facts, params, state, splice, exact)
        except Exception:
            # The serving boundary: an exception here would end the scheduler.
            logger.exception("matching failed for request %s; prefilling it exactly", req.rid)
            self.facts.count_failure()
            match, reason = exact, "splice_failed"
        state.exact, state.reason = reason is not None, reason
        state.tell(req)
        return match

    def _match_spliced(
        self, facts: FactKV, params: MatchPrefixParams, state: RequestState, splice: Splice, exact: MatchResult
    ) -> tuple[MatchResult, str | None]:
        """The match under the spliced key, or the exact one and the reason for it."""
        end = self._page_floor(splice.end)
        if exact.device_prefix_len >= end:
            return exact, "exact_prefix_cached"
        if end <= splice.start:
            return exact, "shorter_than_a_page"
        if not facts.accepts(splice.fingerprint):
            return exact, "weights_changed"
        if missing := facts.missing(list(dict.fromkeys(span.encoding_id for span in splice.spans))):
            return exact, f"not_encoded:{len(missing)}"
        if end > len(params.key):  # the caller wants log probabilities of tokens inside the block
            return exact, "prompt_logprobs"
        match = super().match_prefix(self._spliced(params, state, splice))
        hole_tokens = sum(run.end - run.start for run in holes_of(splice.spans, match.device_prefix_len, end))
        if hole_tokens > MAX_TOKENS:  # SGLang's own prefill does that in chunks
            return exact, f"uncached_text_too_long:{hole_tokens}"
        if match.device_prefix_len < end:
            match = match._replace(host_hit_length=end - match.device_prefix_len)
        state.hole_tokens = hole_tokens
        return match, None

    def _with_snapshot(self, params: MatchPrefixParams, state: RequestState, match: MatchResult) -> MatchResult:
        """The match, with the tokens that are to be read from the session's snapshot as a hit on the host."""
        snapshot = None if state.hold is None else state.hold.snapshot
        if snapshot is None or self.session_kv is None or state.directive is not None or state.snapshot is not None:
            return match
        found = self._page_floor(min(snapshot.tokens, len(params.key))) - match.device_prefix_len
        return match if found < snapshot.least_tokens else match._replace(host_hit_length=found)

    def _read_snapshot(self, kv: SessionKV, req: Any, state: RequestState, hold: Hold, tokens: int) -> int:
        """Read ``tokens`` tokens behind the matched prefix into slots of the request's own; 0 on any miss."""
        assert hold.snapshot is not None, "a host hit without a snapshot"
        start, ids = req.prefix_len, req.full_untruncated_fill_ids
        try:
            slots, state.snapshot = load_snapshot(self, kv, hold.snapshot, ids, start=start, end=start + tokens)
        except SnapshotUnusable as reason:
            state.snapshot = {"state": "missed", "reason": str(reason)}
            return 0
        except Exception:
            # The serving boundary: whatever fails here must cost speed, not the answer or the server.
            logger.exception("reading the snapshot of session %s failed; prefilling it", hold.session_id)
            state.snapshot = {"state": "missed", "reason": "failed"}
            return 0
        state.private_slots = slots
        return tokens

    def _spliced(self, params: MatchPrefixParams, state: RequestState, splice: Splice) -> MatchPrefixParams:
        return replace(params, key=self._virtual_key(params.key, state, splice))

    def _page_floor(self, position: int) -> int:
        return position // self.page_size * self.page_size

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        """Splice the facts into slots of the request's own; on any miss load nothing, so that SGLang prefills."""
        self._loading_private = False
        req = params.req
        state = state_of(req)
        if self.session_kv is not None and state.hold is not None and state.directive is None and req.host_hit_length:
            loaded = self._read_snapshot(self.session_kv, req, state, state.hold, req.host_hit_length)
            self._loading_private = loaded > 0
            return loaded, req.last_node
        if self.facts is None or not isinstance(state.directive, Splice) or state.exact:
            return super().init_load_back(params)
        try:
            loaded = self._load_facts(self.facts, req, state, state.directive)
        except Exception:
            # The serving boundary: whatever fails here must cost speed, not the answer or the server.
            logger.exception("splice failed for request %s; prefilling it exactly", req.rid)
            self.facts.count_failure()
            loaded = 0
            state.reason = state.reason or "splice_failed"
        if loaded == 0:
            state.exact, state.failed = True, state.reason
        state.tell(req)
        self._loading_private = loaded > 0
        if loaded == 0 and req.prefix_len > state.directive.start:
            # The prefix that was matched is spliced KV, which an exact request must not build on: match again.
            return None
        return loaded, req.last_node

    def _load_facts(self, facts: FactKV, req: Any, state: RequestState, splice: Splice) -> int:
        started = time.perf_counter()
        start, end = req.prefix_len, self._page_floor(splice.end)
        tokens = req.full_untruncated_fill_ids
        parts = [
            FactPart(
                span.encoding_id,
                tokens[span.start : span.end],
                span.offset,
                span.start,
                max(span.start, start),
                min(span.end, end),
            )
            for span in splice.spans
            if span.end > start and span.start < end
        ]
        spliced = facts.rows(parts)
        if spliced is None:
            state.reason = "facts_lost"
            return 0
        rows, positions = spliced
        holes = holes_of(splice.spans, start, end)
        assert len(rows) + sum(run.end - run.start for run in holes) == end - start, (start, end, holes)
        allocator = self.token_to_kv_pool_allocator
        if (short := end - start - allocator.available_size()) > 0:
            self.evict(EvictParams(num_tokens=short))
        slots = allocator.alloc(end - start)
        if slots is None:
            state.reason = "pool_full"
            return 0
        slots = slots.to(torch.int64)
        try:
            facts.splice(rows, slots[positions - start], positions)
        except Exception:
            allocator.free(slots)
            raise
        if holes:
            setattr(req, HOLES, holes)
        state.private_slots, state.spliced_tokens = slots, len(rows)
        state.computed_tokens = end - start - len(rows)
        state.splice_ms = 1e3 * (time.perf_counter() - started)
        return end - start

    def load_back_is_cache_owned(self) -> bool:
        """Spliced slots are the request's own until its checkpoint publishes them."""
        return not self._loading_private and super().load_back_is_cache_owned()

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """Slots of the matched prefix: the tree's path, then the spliced ones."""
        private = state_of(req).private_slots
        if private is None:
            return super().prefix_device_indices(req)
        tree_len = req.prefix_len - len(private)
        path = self.path_device_indices(req.last_node)
        assert len(path) >= tree_len, f"path of {len(path)} slots under a prefix of {tree_len}"
        return torch.cat([path[:tree_len], private])

    # ---- the end of a request ----

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish the request's KV under its key; capture facts once it has finished."""
        state = state_of(req)
        state.private_slots = None  # the row holds them now
        if self.facts is not None and state.directive is not None and req.finished():
            self._at_finish(self.facts, req, state)
            if isinstance(state.directive, Capture) and not state.directive.publish:
                for component in self._components_tuple:
                    component.cleanup_after_caching_req(req, is_finished=True)
                return
        self._active = req
        try:
            super().checkpoint(req, up_to=up_to, **kwargs)
        finally:
            self._active = None
        if state.hold is not None and req.finished() and not isinstance(req.finished_reason, FINISH_ABORT):
            self._pin(req, state, state.hold, up_to)

    def _pin(self, req: Any, state: RequestState, hold: Hold, up_to: int) -> None:
        """Pin the session's tokens, which this request has just published, and report it."""
        pins = self.pins
        assert pins is not None, "a request before the cache was attached"
        lost = None
        try:
            if hold.pin:
                length = up_to if hold.tokens is None else min(hold.tokens, up_to)
                if not state.exact:  # what comes from the splice on is keyed by virtual ids: nobody else's prefix
                    length = state.shareable_tokens(length)
                lost = pins.hold(hold, *self._published(req, length))
        except Exception:
            # The serving boundary: a session without its pin costs time, an exception here the server.
            logger.exception("pinning session %s failed", hold.session_id)
            pins.counts.failures += 1
        cells = {"pinned_tokens": pins.tokens_of(hold.pin_name), "pinned_cells": pins.pinned_cells}
        read = {} if state.snapshot is None else {"snapshot": state.snapshot}
        state.tell_session(req, {**cells, "lost": lost, **read})

    def _published(self, req: Any, length: int) -> tuple[Any, int]:
        """The node where the first ``length`` tokens of a finished request end, in whole pages, and how many they are.

        A node that goes on behind them is split there; the request still locks the whole path.
        """
        ids = req.full_untruncated_fill_ids[:length]
        key = RadixKey(ids, req.extra_key, is_bigram=self.tree_core.is_eagle, cache_salt=req.cache_salt)
        match = super().match_prefix(MatchPrefixParams(key=key))
        return match.last_device_node, match.device_prefix_len

    def _at_finish(self, facts: FactKV, req: Any, state: RequestState) -> None:
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        try:
            more = facts.at_finish(state.directive, row, req.origin_input_ids)
        except Exception as error:
            # A KV store that is full is no bug, and fails for every fact.
            is_outage = isinstance(error, BlobStoreError)
            logger.warning("capture failed for request %s: %s", req.rid, error, exc_info=not is_outage)
            facts.count_failure()
            kind = type(error).__name__
            more = {"error": f"{kind}: {error}", "error_type": kind}
        if more:
            state.tell(req, more)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Forget the decision: a retracted request decides anew."""
        super().on_release(req, checkpointed=checkpointed)
        forget_state(req)
        req.__dict__.pop(HOLES, None)

    def reset(self) -> None:
        """Flush: the tree goes, and with it what the arena holds; encoded facts stay in the blob store."""
        super().reset()
        if self.pins is not None and (lost := self.pins.lost_all("flushed")):
            logger.info("the KV pool was flushed, and with it the pins of %d sessions", lost)
        if self.facts is not None:
            self.facts.clear_arena()
