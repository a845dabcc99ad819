from typing import Any

from prometheus_client import CollectorRegistry

from sgl_stateful.metrics import MemoryMetrics


def shown(tier: str, *, requested: str = "splice", reason: str | None = None, cached: int = 3) -> dict[str, Any]:
    return {
        "tier": tier,
        "requested_mode": requested,
        "reason": reason,
        "degraded": False,
        "tokens": {"prompt": 20, "cached": cached, "spliced": 7, "prefilled": 10},
        "ms": {"retrieve": 4.0, "assemble": 0.2, "splice": 30.0},
    }


def test_requests_are_counted_by_what_became_of_them() -> None:
    registry = CollectorRegistry()
    metrics = MemoryMetrics(registry)
    metrics.observe(shown("spliced"))
    metrics.observe(shown("text", reason="not_encoded:3", cached=-2))
    metrics.observe(shown("text", reason="not_encoded:1"))
    metrics.observe(shown("text"))
    metrics.observe(shown("text", requested="text"))
    metrics.observe(shown("none"))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sgl_stateful_memory_{name}", labels)

    assert [value("requests_total", tier=tier) for tier in ("spliced", "text", "none")] == [1, 4, 1]
    assert value("fallbacks_total", reason="not_encoded") == 2, "one label, however many facts"
    assert value("fallbacks_total", reason="unknown") == 1
    assert value("fallbacks_total", reason="None") is None
    assert [value("tokens_total", source=source) for source in ("cached", "spliced", "prefilled")] == [15, 42, 60]
    assert value("ms_sum", stage="splice") == 180.0
    assert value("ms_bucket", stage="retrieve", le="5.0") == 6
    assert value("ms_bucket", stage="retrieve", le="2.0") == 0
    assert metrics.totals() == {"spliced": 1, "text": 4, "none": 1}
