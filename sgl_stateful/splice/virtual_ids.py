"""Token ids outside every vocabulary that stand for spliced facts in radix keys.

Spliced KV approximates what full prefill would compute, so it must never be found under the real token ids. In the
radix key (never in the request) each spliced token is replaced by an id that only the same encoding, at the same
offset, produces. The 62 bits behind ``VIRTUAL_BIT`` come from the encoding id, which is a content address of the
fact, its version, the model and everything that its encoding saw.
"""

from __future__ import annotations

from array import array

import numpy as np
import xxhash

VIRTUAL_BIT = 1 << 62
_MASK = np.uint64(VIRTUAL_BIT - 1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def virtual_ids(encoding_id: str, num_tokens: int, *, offset: int = 0) -> array[int]:
    """Ids of tokens of one spliced fact.

    Parameters
    ----------
    encoding_id
        Content address of the encoding.
    num_tokens
        How many.
    offset
        Tokens of the fact before them.

    Returns
    -------
    array of ``num_tokens`` int64 in ``[2**62, 2**63)``.

    Notes
    -----
    The mixing function is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 17) over a 64-bit hash of the
    encoding id plus the offset: two facts that share a token share no id, but for a chance of 2**-62 a pair.
    """
    base = np.uint64(xxhash.xxh3_64_intdigest(encoding_id.encode()))
    with np.errstate(over="ignore"):
        x = base + _GOLDEN * np.arange(offset + 1, offset + num_tokens + 1, dtype=np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    ids = (x & _MASK) | np.uint64(VIRTUAL_BIT)
    return array("q", ids.astype(np.int64).tobytes())
