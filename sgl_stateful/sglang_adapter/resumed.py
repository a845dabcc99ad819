"""A request that goes on from an entry: what was known beforehand, and what its replies say of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_stateful.flash.entries import EntryService
from sgl_stateful.flash.metrics import EntryUse
from sgl_stateful.flash.outcomes import Hit


@dataclass(slots=True, eq=False)
class Resumed:
    """A request that goes on from an entry.

    Attributes
    ----------
    session_tokens
        Before the question.
    tokens_ahead
        Of the answer, that it begins with.
    early
        A reply before the engine's first; None: there is none.
    """

    entries: EntryService
    hit: Hit
    session_tokens: int
    tokens_ahead: int
    early: dict[str, Any] | None = None
    _sent: str = ""

    def __post_init__(self) -> None:
        if self.early is not None:
            self._sent = self.early["text"]

    def see(self, item: dict[str, Any], *, incremental: bool) -> None:
        """Take a reply of the engine: what was known counts as cached, and is not sent twice."""
        meta = item["meta_info"]
        meta["cached_tokens"] = min(meta["cached_tokens"], meta["prompt_tokens"])
        if incremental and self._sent:
            item["text"] = item["text"].removeprefix(self._sent)
            item["output_ids"] = item["output_ids"][self.tokens_ahead :]
            self._sent = ""

    def told(self, meta: dict[str, Any]) -> dict[str, Any]:
        """What the last reply says of its session besides; counts the hit."""
        is_first = self.hit.stored.key.present.is_first
        point = self.hit.entry.question
        known = self.session_tokens + len(point.first if is_first else point.behind)
        # The last token of a prompt is computed in any case.
        if not self.tokens_ahead and meta["cached_tokens"] < min(known, meta["prompt_tokens"] - 1):
            self.entries.metrics.missed("evicted")
            return {}
        by: EntryUse = "ahead" if self.tokens_ahead else "prefix"
        self.entries.table.counted(self.hit)
        self.entries.metrics.used(by, self.tokens_ahead)
        return told(self.entries, self.hit, by, self.tokens_ahead)


def told(entries: EntryService, hit: Hit, by: EntryUse, tokens_ahead: int) -> dict[str, Any]:
    """What a reply says of its session besides, where an entry was of use."""
    entry, stored = hit.entry, hit.stored
    answer = stored.answer
    gate = entry.gate if by == "gate" else None
    return {
        "served_from": "entry",
        "entry": {
            "name": entry.name,
            "by": by,
            "tokens_ahead": tokens_ahead,
            "data_version": stored.key.present.data_version,
            "age_s": round(max(entries.table.clock() - stored.computed_at, 0.0), 6),
            "confidence": None if gate is None or answer.gap is None else gate.confidence(answer.gap),
        },
    }
