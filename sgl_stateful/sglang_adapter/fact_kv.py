"""The facts' KV in the scheduler process: captured from the pool, kept in blobs and arena, spliced back."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kv_splice import KVScales, QuantiseError
from memstore import CorruptBlob, Encoding, EncodingId, FactId, KVBlob, KVBlobs
from sgl_stateful.directive import Capture, CaptureItem, KeepProbe, Splice
from sgl_stateful.splice import ArenaFullError, FactArena

from .kv_pool import KVPool

logger = logging.getLogger(__name__)


class FactPart(NamedTuple):
    """What is spliced of a fact, at prompt positions ``[start, end)``.

    ``token_ids`` are the ids that the request has at ``[span_start, span_start + len(token_ids))``: those of the fact
    from its token ``offset`` on. The part begins within them, and ends with them or before.
    """

    encoding_id: EncodingId
    token_ids: array[int]
    offset: int
    span_start: int
    start: int
    end: int


class FactKV:
    """Moves facts between pool, arena and blobs. Belongs to the scheduler's thread."""

    def __init__(self, *, pool: KVPool, arena: FactArena, blobs: KVBlobs) -> None:
        self.pool = pool
        self.arena = arena
        self._blobs = blobs
        self._fence: str | None = None
        self._is_fenced = False  # until weights change for the first time there is nothing to tell apart
        self._probes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._counts = {"captured": 0, "refused": 0, "spliced_tokens": 0, "corrupt": 0, "failures": 0}

    # ---- splice ----

    def fence(self, fingerprint: str | None) -> None:
        """From now on splice only encodings of these weights; None refuses all, while weights change."""
        self._fence = fingerprint
        self._is_fenced = True

    def accepts(self, fingerprint: str) -> bool:
        """Whether encodings of these weights may be spliced."""
        return not self._is_fenced or fingerprint == self._fence

    def missing(self, encoding_ids: Sequence[EncodingId]) -> list[EncodingId]:
        """Those that neither arena nor blob store holds."""
        return [e for e in encoding_ids if e not in self.arena and not self._blobs.has(e)]

    def rows(self, parts: Sequence[FactPart]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Arena rows of the parts, one after the other, loading from the blob store what is not there.

        Returns
        -------
        Rows and prompt positions, both ``[num_tokens]`` int64 on the CPU; None where a fact is gone, damaged, too
        large, or has other token ids than the request: then nothing may be spliced.
        """
        keep = frozenset(part.encoding_id for part in parts)
        pieces = [torch.empty(0, dtype=torch.int64)]
        positions = [torch.empty(0, dtype=torch.int64)]
        lost = False
        for part in parts:
            rows = self.arena.rows(part.encoding_id)
            if rows is None:
                rows = self._load(part.encoding_id, keep)
            else:
                # Otherwise what is spliced most, and so never loaded again, would be the first to be evicted.
                self._blobs.touch([part.encoding_id])
            wanted = slice(part.offset, part.offset + len(part.token_ids))
            if rows is None or self.arena.token_ids(part.encoding_id)[wanted] != part.token_ids:
                lost = True  # look at the others too: all that are damaged are found, and encoded again, at once
                continue
            first = part.offset - part.span_start
            pieces.append(rows[part.start + first : part.end + first])
            positions.append(torch.arange(part.start, part.end))
        return None if lost else (torch.cat(pieces), torch.cat(positions))

    def _load(self, encoding_id: EncodingId, keep: frozenset[EncodingId]) -> torch.Tensor | None:
        try:
            blob = self._blobs.load(encoding_id)
        except CorruptBlob:
            logger.warning("encoding %s is damaged; its fact will be encoded again", encoding_id)
            self._counts["corrupt"] += 1
            return None
        if blob is None:
            return None
        if (blob.scales is not None) != self.arena.is_quantised:
            logger.warning("encoding %s is %s, which this server does not splice", encoding_id, blob.k.dtype)
            return None
        return self._admit(encoding_id, blob, keep)

    def _admit(self, encoding_id: EncodingId, blob: KVBlob, keep: frozenset[EncodingId]) -> torch.Tensor | None:
        self.pool.order_after_forward()  # an earlier splice may still read the rows that are reused
        token_ids = array("q", blob.token_ids)
        try:
            return self.arena.put(encoding_id, blob.k, blob.v, token_ids=token_ids, keep=keep, scales=blob.scales)
        except ArenaFullError as full:
            logger.warning("the fact arena is too small for one request (%s); raise --arena-mib", full)
            return None

    def splice(self, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Write arena ``rows`` to pool ``slots``, rotated to ``positions``."""
        self.pool.splice(self.arena, rows, slots, positions)
        self._counts["spliced_tokens"] += len(rows)

    # ---- capture ----

    def at_finish(
        self, directive: Splice | Capture | KeepProbe | None, row: torch.Tensor, input_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Capture or probe a finished request; returns what its reply should say about it.

        ``row`` holds the request's slots by position, ``input_ids`` its prompt.
        """
        match directive:
            case Capture(items):
                return self._capture_all(items, row, input_ids)
            case KeepProbe(probe, start, end):
                self._probes[probe] = self.pool.read_layer(row[start:end], layer=0)
                return {"kept": probe}
            case Splice(spans, str(probe)):
                kept = self._probes.pop(probe)
                return _layer_error(self.pool.read_layer(row[spans[0].start : spans[-1].end], layer=0), kept)
            case _:
                return {}

    def _capture_all(self, items: Sequence[CaptureItem], row: torch.Tensor, input_ids: Sequence[int]) -> dict[str, Any]:
        """Capture facts; those that int8 does not hold are left out, and named under ``refused``."""
        sizes: list[int] = []
        refused: list[EncodingId] = []
        for item in items:
            try:
                sizes.append(self._capture(item, row, input_ids))
            except QuantiseError as error:
                logger.warning("fact %s cannot be kept in int8: %s", item.encoding["fact_id"], error)
                refused.append(item.span.encoding_id)
        self._counts["refused"] += len(refused)
        report: dict[str, Any] = {"captured": len(sizes), "captured_bytes": sum(sizes)}
        return {**report, "refused": refused} if refused else report

    def _capture(self, item: CaptureItem, row: torch.Tensor, input_ids: Sequence[int]) -> int:
        span = item.span
        token_ids = array("q", input_ids[span.start : span.end])
        blob = self._read(row[span.start : span.end], span.start, tuple(token_ids))
        described = dict(item.encoding)
        described["saw"] = tuple((FactId(fact_id), version) for fact_id, version in described["saw"])
        described["token_ids"] = blob.token_ids
        if not self.accepts(described["fingerprint"]):
            raise RuntimeError("weights have changed since this fact was to be encoded")
        if not self._blobs.put(Encoding(**described), blob.k, blob.v, scales=blob.scales):
            raise RuntimeError("a newer version of this fact has been encoded meanwhile")
        self._counts["captured"] += 1
        if self.arena.fits_free(len(span)):
            self._admit(span.encoding_id, blob, frozenset())
        return blob.nbytes

    def _read(self, slots: torch.Tensor, start: int, token_ids: tuple[int, ...]) -> KVBlob:
        """KV of the tokens in ``slots``, which stand at ``start`` and onwards, as blobs and arena keep it."""
        if not self.arena.is_quantised:
            keys, values = self.pool.read(slots, start)
            return KVBlob(keys.cpu(), values.cpu(), token_ids)
        # On the pool's device: there are half the bytes to copy afterwards.
        k, v, scales = self.pool.read_quantised(slots, start)
        return KVBlob(k.cpu(), v.cpu(), token_ids, KVScales(scales.keys.cpu(), scales.values.cpu()))

    # ---- upkeep ----

    def drop(self, encoding_ids: Sequence[EncodingId]) -> int:
        """Forget facts in the arena; returns how many it held."""
        return sum(self.arena.drop(encoding_id) for encoding_id in encoding_ids)

    def sweep(self) -> int:
        """Forget facts in the arena that the blob store no longer has; returns how many there were."""
        return self.drop([encoding_id for encoding_id in self.arena.ids() if not self._blobs.has(encoding_id)])

    def clear_arena(self) -> None:
        """Forget every fact in the arena."""
        self.arena.clear()
        self._probes.clear()

    def count_failure(self) -> None:
        """A splice or capture raised; the request was served without it."""
        self._counts["failures"] += 1

    def stats(self) -> Mapping[str, Any]:
        """Counters and the arena's occupancy."""
        return {**self._counts, "arena": self.arena.stats()._asdict()}


def _layer_error(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
    """Largest difference of keys and of values, and the scale (largest magnitude) that it is relative to."""
    out: dict[str, Any] = {}
    for name, a, b in (("k", got[0], want[0]), ("v", got[1], want[1])):
        if a.shape != b.shape:
            return {"shape_mismatch": [list(a.shape), list(b.shape)]}
        out[f"{name}_error"] = (a.double() - b.double()).abs().max().item()
        out[f"{name}_scale"] = b.double().abs().max().item()
        assert math.isfinite(out[f"{name}_scale"]), f"layer 0 of the probe holds {out[f'{name}_scale']}"
    return out
