"""A fact into int8 in one launch, as `kv_splice.quantise` has it: out of the pool with the rotation undone, or as is.

A program has one fact, one head, one layer: the scale of a key's channel is over all tokens of the fact, so it reads
the fact's keys twice, the second time out of the cache, and its values once.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton import knobs

from kv_splice.gpu.move import angles_of, narrow

__all__ = ["quantise_kernel"]

_IS_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

_RUNTIME = (
    "k_out",
    "v_out",
    "k_layer_stride",
    "k_token_stride",
    "v_layer_stride",
    "v_token_stride",
    "k_pools",
    "v_pools",
    "k_pool_stride",
    "v_pool_stride",
    "slots",
    "cos_sin",
    "cos_sin_stride",
    "positions",
    "offsets",
    "refused",
    "key_scales",
    "key_scales_layer_stride",
    "key_scales_set_stride",
    "value_scales",
    "value_scales_layer_stride",
    "value_scales_token_stride",
)


@triton.jit
def _slots_of(slots, t, is_token):
    if slots is not None:
        return tl.load(slots + t, mask=is_token, other=0)
    else:
        return t


@triton.jit
def _plain_pairs(
    tokens,
    t,
    is_token,
    cos_sin,
    cos_sin_stride,
    positions,
    R: tl.constexpr,
    IS_NEOX: tl.constexpr,
    ANGLE_ALIGNMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Both elements of each pair before rotation, `[BLOCK_T, BLOCK_HALF]` fp32, rounded to the pool's dtype."""
    dtype: tl.constexpr = tokens.dtype.element_ty
    HALF: tl.constexpr = R // 2
    pair = tl.arange(0, BLOCK_HALF)[None, :].to(tl.int64)
    is_pair = is_token[:, None] & (pair < HALF)
    if IS_NEOX:
        a = tl.load(tokens[:, None] + pair, mask=is_pair, other=0.0).to(tl.float32)
        b = tl.load(tokens[:, None] + (pair + HALF), mask=is_pair, other=0.0).to(tl.float32)
    else:
        element = tl.arange(0, 2 * BLOCK_HALF)[None, :].to(tl.int64)
        x = tl.load(tokens[:, None] + element, mask=is_token[:, None] & (element < R), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_HALF, 2)))
    if cos_sin is not None:
        if positions is not None:
            angle = tl.load(positions + t, mask=is_token, other=0)
        else:
            angle = t
        row = tl.multiple_of(cos_sin + angle * cos_sin_stride, [ANGLE_ALIGNMENT])[:, None]
        cos, sin = angles_of(row + pair, row + (pair + HALF), is_pair, True)
        first = narrow(a * cos - b * sin, dtype).to(tl.float32)
        second = narrow(b * cos + a * sin, dtype).to(tl.float32)
        return first, second
    else:
        return a, b


@triton.jit
def _magnitudes(x, LARGEST: tl.constexpr):
    """Absolute values, infinity where int8 does not hold them: NaN would be lost in a maximum."""
    return tl.where(tl.abs(x) <= LARGEST, tl.abs(x), float("inf"))


@triton.jit
def _fused(x, y, z):
    """`x * y + z`, rounded once; Triton's interpreter would round twice."""
    if _IS_INTERPRETED:
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def _inverse_of(scale):
    """One over the fp16 `scale`, rounded to nearest; 1 where it is 0, of zeros only.

    A device's quotient may be two units in the last place off. A Newton step rounds it as IEEE does, because the
    inverse of eleven bits is never as near to the middle of two fp32 numbers as the step's error.
    """
    divisor = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    inverse = 1.0 / divisor
    return _fused(_fused(-divisor, inverse, tl.full(divisor.shape, 1.0, tl.float32)), inverse, inverse)


@triton.jit
def _quotient(x, divisor, inverse):
    """`x / divisor` rounded as IEEE has it, where it is not subnormal; `inverse` is one over the divisor, rounded.

    The product is corrected twice by what is left of `x` (Markstein, Computation of elementary functions on the IBM
    RISC System/6000 processor, 1990). A division to the last bit is a function with rare cases, and a thread that calls
    it has fewer registers for the rest.
    """
    quotient = x * inverse
    quotient = _fused(_fused(-quotient, divisor, x), inverse, quotient)
    return _fused(_fused(-quotient, divisor, x), inverse, quotient)


@triton.jit
def _scale_of(largest, LARGEST: tl.constexpr, CLAMP: tl.constexpr):
    """A 127th in fp16, rounded up; at most 515.5 where `CLAMP`."""
    largest = tl.minimum(largest, LARGEST)
    steps = tl.full(largest.shape, 127.0, tl.float32)
    scale = _quotient(largest, steps, tl.full(largest.shape, 1.0 / 127.0, tl.float32)).to(tl.float16)
    is_too_small = scale.to(tl.float32) * 127.0 < largest
    scale = (scale.to(tl.int16, bitcast=True) + is_too_small.to(tl.int16)).to(tl.float16, bitcast=True)
    if CLAMP:
        return tl.minimum(scale.to(tl.float32), 515.5).to(tl.float16)
    else:
        return scale


@triton.jit
def _rounded(x, scale, inverse, LARGEST: tl.constexpr):
    """`x / scale` to the nearest integer, ties to even, which adding and taking away 1.5 * 2**23 does."""
    quotient = _quotient(tl.where(tl.abs(x) <= LARGEST, x, 0.0), scale, inverse)
    return ((quotient + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit(do_not_specialize=_RUNTIME)
def quantise_kernel(
    k_out,
    v_out,
    k_layer_stride: tl.int64,
    k_token_stride: tl.int64,
    v_layer_stride: tl.int64,
    v_token_stride: tl.int64,
    k_pools,
    v_pools,
    k_pool_stride: tl.int64,
    v_pool_stride: tl.int64,
    slots,
    cos_sin,
    cos_sin_stride: tl.int64,
    positions,
    offsets,
    refused,
    key_scales,
    key_scales_layer_stride: tl.int64,
    key_scales_set_stride: tl.int64,
    value_scales,
    value_scales_layer_stride: tl.int64,
    value_scales_token_stride: tl.int64,
    POOL: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    IS_NEOX: tl.constexpr,
    ANGLE_ALIGNMENT: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fact f is tokens `[offsets[f], offsets[f + 1])`, in their slots, or in rows of that number without slots.

    Its scales go to `key_scales[layer, f]`, those of its tokens to `value_scales[layer, t]`. `refused[f]` becomes 1
    where a number is not finite or too large, and the fact's output means nothing.
    """
    fact = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    start = tl.load(offsets + fact)
    end = tl.load(offsets + (fact + 1))
    HALF: tl.constexpr = R // 2
    CLAMP: tl.constexpr = POOL == tl.float16
    k_pool = tl.load(k_pools + layer).to(tl.pointer_type(POOL)) + head * D
    v_pool = tl.load(v_pools + layer).to(tl.pointer_type(POOL)) + head * D
    pair = tl.arange(0, BLOCK_HALF)
    tail = tl.arange(0, BLOCK_TAIL)
    element = tl.arange(0, BLOCK_D)[None, :].to(tl.int64)
    largest_v = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(start, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T).to(tl.int64)
        is_token = t < end
        v_tokens = tl.multiple_of(v_pool + _slots_of(slots, t, is_token) * v_pool_stride, [16])
        is_element = is_token[:, None] & (element < D)
        v = tl.load(v_tokens[:, None] + element, mask=is_element, other=0.0).to(tl.float32)
        largest = tl.max(_magnitudes(v, LARGEST), 1)
        largest_v = tl.maximum(largest_v, largest)
        scale = _scale_of(largest, LARGEST, CLAMP)
        of_token = value_scales + layer * value_scales_layer_stride + t * value_scales_token_stride + head
        tl.store(of_token, scale, mask=is_token)
        v_row = tl.multiple_of(v_out + layer * v_layer_stride + t * v_token_stride + head * D, [16])
        v8 = _rounded(v, scale.to(tl.float32)[:, None], _inverse_of(scale)[:, None], LARGEST)
        tl.store(v_row[:, None] + element, v8, mask=is_element)

    most_a = tl.zeros((BLOCK_T, BLOCK_HALF), tl.float32)
    most_b = tl.zeros((BLOCK_T, BLOCK_HALF), tl.float32)
    most_tail = tl.zeros((BLOCK_T, BLOCK_TAIL), tl.float32)
    for first in range(start, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T).to(tl.int64)
        is_token = t < end
        slot = _slots_of(slots, t, is_token)
        k_tokens = tl.multiple_of(k_pool + slot * k_pool_stride, [16])
        a, b = _plain_pairs(
            k_tokens, t, is_token, cos_sin, cos_sin_stride, positions, R, IS_NEOX, ANGLE_ALIGNMENT, BLOCK_T, BLOCK_HALF
        )
        most_a = tl.maximum(most_a, _magnitudes(a, LARGEST))
        most_b = tl.maximum(most_b, _magnitudes(b, LARGEST))
        if R < D:
            at = k_tokens[:, None] + (R + tail)[None, :].to(tl.int64)
            c = tl.load(at, mask=is_token[:, None] & (tail < D - R)[None, :], other=0.0).to(tl.float32)
            most_tail = tl.maximum(most_tail, _magnitudes(c, LARGEST))
    largest_a = tl.max(most_a, 0)
    largest_b = tl.max(most_b, 0)
    largest_tail = tl.max(most_tail, 0)

    of_fact = key_scales + layer * key_scales_layer_stride + fact * key_scales_set_stride + head * D
    scale_a = _scale_of(largest_a, LARGEST, CLAMP)
    scale_b = _scale_of(largest_b, LARGEST, CLAMP)
    scale_tail = _scale_of(largest_tail, LARGEST, CLAMP)
    stride: tl.constexpr = 1 if IS_NEOX else 2
    second: tl.constexpr = HALF if IS_NEOX else 1
    tl.store(of_fact + stride * pair.to(tl.int64), scale_a, mask=pair < HALF)
    tl.store(of_fact + (stride * pair + second).to(tl.int64), scale_b, mask=pair < HALF)
    if R < D:
        tl.store(of_fact + (R + tail).to(tl.int64), scale_tail, mask=tail < D - R)
    worst = tl.maximum(tl.maximum(tl.max(largest_a, 0), tl.max(largest_b, 0)), tl.max(largest_tail, 0))
    worst = tl.maximum(worst, tl.max(largest_v, 0))
    tl.store(refused + fact, 1, mask=worst > LARGEST)

    inverse_a = _inverse_of(scale_a)[None, :]
    inverse_b = _inverse_of(scale_b)[None, :]
    inverse_tail = _inverse_of(scale_tail)[None, :]
    wide_a = scale_a.to(tl.float32)[None, :]
    wide_b = scale_b.to(tl.float32)[None, :]
    wide_tail = scale_tail.to(tl.float32)[None, :]
    for first in range(start, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T).to(tl.int64)
        is_token = t < end
        slot = _slots_of(slots, t, is_token)
        k_tokens = tl.multiple_of(k_pool + slot * k_pool_stride, [16])
        a, b = _plain_pairs(
            k_tokens, t, is_token, cos_sin, cos_sin_stride, positions, R, IS_NEOX, ANGLE_ALIGNMENT, BLOCK_T, BLOCK_HALF
        )
        a = _rounded(a, wide_a, inverse_a, LARGEST)
        b = _rounded(b, wide_b, inverse_b, LARGEST)
        k_row = tl.multiple_of(k_out + layer * k_layer_stride + t * k_token_stride + head * D, [16])
        is_pair = is_token[:, None] & (pair < HALF)[None, :]
        if IS_NEOX:
            at = k_row[:, None] + pair[None, :].to(tl.int64)
            tl.store(at, a, mask=is_pair)
            tl.store(k_row[:, None] + (pair + HALF)[None, :].to(tl.int64), b, mask=is_pair)
        else:
            both = tl.reshape(tl.join(a, b), (BLOCK_T, 2 * BLOCK_HALF))
            of_pair = tl.arange(0, 2 * BLOCK_HALF)[None, :].to(tl.int64)
            tl.store(k_row[:, None] + of_pair, both, mask=is_token[:, None] & (of_pair < R))
        if R < D:
            is_tail = is_token[:, None] & (tail < D - R)[None, :]
            at = k_tokens[:, None] + (R + tail)[None, :].to(tl.int64)
            c = tl.load(at, mask=is_tail, other=0.0).to(tl.float32)
            to = k_row[:, None] + (R + tail)[None, :].to(tl.int64)
            tl.store(to, _rounded(c, wide_tail, inverse_tail, LARGEST), mask=is_tail)
