"""Rope specs against transformers' frequencies, SGLang's rotary modules and configurations of both ages."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kv_splice import RopeScaling, RopeSpec, UnsupportedRope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn with betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
}


def config(rope: dict[str, Any], **changes: Any) -> LlamaConfig:
    fields: dict[str, Any] = {"hidden_size": 576, "num_attention_heads": 9, "head_dim": 64, **changes}
    return LlamaConfig(max_position_embeddings=32768, rope_parameters={"rope_theta": 5e5, **rope}, **fields)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_cos_sin_has_the_frequencies_of_transformers(name: str, head_dim: int, partial: float) -> None:
    model = config({**SCALINGS[name], "partial_rotary_factor": partial}, head_dim=head_dim)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](model, device=torch.device("cpu"))
    positions = torch.tensor([0, 1, 17, 300])
    angles = positions[:, None].double() * frequencies.double()
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude
    spec = RopeSpec.from_hf_config(model)
    assert spec.rotary_dim == int(head_dim * partial)
    torch.testing.assert_close(spec.cos_sin(positions).double(), expected, rtol=0, atol=5e-5)


def test_cos_sin_without_scaling_is_the_formula() -> None:
    spec = RopeSpec(head_dim=4, rotary_dim=4, is_neox=True, base=100.0)
    # theta_0 = 1, theta_1 = 100^(-2/4) = 0.1
    angles = torch.tensor([[0.0, 0.0], [3.0, 0.3]])
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1)
    torch.testing.assert_close(spec.cos_sin(torch.tensor([0, 3])), expected)
    assert spec.cos_sin(torch.tensor([], dtype=torch.int64)).shape == (0, 4)


@pytest.mark.parametrize("name", ["default", *SCALINGS])
@pytest.mark.parametrize("is_neox", [True, False])
def test_cos_sin_is_the_cache_of_sglangs_module(name: str, is_neox: bool) -> None:
    rope = SCALINGS.get(name, {"rope_type": "default"})
    module = get_rope(64, 32, 4096, 10000, is_neox, dict(rope), torch.float32)
    spec = RopeSpec.from_rotary_module(module)
    assert (spec.head_dim, spec.rotary_dim, spec.is_neox) == (64, 32, is_neox)
    positions = torch.tensor([0, 1, 63, 1000])
    torch.testing.assert_close(spec.cos_sin(positions), module.cos_sin_cache[positions].float(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_the_module_and_the_configuration_give_one_spec(name: str) -> None:
    rope = SCALINGS[name]
    module = get_rope(64, 64, 32768, 500000, True, dict(rope), torch.float32)
    spec = RopeSpec.from_rotary_module(module)
    assert spec == RopeSpec.from_hf_config(config(rope))
    assert spec.digest() == RopeSpec.from_hf_config(config(rope)).digest()


def test_old_and_new_configurations_give_one_spec() -> None:
    size = {"hidden_size": 576, "num_attention_heads": 9, "max_position_embeddings": 32768}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    old = {**size, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {**size, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    assert RopeSpec.from_hf_config(old) == RopeSpec.from_hf_config(new) == RopeSpec.from_hf_config(config(LLAMA3))
    plain = RopeSpec.from_hf_config({**size, "rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.25})
    assert plain == RopeSpec(head_dim=64, rotary_dim=16, is_neox=True, base=1e4)


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "proportional"])
def test_refuses_other_kinds_by_name(kind: str) -> None:
    rope = {"rope_theta": 1e4, "rope_type": kind, "factor": 2.0}
    with pytest.raises(UnsupportedRope, match=kind):
        RopeSpec.from_hf_config({"head_dim": 64, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_theta": 1e4, "rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope"),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "between layers"),
        ({"rope_type": "default"}, "without rope_theta"),
    ],
)
def test_refuses_other_configurations_by_name(rope: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedRope, match=name):
        RopeSpec.from_hf_config({"head_dim": 64, "rope_parameters": rope})


def test_refuses_other_modules_by_class_name() -> None:
    module = get_rope(64, 64, 128, 10000, True, {"rope_type": "dynamic", "factor": 2.0}, torch.float32)
    with pytest.raises(UnsupportedRope, match=type(module).__name__):
        RopeSpec.from_rotary_module(module)
    with pytest.raises(UnsupportedRope, match="SimpleNamespace"):
        RopeSpec.from_rotary_module(SimpleNamespace())


@pytest.mark.parametrize("rotary_dim", [0, 7, 66])
def test_refuses_an_impossible_width(rotary_dim: int) -> None:
    with pytest.raises(UnsupportedRope, match="rotary_dim"):
        RopeSpec(head_dim=64, rotary_dim=rotary_dim, is_neox=True, base=1e4)


def test_the_digest_tells_specs_apart() -> None:
    base = {"head_dim": 64, "rotary_dim": 64, "is_neox": True, "base": 1e4}
    changes: list[dict[str, Any]] = [
        {},
        {"rotary_dim": 32},
        {"is_neox": False},
        {"base": 2e4},
        {"scaling": RopeScaling(kind="linear", factor=2.0)},
        {"scaling": RopeScaling(kind="linear", factor=4.0)},
    ]
    digests = {RopeSpec(**{**base, **change}).digest() for change in changes}
    assert len(digests) == len(changes)
    assert RopeSpec(**base).digest() == "f27b3c0701edee8f"  # stored beside encodings: must not change
