"""The Triton kernels and what launches them. Importing this imports Triton; `kv_splice` itself does not."""

from kv_splice.gpu.capture import (
    Captured,
    capture_quantised,
    launch_capture,
    launch_quantise,
    quantise_fact,
    unrotate_capture,
)
from kv_splice.gpu.launch import CHOICES, LAUNCHES, launch_splice, splice
from kv_splice.gpu.pools import PoolTable, table_of
from kv_splice.gpu.tiers import HostTier
from kv_splice.gpu.tiles import TILES, Tile
from kv_splice.gpu.traffic import Traffic, capture_traffic, splice_traffic
from kv_splice.gpu.warm import warm_up

__all__ = [
    "CHOICES",
    "LAUNCHES",
    "TILES",
    "Captured",
    "HostTier",
    "PoolTable",
    "Tile",
    "Traffic",
    "capture_quantised",
    "capture_traffic",
    "launch_capture",
    "launch_quantise",
    "launch_splice",
    "quantise_fact",
    "splice",
    "splice_traffic",
    "table_of",
    "unrotate_capture",
    "warm_up",
]
