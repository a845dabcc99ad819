"""From facts to token ids, and from what an encoding saw to its address."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from memstore import EncodingId, Fact, FactId
from sgl_stateful.prompt import FactTokens, Tokenizer, render_fact

_CACHED_FACTS = 65_536


class FactCodec:
    """Renders and tokenises facts, and addresses their encodings. Thread-safe.

    Parameters
    ----------
    context
        Ids in front of every encoding: the chat template up to the facts, and the header.
    model_fingerprint
        Of weights, rotary formula and KV layout, from the scheduler.
    """

    def __init__(self, tokenizer: Tokenizer, *, context: Sequence[int], model_fingerprint: str) -> None:
        self._tokenizer = tokenizer
        # By what is rendered: an id and a version may come back with another text, from an export after a purge.
        self._cache: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = Lock()
        self.context = tuple(context)
        self.fingerprint = hashlib.blake2b(
            json.dumps([model_fingerprint, self.context]).encode(), digest_size=16
        ).hexdigest()

    def encode_text(self, text: str) -> list[int]:
        """Ids of a piece of prompt, special tokens only where the text spells them."""
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def encode_fact(self, fact: Fact) -> FactTokens:
        """The fact and the ids of its rendering."""
        line = render_fact(fact)
        key = hashlib.blake2b(line.encode(), digest_size=16).digest()
        with self._lock:
            if (ids := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return FactTokens(fact, ids)
        ids = tuple(self.encode_text(line))
        with self._lock:
            self._cache[key] = ids
            if len(self._cache) > _CACHED_FACTS:
                self._cache.popitem(last=False)
        return FactTokens(fact, ids)

    def encoding_id(
        self, fact: FactTokens, *, policy: str, saw: Sequence[tuple[FactId, int]], saw_ids: Sequence[int]
    ) -> EncodingId:
        """Content address: equal ids mean that the same tokens saw the same tokens under the same model."""
        body = json.dumps(
            [self.fingerprint, policy, fact.fact.id, fact.fact.version, list(fact.token_ids), list(saw), list(saw_ids)]
        )
        return EncodingId(hashlib.blake2b(body.encode(), digest_size=16).hexdigest())
