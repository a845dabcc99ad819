"""Time on the device that the tensors are on."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["median_ms"]

_Event: Any = torch.cuda.Event
_sleep: Any = torch.cuda._sleep
_AHEAD_CYCLES = 10_000_000


def median_ms(run: Callable[[], object], device: torch.device, *, repeats: int, warm_ups: int = 2) -> float:
    """Median of `repeats` runs, milliseconds: between two events on a GPU's current stream, else of wall time."""
    for _ in range(warm_ups):
        run()
    return statistics.median(_event_ms(run, device) if device.type == "cuda" else _wall_ms(run) for _ in range(repeats))


def _event_ms(run: Callable[[], object], device: torch.device) -> float:
    start, end = (_Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    _sleep(_AHEAD_CYCLES)  # so that all is launched before the first event, and no launch is timed
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end))


def _wall_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
