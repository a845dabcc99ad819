"""Keys and values that move: undo a key's rotation, keep it, and write it back at another position."""

from kv_splice.capture import capture_quantised, unrotate_capture
from kv_splice.dispatch import splice, warm_up, warm_up_pools
from kv_splice.errors import KvSpliceError, QuantiseError, SpliceError, UnsupportedDevice, UnsupportedRope
from kv_splice.quantise import SCHEME, ArenaScales, KVScales, quantise
from kv_splice.reference import rotate_keys, splice_reference, unrotate_keys
from kv_splice.rope import RopeScaling, RopeSpec
from kv_splice.streams import on_stream

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
    "capture_quantised",
    "on_stream",
    "quantise",
    "rotate_keys",
    "splice",
    "splice_reference",
    "unrotate_capture",
    "unrotate_keys",
    "warm_up",
    "warm_up_pools",
]
