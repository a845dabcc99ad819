"""Several facts at once, of any lengths: where each begins, and its scales."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["FactScales", "Facts"]


class Facts(NamedTuple):
    """F facts one behind the other: token t is of the fact f with `offsets[f] <= t < offsets[f + 1]`."""

    offsets: Tensor
    """`[F + 1]` int64, from 0 to the number of tokens; never falling. A fact may be empty."""

    first_rows: Tensor
    """`[F]` int64: the row of the source that a fact's first token is in; its others are in the rows that follow."""


class FactScales(NamedTuple):
    """The scales of F facts in int8, fp16."""

    keys: Tensor
    """`[num_layers, F, num_kv_heads, head_dim]`: a set a fact."""

    values: Tensor
    """`[num_layers, num_rows, num_kv_heads]`: a scale a row and head."""
