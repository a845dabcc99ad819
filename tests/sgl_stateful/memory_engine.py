"""An `EnginePort` without a model: a radix cache of token ids by salt, and KV worked out from the tokens.

KV of a token is a number made of the token itself and of all tokens before it, so that tests can tell what a
captured fact saw. No attention, no positions.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from kv_splice import QuantiseError, quantise
from memstore import BlobStoreError, Encoding, FactId, KVBlobs
from sgl_stateful.directive import Capture, CaptureItem, Directive
from sgl_stateful.engine_port import PrefillResult
from sgl_stateful.sessions.hold import Hold

DESCRIPTION = {
    "fingerprint": "memory-engine",
    "fact_fingerprint": "memory-engine",
    "kv_storage": "native",
    "dtype": "float32",
    "pool_tokens": 1 << 20,
}


class Sent(NamedTuple):
    """One prefill that the engine was asked for."""

    salt: str
    token_ids: tuple[int, ...]
    directive: Directive | None
    others_in_flight: int
    hold: Hold | None = None


def kv_of(token_ids: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[num_layers=2, end - start, num_kv_heads=1, head_dim=2]` of positions `[start, end)`."""
    seen = xxhash.xxh3_64("".join(f"{i} " for i in token_ids[:start]).encode())
    numbers = []
    for token_id in token_ids[start:end]:
        seen.update(f"{token_id} ".encode())
        numbers.append(seen.intdigest() % 2**20)
    k = torch.tensor(numbers, dtype=torch.float32)[None, :, None, None].expand(2, -1, 1, 2).contiguous()
    return k, -k


class MemoryEngine:
    """Serves prefills at once, several at a time.

    Attributes
    ----------
    failing
        How many of the next prefills raise.
    closed_gate
        While it is set to an event, captures wait for it before they are written.
    infinite
        Facts whose keys hold infinity, which int8 refuses.
    """

    def __init__(self, blobs: KVBlobs) -> None:
        self._blobs = blobs
        self._trees: dict[str, dict[int, Any]] = {}
        self._in_flight = 0
        self.sent: list[Sent] = []
        self.controls: list[tuple[str, Mapping[str, Any]]] = []
        self.description: dict[str, Any] = dict(DESCRIPTION)
        self.failing = 0
        self.failing_controls = 0
        self.foreground = 0
        self.closing = False
        self.infinite: set[FactId] = set()
        self.gate: asyncio.Event | None = None
        self.at_gate = asyncio.Event()

    async def prefill(
        self,
        token_ids: Sequence[int],
        *,
        salt: str,
        directive: Directive | None,
        top_logprobs: int = 0,
        hold: Hold | None = None,
    ) -> PrefillResult:
        self.sent.append(Sent(salt, tuple(token_ids), directive, self._in_flight, hold))
        self._in_flight += 1
        try:
            await asyncio.sleep(0)
            if self.failing:
                self.failing -= 1
                raise RuntimeError("the engine is out of order")
            cached = self._cached(salt, token_ids)
            report: dict[str, Any] = {}
            if isinstance(directive, Capture):
                if self.gate is not None:
                    self.at_gate.set()
                    await self.gate.wait()
                try:
                    report = self._capture_all(directive, token_ids)
                except BlobStoreError as error:
                    kind = type(error).__name__
                    report = {"error": f"{kind}: {error}", "error_type": kind}
            if not isinstance(directive, Capture) or directive.publish:
                self._publish(salt, token_ids)
            await asyncio.sleep(0)
            return PrefillResult(len(token_ids), cached, report)
        finally:
            self._in_flight -= 1

    async def control(self, op: str, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        if self.failing_controls:
            self.failing_controls -= 1
            raise RuntimeError(f"control call {op!r} failed: the scheduler is busy")
        self.controls.append((op, dict(payload or {})))
        return self.description if op == "describe" else {}

    def is_closing(self) -> bool:
        return self.closing

    def foreground_requests(self) -> int:
        return self.foreground

    @property
    def captures(self) -> list[Sent]:
        return [sent for sent in self.sent if isinstance(sent.directive, Capture)]

    def _cached(self, salt: str, token_ids: Sequence[int]) -> int:
        node, length = self._trees.get(salt, {}), 0
        # The last token is always computed: its logits are asked for.
        for token_id in token_ids[:-1]:
            if (child := node.get(token_id)) is None:
                break
            node, length = child, length + 1
        return length

    def _publish(self, salt: str, token_ids: Sequence[int]) -> None:
        node = self._trees.setdefault(salt, {})
        for token_id in token_ids:
            node = node.setdefault(token_id, {})

    def _capture_all(self, capture: Capture, token_ids: Sequence[int]) -> dict[str, Any]:
        sizes, refused = [], []
        for item in capture.items:
            try:
                sizes.append(self._capture(item, token_ids))
            except QuantiseError:
                refused.append(item.span.encoding_id)
        report: dict[str, Any] = {"captured": len(sizes), "captured_bytes": sum(sizes)}
        return {**report, "refused": refused} if refused else report

    def _capture(self, item: CaptureItem, token_ids: Sequence[int]) -> int:
        start, end = item.span.start, item.span.end
        k, v = kv_of(token_ids, start, end)
        if item.encoding["fact_id"] in self.infinite:
            k[0, -1] = torch.inf
        described = dict(item.encoding)
        described["saw"] = tuple((FactId(fact_id), version) for fact_id, version in described["saw"])
        described["token_ids"] = tuple(token_ids[start:end])
        if self.description["kv_storage"] == "native":
            self._blobs.put(Encoding(**described), k, v)
            return k.nbytes + v.nbytes
        k8, v8, scales = quantise(k, v)
        self._blobs.put(Encoding(**described), k8, v8, scales=scales)
        return sum(tensor.nbytes for tensor in (k8, v8, *scales))
