"""The two kernels that move keys and values between stored facts and the KV pool, all layers in one launch.

A program moves a tile of tokens and heads of one layer: program (i, j, l) has tokens `[i BLOCK_T, (i + 1) BLOCK_T)`,
heads `[j BLOCK_H, (j + 1) BLOCK_H)` and layer l. Addresses are 64 bits everywhere: a pool passes 2**31 elements at two
million tokens of eight heads of 128.

What the launcher has checked and the compiler cannot know is said to it by `multiple_of`: every token starts at a
multiple of 16 bytes. Nothing is specialised on arguments, so a shape is compiled once, not once a kind of stride.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from kv_splice.gpu.move import fact_of, move

__all__ = ["capture_kernel", "splice_kernel"]

_RUNTIME = (
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
    "num_tokens",
)
_OF_FACTS = (
    "rows",
    "first_rows",
    "offsets",
    "num_facts",
    "span",
    "sets",
    "key_scales",
    "key_scales_layer_stride",
    "key_scales_set_stride",
    "value_scales",
    "value_scales_layer_stride",
    "value_scales_token_stride",
)


@triton.jit(do_not_specialize=("k_source", "v_source", *_RUNTIME, *_OF_FACTS))
def splice_kernel(
    k_source,
    v_source,
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
    num_tokens: tl.int64,
    rows,
    first_rows,
    offsets,
    num_facts: tl.int64,
    span: tl.int64,
    sets,
    key_scales,
    key_scales_layer_stride: tl.int64,
    key_scales_set_stride: tl.int64,
    value_scales,
    value_scales_layer_stride: tl.int64,
    value_scales_token_stride: tl.int64,
    POOL: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    IS_NEOX: tl.constexpr,
    ANGLE_ALIGNMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Write token t of every layer, its key rotated, to slot `slots[t]`.

    Its row in the source is `rows[t]`, or that of the fact it belongs to by `offsets` and `first_rows`, or t. The set
    of its key scales is `sets[t]`, or its fact. Its cosines are row `positions[t]` of `cos_sin`, or row t.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    layer = tl.program_id(2).to(tl.int64)
    is_token = t < num_tokens
    slot = tl.load(slots + t, mask=is_token, other=0)
    if offsets is not None:
        fact = fact_of(offsets, num_facts, t, span)
        row = tl.load(first_rows + fact, mask=is_token, other=0) + t - tl.load(offsets + fact, mask=is_token, other=0)
    elif rows is not None:
        row = tl.load(rows + t, mask=is_token, other=0)
    else:
        row = t
    if positions is not None:
        angle = tl.load(positions + t, mask=is_token, other=0)
    else:
        angle = t
    if key_scales is None:
        of_set = None
        of_token = None
    else:
        if offsets is not None:
            scale_set = fact
        else:
            scale_set = tl.load(sets + t, mask=is_token, other=0)
        of_set = key_scales + layer * key_scales_layer_stride + scale_set * key_scales_set_stride
        of_set = tl.multiple_of(of_set, [16])
        of_token = value_scales + layer * value_scales_layer_stride + row * value_scales_token_stride
    k_pool = tl.load(k_pools + layer).to(tl.pointer_type(POOL))
    v_pool = tl.load(v_pools + layer).to(tl.pointer_type(POOL))
    move(
        tl.multiple_of(k_source + layer * k_layer_stride + row * k_token_stride, [16]),
        tl.multiple_of(v_source + layer * v_layer_stride + row * v_token_stride, [16]),
        of_set,
        of_token,
        tl.multiple_of(k_pool + slot * k_pool_stride, [16]),
        tl.multiple_of(v_pool + slot * v_pool_stride, [16]),
        tl.multiple_of(cos_sin + angle * cos_sin_stride, [ANGLE_ALIGNMENT]),
        is_token,
        tl.program_id(1) * BLOCK_H,
        H,
        D,
        R,
        IS_NEOX,
        False,
        BLOCK_T,
        BLOCK_H,
        BLOCK_HALF,
        BLOCK_TAIL,
    )


@triton.jit(do_not_specialize=("k_out", "v_out", *_RUNTIME))
def capture_kernel(
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
    num_tokens: tl.int64,
    POOL: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    IS_NEOX: tl.constexpr,
    ANGLE_ALIGNMENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Write the key and value in slot `slots[t]` of every layer to row t of the output, the key's rotation undone."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    layer = tl.program_id(2).to(tl.int64)
    is_token = t < num_tokens
    slot = tl.load(slots + t, mask=is_token, other=0)
    if positions is not None:
        angle = tl.load(positions + t, mask=is_token, other=0)
    else:
        angle = t
    k_pool = tl.load(k_pools + layer).to(tl.pointer_type(POOL))
    v_pool = tl.load(v_pools + layer).to(tl.pointer_type(POOL))
    move(
        tl.multiple_of(k_pool + slot * k_pool_stride, [16]),
        tl.multiple_of(v_pool + slot * v_pool_stride, [16]),
        None,
        None,
        tl.multiple_of(k_out + layer * k_layer_stride + t * k_token_stride, [16]),
        tl.multiple_of(v_out + layer * v_layer_stride + t * v_token_stride, [16]),
        tl.multiple_of(cos_sin + angle * cos_sin_stride, [ANGLE_ALIGNMENT]),
        is_token,
        tl.program_id(1) * BLOCK_H,
        H,
        D,
        R,
        IS_NEOX,
        True,
        BLOCK_T,
        BLOCK_H,
        BLOCK_HALF,
        BLOCK_TAIL,
    )
