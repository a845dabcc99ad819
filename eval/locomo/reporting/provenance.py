"""What was run: the configuration and the header, as they stand in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .contents import Section, Table, text


def provenance(score: Mapping[str, Any]) -> Section:
    """Two tables of names and values; what is nested has its keys joined by dots."""
    tables = [
        Table(caption, ("Setting", "Value"), [(text(name), text(value)) for name, value in flatten(score[key])])
        for key, caption in (("config", "Configuration"), ("header", "Versions, hashes and machine"))
        if score.get(key)
    ]
    return Section("run", "What was run", parts=tables)


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
    return find(score, "model.name", "model", "model_id", "model_path")


def machine_of(score: Mapping[str, Any]) -> str | None:
    """The machine in a few words."""
    cpu, cores = find(score, "machine.cpu", "machine"), find(score, "machine.cores")
    return f"{cpu}, {cores} cores" if cpu and cores else cpu


def find(score: Mapping[str, Any], *names: str) -> str | None:
    """The first leaf of header or config that has one of `names` at the end of its dotted name, in their order."""
    leaves = [leaf for part in ("header", "config") for leaf in flatten(score.get(part) or {})]
    for wanted in names:
        for name, value in leaves:
            if f".{name}".endswith(f".{wanted}") and value != "–":
                return value
    return None
