"""A `FlashEngine` without a model: its answer is a digest of the prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pinning_engine import PinningEngine

from sgl_stateful.flash.port import Decoded, EnginePrompt
from sgl_stateful.foreground import Foreground, Listener


class Asked(NamedTuple):
    prompt: EnginePrompt
    sampling: Mapping[str, Any]
    label_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.prompt.token_ids)


def said(token_ids: Sequence[int]) -> str:
    """What is decoded after a prompt."""
    return hashlib.md5(repr(tuple(token_ids)).encode()).hexdigest()[:8]


class DigestEngine:
    """Decodes at once, unless a gate is closed.

    Attributes
    ----------
    gate
        While it is set to an event, decoding waits for it; `at_gate` counts who does, and `most_at_gate` at once.
    failing
        Why decoding fails; None: it does not.
    logprobs
        Of the first token, by id.
    answers
        What is decoded, one after the other, before digests are.
    stopped_by
        What has ended it; None: its length.
    pinning
        Where what a request holds is pinned.
    """

    def __init__(self, pinning: PinningEngine | None = None) -> None:
        self.pinning = pinning or PinningEngine()
        self.foreground = Foreground()
        self.asked: list[Asked] = []
        self.aborted = 0
        self.gate: asyncio.Event | None = None
        self.at_gate = self.most_at_gate = 0
        self.failing: str | None = None
        self.logprobs: dict[int, float] = {}
        self.answers: list[str] = []
        self.stopped_by: str | int | None = None
        self.closing = False

    async def decode(
        self, prompt: EnginePrompt, sampling_params: Mapping[str, Any], *, label_ids: Sequence[int] = ()
    ) -> Decoded:
        self.asked.append(Asked(prompt, sampling_params, tuple(label_ids)))
        self.at_gate += 1
        self.most_at_gate = max(self.most_at_gate, self.at_gate)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.at_gate -= 1
        if self.failing is not None:
            raise RuntimeError(self.failing)
        text = self.answers.pop(0) if self.answers else said(prompt.token_ids)
        ids = tuple(text.encode())[: sampling_params.get("max_new_tokens", 32)]
        text = bytes(ids).decode()
        end = {"type": "length", "length": len(ids)}
        if self.stopped_by is not None:
            end = {"type": "stop", "matched": self.stopped_by}
        held = self.pinning.held((*prompt.token_ids, *ids), prompt.hold) or {"pinned_tokens": 0}
        meta = {
            "id": "of-the-evaluation",
            "finish_reason": end,
            "prompt_tokens": len(prompt.token_ids),
            "cached_tokens": 3,
            "output_token_logprobs": [[-0.1, 1, None]],
        }
        reply = {"text": text, "output_ids": list(ids), "meta_info": meta}
        labels = {token_id: self.logprobs[token_id] for token_id in label_ids}
        return Decoded(text, ids, len(prompt.token_ids), 3, 1.0, labels, reply, held["pinned_tokens"])

    def foreground_requests(self) -> int:
        return self.foreground.count

    def listen(self, listener: Listener) -> None:
        self.foreground.listen(listener)

    def is_closing(self) -> bool:
        return self.closing
