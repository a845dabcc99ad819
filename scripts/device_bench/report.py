"""The result as JSON, and as a table."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

from device_bench.settings import Setting
from device_bench.timing import FASTEST
from kv_splice.gpu import CHOICES

__all__ = ["result", "table"]

_COLUMNS = ("tokens", "source", "tier", "ms", "copy_ms", "fraction_of_copy", "gb_s", "launches")


def result(
    setting: Setting, checks: list[dict[str, str]], rows: list[dict[str, Any]], *, seconds: float
) -> dict[str, Any]:
    """Everything that was found, and where, and how long it took."""
    wrong = [check for check in checks if check["error"]]
    is_cuda = setting.device.type == "cuda"
    return {
        "correct": not wrong,
        "checks": len(checks),
        "wrong": wrong,
        "rows": rows,
        "tiles": {str(kind): tile._asdict() for kind, tile in CHOICES.items()},
        "shape": {
            "num_layers": setting.num_layers,
            "num_kv_heads": setting.num_kv_heads,
            "head_dim": setting.head_dim,
            "fact_tokens": setting.fact_tokens,
        },
        "repeats": setting.repeats,
        "seconds": seconds,
        "device": torch.cuda.get_device_name(setting.device) if is_cuda else f"{platform.machine()}, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": _commit(),
    }


def table(found: dict[str, Any]) -> str:
    """What a terminal shows."""
    lines = [f"{found['device']}, torch {found['torch']}, triton {found['triton']}, commit {found['commit']}"]
    lines.append(f"{found['checks'] - len(found['wrong'])} of {found['checks']} checks passed")
    lines += [f"WRONG: {check['name']}: {check['error'].splitlines()[0]}" for check in found["wrong"]]
    cells = [list(_COLUMNS), *([_cell(row[column]) for column in _COLUMNS] for row in found["rows"])]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines += [_verdict(row) for row in found["rows"] if "target_met" in row]
    lines.append(f"took {found['seconds']:.0f} s")
    return "\n".join(lines)


def _verdict(row: dict[str, Any]) -> str:
    verdict = "met" if row["target_met"] else "MISSED"
    return (
        f"target {verdict}: {row['tokens']} tokens of {row['source']} in device memory, "
        f"{row['fraction_of_copy']:.2f} of a copy (at least {FASTEST}), launches {row['launches']} (1)"
    )


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _commit() -> str:
    here = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"
