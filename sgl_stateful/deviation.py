"""Which tokens of a fact depend most on what stands before it, by two encodings of it behind different lists.

CacheBlend (Yao et al. 2024, arXiv 2405.16444) compares what is spliced with a prefill of the first layers, and computes
anew where they differ most. A ladder has two encodings of every fact, whose difference tells much the same without a
forward: where the KV of a token hardly changes between two lists in front of it, a third hardly changes it either.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from threading import Lock

import torch

from kv_splice.quantise import dequantise
from memstore import EncodingId, KVBlob, KVBlobs, MemStoreError

logger = logging.getLogger(__name__)

_MOST = 100_000  # pairs that are remembered, of a few hundred bytes each


class Deviations:
    """Orders the tokens of facts by how much their keys differ between two encodings. Thread-safe.

    What was worked out once is kept: an encoding's KV never changes.
    """

    def __init__(self, blobs: KVBlobs) -> None:
        self._blobs = blobs
        self._known: OrderedDict[tuple[EncodingId, EncodingId], array[int]] = OrderedDict()
        self._lock = Lock()

    def order(self, one: EncodingId, other: EncodingId) -> array[int] | None:
        """Return the tokens of a fact, those first whose keys differ most; None where either encoding has no KV."""
        pair = (min(one, other), max(one, other))
        with self._lock:
            if (known := self._known.get(pair)) is not None:
                self._known.move_to_end(pair)
                return known
        try:
            blobs = [self._blobs.load(encoding_id) for encoding_id in pair]
        except MemStoreError:
            logger.warning("KV to compare could not be read; no token is computed anew for it", exc_info=True)
            return None
        if blobs[0] is None or blobs[1] is None or blobs[0].token_ids != blobs[1].token_ids:
            return None
        order = array("i", deviation(blobs[0], blobs[1]).argsort(descending=True, stable=True).tolist())
        with self._lock:
            self._known[pair] = order
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return order


def deviation(one: KVBlob, other: KVBlob) -> torch.Tensor:
    """Return ``[num_tokens]``, fp32: over layers the mean of the keys' squared distance, in units of their mean square.

    Keys, not values: they are what context changes most, and what decides where attention goes.
    """
    first, second = _keys(one), _keys(other)
    distance = (first - second).square().sum(dim=(2, 3))  # [num_layers, num_tokens]
    scale = first.square().sum(dim=(2, 3)).mean(dim=1, keepdim=True)
    return (distance / scale.clamp_min(torch.finfo(torch.float32).tiny)).mean(dim=0)


def _keys(blob: KVBlob) -> torch.Tensor:
    if blob.scales is None:
        return blob.k.float()
    return dequantise(blob.k, blob.v, blob.scales)[0].float()
