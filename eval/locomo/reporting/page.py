"""The report: one HTML file that needs nothing else, and the charts beside it as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from . import contents, palette
from .accuracy import accuracy
from .conclusions import conclusions
from .encoding import encoding
from .fidelity import fidelity
from .information import information
from .key_figures import key_figures
from .provenance import find, machine_of, model_of, provenance
from .published import published
from .retrieval import retrieval
from .speed import time_to_first_token
from .throughput import throughput

BENCHES = ("bench_ttft", "bench_throughput", "bench_encode")


def write_report(
    score: Mapping[str, Any], *, out: Path, benches: Mapping[str, Mapping[str, Any]] | None = None
) -> Path:
    """Write ``report.html`` and its PNGs into a folder; the same input gives the same bytes.

    Parameters
    ----------
    score
        What ``python -m locomo score`` wrote.
    out
        The folder, made where it is absent.
    benches
        What the speed benchmarks wrote, under `BENCHES`' names; those absent leave a line that says how to make them.

    Returns
    -------
    Path
        ``out / "report.html"``.

    Raises
    ------
    ReportInputError
        If a benchmark's rows are of another shape.
    OSError
        If the folder cannot be written to.
    """
    benches = benches or {}
    sections = sections_of(score, benches)
    page = (
        environment()
        .get_template("report.html.jinja")
        .render(
            title="LoCoMo: what was measured",
            facts=_facts(score),
            figures=key_figures(score, benches),
            sections=sections,
            conclusions=conclusions(score, benches),
        )
    )
    out.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for figure in section.figures:
            (out / f"{figure.name}.png").write_bytes(figure.png)
    target = out / "report.html"
    target.write_text(page, encoding="utf-8")
    return target


def sections_of(score: Mapping[str, Any], benches: Mapping[str, Mapping[str, Any]]) -> list[contents.Section]:
    """Everything measured, then what others published."""
    return [
        provenance(score),
        fidelity(score),
        information(score),
        accuracy(score),
        retrieval(score),
        time_to_first_token(benches.get("bench_ttft")),
        throughput(benches.get("bench_throughput")),
        encoding(benches.get("bench_encode")),
        published(),
    ]


def environment() -> Environment:
    """Templates of this package, with escaping on and the charts' palette at hand."""
    made = Environment(
        loader=PackageLoader("locomo.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(light=palette.LIGHT, dark=palette.DARK)
    made.tests["figure"] = lambda part: isinstance(part, contents.Figure)
    made.tests["table"] = lambda part: isinstance(part, contents.Table)
    return made


def _facts(score: Mapping[str, Any]) -> list[str]:
    """What stands under the title: model, questions, commit and machine, as far as they are known."""
    counts = [values["n"] for values in (score.get("arms") or {}).values() if isinstance(values.get("n"), int)]
    found = {
        "model": model_of(score),
        "questions": str(max(counts)) if counts else None,
        "commit": find(score, "commit"),
        "machine": machine_of(score),
    }
    return [f"{name} {value}" for name, value in found.items() if value]
