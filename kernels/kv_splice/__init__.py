"""Keys and values that move: undo a key's rotation, keep it, and write it back at another position."""

from kv_splice.dispatch import splice, warm_up
from kv_splice.errors import KvSpliceError, QuantiseError, SpliceError, UnsupportedDevice, UnsupportedRope
from kv_splice.quantise import SCHEME, ArenaScales, KVScales, quantise
from kv_splice.reference import rotate_keys, splice_reference, unrotate_keys
from kv_splice.rope import RopeScaling, RopeSpec

__all__ = [
    "SCHEME",
    "ArenaScales",
    "KVScales",
    "KvSpliceError",
    "QuantiseError",
    "RopeScaling",
    "RopeSpec",
    "SpliceError",
    "UnsupportedDevice",
    "UnsupportedRope",
    "quantise",
    "rotate_keys",
    "splice",
    "splice_reference",
    "unrotate_keys",
    "warm_up",
]
