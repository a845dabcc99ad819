"""Forwards of SGLang's small layers for the platform `portable_cpu`: one compiled pass instead of many torch operators.

They take over where it is bf16 in the plain form that a decoder serves; everything else, and every batch beyond
`_MAX_ROWS`, where torch's threads win, goes to the layer's own `forward_native`. Like SGLang's CUDA forwards, and
unlike `forward_native`, the norm and the rotation write into their inputs.
"""

from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from torch import Tensor

from sgl_stateful.sglang_adapter.cpu_kernels import norm_rows, rotate_rows, silu_mul_rows, store_rows

__all__ = ["register", "rms_norm", "rotate", "silu_and_mul", "store"]

# Rows up to which one thread in one pass beats torch's operators on all threads.
_MAX_ROWS = {"norm": 512, "silu": 40, "rotate": 256}


def register(platform_key: str) -> None:
    """Make SGLang dispatch to these forwards on the out-of-tree platform of that key, and on no other."""
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, platform_key)
    BaseFusedOp.register_oot_forward(SiluAndMul, silu_and_mul, platform_key)
    for rotary in (RotaryEmbedding, Llama3RotaryEmbedding):
        BaseFusedOp.register_oot_forward(rotary, rotate, platform_key)


def rms_norm(
    self: RMSNorm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Norm of `x [num_rows, hidden_size]`, plus `residual` where given, which then receives the sum.

    Returns
    -------
    A new tensor; with a residual, `(x, residual)`, both overwritten.
    """
    plain = (
        x.dtype == self.weight.dtype == torch.bfloat16
        and x.dim() == 2
        and 0 < x.shape[0] <= _MAX_ROWS["norm"]
        and x.shape[1] == self.hidden_size
        and x.is_contiguous()
        and self.variance_size_override is None
        and self.override_orig_dtype is None
        and not self.cast_x_before_out_mul
        and not self.fp32_residual
        and post_residual_addition is None
    )
    if not plain or (residual is not None and not _alike(residual, x)):
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    out = torch.empty_like(x) if residual is None else x
    residual_at = 0 if residual is None else residual.data_ptr()
    norm_rows(
        x.data_ptr(),
        residual_at,
        self.weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        self.variance_epsilon,
    )
    return out if residual is None else (out, residual)


def silu_and_mul(self: SiluAndMul, x: Tensor) -> Tensor:
    """`silu(x[:, :n]) * x[:, n:]` for `x [num_rows, 2 * n]`."""
    if x.dtype != torch.bfloat16 or x.dim() != 2 or not 0 < x.shape[0] <= _MAX_ROWS["silu"] or not x.is_contiguous():
        return self.forward_native(x)
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_rows, width)
    silu_mul_rows(x.data_ptr(), out.data_ptr(), num_rows, width)
    return out


def rotate(
    self: RotaryEmbedding,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """Rotate `query [num_tokens, num_heads * head_size]` and `key` in place, by fp32 products rounded once."""
    cache = self.cos_sin_cache
    num_tokens = positions.numel()
    plain = (
        query.dtype == key.dtype == cache.dtype == torch.bfloat16
        and positions.dtype == torch.int64
        and self.is_neox_style
        and 0 < num_tokens <= _MAX_ROWS["rotate"]
        and query.dim() == key.dim() == 2
        and query.stride(1) == key.stride(1) == 1
        and positions.is_contiguous()
        and cache.is_contiguous()
        and offsets is None
        and fused_set_kv_buffer_arg is None
        and not hasattr(self, "sin_cos_cache")
    )
    if not plain:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    head_dim, rotary_dim = self.head_size, self.rotary_dim
    assert query.shape[0] == key.shape[0] == num_tokens, (query.shape, key.shape, num_tokens)
    for x in (query, key):
        rotate_rows(
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            x.shape[1] // head_dim,
            head_dim,
            positions.data_ptr(),
            cache.data_ptr(),
            rotary_dim,
        )
    return query, key


def store(source: Tensor, pool: Tensor, slots: Tensor) -> None:
    """`pool[slots] = source`, for `source [num_tokens, num_heads, head_dim]`, its tokens any stride apart.

    Both have one dtype of 2 or 4 bytes; the pool is contiguous, `slots` contiguous int64 and within it.
    """
    halves = source.element_size() // 2
    width = source.shape[1] * source.shape[2] * halves
    store_rows(source.data_ptr(), source.stride(0) * halves, pool.data_ptr(), slots.data_ptr(), slots.numel(), width)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous()
