"""Matrix products of a few bf16 rows on a CPU with AMX, by one thread and from the weights as they lie.

oneDNN repacks the weights into the layout of an AMX operand at each call, and its threads meet at a barrier, where a
busy second core costs whole time slices. Here `out^T = weight @ x^T`: the weights are the operand that AMX reads row by
row, so only the few rows of `x` are packed, and nothing is kept that an update of the weights could make stale.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call, untyped-decorator"

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor

from kv_splice.elements import narrow

__all__ = ["AmxLinearMethod", "adopt"]

MAX_ROWS = 32
_BLOCK = 32  # output channels, and elements of the inner dimension, that one step takes

_I8, _I64, _VOID = ir.IntType(8), ir.IntType(64), ir.VoidType()
_TILES = np.zeros(64, np.uint8)  # palette 1: eight tiles of 16 rows of 64 bytes
_TILES[0], _TILES[16:32:2], _TILES[48:56] = 1, 64, 16

Emitter = tuple[Any, Callable[[Any, Any, Any, Any], Any]]


class AmxLinearMethod(UnquantizedLinearMethod):
    """SGLang's unquantised linear layer, with its small bf16 products computed here."""

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ layer.weight.T + bias`."""
        weight = layer.weight
        assert isinstance(weight, Tensor), type(weight)
        if bias is not None or not _takes(x, weight):
            return super().apply(layer, x, bias)
        num_rows, out = x.shape[0], x.new_empty(x.shape[0], weight.shape[0])
        addresses = x.data_ptr(), weight.data_ptr(), out.data_ptr(), _TILES.ctypes.data
        _linear_rows(*addresses, num_rows, weight.shape[0], weight.shape[1])
        return out


def adopt(model: torch.nn.Module) -> int:
    """Give the unquantised linear layers of `model` an `AmxLinearMethod` where the CPU has AMX; returns how many."""
    if not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        return 0
    layers = [m for m in model.modules() if type(getattr(m, "quant_method", None)) is UnquantizedLinearMethod]
    for layer in layers:
        layer.quant_method = AmxLinearMethod()
    return len(layers)


def _takes(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and x.dim() == 2
        and 0 < x.shape[0] <= MAX_ROWS
        and x.shape[1] == weight.shape[1]
        and weight.shape[0] % _BLOCK == weight.shape[1] % _BLOCK == 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


def _emit(builder: Any, name: str, args: list[Any]) -> None:
    shape = ir.FunctionType(_VOID, [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", [], shape), args)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I8.as_pointer())


@intrinsic
def _configure(_context: Any, address: Any) -> Emitter:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _emit(builder, "ldtilecfg", [_pointer(builder, args[0])])
        return context.get_dummy_value()

    return types.none(address), emit


@intrinsic
def _release(_context: Any) -> Emitter:
    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        _emit(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.none(), emit


@intrinsic(prefer_literal=True)
def _zero(_context: Any, tile: Any) -> Emitter:
    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        _emit(builder, "tilezero", [_I8(tile.literal_value)])
        return context.get_dummy_value()

    return types.none(tile), emit


@intrinsic(prefer_literal=True)
def _load(_context: Any, tile: Any, address: Any, stride: Any) -> Emitter:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _emit(builder, "tileloadd64", [_I8(tile.literal_value), _pointer(builder, args[1]), args[2]])
        return context.get_dummy_value()

    return types.none(tile, types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def _save(_context: Any, tile: Any, address: Any, stride: Any) -> Emitter:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _emit(builder, "tilestored64", [_I8(tile.literal_value), _pointer(builder, args[1]), args[2]])
        return context.get_dummy_value()

    return types.none(tile, types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def _multiply(_context: Any, total: Any, a: Any, b: Any) -> Emitter:
    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        _emit(builder, "tdpbf16ps", [_I8(tile.literal_value) for tile in (total, a, b)])
        return context.get_dummy_value()

    return types.none(total, a, b), emit


@intrinsic
def _elements_at(_context: Any, address: Any) -> Emitter:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint16)(address), emit


@njit(nogil=True, cache=True)
def _linear_rows(
    x_at: int, weight_at: int, out_at: int, tiles_at: int, num_rows: int, num_out: int, width: int
) -> None:
    """`out [num_rows, num_out] = x [num_rows, width] @ weight [num_out, width].T`, at most 32 rows.

    Tiles 0-3 sum channels [0, 16) and [16, 32) of the block for rows [0, 16) and [16, 32); 4 and 5 hold weights, 6 and
    7 pairs of `x`. Columns of a tile beyond `num_rows` hold what was in memory and are not read.
    """
    wide = num_rows > 16
    packed = np.empty((2, width // 2, 16, 2), np.uint16)
    for r in range(num_rows):
        x = carray(_elements_at(x_at + 2 * r * width), width)
        for i in range(width // 2):
            packed[r // 16, i, r % 16, 0] = x[2 * i]
            packed[r // 16, i, r % 16, 1] = x[2 * i + 1]
    total = np.empty((2, 32, 16), np.float32)
    packed_at, total_at, stride = packed.ctypes.data, total.ctypes.data, 2 * width
    _configure(tiles_at)
    for n in range(0, num_out, 32):
        _zero(0)
        _zero(1)
        _zero(2)
        _zero(3)
        block_at = weight_at + n * stride
        for k in range(0, width, 32):
            _load(6, packed_at + 32 * k, 64)
            _load(4, block_at + 2 * k, stride)
            _multiply(0, 4, 6)
            _load(5, block_at + 2 * k + 16 * stride, stride)
            _multiply(1, 5, 6)
            if wide:
                _load(7, packed_at + 32 * (width + k), 64)
                _multiply(2, 4, 7)
                _multiply(3, 5, 7)
        _save(0, total_at, 64)
        _save(1, total_at + 1024, 64)
        if wide:
            _save(2, total_at + 2048, 64)
            _save(3, total_at + 3072, 64)
        for r in range(num_rows):
            out = carray(_elements_at(out_at + 2 * (r * num_out + n)), 32)
            for i in range(32):
                out[i] = narrow(total[r // 16, i, r % 16], out[i])
    _release()
