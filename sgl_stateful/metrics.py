"""Prometheus metrics of the memory, shown in SGLang's own ``/metrics``."""

from __future__ import annotations

from collections import Counter as Tally
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)


@cache
def process_metrics() -> MemoryMetrics:
    """The metrics of this process: Prometheus takes each name once, however many engines a program makes."""
    return MemoryMetrics()


class MemoryMetrics:
    """Counters and latencies of memory requests."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # Not at the top: SGLang sets up prometheus_client's multi-process mode before anything may import it.
        from prometheus_client import REGISTRY, Counter, Histogram

        registry = registry or REGISTRY
        prefix = "sgl_stateful_memory"
        self.requests = Counter(f"{prefix}_requests", "Memory requests by outcome.", ["tier"], registry=registry)
        self.fallbacks = Counter(
            f"{prefix}_fallbacks", "Requests that asked for a splice and got none.", ["reason"], registry=registry
        )
        self.tokens = Counter(f"{prefix}_tokens", "Prompt tokens of memory requests.", ["source"], registry=registry)
        self.degraded = Counter(
            f"{prefix}_degraded",
            "Requests whose store failed: served without facts, or with them as text.",
            registry=registry,
        )
        self.latency_ms = Histogram(f"{prefix}_ms", "Milliseconds by stage.", ["stage"], buckets=_MS, registry=registry)
        self.promotions = Counter(
            f"{prefix}_promotions", "Recurring blocks of facts by what became of them.", ["event"], registry=registry
        )
        self._tally: Tally[str] = Tally()

    def observe(self, shown: dict[str, Any]) -> None:
        """Count one finished request by its report."""
        self.requests.labels(shown["tier"]).inc()
        self._tally[shown["tier"]] += 1
        if shown["degraded"]:
            self.degraded.inc()
        if shown["requested_mode"] == "splice" and shown["tier"] == "text":
            self.fallbacks.labels((shown["reason"] or "unknown").split(":")[0]).inc()
        for source in ("cached", "spliced", "prefilled"):
            self.tokens.labels(source).inc(max(shown["tokens"][source], 0))
        for stage, value in shown["ms"].items():
            self.latency_ms.labels(stage).observe(value)

    def promotion(self, event: str) -> None:
        """Count what became of a recurring block; a `promotion.Event`."""
        self.promotions.labels(event).inc()

    def totals(self) -> dict[str, int]:
        """Finished requests by tier."""
        return dict(self._tally)
