"""Prometheus metrics of registered questions, shown in SGLang's own ``/metrics``, and the plain numbers of the API."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from sgl_stateful.sessions.metrics import percentile

from .outcomes import MissCause

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Outcome = Literal["stored", "void", "unchanged", "preempted", "failed"]
"""Of an evaluation: kept; void, as something changed meanwhile; not needed; broken off; failed."""

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_RECENT = 1000

EntryUse = Literal["ahead", "prefix", "whole", "gate"]
"""How an entry was of use: the answer was gone on with; its tokens were cached; it was all known; the gate fired."""

_of_process: FlashMetrics | None = None
_of_entries: EntryMetrics | None = None
_making = threading.Lock()


def process_flash_metrics() -> FlashMetrics:
    """The metrics of this process: Prometheus takes each name once, however many engines a program makes."""
    global _of_process
    with _making:
        _of_process = _of_process or FlashMetrics()
        return _of_process


def process_entry_metrics() -> EntryMetrics:
    """The same of entries."""
    global _of_entries
    with _making:
        _of_entries = _of_entries or EntryMetrics()
        return _of_entries


class FlashMetrics:
    """Counts and times of registered questions. Of the event loop.

    Parameters
    ----------
    registry
        None: that of the process.
    """

    PREFIX: ClassVar[str] = "sgl_stateful_flash"
    CAUSES: ClassVar[tuple[str, ...]] = tuple(cause for cause in get_args(MissCause) if cause != "evicted")

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # Not at the top: SGLang sets up prometheus_client's multi-process mode before anything may import it.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        registry = registry or REGISTRY
        prefix = self.PREFIX

        def counter(name: str, text: str, label: str | None = None, values: Collection[str] = ()) -> Counter:
            made = Counter(f"{prefix}_{name}", text, [label] if label else [], registry=registry)
            for value in values:  # at 0 from the start, so that a rate sees the first one
                made.labels(value)
            return made

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{prefix}_{name}", text, registry=registry, multiprocess_mode="livemostrecent")

        self._hits = counter("hits", "Questions answered from what was stored.")
        self._misses = counter("misses", "Registered questions decoded for real.", "cause", self.CAUSES)
        self._stale = counter("stale_prevented", "Answers of an earlier version that were not served.")
        self._false = counter("false_accepts", "Served answers that decoding again contradicted.")
        self._audits = counter("audits", "Served answers that were decoded again.")
        self._alike = counter("semantic_hits", "Questions in other words answered from what was stored.")
        self._alike_audits = counter("semantic_audits", "Answers to other words that were decoded for real.")
        self._alike_false = counter("semantic_false_accepts", "Answers to other words that decoding contradicted.")
        self._evaluations = counter("evaluations", "Evaluations by outcome.", "outcome", get_args(Outcome))
        self._tokens = counter("tokens", "Tokens of evaluations.", "source", ("prefilled", "cached", "decoded"))
        self._seconds = counter("seconds", "Seconds in which something was evaluated.")
        self._slow = counter("dropped_readers", "Followers that were dropped as they did not read.")
        self._depth = gauge("queue_depth", "Questions that wait to be evaluated.")
        self._registered = gauge("registered", "Questions that are registered.")
        self._fresh = Histogram(
            f"{prefix}_fresh_seconds", "Seconds from new data to the answer on it.", buckets=_SECONDS, registry=registry
        )
        self._counts: Tally[str] = Tally()
        self._spent_s = 0.0
        self._recent_fresh_s: deque[float] = deque(maxlen=_RECENT)
        self._recent_hit_ms: deque[float] = deque(maxlen=_RECENT)

    def hit(self) -> None:
        """A stored answer was served."""
        self._hits.inc()
        self._counts["hits"] += 1

    def semantic_hit(self) -> None:
        """A stored answer was served to other words than its question's."""
        self.hit()
        self._alike.inc()
        self._counts["semantic hits"] += 1

    def semantic_audited(self, *, agreed: bool) -> None:
        """An answer to other words was decoded for real, with these words."""
        self._alike_audits.inc()
        self._counts["semantic audits"] += 1
        if not agreed:
            self._alike_false.inc()
            self._counts["semantic false_accepts"] += 1

    def hit_took(self, ms: float) -> None:
        """A question was answered by one so long after it had been rendered."""
        self._recent_hit_ms.append(ms)

    def missed(self, cause: MissCause) -> None:
        """A registered question was decoded for real."""
        self._misses.labels(cause).inc()
        self._counts[f"miss {cause}"] += 1
        if cause in ("version", "facts"):
            self._stale.inc()
            self._counts["stale_prevented"] += 1

    def evaluation(self, outcome: Outcome) -> None:
        """An evaluation has come to its end."""
        self._evaluations.labels(outcome).inc()
        self._counts[f"evaluation {outcome}"] += 1

    def audited(self, *, agreed: bool) -> None:
        """A hit was decoded again."""
        self._audits.inc()
        self._counts["audits"] += 1
        if not agreed:
            self._false.inc()
            self._counts["false_accepts"] += 1

    def tokens(self, *, prefilled: int, cached: int, decoded: int) -> None:
        """What one request of an evaluation took."""
        for source, count in (("prefilled", prefilled), ("cached", cached), ("decoded", decoded)):
            self._tokens.labels(source).inc(max(count, 0))
            self._counts[f"tokens {source}"] += max(count, 0)

    def spent(self, seconds: float) -> None:
        """A batch took so long."""
        self._seconds.inc(max(seconds, 0.0))
        self._spent_s += max(seconds, 0.0)

    def fresh(self, seconds: float) -> None:
        """So long after new data there is an answer on it."""
        self._fresh.observe(seconds)
        self._recent_fresh_s.append(seconds)

    def depth(self, waiting: int) -> None:
        """So many questions wait."""
        self._depth.set(waiting)

    def registered(self, count: int) -> None:
        """So many are registered."""
        self._registered.set(count)

    def dropped_reader(self) -> None:
        """A follower did not read what happened in time."""
        self._slow.inc()
        self._counts["dropped_readers"] += 1

    def totals(self) -> dict[str, Any]:
        """Plain numbers since the start of the process, as docs/flash.md shows them."""

        def of(name: str, labels: Collection[str]) -> dict[str, int]:
            return {label: self._counts[f"{name} {label}"] for label in labels}

        fresh, hits = sorted(self._recent_fresh_s), sorted(self._recent_hit_ms)
        plain = ("hits", "stale_prevented", "audits", "false_accepts", "dropped_readers")
        return {
            **{name: self._counts[name] for name in plain},
            "misses": of("miss", self.CAUSES),
            "semantic": of("semantic", ("hits", "audits", "false_accepts")),
            "evaluations": of("evaluation", get_args(Outcome)),
            "tokens": of("tokens", ("prefilled", "cached", "decoded")),
            "seconds": round(self._spent_s, 6),
            "hit_ms": {"p50": percentile(hits, 50), "p99": percentile(hits, 99)},
            "fresh_s": {"p50": percentile(fresh, 50), "p99": percentile(fresh, 99)},
        }


class EntryMetrics(FlashMetrics):
    """The same of entries, with what they hold and how they were of use."""

    PREFIX = "sgl_stateful_entry"
    CAUSES = tuple(cause for cause in get_args(MissCause) if cause != "facts")

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = registry or REGISTRY
        self._uses = Counter(f"{self.PREFIX}_uses", "Hits by how they were of use.", ["by"], registry=registry)
        for use in get_args(EntryUse):
            self._uses.labels(use)
        self._ahead = Counter(f"{self.PREFIX}_tokens_ahead", "Tokens of answers known beforehand.", registry=registry)
        self._cells = Gauge(
            f"{self.PREFIX}_cells", "Cells that entries hold.", registry=registry, multiprocess_mode="livemostrecent"
        )

    def used(self, by: EntryUse, tokens_ahead: int) -> None:
        """An entry was of use, with so many tokens of the answer known beforehand."""
        self.hit()
        self._uses.labels(by).inc()
        self._ahead.inc(tokens_ahead)
        self._counts[f"use {by}"] += 1
        self._counts["tokens_ahead"] += tokens_ahead

    def held(self, cells: int) -> None:
        """Entries hold so many cells."""
        self._cells.set(cells)

    def totals(self) -> dict[str, Any]:
        """Plain numbers since the start of the process."""
        uses = {use: self._counts[f"use {use}"] for use in get_args(EntryUse)}
        return {**super().totals(), "uses": uses, "tokens_ahead": self._counts["tokens_ahead"]}
