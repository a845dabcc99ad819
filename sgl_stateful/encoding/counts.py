"""What encoding has cost so far."""

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class EncodeCounts:
    """What one policy has cost so far. ``tokens_prefilled`` counts what the engine computed, prefixes included."""

    facts: int = 0
    fact_tokens: int = 0
    tokens_prefilled: int = 0
    bytes: int = 0
    failures: int = 0
    refused: int = 0  # facts whose KV int8 does not hold
    seconds: float = 0.0

    def as_dict(self) -> dict[str, float | None]:
        """As the status shows it."""
        ratio = self.tokens_prefilled / self.fact_tokens if self.fact_tokens else None
        shown: dict[str, float | None] = {**dataclasses.asdict(self), "seconds": round(self.seconds, 3)}
        return {**shown, "tokens_prefilled_per_fact_token": None if ratio is None else round(ratio, 4)}
