"""Storage elements to fp32 and back inside compiled loops, and a hint to the cache.

NumPy has no bf16, and Numba no fp16 on the CPU. Both travel as integers of their bits: `uint16` holds a bf16, `int16`
an fp16; `float32` is itself, and `int8` a number that is read and never written. Rounding is to nearest, ties to even,
as in torch.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call, untyped-decorator"

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

__all__ = ["as_elements", "narrow", "prefetch", "widen"]

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16, torch.float32: torch.float32, torch.int8: torch.int8}

# What Numba asks of an intrinsic: its signature, and the emitter of its code.
Emitter = tuple[Any, Callable[[Any, Any, Any, Any], Any]]


def as_elements(tokens: Tensor) -> np.ndarray[Any, Any]:
    """The memory from the first to the last element of `tokens [n, num_kv_heads, head_dim]`, flat, without a copy.

    Token i starts at element `i * tokens.stride(0)`. Heads and elements are contiguous; tokens need not be.
    """
    num_tokens, num_heads, head_dim = tokens.shape
    assert tokens.stride()[1:] == (head_dim, 1), f"heads are not contiguous: strides {tokens.stride()}"
    length = (num_tokens - 1) * tokens.stride(0) + num_heads * head_dim
    return tokens.as_strided((length,), (1,)).view(_BITS[tokens.dtype]).numpy()


@intrinsic
def widen(_context: Any, element: Any) -> Emitter:
    """`widen(element)`: its value in fp32."""

    def emit(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.args[0] == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)
        if signature.args[0] == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)
        if signature.args[0] == types.int8:
            return builder.sitofp(args[0], _F32)
        return args[0]

    return types.float32(element), emit


@intrinsic
def narrow(_context: Any, _value: Any, like: Any) -> Emitter:
    """`narrow(value, like)`: the fp32 value, rounded to the type of the element `like`, whose value is not used."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if like == types.uint16:
            bits = builder.bitcast(args[0], _I32)
            odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
            rounded = builder.lshr(builder.add(builder.add(bits, _I32(0x7FFF)), odd), _I32(16))
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])
            return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), _I16)
        return args[0]

    return like(types.float32, like), emit


@intrinsic
def prefetch(_context: Any, array: Any, _index: Any) -> Emitter:
    """`prefetch(array, index)`: ask for the cache line of an element that is about to be read or written."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), _I8.as_pointer())
        shape = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        call = builder.module.declare_intrinsic("llvm.prefetch", [_I8.as_pointer()], shape)
        builder.call(call, [pointer, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp), emit
