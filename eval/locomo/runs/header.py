"""What a reader needs to know of where a run's numbers come from."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from locomo.arms.prompts import prompt_hash

_PACKAGES = ("sgl-stateful", "sglang", "torch", "transformers", "numpy", "faiss-cpu", "sentence-transformers")


def header_of(
    data_sha256: str, described: Mapping[str, Any], *, model_name: str, server_flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Names, versions, commit, machine, hashes of the data and the wording, and what the system says of itself.

    Parameters
    ----------
    described
        As of ``System.describe``.
    model_name
        As the user gave it: see `model_name_of`.
    server_flags
        Of the servers that this run starts, beside its own.
    """
    model = described.get("model", {})
    return {
        "model_name": model_name,
        "embedder": described.get("embedder"),
        "versions": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "python": platform.python_version(),
        "commit": _commit(),
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "server_flags": list(server_flags),
        "data_sha256": data_sha256,
        "prompt_sha256": prompt_hash(),
        "model_fingerprint": model.get("fingerprint") or model.get("name"),
        "system": {name: value for name, value in described.items() if name != "embedder"},
    }


def model_name_of(model: Path) -> str:
    """A directory's own name, or a hub id as it is."""
    return model.resolve().name if model.is_dir() else str(model)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(__file__).parents[3]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
