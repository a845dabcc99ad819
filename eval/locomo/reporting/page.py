"""The report: one HTML file that needs nothing else, and the charts beside it as PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from .provenance import commit_of, differing_benches, embedder_of, machine_of, model_of, provenance
from .published import published
from .retrieval import retrieval
from .speed import time_to_first_token
from .throughput import throughput

BENCHES = ("bench_ttft", "bench_throughput", "bench_encode")


def write_report(
    score: Mapping[str, Any],
    *,
    out: Path,
    benches: Mapping[str, Mapping[str, Any]] | None = None,
    encoded: Mapping[str, Any] | None = None,
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

    encoded
        What the run encoded, by policy.

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
    sections = sections_of(score, benches, encoded)
    page = (
        environment()
        .get_template("report.html.jinja")
        .render(
            title="LoCoMo: what was measured",
            facts=_facts(score),
            notes=list(_notes(score, benches)),
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


def sections_of(
    score: Mapping[str, Any], benches: Mapping[str, Mapping[str, Any]], encoded: Mapping[str, Any] | None = None
) -> list[contents.Section]:
    """Everything measured, then what others published."""
    return [
        provenance(score, benches),
        fidelity(score),
        information(score),
        accuracy(score),
        retrieval(score),
        *_audited(score),
        time_to_first_token(benches.get("bench_ttft")),
        throughput(benches.get("bench_throughput")),
        encoding(benches.get("bench_encode"), encoded),
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


def _audited(score: Mapping[str, Any]) -> Iterator[contents.Section]:
    """The tables of a run's figures once more, without the questions whose gold is known to be wrong."""
    if not (audited := score.get("audited")):
        return
    audit = score.get("audit") or {}
    without = {**score, **audited}
    sections = (fidelity(without), information(without), accuracy(without), retrieval(without))
    tables = [
        replace(part, caption=f"Without audited errors: {part.caption}")
        for section in sections
        for part in section.parts
        if isinstance(part, contents.Table)
    ]
    lead = f"All figures without the {audit.get('excluded', 0)} of these questions whose gold is known to be wrong."
    best = f"Of the spliced arms, {audited.get('best_arm') or 'none'} is the nearest to full prefill."
    yield contents.Section("audited", "Without audited errors", [lead, best], tables)


def _facts(score: Mapping[str, Any]) -> list[str]:
    """What stands under the title: model, embedder, questions, commit and machine, as far as they are known."""
    questions = score.get("questions") or {}
    scored, wanted, conversations = (questions.get(name) for name in ("scored", "wanted", "conversations"))
    of = f" of {wanted}" if wanted and wanted != scored else ""
    found = {
        "model": model_of(score),
        "embedder": embedder_of(score),
        "questions": f"{scored}{of}" if scored is not None else None,
        "conversations": conversations,
        "commit": commit_of(score),
        "machine": machine_of(score),
    }
    return [f"{name} {value}" for name, value in found.items() if value]


def _notes(score: Mapping[str, Any], benches: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What a reader must know before the first figure."""
    questions = score.get("questions") or {}
    scored, wanted = questions.get("scored"), questions.get("wanted")
    if scored is not None and wanted is not None and scored < wanted:
        yield f"The run is unfinished: {scored} of {wanted} questions."
    if reason := score.get("judge_refused"):
        yield f"No answer counts as judged: {reason} before all were."
    yield from differing_benches(score, benches)
    for name, bench in benches.items():
        if (bench.get("meta") or {}).get("finished") is False:
            yield f"{name} was ended before it had measured everything."
