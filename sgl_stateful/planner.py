"""From retrieved facts to a prompt: which fit, in which order, and which encoding of each is spliced."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memstore import Encoding, FactId, KVBlobs, MemStoreError, OwnerId, SearchHit
from sgl_stateful.deviation import Deviations
from sgl_stateful.directive import Directive, Span, Splice
from sgl_stateful.encoding import Ladder
from sgl_stateful.encoding.codec import FactCodec
from sgl_stateful.params import MemoryParams
from sgl_stateful.promotion import FactBlock
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
        self._deviations = Deviations(blobs)

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
        others: dict[FactId, Encoding] = {}
        if params.mode == "splice" and hits:
            encodings, others = self._encodings(params.owner, ladder, ordered, report)
            report.not_encoded = sum(
                f.fact.id not in encodings for rank, f in enumerate(ordered) if not ladder.is_live(rank)
            )
            if report.not_encoded:
                report.reason = f"not_encoded:{report.not_encoded}"
            elif all(ladder.is_live(rank) for rank in range(len(ordered))):
                report.reason = "first_fact_computed"
        report.facts = [
            {"id": f.fact.id, "score": scores[f.fact.id], "encoded": f.fact.id in encodings} for f in ordered
        ]
        prompt = assemble(head=head, header=self._header, facts=ordered, footer=self._footer, tail=tail)
        orders = self._orders(ordered, encodings, others) if repair.share_percent else None
        spans = _spans(prompt.blocks, encodings, repair.kept([len(f.token_ids) for f in ordered], orders), report)
        if spans:
            report.block = FactBlock(params.owner, array("q", prompt.token_ids[: prompt.blocks[-1].end]))
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
    ) -> tuple[dict[FactId, Encoding], dict[FactId, Encoding]]:
        """The encoding to splice for each fact, by its rank, and the next best; facts without one are left out."""
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
            return {}, {}
        chosen: dict[FactId, Encoding] = {}
        others: dict[FactId, Encoding] = {}
        for rank, fact in enumerate(ordered):
            found = [stored[policy.name].get(fact.fact.id, {}).get(0) for policy in ladder.for_rank(rank)]
            usable = [one for one in found if one is not None and one.token_ids == fact.token_ids]
            if usable:
                chosen[fact.fact.id] = usable[0]
            if len(usable) > 1:
                others[fact.fact.id] = usable[1]
        return chosen, others

    def _orders(
        self, ordered: Sequence[FactTokens], encodings: Mapping[FactId, Encoding], others: Mapping[FactId, Encoding]
    ) -> list[Sequence[int] | None]:
        """Tokens of each fact by how much they depend on context; None of a fact that has not two encodings."""
        ids = [fact.fact.id for fact in ordered]
        return [
            self._deviations.order(encodings[one].id, others[one].id) if one in encodings and one in others else None
            for one in ids
        ]


def _spans(
    blocks: Sequence[Block],
    encodings: Mapping[FactId, Encoding],
    kept: Sequence[Sequence[range]],
    report: Report,
) -> tuple[Span, ...]:
    """What is spliced of the facts that have an encoding; ``report`` receives the share that the repair takes."""
    spans, repaired = [], 0
    for block, runs in zip(blocks, kept, strict=True):
        if (encoding := encodings.get(block.fact.fact.id)) is None:
            continue
        repaired += block.end - block.start - sum(map(len, runs))
        spans += [Span(encoding.id, block.start + run.start, block.start + run.stop, run.start) for run in runs]
    if repaired:
        report.repaired_share = round(repaired / sum(block.end - block.start for block in blocks), 6)
        if not spans and report.reason is None:
            report.reason = "repair_covers_all"
    return tuple(spans)
