"""Questions and answers as the API shows them."""

from __future__ import annotations

from typing import Any

from .ahead import Ahead
from .answers import Stored
from .audit import AlikeAudit
from .entry import Entry
from .entry_point import EntryPoint
from .gate import Gate


def shown_answer(entry: Entry, stored: Stored, now: float) -> dict[str, Any]:
    """An answer; ages in seconds, ``gap`` in nats."""
    answer = stored.answer
    return {
        "text": answer.text,
        "output_ids": list(answer.token_ids),
        "data_version": stored.key.present.data_version,
        "age_s": round(max(now - stored.computed_at, 0.0), 6),
        "confidence": entry.confidence(answer),
        "choice": answer.choice,
        "gap": answer.gap,
        "by": answer.by,
    }


def shown_entry(entry: Entry, *, data_version: int, now: float, waiting: bool) -> dict[str, Any]:
    """A registration with its state; ``data_version``: of its session now."""
    question, stored = entry.question, entry.stored
    content = question.content
    asked = {name: getattr(content, name) for name in ("text", "messages", "input_ids")}
    return {
        "name": entry.name,
        "session": entry.session_id,
        "owner": entry.owner,
        **{name: value for name, value in asked.items() if value is not None},
        "data": dict(question.data),
        "max_tokens": question.max_tokens,
        "sampling_params": dict(question.sampling_params),
        "choices": [choice.text for choice in question.choices],
        "min_interval_ms": question.min_interval_ms,
        "priority": question.priority,
        "gate": None if entry.gate is None else shown_gate(entry.gate),
        "audit": {
            "target": entry.audit.target,
            "audited": entry.audit.audited,
            "agreed": entry.audit.agreed,
            "interval": list(entry.audit.interval()),
        },
        "semantic": None if entry.alike is None else shown_alike(entry, entry.alike),
        "memory": None if question.memory is None else question.memory.model_dump(exclude_defaults=True),
        "template_version": entry.template_version,
        "state": _state(entry, data_version),
        "waiting": waiting,
        "retired": entry.retired,
        "error": entry.error,
        "hits": entry.hits,
        "evaluations": entry.worth.evaluations,
        "value": round(entry.worth.value(), 6),
        "answer": None if stored is None else shown_answer(entry, stored, now),
    }


def shown_alike(entry: Entry, alike: AlikeAudit) -> dict[str, Any]:
    """How a question answers other words; shares in [0, 1]."""
    low, high = alike.interval()
    return {
        "threshold": entry.question.semantic,
        "hits": alike.hits,
        "audited": alike.audited,
        "agreed": alike.agreed,
        "false_accepts": alike.false_accept_share(),
        "false_accept_interval": [1 - high, 1 - low],
        "retired": alike.retired,
    }


def shown_entry_point(shown: dict[str, Any], entry: Entry, *, cells: int) -> dict[str, Any]:
    """An entry with its state, of what ``shown_entry`` says of it; ``cells``: that it has pinned beyond its session."""
    point, stored = entry.question, entry.stored
    assert isinstance(point, EntryPoint), point
    ahead = None
    if stored is not None:
        answer = stored.answer
        assert isinstance(answer, Ahead), answer
        found = shown.pop("answer")
        ahead = {**found, "tokens": len(answer.token_ids), "agreed": answer.agreed, "ends": answer.ends}
    of_a_question = ("answer", "data", "memory", "min_interval_ms")
    return {
        **{name: value for name, value in shown.items() if name not in of_a_question},
        "until": [*point.until, *point.until_ids],
        "cells": cells,
        "ahead": ahead,
    }


def shown_gate(gate: Gate) -> dict[str, Any]:
    """A gate: what fires, and the reliability curve; gaps in nats."""
    agreed, fired = gate.precision()
    return {
        "target": gate.target,
        "threshold": gate.threshold if gate.is_calibrated else None,
        "observed": len(gate),
        "coverage": gate.coverage(),
        "fired": fired,
        "agreed": agreed,
        "curve": [{**one._asdict(), "interval": list(one.interval)} for one in gate.curve()],
    }


def _state(entry: Entry, data_version: int) -> str:
    if entry.retired is not None:
        return "retired"
    if entry.stored is None:
        return "failed" if entry.error is not None else "pending"
    return "fresh" if entry.stored.key.present.data_version == data_version else "stale"
