"""What a server's encodings saw, from its KV store: by their descriptions, and keys where a repair goes by them.

A description names the facts that stood in front, and the address of an encoding is a hash over their tokens. So what
is worked out here is checked: tokens that hash to another address are not what the encoding saw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from locomo.errors import OracleError
from memstore import Encoding, EncodingId, FactId, KVBlobs, OwnerId

from .rungs import policies_for_rank, policies_of, rungs_of


class FactVersion(NamedTuple):
    """A fact as it is served."""

    id: FactId
    version: int


class Seen(NamedTuple):
    """An encoding that the server serves: the fact's own tokens, and those that stood in front of it."""

    token_ids: tuple[int, ...]
    seen_ids: tuple[int, ...]


def check_context(context: Sequence[int], *, fingerprint: str, model_fingerprint: str) -> None:
    """Check that these tokens stand in front of every encoding of a server.

    Parameters
    ----------
    context
        The chat template of a fresh conversation up to the facts, and the header.
    fingerprint, model_fingerprint
        Of the server's encodings and of its model, from its status.

    Raises
    ------
    OracleError
        They do not.
    """
    if _hash([model_fingerprint, list(context)]) != fingerprint:
        raise OracleError(f"the server encodes facts behind other tokens than these {len(context)}")


class StoredEncodings:
    """The encodings of one owner under one fingerprint.

    Parameters
    ----------
    blobs
        The server's KV store; it may be in use by the server.
    policies
        All that the server serves from: a fact that has no encoding under one has its tokens from another.
    """

    def __init__(self, blobs: KVBlobs, *, owner: str, fingerprint: str, policies: Sequence[str]) -> None:
        self._blobs = blobs
        self._policies = list(dict.fromkeys(name for policy in policies for name in policies_of(policy)))
        self._owner = OwnerId(owner)
        self._fingerprint = fingerprint

    def served(self, facts: Sequence[FactVersion], policy: str, *, context: Sequence[int]) -> list[Seen | None]:
        """The encoding that is served for each fact, which are in the order of the prompt; None where there is none.

        ``context`` is what stood in front of each of them: see ``check_context``.

        Raises
        ------
        OracleError
            A fact that an encoding saw has no encoding of its own any more, or not with the tokens that it had.
        """
        rungs = rungs_of(policy)
        stored = {name: self._current(facts, name) for name in policies_of(policy)}
        found: list[Seen | None] = []
        for rank, fact in enumerate(facts):
            candidates = (stored[name].get(fact.id) for name in policies_for_rank(rungs, rank))
            encoding = next((candidate for candidate in candidates if candidate is not None), None)
            found.append(None if encoding is None else self._seen(encoding, context))
        return found

    def orders(self, facts: Sequence[FactVersion], policy: str) -> list[list[int] | None]:
        """Tokens of each fact, in the order of the prompt, whose keys its two nearest encodings disagree most on first.

        In fp64: of each layer the squared distance, over the mean square of the keys of the encoding with the smaller
        id; the mean over layers. None where a fact has not two encodings under the policy.
        """
        rungs = rungs_of(policy)
        stored = {name: self._current(facts, name) for name in policies_of(policy)}
        found: list[list[int] | None] = []
        for rank, fact in enumerate(facts):
            ids = [stored[name][fact.id].id for name in policies_for_rank(rungs, rank) if fact.id in stored[name]][:2]
            found.append(self._disagreement(*sorted(ids)) if len(ids) == 2 else None)
        return found

    def _disagreement(self, one: EncodingId, other: EncodingId) -> list[int]:
        first, second = (self._keys(encoding_id) for encoding_id in (one, other))
        far = ((first - second) ** 2).sum((2, 3)) / (first**2).sum((2, 3)).mean(1, keepdims=True)
        return [int(token) for token in np.argsort(-far.mean(0), kind="stable")]

    def _keys(self, encoding_id: EncodingId) -> NDArray[np.float64]:
        blob = self._blobs.load(encoding_id)
        if blob is None or blob.scales is not None:
            raise OracleError(f"encoding {encoding_id} has no keys in the model's own dtype")
        keys: NDArray[np.float64] = blob.k.double().numpy()
        return keys

    def token_ids(self, facts: Sequence[tuple[FactId, int]]) -> dict[FactId, tuple[int, ...]]:
        """The tokens of facts (id and version) that have an encoding under any policy."""
        return {
            fact_id: encoding.token_ids
            for name in self._policies
            for fact_id, encoding in self._current(facts, name).items()
        }

    def _current(self, facts: Sequence[tuple[FactId, int]], policy: str) -> dict[FactId, Encoding]:
        found = self._blobs.current(self._owner, facts, fingerprint=self._fingerprint, policy=policy)
        return {fact_id: by_rung[0] for fact_id, by_rung in found.items() if 0 in by_rung}

    def _seen(self, encoding: Encoding, context: Sequence[int]) -> Seen:
        in_front = self.token_ids(encoding.saw)
        if missing := [fact_id for fact_id, _ in encoding.saw if fact_id not in in_front]:
            raise OracleError(f"encoding {encoding.id} saw facts that have no encoding any more: {missing}")
        tokens = [in_front[fact_id] for fact_id, _ in encoding.saw]
        # A prompt that was too long lost facts at its front; which is not written down, but the address tells.
        for lost in range(len(tokens) + 1):
            seen = [i for ids in tokens[lost:] for i in ids]
            if _address(encoding, seen) == encoding.id:
                return Seen(encoding.token_ids, (*context, *seen))
        raise OracleError(f"encoding {encoding.id} did not see the tokens that its facts have now")


def _address(encoding: Encoding, seen_ids: Sequence[int]) -> str:
    return _hash(
        [
            encoding.fingerprint,
            encoding.policy,
            encoding.fact_id,
            encoding.fact_version,
            list(encoding.token_ids),
            [list(pair) for pair in encoding.saw],
            list(seen_ids),
        ]
    )


def _hash(parts: list[object]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
