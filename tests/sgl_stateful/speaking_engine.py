"""A `MemoryEngine` that says what comes next: five tokens, as likely as the KV of all tokens of the prompt has it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from memory_engine import MemoryEngine, kv_of

from memstore import KVBlobs
from sgl_stateful.directive import Directive, Splice
from sgl_stateful.engine_port import PrefillResult
from sgl_stateful.sessions.hold import Hold


class Spoken(NamedTuple):
    """One prompt whose next token was asked for."""

    salt: str
    token_ids: tuple[int, ...]
    directive: Directive | None
    log_probs: Mapping[int, float]


class SpeakingEngine(MemoryEngine):
    """KV of spliced spans is what was captured, wherever it was captured.

    Attributes
    ----------
    tier
        As which splices are reported.
    """

    def __init__(self, blobs: KVBlobs) -> None:
        super().__init__(blobs)
        self.spoken: list[Spoken] = []
        self.tier = "spliced"

    async def prefill(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        directive: Directive | None,
        top_logprobs: int = 0,
        hold: Hold | None = None,
    ) -> PrefillResult:
        result = await super().prefill(token_ids, salt=salt, directive=directive, hold=hold)
        if not top_logprobs:
            return result
        said = Spoken(salt, tuple(token_ids), directive, self._next(token_ids, directive))
        self.spoken.append(said)
        report: dict[str, Any] = {"tier": self.tier} if isinstance(directive, Splice) else {}
        return dataclasses.replace(result, scheduler=report, top_logprobs=said.log_probs)

    def _next(self, token_ids: Sequence[int], directive: Directive | None) -> dict[int, float]:
        numbers = kv_of(token_ids, 0, len(token_ids))[0][0, :, 0, 0].clone()
        for span in directive.spans if isinstance(directive, Splice) else ():
            blob = self._blobs.load(span.encoding_id)
            assert blob is not None, f"{span.encoding_id} is spliced without KV"
            numbers[span.start : span.end] = blob.k[0, span.offset : span.offset + len(span), 0, 0]
        by_token = torch.stack([(numbers * factor) % 1021 / 1021 - 0.5 for factor in (1, 3, 7, 11, 13)])
        logits = 3 * by_token.double().sum(dim=1) / len(token_ids) ** 0.5
        return dict(enumerate(torch.log_softmax(logits, dim=0).tolist()))
