"""What both kernels do with a tile of tokens and heads of one layer: load, dequantise, turn the keys, round, store.

Loads stand before stores, because the compiler may not move them there: it does not know that source and destination
are apart. A tile is `[BLOCK_T, BLOCK_H, width]`; the widths are the two halves of the rotated part (or, interleaved,
all of it) and the tail that does not rotate, so that a load or store is 16 bytes a thread and nothing is read twice.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton import knobs

__all__ = ["angles_of", "fact_of", "move", "narrow"]

# Triton's interpreter truncates to bf16 where the hardware rounds, so there the bits are rounded here.
_IS_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Fp32 `x` rounded to nearest, ties to even."""
    if _IS_INTERPRETED & (dtype == tl.bfloat16):
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def fact_of(offsets, num_facts, t, span):
    """The fact of each token: the last f with `offsets[f] <= t`. `span` is a power of two, at least half the facts."""
    fact = tl.zeros_like(t)
    while span > 0:
        candidate = fact + span
        start = tl.load(offsets + candidate, mask=candidate < num_facts, other=0)
        fact = tl.where((candidate < num_facts) & (start <= t), candidate, fact)
        span = span // 2
    return fact


@triton.jit
def angles_of(cos_at, sin_at, mask, INVERSE: tl.constexpr):
    """Cosines and sines in fp32; for the inverse, of the inverse: divided by the squared amplitude, other way round."""
    cos = tl.load(cos_at, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_at, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        norm = cos * cos + sin * sin
        return cos / norm, -sin / norm
    else:
        return cos, sin


@triton.jit
def _load_keys(tokens, scales, at, mask):
    x = tl.load(tokens[:, None, None] + at, mask=mask).to(tl.float32)
    if scales is not None:
        x = x * tl.load(scales[:, None, None] + at, mask=mask).to(tl.float32)
    return x


@triton.jit
def _load_values(tokens, scales, at, mask, dtype: tl.constexpr):
    x = tl.load(tokens[:, None, None] + at, mask=mask)
    if scales is not None:
        return narrow(x.to(tl.float32) * scales, dtype)
    elif x.dtype == dtype:
        return x
    else:
        return narrow(x.to(tl.float32), dtype)


@triton.jit
def move(
    k_from,
    v_from,
    key_scales,
    value_scales,
    k_to,
    v_to,
    angles,
    is_token,
    first_head,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    IS_NEOX: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Keys and values of `[BLOCK_T]` tokens, heads `first_head` and `BLOCK_H` on.

    `k_from`, `v_from`, `k_to`, `v_to` `[BLOCK_T]` point at each token's head 0, `angles` at its cosines, `key_scales`
    at the scales of its fact, `value_scales` at its own, of head 0. Scales are None where there are none. H heads of D
    elements, R of which rotate.
    """
    dtype: tl.constexpr = k_to.dtype.element_ty
    HALF: tl.constexpr = R // 2
    h = first_head + tl.arange(0, BLOCK_H)
    is_head = is_token[:, None, None] & (h < H)[None, :, None]
    head_at = (h * D).to(tl.int64)[None, :, None]
    pair = tl.arange(0, BLOCK_HALF)[None, None, :].to(tl.int64)
    is_pair = is_head & (pair < HALF)
    if value_scales is not None:
        of_head = value_scales[:, None] + h[None, :].to(tl.int64)
        value_scale = tl.load(of_head, mask=is_token[:, None] & (h < H)[None, :]).to(tl.float32)[:, :, None]
    else:
        value_scale = None
    cos_at = tl.broadcast_to(angles[:, None, None] + pair, (BLOCK_T, BLOCK_H, BLOCK_HALF))
    sin_at = tl.broadcast_to(angles[:, None, None] + (pair + HALF), (BLOCK_T, BLOCK_H, BLOCK_HALF))
    cos, sin = angles_of(cos_at, sin_at, is_pair, INVERSE)
    if IS_NEOX:
        at = head_at + pair
        a = _load_keys(k_from, key_scales, at, is_pair)
        b = _load_keys(k_from, key_scales, at + HALF, is_pair)
        va = _load_values(v_from, value_scale, at, is_pair, dtype)
        vb = _load_values(v_from, value_scale, at + HALF, is_pair, dtype)
        tl.store(k_to[:, None, None] + at, narrow(a * cos - b * sin, dtype), mask=is_pair)
        tl.store(k_to[:, None, None] + (at + HALF), narrow(b * cos + a * sin, dtype), mask=is_pair)
        tl.store(v_to[:, None, None] + at, va, mask=is_pair)
        tl.store(v_to[:, None, None] + (at + HALF), vb, mask=is_pair)
    else:
        element = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        at = head_at + element
        is_rotated = is_head & (element < R)
        x = _load_keys(k_from, key_scales, at, is_rotated)
        v = _load_values(v_from, value_scale, at, is_rotated, dtype)
        a, b = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_H, BLOCK_HALF, 2)))
        turned = tl.join(narrow(a * cos - b * sin, dtype), narrow(b * cos + a * sin, dtype))
        tl.store(k_to[:, None, None] + at, tl.reshape(turned, (BLOCK_T, BLOCK_H, 2 * BLOCK_HALF)), mask=is_rotated)
        tl.store(v_to[:, None, None] + at, v, mask=is_rotated)
    for start in tl.static_range(R, D, BLOCK_TAIL):
        element = start + tl.arange(0, BLOCK_TAIL)[None, None, :]
        at = head_at + element
        is_tail = is_head & (element < D)
        if key_scales is None:
            k = _load_values(k_from, None, at, is_tail, dtype)
        else:
            k = narrow(_load_keys(k_from, key_scales, at, is_tail), dtype)
        v = _load_values(v_from, value_scale, at, is_tail, dtype)
        tl.store(k_to[:, None, None] + at, k, mask=is_tail)
        tl.store(v_to[:, None, None] + at, v, mask=is_tail)
