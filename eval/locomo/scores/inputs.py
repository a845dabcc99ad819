"""What a report and a comparison are made of, read from a run's folder: its score, benchmarks and encodings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locomo import reporting
from locomo.errors import ReportInputError
from locomo.runs.folder import RunFolder
from locomo.scores.files import SCORE, read_scored

ENCODING = "encoding.json"
# A bar that each benchmark's file has, and no other: what tells a file of another name.
_BENCH_BARS = dict(
    zip(
        reporting.BENCHES,
        ("ttft_text_over_splice_k50", "qps_ratio_16_users_k50", "encode_tokens_per_fact_token"),
        strict=True,
    )
)


def read_score(out: Path) -> Mapping[str, Any]:
    """The score of a run's folder.

    Raises
    ------
    ReportInputError
        There is none, it cannot be read, or the run has more rows than it was made of.
    """
    again = f"python -m locomo score {out}"
    if not (out / SCORE).exists():
        raise ReportInputError(f"{out} has no {SCORE}: {again} makes it")
    score = reporting.read_object(out / SCORE)
    scored = (score.get("questions") or {}).get("scored")
    rows = sum(1 for _ in RunFolder(out).rows())
    if isinstance(scored, int) and rows > scored:
        raise ReportInputError(f"{out} has {rows} rows and a {SCORE} of {scored}: {again} again")
    return score


def read_run(out: Path, *, among: Sequence[Path]) -> reporting.Run:
    """A run with the figures of its answers; named by its folder, with the path where two `among` these have one name.

    Raises
    ------
    ReportInputError, RunError
        As of `read_score`, or the figures cannot be read.
    """
    score = read_score(out)
    names = [other.resolve().name for other in among]
    name = out.resolve().name
    return reporting.Run(name if names.count(name) == 1 else str(out), score, read_scored(out))


def read_encoding(out: Path) -> Mapping[str, Any] | None:
    """What a run encoded, by policy; None where it does not say.

    Raises
    ------
    ReportInputError
        The file is there and cannot be read.
    """
    return reporting.read_object(out / ENCODING) if (out / ENCODING).exists() else None


def read_benches(out: Path, given: Sequence[Path]) -> dict[str, Mapping[str, Any]]:
    """Benchmarks' files by name: those in the run's folder, over which those given prevail.

    Raises
    ------
    ReportInputError
        A file cannot be read, or is of no known benchmark.
    """
    lying = [path for name in reporting.BENCHES if (path := out / f"{name}.json").exists()]
    found = {}
    for path in [*lying, *given]:
        bench = reporting.read_object(path)
        bars = bench.get("bars") or {}
        name = (
            path.stem
            if path.stem in reporting.BENCHES
            else next((n for n, b in _BENCH_BARS.items() if b in bars), None)
        )
        if name is None:
            raise ReportInputError(f"{path} is of no known benchmark: neither its name nor its bars are of one")
        found[name] = bench
    return found
