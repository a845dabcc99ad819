"""Keys and values in eight bits: symmetric int8 in [-127, 127], times a scale in fp16.

A key has outliers that stay in the same channel from token to token before it is rotated, so a fact's keys have one
scale for each (layer, head, channel), over its tokens; values have no such channels, and one scale for each (layer,
token, head). Per-channel keys and per-token values: Liu et al., KIVI, section 3. Keys before rotation: Hooper et al.,
KVQuant, section 3.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kv_splice.errors import QuantiseError

__all__ = ["LARGEST_QUANTISED", "SCHEME", "ArenaScales", "KVScales", "dequantise", "quantise"]

SCHEME = "int8:k-channel:v-token:1"
"""Names what the bytes mean: KV that was quantised under another name is other KV."""

_STEPS = 127
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LARGEST_QUANTISED = _STEPS * torch.finfo(torch.float16).max
"""The largest magnitude that a scale in fp16 reaches: 8,319,008."""

# 127 times the scale that is next to it, 516, rounds to infinity in fp16.
_LARGEST_SCALE_OF_FP16 = 515.5


class KVScales(NamedTuple):
    """The scales of one fact's keys and values, fp16."""

    keys: Tensor
    """`[num_layers, num_kv_heads, head_dim]`."""

    values: Tensor
    """`[num_layers, num_tokens, num_kv_heads]`."""


class ArenaScales(NamedTuple):
    """The scales of an arena that holds many facts, for one splice out of it."""

    keys: Tensor
    """`[num_layers, num_sets, num_kv_heads, head_dim]` fp16: one set a fact, wherever it lies."""

    sets: Tensor
    """`[num_tokens]` int64: the set of each token that is spliced."""

    values: Tensor
    """`[num_layers, capacity, num_kv_heads]` fp16: of the arena's rows."""


def quantise(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, KVScales]:
    """Round one fact's keys and values to int8.

    A scale is the largest magnitude of its group divided by 127, rounded up to fp16, so that nothing is clipped and
    every element is at most half a scale away from what `dequantise` returns. Rounded up, a scale exceeds the quotient
    by less than 2**-10 of it, or by less than 2**-24, fp16's smallest number, where that is more: so groups that are
    tiny do not underflow, and the error of an element is below `largest * 2**-7.98 + 2**-25`. A group of zeros has the
    scale 0, and comes back as zeros; -0.0 loses its sign. In fp16, the largest scale is 515.5: up to fp16's limit of
    65504 the error is as above, and no element comes back as infinity.

    Parameters
    ----------
    k, v
        `[num_layers, num_tokens, num_kv_heads, head_dim]`, fp32, bf16 or fp16; K before rotation.

    Returns
    -------
    K and V int8 in the shape they had, contiguous, and their scales. With L layers, T tokens, H heads of D channels
    that is 2LTHD bytes, and 2LHD + 2LTH of scales: 1/2 + 1/(2T) + 1/(2D) of bf16's 4LTHD, or 0.533 of it for 20 tokens
    of 64 channels.

    Raises
    ------
    QuantiseError
        A shape or dtype that is not as above, no elements, NaN, infinity, or a magnitude above `LARGEST_QUANTISED`.
    """
    if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype or k.dtype not in _DTYPES or 0 in k.shape:
        raise QuantiseError(
            f"K is {k.dtype} {list(k.shape)} and V is {v.dtype} {list(v.shape)}: both must be [num_layers, num_tokens, "
            "num_kv_heads, head_dim], of one dtype out of float32, bfloat16 and float16, and not empty"
        )
    key_scales = _scales("K", k, dim=1)
    value_scales = _scales("V", v, dim=3)
    scales = KVScales(key_scales, value_scales)
    return _rounded(k, key_scales[:, None]), _rounded(v, value_scales[..., None]), scales


def dequantise(k: Tensor, v: Tensor, scales: KVScales) -> tuple[Tensor, Tensor]:
    """Return the keys and values that `quantise` left, `[num_layers, num_tokens, num_kv_heads, head_dim]` fp32.

    Nothing is rounded: eight bits times the eleven of an fp16 fit into fp32's 24.
    """
    return k.float() * scales.keys[:, None].float(), v.float() * scales.values[..., None].float()


def _scales(name: str, x: Tensor, *, dim: int) -> Tensor:
    """One fp16 scale for all elements along `dim`, which goes."""
    largest = x.abs().amax(dim).float()
    # NaN fails the comparison, too.
    if not bool((largest <= LARGEST_QUANTISED).all()):
        raise QuantiseError(f"{name} holds {largest.max().item()}; int8 takes magnitudes up to {LARGEST_QUANTISED:.0f}")
    scales = (largest / _STEPS).half()
    is_too_small = scales.float() * _STEPS < largest
    # The bits of a positive number, plus one, are those of the next.
    scales = (scales.view(torch.int16) + is_too_small).view(torch.float16)
    return scales.clamp(max=_LARGEST_SCALE_OF_FP16) if x.dtype == torch.float16 else scales


def _rounded(x: Tensor, scales: Tensor) -> Tensor:
    divisors = torch.where(scales == 0, 1, scales).float()  # of zeros only
    return (x.float() / divisors).round().to(torch.int8)
