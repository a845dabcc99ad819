"""What the HTTP process asks of the scheduler, carried inside a request's ``custom_params``.

SGLang broadcasts ``custom_params`` to every tensor-parallel rank and lets one level of JSON-safe values through, so a
directive travels as one JSON string under one key. Callers can never set it: the HTTP process refuses the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from memstore import EncodingId

DIRECTIVE_KEY = "sgl_stateful"


@dataclass(frozen=True, slots=True)
class Span:
    """Prompt positions ``[start, end)`` that hold the fact encoded as ``encoding_id``, from its token ``offset`` on."""

    encoding_id: EncodingId
    start: int
    end: int
    offset: int = 0

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Splice:
    """Serve ``spans`` (ascending) from the arena instead of prefilling them; tokens between them are computed in place.

    ``probe`` makes the scheduler report how far layer 0 of the spans is from the one kept under that name.
    ``fingerprint`` is of the weights that the encodings were made with.
    """

    spans: tuple[Span, ...]
    probe: str | None = None
    fingerprint: str = ""

    @property
    def start(self) -> int:
        """First spliced position."""
        return self.spans[0].start

    @property
    def end(self) -> int:
        """One past the last spliced position."""
        return self.spans[-1].end


@dataclass(frozen=True, slots=True)
class CaptureItem:
    """One fact to capture: where it stands in the prompt, and the metadata stored beside its KV."""

    span: Span
    encoding: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep the KV of ``items`` once the request has finished.

    ``publish`` lets the radix cache keep the request's prompt as well; a fact encoded behind a list that many facts
    share is nobody's prefix, and would only push other prompts out.
    """

    items: tuple[CaptureItem, ...]
    publish: bool = True


@dataclass(frozen=True, slots=True)
class KeepProbe:
    """Keep layer 0 of ``[start, end)`` of an exact request under ``probe``, for the start-up self-test."""

    probe: str
    start: int
    end: int


Directive = Splice | Capture | KeepProbe


def _spans(raw: list[list[Any]]) -> tuple[Span, ...]:
    return tuple(Span(EncodingId(encoding_id), start, end, offset) for encoding_id, start, end, offset in raw)


def dump_directive(directive: Directive) -> str:
    """The JSON string that travels under ``DIRECTIVE_KEY``."""
    match directive:
        case Splice(spans, probe, fingerprint):
            body: dict[str, Any] = {
                "op": "splice",
                "spans": [[s.encoding_id, s.start, s.end, s.offset] for s in spans],
                "fingerprint": fingerprint,
            }
            if probe is not None:
                body["probe"] = probe
        case Capture(items, publish):
            body = {
                "op": "capture",
                "publish": publish,
                "items": [[i.span.encoding_id, i.span.start, i.span.end, dict(i.encoding)] for i in items],
            }
        case KeepProbe(probe, start, end):
            body = {"op": "keep_probe", "probe": probe, "start": start, "end": end}
    return json.dumps(body, separators=(",", ":"))


def parse_directive(custom_params: Any) -> Directive | None:
    """Read the directive of a request, or None where it has none."""
    raw = custom_params.get(DIRECTIVE_KEY) if isinstance(custom_params, dict) else None
    if raw is None:
        return None
    body = json.loads(raw)
    match body["op"]:
        case "splice":
            spans = _spans(body["spans"])
            assert spans, "a splice without spans"
            assert all(a.end <= b.start for a, b in pairwise(spans)), f"spans that overlap: {spans}"
            return Splice(spans, body.get("probe"), body.get("fingerprint", ""))
        case "capture":
            return Capture(
                tuple(
                    CaptureItem(Span(EncodingId(encoding_id), start, end), encoding)
                    for encoding_id, start, end, encoding in body["items"]
                ),
                body["publish"],
            )
        case "keep_probe":
            return KeepProbe(body["probe"], body["start"], body["end"])
        case op:
            raise AssertionError(f"unknown directive {op!r}")
