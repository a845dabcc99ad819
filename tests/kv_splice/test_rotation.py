"""Rotation and its inverse against transformers and against SGLang's own rotary modules."""

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_neox

from kv_splice import RopeScaling, RopeSpec, rotate_keys, unrotate_keys

LAYERS, HEADS = 2, 3
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}


def spec_of(head_dim: int, rotary_dim: int, *, is_neox: bool) -> RopeSpec:
    return RopeSpec(head_dim=head_dim, rotary_dim=rotary_dim, is_neox=is_neox, base=1e4)


def transformers_rotation(keys: Tensor, cos_sin: Tensor, *, is_neox: bool) -> Tensor:
    """`keys [num_layers, num_tokens, num_kv_heads, head_dim]` turned by transformers, in its own layout."""
    rotary_dim = cos_sin.shape[1]
    cos, sin = (torch.cat((half, half), dim=-1)[None] for half in cos_sin.chunk(2, dim=-1))
    heads_first = keys.float().transpose(1, 2)
    turn = apply_neox if is_neox else apply_interleaved
    rotated, _ = turn(heads_first[..., :rotary_dim], heads_first[..., :rotary_dim], cos, sin)
    return torch.cat((rotated, heads_first[..., rotary_dim:]), dim=-1).transpose(1, 2)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("num_tokens", [0, 1, 63])
def test_rotates_like_transformers(head_dim: int, partial: bool, is_neox: bool, num_tokens: int) -> None:
    rotary_dim = head_dim // 2 if partial else head_dim
    keys = torch.randn(LAYERS, num_tokens, HEADS, head_dim)
    cos_sin = spec_of(head_dim, rotary_dim, is_neox=is_neox).cos_sin(torch.randint(0, 5000, (num_tokens,)))
    expected = transformers_rotation(keys, cos_sin, is_neox=is_neox)
    torch.testing.assert_close(rotate_keys(keys, cos_sin, is_neox=is_neox), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unrotate_keys(expected, cos_sin, is_neox=is_neox), keys, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_moves_a_key_that_sglang_rotated(name: str, is_neox: bool, rotary_dim: int) -> None:
    module = get_rope(64, rotary_dim, 1024, 10000, is_neox, SCALINGS[name], torch.float32)
    spec = RopeSpec.from_rotary_module(module)
    plain = torch.randn(63, HEADS, 64)
    there, here = torch.randperm(1000)[:63], torch.randperm(1000)[:63]

    def rotated_by_sglang(positions: Tensor) -> Tensor:
        flat = plain.reshape(63, -1).clone()
        _, keys = module.forward_native(positions, flat.clone(), flat)
        return keys.view(1, 63, HEADS, 64)

    stored = unrotate_keys(rotated_by_sglang(there), spec.cos_sin(there), is_neox=is_neox)
    torch.testing.assert_close(stored[0], plain, rtol=0, atol=2e-3)
    moved = rotate_keys(stored, spec.cos_sin(here), is_neox=is_neox)
    torch.testing.assert_close(moved, rotated_by_sglang(here), rtol=0, atol=4e-3)
    cache = module.cos_sin_cache.float()
    moved = rotate_keys(
        unrotate_keys(rotated_by_sglang(there), cache[there], is_neox=is_neox), cache[here], is_neox=is_neox
    )
    torch.testing.assert_close(moved, rotated_by_sglang(here), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_undoes_an_amplitude_and_rows_rounded_to_a_narrow_dtype(dtype: torch.dtype) -> None:
    spec = RopeSpec(
        head_dim=64,
        rotary_dim=64,
        is_neox=True,
        base=1e4,
        scaling=RopeScaling(kind="yarn", factor=8.0, original_positions=512, amplitude=1.2),
    )
    rows = spec.cos_sin(torch.arange(63)).to(dtype).float()
    keys = torch.randn(LAYERS, 63, HEADS, 64)
    served = transformers_rotation(keys, rows, is_neox=True)
    torch.testing.assert_close(unrotate_keys(served, rows, is_neox=True), keys, rtol=1e-5, atol=1e-5)


def test_writes_into_the_given_tensor_even_its_own_input() -> None:
    keys = torch.randn(LAYERS, 5, HEADS, 64)
    cos_sin = spec_of(64, 32, is_neox=True).cos_sin(torch.arange(5))
    expected = transformers_rotation(keys, cos_sin, is_neox=True)
    out = torch.full_like(keys, float("nan"))
    assert rotate_keys(keys, cos_sin, is_neox=True, out=out) is out
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    rotate_keys(keys, cos_sin, is_neox=True, out=keys)
    torch.testing.assert_close(keys, expected, rtol=1e-5, atol=1e-5)
