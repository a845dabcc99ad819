"""What was run: the configuration and the header, as they stand in the run's folder, and what benchmarks ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .contents import Section, Table, text

_SAME_WORDS = {"model": "model_name", "data_sha256": "data_sha256"}
"""A benchmark's word for what must be as in the run, and the run's header's."""


def provenance(score: Mapping[str, Any], benches: Mapping[str, Mapping[str, Any]]) -> Section:
    """Tables of names and values; what is nested has its keys joined by dots."""
    named = {"Configuration": score.get("config"), "Versions, hashes and machine": score.get("header")}
    named |= {f"What {name} was run on": bench.get("meta") for name, bench in benches.items()}
    tables = [
        Table(caption, ("Setting", "Value"), [(text(name), text(value)) for name, value in flatten(values)])
        for caption, values in named.items()
        if isinstance(values, Mapping) and values
    ]
    return Section("run", "What was run", parts=tables)


def differing_benches(score: Mapping[str, Any], benches: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for every benchmark of another model or other data than the run."""
    header = score.get("header") or {}
    for bench, found in benches.items():
        meta = found.get("meta") or {}
        for theirs, ours in _SAME_WORDS.items():
            mine, other = header.get(ours), meta.get(theirs)
            if mine and other and mine != other:
                what = "model" if theirs == "model" else "data"
                yield f"{bench} is of another {what} than the run: {_short(other)}, not {_short(mine)}."


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of nested objects as (dotted name, text)."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield name, ", ".join(map(str, value))
        else:
            yield name, "–" if value is None else str(value)


def model_of(score: Mapping[str, Any]) -> str | None:
    """The name of the model that the run asked."""
    return _of_header(score, "model_name")


def embedder_of(score: Mapping[str, Any]) -> str | None:
    """What embedded facts and questions."""
    return _of_header(score, "embedder")


def commit_of(score: Mapping[str, Any]) -> str | None:
    """The commit of this code that the run was started with."""
    return _of_header(score, "commit")


def machine_of(score: Mapping[str, Any]) -> str | None:
    """The machine in a few words."""
    machine = (score.get("header") or {}).get("machine") or {}
    cpu, cores = machine.get("cpu"), machine.get("cores")
    return f"{cpu}, {cores} cores" if cpu and cores else cpu


def _of_header(score: Mapping[str, Any], name: str) -> str | None:
    value = (score.get("header") or {}).get(name)
    return str(value) if value else None


def _short(value: object) -> str:
    """A name, or the beginning of a hash."""
    written = str(value)
    return f"{written[:12]}…" if len(written) == 64 else written
