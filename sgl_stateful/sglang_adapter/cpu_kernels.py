"""The small steps between a decoder layer's matrix products, one pass over bf16 rows each.

Torch takes four to ten operators for each of these, and for a handful of rows the operators' fixed costs are most of a
forward. Compiled by Numba and addressed by raw pointers, a step costs a few microseconds and waits for no other thread.
A bf16 travels as the `uint16` of its bits. Strides are elements; the last dimension of every tensor is contiguous.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call, untyped-decorator"

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from kv_splice.elements import narrow, widen

__all__ = ["norm_rows", "rotate_rows", "silu_mul_rows", "store_rows"]

_I32, _F32 = ir.IntType(32), ir.FloatType()

# exp(x) = 2^n * exp(r), |r| <= ln(2) / 2, with ln(2) in two parts so that n * ln(2) is exact where it matters.
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_TO_INTEGER = np.float32(1.5 * 2**23)  # added to a small fp32, it rounds to an integer and leaves it in the low bits
_EXP_MIN, _EXP_MAX = np.float32(-87.0), np.float32(88.0)
_ONE, _C2, _C3 = np.float32(1), np.float32(1 / 2), np.float32(1 / 6)
_C4, _C5, _C6 = np.float32(1 / 24), np.float32(1 / 120), np.float32(1 / 720)

Emitter = tuple[Any, Callable[[Any, Any, Any, Any], Any]]


@intrinsic
def _elements_at(_context: Any, address: Any) -> Emitter:
    """`_elements_at(address)`: pointer to 16-bit elements."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint16)(address), emit


@intrinsic
def _indices_at(_context: Any, address: Any) -> Emitter:
    """`_indices_at(address)`: pointer to int64."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(address), emit


@intrinsic
def _power_of_two(_context: Any, shifted: Any) -> Emitter:
    """`_power_of_two(n + _TO_INTEGER)`: 2 to the integer n, by its exponent bits."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        exponent = builder.shl(builder.bitcast(args[0], _I32), _I32(23))
        return builder.bitcast(builder.add(exponent, _I32(127 << 23)), _F32)

    return types.float32(types.float32), emit


@njit(nogil=True, cache=True, inline="always")
def _exp(x: Any) -> Any:
    x = min(max(x, _EXP_MIN), _EXP_MAX)
    shifted = x * _LOG2_E + _TO_INTEGER
    n = shifted - _TO_INTEGER
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    series = _ONE + r * (_ONE + r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * _C6)))))
    return series * _power_of_two(shifted)


# Only the sum of squares may be reordered: no contraction into FMA, so that each product rounds as in torch.
@njit("void(int64, int64, int64, int64, int64, int64, float32)", nogil=True, cache=True, fastmath={"reassoc"})
def norm_rows(x_at: int, residual_at: int, weight_at: int, out_at: int, num_rows: int, width: int, eps: float) -> None:
    """`out = (x + residual) * rsqrt(mean((x + residual)^2) + eps) * weight`, and the sum rounded into `residual`.

    `x`, `residual` and `out` are contiguous `[num_rows, width]`; `out` may be `x`. A `residual_at` of 0 adds none.
    """
    weight = carray(_elements_at(weight_at), width)
    row = np.empty(width, np.float32)
    scale = np.float32(1) / np.float32(width)
    for r in range(num_rows):
        x = carray(_elements_at(x_at + 2 * r * width), width)
        out = carray(_elements_at(out_at + 2 * r * width), width)
        squares = np.float32(0)
        if residual_at != 0:
            residual = carray(_elements_at(residual_at + 2 * r * width), width)
            for i in range(width):
                value = widen(x[i]) + widen(residual[i])
                residual[i] = narrow(value, residual[i])
                row[i] = value
                squares += value * value
        else:
            for i in range(width):
                value = widen(x[i])
                row[i] = value
                squares += value * value
        factor = np.float32(1) / np.sqrt(squares * scale + eps)
        for i in range(width):
            out[i] = narrow(row[i] * factor * widen(weight[i]), out[i])


# Numba's own division looks for a zero and raises, which keeps the loop from being vectorised.
@njit("void(int64, int64, int64, int64)", nogil=True, cache=True, error_model="numpy")
def silu_mul_rows(gate_up_at: int, out_at: int, num_rows: int, width: int) -> None:
    """`out = silu(gate) * up` for contiguous `gate_up [num_rows, 2 * width]`, silu rounded before the product."""
    for r in range(num_rows):
        gate = carray(_elements_at(gate_up_at + 4 * r * width), width)
        up = carray(_elements_at(gate_up_at + 4 * r * width + 2 * width), width)
        out = carray(_elements_at(out_at + 2 * r * width), width)
        for i in range(width):
            g = widen(gate[i])
            silu = widen(narrow(g / (_ONE + _exp(-g)), gate[i]))
            out[i] = narrow(silu * widen(up[i]), out[i])


@njit("void(int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def rotate_rows(
    x_at: int,
    stride: int,
    num_rows: int,
    num_heads: int,
    head_dim: int,
    positions_at: int,
    cos_sin_at: int,
    rotary_dim: int,
) -> None:
    """Rotate `x [num_rows, num_heads, head_dim]` in place, NeoX style, by rows `positions` of `[_, rotary_dim]`."""
    half = rotary_dim // 2
    positions = carray(_indices_at(positions_at), num_rows)
    angles, head = np.empty(2 * half, np.float32), np.empty(2 * half, np.float32)
    cos, sin, a, b = angles[:half], angles[half:], head[:half], head[half:]
    for r in range(num_rows):
        row = carray(_elements_at(cos_sin_at + 2 * positions[r] * rotary_dim), 2 * half)
        for i in range(2 * half):
            angles[i] = widen(row[i])
        for h in range(num_heads):
            at = x_at + 2 * (r * stride + h * head_dim)
            x = carray(_elements_at(at), 2 * half)
            for i in range(2 * half):
                head[i] = widen(x[i])
            for i in range(half):
                x[i] = narrow(a[i] * cos[i] - b[i] * sin[i], x[i])
            for i in range(half):
                x[half + i] = narrow(b[i] * cos[i] + a[i] * sin[i], x[half + i])


@njit("void(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def store_rows(source_at: int, stride: int, pool_at: int, slots_at: int, num_rows: int, width: int) -> None:
    """`pool[slots] = source`: rows of `width` 16-bit elements, `stride` apart in the source, contiguous in the pool."""
    slots = carray(_indices_at(slots_at), num_rows)
    for r in range(num_rows):
        source = carray(_elements_at(source_at + 2 * r * stride), width)
        target = carray(_elements_at(pool_at + 2 * slots[r] * width), width)
        for i in range(width):
            target[i] = source[i]
