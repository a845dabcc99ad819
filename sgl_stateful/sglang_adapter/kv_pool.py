"""The KV pool and the rotary table of the loaded model, as the splice needs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from kv_splice import KVScales, RopeSpec, capture_quantised, on_stream, splice, unrotate_capture
from sgl_stateful.errors import IncompatibleServer
from sgl_stateful.splice import FactArena


@dataclass(frozen=True, slots=True)
class KVPool:
    """Views of SGLang's KV pool and of the model's rotary table.

    ``k_pools`` and ``v_pools`` hold one tensor a layer, ``[num_slots, num_kv_heads, head_dim]``; ``cos_sin_cache`` is
    the model's own ``[max_position, rotary_dim]`` table, cosines before sines. Writes go to the forward stream, so a
    forward that is launched later reads them.
    """

    k_pools: tuple[torch.Tensor, ...]
    v_pools: tuple[torch.Tensor, ...]
    rope: RopeSpec
    cos_sin_cache: torch.Tensor
    forward_stream: Any

    @property
    def num_layers(self) -> int:
        """Layers on this rank."""
        return len(self.k_pools)

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return self.k_pools[0].shape[1]

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.k_pools[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.k_pools[0].dtype

    @property
    def device(self) -> torch.device:
        """Of keys and values."""
        return self.k_pools[0].device

    def read(self, slots: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys before rotation and values of the tokens in ``slots``, which stand at ``start`` and onwards.

        Returns
        -------
        Two tensors ``[num_layers, num_tokens, num_kv_heads, head_dim]`` of the pool's dtype, on its device.
        """
        self.order_after_forward()
        slots, positions = slots.to(self.device, torch.int64), self._positions(start, len(slots))
        return unrotate_capture(
            self.k_pools, self.v_pools, slots, self.cos_sin_cache, positions=positions, is_neox=self.rope.is_neox
        )

    def read_quantised(self, slots: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, KVScales]:
        """The same in int8, with its scales.

        Raises
        ------
        QuantiseError
            The tokens hold what int8 does not.
        """
        self.order_after_forward()
        slots, positions = slots.to(self.device, torch.int64), self._positions(start, len(slots))
        return capture_quantised(
            self.k_pools, self.v_pools, slots, self.cos_sin_cache, positions=positions, is_neox=self.rope.is_neox
        )

    def _positions(self, start: int, num_tokens: int) -> torch.Tensor:
        return torch.arange(start, start + num_tokens, device=self.device)

    def read_layer(self, slots: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys as served (rotated) and values ``[num_tokens, num_kv_heads, head_dim]`` of one layer, on the CPU."""
        self.order_after_forward()
        slots = slots.long()
        return self.k_pools[layer][slots].cpu(), self.v_pools[layer][slots].cpu()

    def read_as_served(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys as served (rotated) and values on the CPU, ``[num_layers, num_tokens, num_kv_heads, head_dim]``."""
        self.order_after_forward()
        slots = slots.to(self.device, torch.int64)
        shape = (self.num_layers, len(slots), self.num_kv_heads, self.head_dim)
        keys, values = (torch.empty(shape, dtype=self.dtype) for _ in range(2))
        for pools, copies in ((self.k_pools, keys), (self.v_pools, values)):
            for pool, copy in zip(pools, copies, strict=True):
                copy.copy_(pool[slots])
        return keys, values

    def write_as_served(
        self, slots: torch.Tensor, layers: Iterable[tuple[torch.Tensor, torch.Tensor]], *, first: int
    ) -> None:
        """Write keys as served and values, one layer after the other, to ``slots``.

        ``layers`` yields CPU tensors ``[first + num_slots, num_kv_heads, head_dim]``, of which the first ``first`` rows
        are left out.
        """
        slots = slots.to(self.device, torch.int64)
        with on_stream(self.forward_stream, slots):
            for layer, (keys, values) in enumerate(layers):
                self.k_pools[layer][slots] = keys[first : first + len(slots)].to(self.device)
                self.v_pools[layer][slots] = values[first : first + len(slots)].to(self.device)

    def splice(self, arena: FactArena, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate arena ``rows`` to ``positions`` and write them to ``slots``, all layers."""
        slots = slots.to(self.device, torch.int64)
        rows, positions = (x.to(self.device, non_blocking=True) for x in (rows, positions))
        splice(
            arena.keys,
            arena.values,
            self.cos_sin_cache,
            slots,
            self.k_pools,
            self.v_pools,
            scales=arena.scales(rows),
            rows=rows,
            positions=positions,
            is_neox=self.rope.is_neox,
            stream=self.forward_stream,
        )

    def order_after_forward(self) -> None:
        """What this stream does next begins when the forwards launched so far have read and written."""
        if self.forward_stream is not None and self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream().wait_stream(self.forward_stream)


def find_kv_pool(kv_cache: Any, model: torch.nn.Module, forward_stream: Any) -> KVPool:
    """Find the pool's tensors and the one rotary table that every attention layer of the model uses.

    Raises
    ------
    IncompatibleServer
        An attention layer without a rotary module beside it, two different rotary modules, or a rotary class whose
        formula is unknown.
    UnsupportedRope
        From ``RopeSpec``: the rotary class has a formula that cannot be inverted by a table.
    """
    rotary: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules():
        attn = getattr(module, "attn", None)
        if not isinstance(attn, RadixAttention):
            continue
        if getattr(module, "rotary_emb", None) is None:
            raise IncompatibleServer(f"layer {name} has attention without a rotary module beside it")
        rotary[attn.layer_id] = module.rotary_emb
    num_layers = kv_cache.layer_num
    if sorted(rotary) != list(range(num_layers)):
        raise IncompatibleServer(
            f"found rotary modules for layers {sorted(rotary)}, but the KV pool has {num_layers} layers "
            "(pipeline parallelism and hybrid models are not supported)"
        )
    specs = {RopeSpec.from_rotary_module(module) for module in rotary.values()}
    if len(specs) != 1:
        raise IncompatibleServer(f"layers use {len(specs)} different rotary embeddings; one is supported")
    table = rotary[0].cos_sin_cache
    assert isinstance(table, torch.Tensor), type(table)
    return KVPool(
        k_pools=tuple(kv_cache.get_key_buffer(layer) for layer in range(num_layers)),
        v_pools=tuple(kv_cache.get_value_buffer(layer) for layer in range(num_layers)),
        rope=specs.pop(),
        cos_sin_cache=table,
        forward_stream=forward_stream,
    )
