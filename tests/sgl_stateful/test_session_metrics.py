import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sgl_stateful.sessions.metrics import SessionMetrics

PREFIX = "sgl_stateful_session_"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def samples(registry: CollectorRegistry, name: str, label: str) -> Mapping[str, float]:
    """What Prometheus reads of one metric, by the value of its label."""
    found = (sample for metric in registry.collect() for sample in metric.samples if sample.name == PREFIX + name)
    return {sample.labels[label]: sample.value for sample in found}


def test_what_happens_is_counted_by_its_reason(registry: CollectorRegistry) -> None:
    metrics = SessionMetrics(registry)
    for _ in range(3):
        metrics.admitted()
    metrics.refused("budget")
    metrics.refused("quota")
    metrics.refused("quota")
    metrics.demoted()
    metrics.expired("idle")
    metrics.expired("idle")
    metrics.lost("flushed")
    metrics.dropped(7)
    metrics.dropped(5)
    metrics.dropped(0)
    for event in ("written", "missed", "written"):
        metrics.snapshot(event)  # type: ignore[arg-type]
    metrics.set_open(4)

    assert registry.get_sample_value(f"{PREFIX}admissions_total") == 3
    assert registry.get_sample_value(f"{PREFIX}demotions_total") == 1
    assert registry.get_sample_value(f"{PREFIX}dropped_total") == 12
    assert registry.get_sample_value(f"{PREFIX}open") == 4
    assert samples(registry, "refusals_total", "reason") == {"budget": 1, "quota": 2, "queue": 0}
    assert samples(registry, "expiries_total", "kind") == {"idle": 2, "age": 0}
    assert samples(registry, "lost_total", "reason") == {"flushed": 1}
    assert samples(registry, "snapshots_total", "event") == {"written": 2, "read": 0, "missed": 1}
    totals = metrics.totals()
    assert {name: totals[name] for name in totals if name not in ("tokens", "operations")} == {
        "admissions": 3,
        "refusals": {"budget": 1, "quota": 2, "queue": 0},
        "demotions": 1,
        "expiries": {"idle": 2, "age": 0},
        "lost": {"flushed": 1},
        "dropped": 12,
        "snapshots": {"written": 2, "read": 0, "missed": 1},
    }


def test_before_anything_has_happened_everything_is_there_and_json() -> None:
    totals = SessionMetrics(CollectorRegistry()).totals()
    nothing = {"count": 0, "p50_ms": None, "p99_ms": None}
    assert json.loads(json.dumps(totals)) == totals
    assert totals["tokens"] == {"cached": 0, "prefilled": 0}
    assert totals["operations"] == dict.fromkeys(("append", "query", "turn", "rebuild"), nothing)


def test_operations_are_timed_and_their_tokens_counted(registry: CollectorRegistry) -> None:
    metrics = SessionMetrics(registry)
    metrics.observe("append", ms=31.0, cached_tokens=51, prefilled_tokens=24)
    metrics.observe("query", ms=4.0, cached_tokens=75, prefilled_tokens=9)
    metrics.observe("query", ms=700.0, cached_tokens=0, prefilled_tokens=84)
    assert samples(registry, "ms_count", "operation") == {"append": 1, "query": 2}
    assert samples(registry, "ms_sum", "operation") == {"append": 31.0, "query": 704.0}
    below = [
        registry.get_sample_value(f"{PREFIX}ms_bucket", {"operation": "query", "le": le}) for le in ("5.0", "1000.0")
    ]
    assert below == [1, 2]
    assert samples(registry, "tokens_total", "source") == {"cached": 126, "prefilled": 117}
    totals = metrics.totals()
    assert totals["tokens"] == {"cached": 126, "prefilled": 117}
    assert totals["operations"]["query"] == {"count": 2, "p50_ms": 4.0, "p99_ms": 700.0}
    assert totals["operations"]["append"] == {"count": 1, "p50_ms": 31.0, "p99_ms": 31.0}


def test_percentiles_are_of_the_last_thousand_in_whatever_order_they_came() -> None:
    metrics = SessionMetrics(CollectorRegistry())
    for ms in [10_000.0] * 500 + [float(1 + 7 * i % 1000) for i in range(1000)]:  # 7 and 1000 share no factor
        metrics.observe("turn", ms=ms, cached_tokens=0, prefilled_tokens=0)
    # Nearest rank among 1, 2, ..., 1000: the 500th and the 990th.
    assert metrics.totals()["operations"]["turn"] == {"count": 1500, "p50_ms": 500.0, "p99_ms": 990.0}


def test_an_owner_belongs_to_the_first_class_that_it_starts_with(registry: CollectorRegistry) -> None:
    metrics = SessionMetrics(registry, owner_classes=["farm-", "farm-north-", "", "lab:"])
    owners = {"farm-north-7": 40, "farm-1": 2, "lab:ana": 300, "ana": 5, "laboratory": 6, "other": 7, "": 1}
    metrics.set_cells(pinned=361, evictable=100, free=5539, by_owner=owners)
    assert samples(registry, "cells", "state") == {"pinned": 361, "evictable": 100, "free": 5539}
    expected = {"farm-": 42, "farm-north-": 0, "lab:": 300, "other": 19}
    assert samples(registry, "cells_by_owner_class", "owner_class") == expected
    assert metrics.by_class(owners) == expected


def test_a_class_whose_sessions_are_gone_is_at_zero(registry: CollectorRegistry) -> None:
    metrics = SessionMetrics(registry, owner_classes=["farm-"])
    metrics.set_cells(pinned=9, evictable=0, free=1, by_owner={"farm-1": 8, "ana": 1})
    metrics.set_cells(pinned=0, evictable=0, free=10, by_owner={})
    assert samples(registry, "cells_by_owner_class", "owner_class") == {"farm-": 0, "other": 0}


def test_label_values_stay_few_however_many_owners_there_are(registry: CollectorRegistry) -> None:
    metrics = SessionMetrics(registry, owner_classes=["a"])
    for number in range(300):
        metrics.set_cells(pinned=1, evictable=0, free=0, by_owner={f"owner-{number}": 1, f"a{number}": 2})
    assert samples(registry, "cells_by_owner_class", "owner_class") == {"a": 2, "other": 1}


def test_counts_from_many_threads_add_up(registry: CollectorRegistry) -> None:
    metrics = SessionMetrics(registry)
    gate = threading.Barrier(8)

    def work() -> None:
        gate.wait()
        for _ in range(500):
            metrics.observe("append", ms=1.0, cached_tokens=2, prefilled_tokens=3)
            metrics.dropped(1)
            metrics.totals()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = metrics.totals()
    assert totals["operations"]["append"]["count"] == totals["dropped"] == 4000
    assert totals["tokens"] == {"cached": 8000, "prefilled": 12000}
    assert registry.get_sample_value(f"{PREFIX}dropped_total") == 4000


def in_another_process(code: str, folder: Path) -> str:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prometheus_is_not_imported_before_metrics_are_made(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from sgl_stateful.sessions.metrics import process_session_metrics\n"
        "assert 'prometheus_client' not in sys.modules\n"
        "first = process_session_metrics(['farm-'])\n"
        "assert 'prometheus_client' in sys.modules\n"
        "assert process_session_metrics(['lab:']) is first is process_session_metrics()\n"
        "print(first.by_class({'farm-1': 2, 'lab:1': 3}))"
    )
    assert in_another_process(code, tmp_path).strip() == "{'farm-': 2, 'other': 3}"


def test_in_multi_process_mode_the_last_process_says_how_full_the_pool_is(tmp_path: Path) -> None:
    """As SGLang's ``/metrics`` reads it: from the files that processes leave, one of which may have ended."""
    tell = (
        "from sgl_stateful.sessions.metrics import process_session_metrics\n"
        "metrics = process_session_metrics(['farm-'])\n"
        "metrics.set_cells(pinned={0}, evictable=1, free=2, by_owner={{'farm-1': {0}}})\n"
        "metrics.set_open({0})\n"
        "metrics.admitted()\n"
        "metrics.observe('append', ms=31.0, cached_tokens=5, prefilled_tokens=6)"
    )
    in_another_process(tell.format(30), tmp_path)
    in_another_process(tell.format(12), tmp_path)
    collect = (
        "from prometheus_client import CollectorRegistry, generate_latest\n"
        "from prometheus_client.multiprocess import MultiProcessCollector\n"
        "registry = CollectorRegistry()\n"
        "MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())"
    )
    lines = in_another_process(collect, tmp_path).splitlines()
    assert {
        'sgl_stateful_session_cells{state="pinned"} 12.0',
        'sgl_stateful_session_cells_by_owner_class{owner_class="farm-"} 12.0',
        "sgl_stateful_session_open 12.0",
        "sgl_stateful_session_admissions_total 2.0",
        'sgl_stateful_session_refusals_total{reason="quota"} 0.0',
        'sgl_stateful_session_tokens_total{source="cached"} 10.0',
        'sgl_stateful_session_ms_bucket{le="50.0",operation="append"} 2.0',
    } <= set(lines)
