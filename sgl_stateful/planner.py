"""From retrieved facts to a prompt: which fit, in which order, and which encoding of each is spliced."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memstore import Encoding, FactId, KVBlobs, MemStoreError, OwnerId, SearchHit
from sgl_stateful.directive import Directive, Span, Splice
from sgl_stateful.encoding import Ladder
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.params import MemoryParams
from sgl_stateful.prompt import Block, FactTokens, assemble, order_facts
from sgl_stateful.repair import Repair
from sgl_stateful.report import Report

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that is ready for the engine."""

    token_ids: list[int]
    directive: Directive | None
    salt: str
    report: Report


class PromptPlanner:
    """Plans prompts under one codec, hence for one state of the model's weights. Thread-safe.

    Parameters
    ----------
    header, footer
        Text around the facts; empty, or ending with a newline.
    max_tokens
        Longest prompt with its answer: of the model's context and of the KV pool the smaller.
    """

    def __init__(self, *, codec: FactCodec, blobs: KVBlobs, header: str, footer: str, max_tokens: int) -> None:
        self._codec = codec
        self._blobs = blobs
        self._header = codec.encode_text(header)
        self._footer = codec.encode_text(footer)
        self._max_tokens = max_tokens

    def plan(
        self,
        params: MemoryParams,
        ladder: Ladder,
        repair: Repair,
        hits: Sequence[SearchHit],
        *,
        head: Sequence[int],
        tail: Sequence[int],
        reserve_tokens: int,
        salt: str,
        report: Report,
    ) -> Prepared:
        """The prompt with the best hits that fit (of named facts the first), spliced where they have an encoding.

        ``report`` is filled in.
        """
        codec = self._codec
        hits, report.dropped_for_length = self._fit(hits, len(head) + len(tail) + reserve_tokens)
        tokens = [codec.encode_fact(hit.fact) for hit in hits]
        is_named = params.facts is not None
        scores = {hit.fact.id: None if is_named else round(hit.score, 6) for hit in hits}
        ordered = tokens if is_named else order_facts(tokens, [hit.score for hit in hits], params.order)
        encodings: dict[FactId, Encoding] = {}
        if params.mode == "splice" and hits:
            encodings = self._encodings(params.owner, ladder, ordered, report)
            report.not_encoded = sum(f.fact.id not in encodings for f in ordered)
            if report.not_encoded:
                report.reason = f"not_encoded:{report.not_encoded}"
        report.facts = [
            {"id": f.fact.id, "score": scores[f.fact.id], "encoded": f.fact.id in encodings} for f in ordered
        ]
        prompt = assemble(head=head, header=self._header, facts=ordered, footer=self._footer, tail=tail)
        spans = _spans(prompt.blocks, encodings, repair, report)
        return Prepared(prompt.token_ids, Splice(spans, fingerprint=codec.fingerprint) if spans else None, salt, report)

    def _fit(self, hits: Sequence[SearchHit], other_tokens: int) -> tuple[list[SearchHit], int]:
        """The best facts that fit the context beside ``other_tokens``, and how many do not."""
        room = self._max_tokens - other_tokens
        room -= len(self._header) + len(self._footer) + 1
        kept = []
        for hit in hits:
            room -= len(self._codec.encode_fact(hit.fact).token_ids)
            if room < 0:
                break
            kept.append(hit)
        return kept, len(hits) - len(kept)

    def _encodings(
        self, owner: str, ladder: Ladder, ordered: Sequence[FactTokens], report: Report
    ) -> dict[FactId, Encoding]:
        """The encoding to splice for each fact, by its rank; facts without one are left out."""
        codec = self._codec
        versions = [(f.fact.id, f.fact.version) for f in ordered]
        try:
            stored = {
                policy.name: self._blobs.current(
                    OwnerId(owner), versions, fingerprint=codec.fingerprint, policy=policy.name
                )
                for policy in ladder.policies
            }
        except MemStoreError:
            logger.exception("the KV store failed; serving facts as text")
            report.degraded = True
            return {}
        chosen: dict[FactId, Encoding] = {}
        for rank, fact in enumerate(ordered):
            for policy in ladder.for_rank(rank):
                encoding = stored[policy.name].get(fact.fact.id, {}).get(0)
                if encoding is not None and encoding.token_ids == fact.token_ids:
                    chosen[fact.fact.id] = encoding
                    break
        return chosen


def _spans(
    blocks: Sequence[Block], encodings: Mapping[FactId, Encoding], repair: Repair, report: Report
) -> tuple[Span, ...]:
    """What is spliced of the facts that have an encoding; ``report`` receives the share that the repair takes."""
    kept = repair.kept([block.end - block.start for block in blocks])
    spans, repaired = [], 0
    for block, tokens in zip(blocks, kept, strict=True):
        if (encoding := encodings.get(block.fact.fact.id)) is None:
            continue
        repaired += block.end - block.start - len(tokens)
        if tokens:
            spans.append(Span(encoding.id, block.start + tokens.start, block.start + tokens.stop, tokens.start))
    if repaired:
        report.repaired_share = round(repaired / sum(block.end - block.start for block in blocks), 6)
        if not spans and report.reason is None:
            report.reason = "repair_covers_all"
    return tuple(spans)
