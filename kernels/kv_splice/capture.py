"""A fact out of the pool, on whichever device it is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_splice.quantise import KVScales, quantise
from kv_splice.reference import unrotate_keys
from kv_splice.validate import check_capture

__all__ = ["capture_quantised", "unrotate_capture"]


def unrotate_capture(
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    slots: Tensor,
    cos_sin: Tensor,
    *,
    positions: Tensor | None = None,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Keys before rotation and values of the tokens in `slots`, all layers; on a GPU in one launch.

    Parameters
    ----------
    k_pools, v_pools
        One `[num_slots, num_kv_heads, head_dim]` a layer, fp32, bf16 or fp16.
    slots
        `[num_tokens]` int64, on the pools' device.
    cos_sin
        `[num_tokens, rotary_dim]` fp32 of the places that the keys were rotated to, cosines of all pairs, then sines;
        with `positions`, the model's own table `[max_position, rotary_dim]`.
    positions
        `[num_tokens]` int64, each token's row of the table.
    is_neox
        Pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).

    Returns
    -------
    Two tensors `[num_layers, num_tokens, num_kv_heads, head_dim]` of the pools' dtype, on their device. Keys are turned
    back in fp32 and rounded once.

    Raises
    ------
    SpliceError
        A wrong dtype, shape, device or stride, no pools, or an index out of range; on a GPU also what is not aligned to
        16 bytes.
    """
    if k_pools and k_pools[0].device.type == "cuda":
        from kv_splice import gpu

        return gpu.unrotate_capture(k_pools, v_pools, slots, cos_sin, positions=positions, is_neox=is_neox)
    check_capture(k_pools, v_pools, slots, cos_sin, positions)
    keys = torch.stack([pool[slots] for pool in k_pools])
    values = torch.stack([pool[slots] for pool in v_pools])
    rows = cos_sin if positions is None else cos_sin[positions].float()
    return unrotate_keys(keys, rows, is_neox=is_neox).to(keys.dtype), values


def capture_quantised(
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    slots: Tensor,
    cos_sin: Tensor,
    *,
    positions: Tensor | None = None,
    is_neox: bool,
) -> tuple[Tensor, Tensor, KVScales]:
    """One fact in int8: `quantise` of what `unrotate_capture` returns, bit for bit; on a GPU in one launch.

    Parameters and results as these two.

    Raises
    ------
    SpliceError
        As `unrotate_capture`.
    QuantiseError
        The fact holds what int8 does not, or no tokens.
    """
    if k_pools and k_pools[0].device.type == "cuda" and slots.numel():
        from kv_splice import gpu

        offsets = torch.tensor([0, slots.numel()], device=slots.device)
        k, v, scales = gpu.capture_quantised(
            k_pools, v_pools, slots, cos_sin, offsets=offsets, positions=positions, is_neox=is_neox
        )
        return k, v, KVScales(scales.keys[:, 0], scales.values)
    return quantise(*unrotate_capture(k_pools, v_pools, slots, cos_sin, positions=positions, is_neox=is_neox))
