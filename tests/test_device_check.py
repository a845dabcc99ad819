"""`scripts/device_check` on a CPU, in Triton's interpreter: all of it, with a few tokens."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from device_bench import correctness, report, timing

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts/device_check"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a tiny run writes; beside it, under `printed`, what it prints."""
    path = tmp_path_factory.mktemp("device") / "figures.json"
    run = subprocess.run([sys.executable, SCRIPT, "--tiny", "--json", path], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return {**json.loads(path.read_text()), "printed": run.stdout}


def test_every_check_passes(found: dict[str, Any]) -> None:
    assert found["correct"]
    assert found["wrong"] == []
    # Two widths in two pairings, and in two more dtypes: a splice native and in int8, and a capture.
    assert found["checks"] == (2 * 2 + 2 * 2) * 3
    assert f"{found['checks']} of {found['checks']} checks passed" in found["printed"]


def test_lengths_sources_and_tiers_are_timed(found: dict[str, Any]) -> None:
    tiers = ["device", "host, read by the kernel", "host, copied in layers", "capture"]
    rows = [(row["source"], row["tokens"], row["tier"]) for row in found["rows"]]
    assert rows == [(source, n, tier) for source in ("bfloat16", "int8") for n in (4, 10) for tier in tiers]
    for row in found["rows"]:
        assert row["ms"] > 0
        assert row["fraction_of_copy"] == pytest.approx(row["copy_ms"] / row["ms"])
        assert row["gb_s"] == pytest.approx((row["bytes_read"] + row["bytes_written"]) / row["ms"] / 1e6)
        assert "target_met" not in row, "a few tokens on a CPU miss no target"


def test_launches_are_counted(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        if row["tier"] != "host, copied in layers":
            assert row["launches"] == 1
    # 10 tokens of keys and values in bf16 are 5,120 bytes a layer: buffers of 6 KiB take one of three.
    copied = {(row["source"], row["tokens"]): row["launches"] for row in found["rows"] if "copied" in row["tier"]}
    assert copied == {("bfloat16", 4): 1, ("bfloat16", 10): 3, ("int8", 4): 1, ("int8", 10): 2}


def test_bytes_by_hand(found: dict[str, Any]) -> None:
    """10 tokens, 3 layers, 2 heads of 64 are 3,840 numbers of keys, and of values; a table in fp32; 4 facts of 3."""
    rows = {(row["source"], row["tier"]): row for row in found["rows"] if row["tokens"] == 10}
    angles, addresses, index = 10 * 64 * 4, 2 * 3 * 8, 10 * 8
    native, int8 = rows["bfloat16", "device"], rows["int8", "device"]
    assert native["bytes_written"] == int8["bytes_written"] == 2 * 3840 * 2
    assert native["bytes_read"] == 2 * 3840 * 2 + angles + 3 * index + addresses
    scales = 2 * (3 * 4 * 2 * 64) + 2 * (3 * 10 * 2)
    assert int8["bytes_read"] == 2 * 3840 + angles + 4 * index + addresses + scales


def test_every_target_is_said_to_be_met_or_missed(found: dict[str, Any]) -> None:
    rows = [dict(row) for row in found["rows"] if row["tier"] == "device"][:3]
    reached = ((0.81, 1, True), (0.79, 1, False), (0.9, 2, False))
    for row, (fraction, launches, is_met) in zip(rows, reached, strict=True):
        row.update(fraction_of_copy=fraction, launches=launches, target_met=is_met)
    *_, first, second, third, _ = report.table({**found, "rows": rows}).splitlines()
    assert first == "target met: 4 tokens of bfloat16 in device memory, 0.81 of a copy (at least 0.8), launches 1 (1)"
    assert second.startswith("target MISSED: 10 tokens of bfloat16")
    assert third.startswith("target MISSED: 4 tokens of int8")
    assert "launches 2 (1)" in third


@pytest.mark.parametrize(
    ("tier", "num_tokens", "ms", "launches", "want"),
    [
        ("device", 2000, 1.25, 1, True),
        ("device", 2000, 1.26, 1, False),
        ("device", 8000, 1.0, 2, False),
        ("device", 500, 9.0, 1, None),
        ("capture", 2000, 9.0, 1, None),
    ],
)
def test_a_target_is_eight_tenths_of_the_copy_in_one_launch(
    tier: str, num_tokens: int, ms: float, launches: int, want: bool | None
) -> None:
    assert timing.target_met(tier, num_tokens, fraction_of_copy=1.0 / ms, launches=launches) is want


def test_a_check_that_raises_is_wrong_and_the_others_run() -> None:
    def broken() -> None:
        raise RuntimeError("out of resources")

    checks = [("first", broken), ("second", lambda: None)]
    assert [correctness.error_of(check) for _, check in checks] == ["RuntimeError: out of resources", ""]


def test_where_there_is_no_gpu_it_says_so() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    run = subprocess.run([sys.executable, SCRIPT], env=hidden, capture_output=True, text=True)
    assert run.returncode == 2
    assert "torch sees no GPU" in run.stderr
