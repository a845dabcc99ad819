"""`portable_cpu`: SGLang's attention in plain torch, for any CPU.

SGLang's `torch_native` pads the queries of an extend to the whole sequence and reads the cache by index, once per
sequence and layer. Here an extend attends with its own tokens only: `n * T` scores instead of `T * T`. Grouped-query
attention copies no head: few queries are laid out as one tall matrix per KV head, many go through torch's own grouping.
"""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sgl_stateful.sglang_adapter.attention_plan import Span, plan_decode, plan_extend
from sgl_stateful.sglang_adapter.cpu_ops import store
from sgl_stateful.sglang_adapter.platform import ATTENTION_BACKEND

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["PortableCpuAttention", "UnsupportedAttention", "attend", "register"]

_EXTEND_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)
_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Up to this many queries the heads of one group form one matrix. Beyond it torch's blocks are full without that.
_GROUPED_QUERIES = 32


class UnsupportedAttention(NotImplementedError):
    """The model or the forward needs a kind of attention that `portable_cpu` does not compute."""

    def __init__(self, feature: str) -> None:
        super().__init__(f"portable_cpu attention does not support {feature}; use --attention-backend torch_native")


class PortableCpuAttention(AttentionBackend):
    """Causal attention of decoder layers over a paged pool with fp32, bf16 or fp16 keys and values.

    Raises
    ------
    UnsupportedAttention
        At construction or at the forward: MLA, encoders, cross-attention, sliding window, logit cap, attention sinks,
        quantised KV, speculative decoding, a device other than the CPU.
    """

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._dtype: torch.dtype = model_runner.dtype
        self._spans: list[Span] = []
        self._stores_directly = _is_plain(self.token_to_kv_pool)
        if torch.device(model_runner.device).type != "cpu":
            raise UnsupportedAttention(f"device {model_runner.device}")
        if model_runner.use_mla_backend:
            raise UnsupportedAttention("multi-head latent attention")
        if self.token_to_kv_pool.dtype not in _KV_DTYPES:
            raise UnsupportedAttention(f"a KV cache of {self.token_to_kv_pool.dtype}")
        model = getattr(model_runner, "model", None)
        for module in () if model is None else model.modules():
            if isinstance(module, RadixAttention):
                _refuse_layer(module)

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Plan the forward: what every layer will read, and with which masks."""
        if self._stores_directly and forward_batch.out_cache_loc is not None:
            _refuse_slots_outside(self.token_to_kv_pool, forward_batch.out_cache_loc)
        mode = forward_batch.forward_mode
        rows = forward_batch.req_pool_indices.tolist()
        req_to_token = self.req_to_token_pool.req_to_token
        if mode.is_idle():
            self._spans = []
        elif mode.is_decode():
            seq_lens = forward_batch.seq_lens.tolist()
            self._spans = plan_decode(req_to_token, rows, seq_lens=seq_lens, dtype=self._dtype)
        elif mode in _EXTEND_MODES:
            prefix_lens = forward_batch.extend_prefix_lens.tolist()
            extend_lens = forward_batch.extend_seq_lens.tolist()
            self._spans = plan_extend(
                req_to_token, rows, prefix_lens=prefix_lens, extend_lens=extend_lens, dtype=self._dtype
            )
        else:
            raise UnsupportedAttention(f"forward mode {mode.name}")

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Store `k, v [num_tokens, num_kv_heads, head_dim]` and attend with `q [num_tokens, num_heads * head_dim]`.

        Returns
        -------
        `[num_tokens, num_heads * v_head_dim]`.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, extra=kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """As `forward_extend`, with one token per sequence."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, extra=kwargs)

    def support_triton(self) -> bool:
        """False: nothing here launches a Triton kernel."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """One: a padded sequence of a captured batch would have one token."""
        return 1

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: "ForwardBatch",
        *,
        save_kv_cache: bool,
        extra: dict[str, Any],
    ) -> Tensor:
        _refuse_layer(layer)
        if extra.get("sinks") is not None:
            raise UnsupportedAttention("attention sinks")
        pool = self.token_to_kv_pool
        k_pool, v_pool = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        if save_kv_cache and k is not None and v is not None:
            slots = forward_batch.out_cache_loc
            if self._stores_directly and _fits(k, k_pool, slots) and _fits(v, v_pool, slots):
                store(k, k_pool, slots)
                store(v, v_pool, slots)
            else:
                pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v)
        if k is None or v is None or k.dtype != k_pool.dtype:
            # Exactly what the cache holds: it may be narrower than what was just computed, or another layer's.
            fresh_k, fresh_v = k_pool[forward_batch.out_cache_loc], v_pool[forward_batch.out_cache_loc]
        else:
            fresh_k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            fresh_v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [num_tokens, num_heads, head_dim]
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for span in self._spans:
            if span.keys is None:
                keys, values = fresh_k[span.queries], fresh_v[span.queries]
            else:
                keys, values = _rows(k_pool, span.keys), _rows(v_pool, span.keys)
            out[span.queries] = attend(q[span.queries], keys, values, span, scale=layer.scaling)
        return out.view(out.shape[0], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, span: Span, *, scale: float) -> Tensor:
    """Attention of one span.

    Parameters
    ----------
    q
        `[batch * num_queries, num_heads, head_dim]`.
    k, v
        `[batch * num_keys, num_kv_heads, head_dim]`, any strides; cast to `q.dtype` where they differ.
    span
        What the rows mean.
    scale
        Factor on the scores before the softmax.

    Returns
    -------
    `[batch * num_queries, num_heads, v_head_dim]` in `q.dtype`.
    """
    batch, n = span.batch, span.num_queries
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    group = num_heads // num_kv_heads
    k = k.to(q.dtype).view(batch, span.num_keys, num_kv_heads, -1).transpose(1, 2)
    v = v.to(q.dtype).view(batch, span.num_keys, num_kv_heads, -1).transpose(1, 2)
    if span.causal or n > _GROUPED_QUERIES:
        q = q.view(batch, n, num_heads, -1).transpose(1, 2)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=span.mask, is_causal=span.causal, scale=scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2).reshape(batch * n, num_heads, -1)
    q = q.view(batch, n, num_kv_heads, group, -1).transpose(1, 2).reshape(batch, num_kv_heads, n * group, -1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=span.grouped_mask(group), scale=scale)
    return out.view(batch, num_kv_heads, n, group, -1).transpose(1, 2).reshape(batch * n, num_heads, -1)


def register() -> None:
    """Make `portable_cpu` known to SGLang: its attention registry, its command line and its paged allocation."""
    register_attention_backend(ATTENTION_BACKEND)(PortableCpuAttention)
    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(ATTENTION_BACKEND)
        HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", _last_loc, HookType.AROUND)


def _last_loc(original: Any, req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    """Slot of each prefix's last token, -1 where it is empty, `[num_seqs]`: SGLang's own version is a Triton kernel."""
    if req_to_token.device.type != "cpu":
        return original(req_to_token, req_pool_indices, prefix_lens)
    last = req_to_token[req_pool_indices, (prefix_lens - 1).clamp(min=0)].to(prefix_lens.dtype)
    return torch.where(prefix_lens > 0, last, torch.full_like(prefix_lens, -1))


def _is_plain(pool: Any) -> bool:
    """Whether writing to the buffers is all that `pool.set_kv_buffer` does."""
    return (
        type(pool) is MHATokenToKVPool
        and not (pool.is_quantized_kv_cache or pool.requires_physical_write_loc)
        and pool.kv_cache_layout == "nhd"
        and pool.store_dtype == pool.dtype
    )


def _refuse_slots_outside(pool: Any, slots: Tensor) -> None:
    """Once per forward what indexing would check in every layer: `store` writes wherever it is told."""
    lowest, highest = slots.aminmax() if slots.numel() > 0 else (0, 0)
    size = pool.size + pool.page_size
    if lowest < 0 or highest >= size:
        raise IndexError(f"slots [{int(lowest)}, {int(highest)}] reach outside the KV pool of {size}")


def _fits(source: Tensor, pool: Tensor, slots: Tensor) -> bool:
    return (
        source.dim() == 3
        and source.shape[0] == slots.numel()
        and source.shape[1:] == pool.shape[1:]
        and source.stride()[1:] == pool.stride()[1:] == (pool.shape[2], 1)
        and source.dtype == pool.dtype
        and slots.dtype == torch.int64
        and slots.is_contiguous()
        and pool.is_contiguous()
    )


def _rows(pool: Tensor, keys: slice | Tensor) -> Tensor:
    return pool[keys] if isinstance(keys, slice) else pool.index_select(0, keys)


def _refuse_layer(layer: RadixAttention) -> None:
    if layer.is_cross_attention:
        raise UnsupportedAttention("cross-attention")
    if layer.attn_type != AttentionType.DECODER:
        raise UnsupportedAttention(f"attention of type {layer.attn_type.value}")
    if layer.sliding_window_size > -1:
        raise UnsupportedAttention("a sliding window")
    if layer.logit_cap > 0:
        raise UnsupportedAttention("a logit cap")
    if layer.xai_temperature_len > 0:
        raise UnsupportedAttention("temperature scaling by length")
