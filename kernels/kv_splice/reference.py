"""The rotation and the splice as they are defined, in fp32 and plain torch, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_splice.quantise import ArenaScales

__all__ = ["rotate_keys", "splice_reference", "unrotate_keys"]


def rotate_keys(keys: Tensor, cos_sin: Tensor, *, is_neox: bool, out: Tensor | None = None) -> Tensor:
    """Apply RoPE: pair (a, b) becomes (a cos - b sin, b cos + a sin), RoFormer equation 34.

    Parameters
    ----------
    keys
        `[num_layers, num_tokens, num_kv_heads, head_dim]`, any float dtype.
    cos_sin
        `[num_tokens, rotary_dim]` fp32: the cosines of all pairs, then the sines.
    is_neox
        Pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).
    out
        fp32, of the shape of `keys`; may be `keys` itself.

    Returns
    -------
    fp32, of the shape of `keys`: elements from `rotary_dim` on are unchanged.
    """
    cos, sin = _halves(cos_sin)
    return _turn(keys, cos, sin, is_neox=is_neox, out=out)


def unrotate_keys(keys: Tensor, cos_sin: Tensor, *, is_neox: bool, out: Tensor | None = None) -> Tensor:
    """Undo `rotate_keys` with the same rows.

    The rotation is inverted, not transposed: dividing by cos² + sin² also cancels an amplitude (YaRN) and the rounding
    of rows that were stored in a narrow dtype. Parameters and result as `rotate_keys`.
    """
    cos, sin = _halves(cos_sin)
    norm = cos.square() + sin.square()
    return _turn(keys, cos / norm, -sin / norm, is_neox=is_neox, out=out)


def splice_reference(
    arena_k: Tensor,
    arena_v: Tensor,
    *,
    scales: ArenaScales | None = None,
    rows: Tensor | None,
    cos_sin: Tensor,
    slots: Tensor,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    is_neox: bool,
) -> None:
    """Write token i of every layer, its key rotated by `cos_sin[i]`, to slot `slots[i]`.

    Shapes as `kv_splice.splice`, which checks what this trusts. Keys are rotated in fp32 and rounded once,
    after int8 has been multiplied by its scales.
    """
    if rows is None:
        rows = torch.arange(slots.numel(), device=slots.device)
    for layer, (k_pool, v_pool) in enumerate(zip(k_pools, v_pools, strict=True)):
        keys, values = arena_k[layer, rows], arena_v[layer, rows]
        if scales is not None:
            keys = keys.float() * scales.keys[layer, scales.sets].float()
            values = values.float() * scales.values[layer, rows, :, None].float()
        k_pool[slots] = rotate_keys(keys[None], cos_sin, is_neox=is_neox)[0].to(k_pool.dtype)
        v_pool[slots] = values.to(v_pool.dtype)


def _halves(cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, `[num_tokens, 1, rotary_dim / 2]` fp32 each, ready to meet `[..., num_kv_heads, :]`."""
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    return cos[:, None], sin[:, None]


def _turn(keys: Tensor, cos: Tensor, sin: Tensor, *, is_neox: bool, out: Tensor | None) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    rotated = keys[..., :rotary_dim].float()
    first, second = rotated.chunk(2, dim=-1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
    result = torch.cat((rotated, keys[..., rotary_dim:].float()), dim=-1)
    return result if out is None else out.copy_(result)
