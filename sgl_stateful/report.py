"""What a response says about its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_stateful.promotion import FactBlock


@dataclass(slots=True)
class Report:
    """What happened to one request's memory; the scheduler's part arrives with its first token."""

    mode: str
    owner: str
    policy: str
    facts: list[dict[str, Any]]
    repair: str = "none"
    not_encoded: int = 0
    dropped_for_length: int = 0
    reason: str | None = None
    degraded: bool = False
    retrieve_ms: float = 0.0
    assemble_ms: float = 0.0
    splice_ms: float = 0.0
    spliced_tokens: int = 0
    computed_tokens: int = 0
    repaired_share: float = 0.0  # of the block's fact tokens, those computed anew by the repair
    tier: str = "text"
    block: FactBlock | None = None  # of a prompt that is spliced; not shown

    def finish(self, scheduler: dict[str, Any] | None, *, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """Merge the scheduler's part and return what the response shows."""
        if scheduler is not None:
            self.spliced_tokens = scheduler.get("spliced_tokens", 0)
            self.computed_tokens = scheduler.get("computed_tokens", 0)
            self.splice_ms = scheduler.get("splice_ms", 0.0)
            self.tier = scheduler.get("tier", "text")
            self.reason = scheduler.get("reason") or self.reason
        if self.tier == "spliced" and self.repaired_share:
            self.tier = "repaired"
        return {
            "mode": "splice" if self.tier in ("spliced", "repaired") else ("off" if self.mode == "off" else "text"),
            "requested_mode": self.mode,
            "tier": self.tier if self.facts else "none",
            "reason": self.reason,
            "degraded": self.degraded,
            "owner": self.owner,
            "policy": self.policy,
            "repair": self.repair,
            "repaired_share": self.repaired_share if self.tier == "repaired" else 0.0,
            "facts": self.facts,
            "not_encoded": self.not_encoded,
            "dropped_for_length": self.dropped_for_length,
            "tokens": {
                "prompt": prompt_tokens,
                # SGLang counts as cached whatever stood in the pool when the prompt's own extend began.
                "cached": cached_tokens - self.spliced_tokens - self.computed_tokens,
                "spliced": self.spliced_tokens,
                "prefilled": prompt_tokens - cached_tokens + self.computed_tokens,
            },
            "ms": {
                "retrieve": round(self.retrieve_ms, 3),
                "assemble": round(self.assemble_ms, 3),
                "splice": round(self.splice_ms, 3),
            },
        }
