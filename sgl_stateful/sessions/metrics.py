"""Prometheus metrics of sessions, shown in SGLang's own ``/metrics``, and the plain numbers of the stats route."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Operation = Literal["append", "query", "turn", "rebuild"]
Refusal = Literal["budget", "quota", "queue"]
Expiry = Literal["idle", "age"]
SnapshotEvent = Literal["written", "read", "missed"]

OTHER = "other"
RECENT = 1000  # latencies that the percentiles are of

_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000)

_of_process: SessionMetrics | None = None
_making = threading.Lock()


def process_session_metrics(owner_classes: Sequence[str] = ()) -> SessionMetrics:
    """The metrics of this process: Prometheus takes each name once, however many engines a program makes.

    The first call's ``owner_classes`` hold for all.
    """
    global _of_process
    with _making:
        _of_process = _of_process or SessionMetrics(owner_classes=owner_classes)
        return _of_process


class SessionMetrics:
    """Counts, latencies and cells of sessions. Thread-safe.

    Parameters
    ----------
    registry
        None: that of the process.
    owner_classes
        Prefixes of owners to tell apart; the first that fits counts, and all other owners are ``other``. There are as
        many label values as that, whatever owners call themselves.
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, owner_classes: Sequence[str] = ()) -> None:
        # Not at the top: SGLang sets up prometheus_client's multi-process mode before anything may import it.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        registry = registry or REGISTRY
        prefix = "sgl_stateful_session"

        def counter(name: str, text: str, label: str | None = None, values: Collection[str] = ()) -> Counter:
            made = Counter(f"{prefix}_{name}", text, [label] if label else [], registry=registry)
            for value in values:  # at 0 from the start, so that a rate sees the first one
                made.labels(value)
            return made

        def gauge(name: str, text: str, label: str | None = None) -> Gauge:
            # One process has the sessions; after a restart its values hold, not their sum with the former one's.
            return Gauge(
                f"{prefix}_{name}",
                text,
                [label] if label else [],
                registry=registry,
                multiprocess_mode="livemostrecent",
            )

        self.cells = gauge("cells", "Token slots of the KV pool.", "state")
        self.cells_by_owner_class = gauge(
            "cells_by_owner_class", "Token slots admitted to sessions, by class of owner.", "owner_class"
        )
        self.open = gauge("open", "Sessions that are open.")
        self.admissions = counter("admissions", "Pins that were given.")
        self.refusals = counter("refusals", "Pins and appends that did not fit.", "reason", get_args(Refusal))
        self.demotions = counter("demotions", "Sessions kept without the pin that they asked for.")
        self.expiries = counter("expiries", "Sessions that came to the end of their time.", "kind", get_args(Expiry))
        self.losses = counter("lost", "Pins that the pool has lost.", "reason")
        self.drops = counter("dropped", "Messages that a window or a queue has let go.")
        self.snapshots = counter("snapshots", "KV of sessions on disk.", "event", get_args(SnapshotEvent))
        self.tokens = counter("tokens", "Session and prompt tokens.", "source", ("cached", "prefilled"))
        self.latency_ms = Histogram(
            f"{prefix}_ms",
            "Milliseconds: server time of append and rebuild, time to the first token of query and turn.",
            ["operation"],
            buckets=_MS,
            registry=registry,
        )
        self._classes = tuple(dict.fromkeys(name for name in owner_classes if name))
        self._lock = threading.Lock()
        self._counts: Tally[tuple[str, str]] = Tally()
        self._recent_ms: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in get_args(Operation)}

    def admitted(self) -> None:
        """A pin was given."""
        self.admissions.inc()
        self._count("admissions")

    def refused(self, reason: Refusal) -> None:
        """A pin did not fit into the budget or the owner's quota, or an append into its queue."""
        self.refusals.labels(reason).inc()
        self._count("refusals", reason)

    def demoted(self) -> None:
        """A session is kept without the pin that it asked for."""
        self.demotions.inc()
        self._count("demotions")

    def expired(self, kind: Expiry) -> None:
        """A session's idle time or age has come to its end."""
        self.expiries.labels(kind).inc()
        self._count("expiries", kind)

    def lost(self, reason: str) -> None:
        """The pool has lost a pin. ``reason`` is one of a few words of the caller's, never a number or a name."""
        self.losses.labels(reason).inc()
        self._count("lost", reason)

    def snapshot(self, event: SnapshotEvent) -> None:
        """A session's KV was written to disk or read back, or could not be read."""
        self.snapshots.labels(event).inc()
        self._count("snapshots", event)

    def dropped(self, n: int) -> None:
        """A window or a queue has let ``n`` messages go."""
        self.drops.inc(n)
        self._count("dropped", n=n)

    def observe(self, operation: Operation, *, ms: float, cached_tokens: int, prefilled_tokens: int) -> None:
        """Count one operation that was done.

        Parameters
        ----------
        ms
            Server time of an append or a rebuild; of a query or a turn the time to its first token.
        """
        self.latency_ms.labels(operation).observe(ms)
        self.tokens.labels("cached").inc(cached_tokens)
        self.tokens.labels("prefilled").inc(prefilled_tokens)
        with self._lock:
            self._recent_ms[operation].append(ms)
            self._counts["operations", operation] += 1
            self._counts["tokens", "cached"] += cached_tokens
            self._counts["tokens", "prefilled"] += prefilled_tokens

    def set_cells(self, *, pinned: int, evictable: int, free: int, by_owner: Mapping[str, int]) -> None:
        """Say how full the pool is, in cells; ``by_owner``: how many of the budget each owner has."""
        for state, cells in (("pinned", pinned), ("evictable", evictable), ("free", free)):
            self.cells.labels(state).set(cells)
        for owner_class, cells in self.by_class(by_owner).items():
            self.cells_by_owner_class.labels(owner_class).set(cells)

    def set_open(self, n: int) -> None:
        """Say how many sessions are open."""
        self.open.set(n)

    def by_class(self, by_owner: Mapping[str, int]) -> dict[str, int]:
        """Sum what owners have over their classes; every class is there, with 0 where it has nothing."""
        sums = dict.fromkeys((*self._classes, OTHER), 0)
        for owner, cells in by_owner.items():
            sums[next((name for name in self._classes if owner.startswith(name)), OTHER)] += cells
        return sums

    def totals(self) -> dict[str, Any]:
        """Plain numbers since the start of the process, as docs/sessions.md shows them under "Stats"."""
        with self._lock:
            counts = self._counts.copy()
            recent = {operation: sorted(values) for operation, values in self._recent_ms.items()}

        def by_label(name: str, *always: str) -> dict[str, int]:
            return dict.fromkeys(always, 0) | {label: n for (of, label), n in counts.items() if of == name}

        return {
            "admissions": counts["admissions", ""],
            "refusals": by_label("refusals", *get_args(Refusal)),
            "demotions": counts["demotions", ""],
            "expiries": by_label("expiries", *get_args(Expiry)),
            "lost": by_label("lost"),
            "dropped": counts["dropped", ""],
            "snapshots": by_label("snapshots", *get_args(SnapshotEvent)),
            "tokens": by_label("tokens", "cached", "prefilled"),
            "operations": {
                operation: {
                    "count": counts["operations", operation],
                    "p50_ms": percentile(values, 50),
                    "p99_ms": percentile(values, 99),
                }
                for operation, values in recent.items()
            },
        }

    def _count(self, name: str, label: str = "", *, n: int = 1) -> None:
        with self._lock:
            self._counts[name, label] += n


def percentile(ascending: Sequence[float], percent: int) -> float | None:
    """The least value that ``percent`` of them do not exceed (nearest rank); None of none."""
    if not ascending:
        return None
    rank = -(-len(ascending) * percent // 100)
    return ascending[max(rank, 1) - 1]
