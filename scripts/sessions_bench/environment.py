"""What the bench runs on."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("sgl-stateful", "sglang", "torch", "numpy", "httpx")


def description() -> dict[str, object]:
    """Return versions, commit, machine and threads."""
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    return {
        **{name: metadata.version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "cpus": os.cpu_count(),
        "cpu": _cpu_model(),
        "machine": platform.machine(),
        "commit": commit.stdout.strip() or "unknown",
    }


def _cpu_model() -> str:
    """Return the processor's name where the kernel says it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
