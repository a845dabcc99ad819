"""Which rotation a model applies to its keys, from its configuration or from its rotary module.

Rotary embedding: Su et al., RoFormer, section 3.2.2. Scalings: linear, Chen et al., Position Interpolation, section
3.2; llama3, Dubey et al., The Llama 3 Herd of Models, section 3.2, as released; YaRN, Peng et al., sections 3.2-3.4.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kv_splice.errors import UnsupportedRope

__all__ = ["RopeScaling", "RopeSpec"]

Kind = Literal["default", "linear", "llama3", "yarn"]

# The rotary modules of SGLang, by class name: nothing here imports it.
_MODULE_KINDS: dict[str, Kind] = {
    "RotaryEmbedding": "default",
    "LinearScalingRotaryEmbedding": "linear",
    "Llama3RotaryEmbedding": "llama3",
    "YaRNScalingRotaryEmbedding": "yarn",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the base frequencies are changed. Fields that a kind does not read keep their defaults.

    Attributes
    ----------
    factor: by how much the context was extended.
    original_positions: context length before the extension, tokens (llama3, yarn).
    low_freq_factor, high_freq_factor: edges of the llama3 ramp, in wavelengths per original context.
    beta_fast, beta_slow: edges of the YaRN ramp, in rotations per original context.
    extrapolation_factor: weight of the unscaled frequencies in YaRN's ramp.
    truncate: whether YaRN's edges fall on whole dimensions.
    amplitude: factor on cos and sin, YaRN's attention temperature.
    """

    kind: Kind = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    extrapolation_factor: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One model's rotary embedding.

    Attributes
    ----------
    head_dim: elements of a key head.
    rotary_dim: the leading elements that rotate; the rest pass through.
    is_neox: pairs are (i, i + rotary_dim / 2); otherwise (2i, 2i + 1).
    base: theta.
    scaling: what extends the context.
    """

    head_dim: int
    rotary_dim: int
    is_neox: bool
    base: float
    scaling: RopeScaling = RopeScaling()

    def __post_init__(self) -> None:
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise UnsupportedRope(f"rotary_dim {self.rotary_dim} of head_dim {self.head_dim}")

    @classmethod
    def from_hf_config(cls, config: Any, *, is_neox: bool = True) -> Self:
        """Read a Hugging Face configuration: a `PretrainedConfig`, or the dict of its `config.json`.

        Both `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` are understood. The pairing of
        elements is not part of a configuration: `is_neox` is true for the Llama family.

        Raises
        ------
        UnsupportedRope
            longrope, dynamic, mrope, rotations that differ between layers, or any other kind, by name.
        """
        fields = config if isinstance(config, Mapping) else config.to_dict()
        rope = dict(fields.get("rope_parameters") or {})
        rope.update(fields.get("rope_scaling") or {})
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise UnsupportedRope(f"rotations that differ between layers ({', '.join(sorted(rope))})")
        if "mrope_section" in rope:
            raise UnsupportedRope("mrope")
        base = rope.get("rope_theta") or fields.get("rope_theta")
        if base is None:
            raise UnsupportedRope("a configuration without rope_theta")
        head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        partial = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
        return cls(
            head_dim=int(head_dim),
            rotary_dim=int(head_dim * partial),
            is_neox=is_neox,
            base=float(base),
            scaling=_scaling_from_hf(rope, fields),
        )

    @classmethod
    def from_rotary_module(cls, module: Any) -> Self:
        """Read one of SGLang's rotary modules, known by the name of its class.

        Raises
        ------
        UnsupportedRope
            Any other class, or a linear scaling with several factors, by name.
        """
        name = type(module).__name__
        kind = _MODULE_KINDS.get(name)
        if kind is None:
            raise UnsupportedRope(name)
        if getattr(module, "position_start", 0) != 0:
            raise UnsupportedRope(f"{name} that starts at position {module.position_start}")
        return cls(
            head_dim=int(module.head_size),
            rotary_dim=int(module.rotary_dim),
            is_neox=bool(module.is_neox_style),
            base=float(module.base),
            scaling=_scaling_from_module(module, kind),
        )

    def inverse_frequencies(self) -> Tensor:
        """Radians per position of each rotated pair, `[rotary_dim / 2]` fp64."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        frequencies = self.base**-exponents
        scaling = self.scaling
        match scaling.kind:
            case "default":
                return frequencies
            case "linear":
                return frequencies / scaling.factor
            case "llama3":
                rotations = scaling.original_positions * frequencies / (2 * math.pi)
                kept = _ramp(rotations, low=scaling.low_freq_factor, high=scaling.high_freq_factor)
            case "yarn":
                low, high = self._yarn_edges()
                dims = torch.arange(self.rotary_dim // 2, dtype=torch.float64)
                kept = (1 - _ramp(dims, low=low, high=high)) * scaling.extrapolation_factor
        return frequencies * kept + frequencies / scaling.factor * (1 - kept)

    def cos_sin(self, positions: Tensor) -> Tensor:
        """Rotation of each position.

        Parameters
        ----------
        positions
            `[n]` int.

        Returns
        -------
        `[n, rotary_dim]` fp32: the cosines of all pairs, then the sines, both times YaRN's amplitude.
        """
        angles = positions.to(torch.float64)[:, None] * self.inverse_frequencies().to(positions.device)
        return (torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scaling.amplitude).float()

    def digest(self) -> str:
        """Hash of everything that decides the rotation, equal across processes and machines: 16 hex digits."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _yarn_edges(self) -> tuple[float, float]:
        """Dimensions between which YaRN's ramp falls (equation 23 and appendix A.2, with the released rounding)."""
        scaling = self.scaling

        def dim_of(rotations: float) -> float:
            ratio = scaling.original_positions / (rotations * 2 * math.pi)
            return self.rotary_dim * math.log(ratio) / (2 * math.log(self.base))

        low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, self.rotary_dim - 1)


def _ramp(values: Tensor, *, low: float, high: float) -> Tensor:
    """0 up to `low`, 1 from `high`, linear between; a step where they meet."""
    if low == high:
        return (values > low).to(values.dtype)
    return ((values - low) / (high - low)).clamp(0, 1)


def _scaling_from_hf(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    positions = int(rope.get("original_max_position_embeddings") or fields.get("max_position_embeddings") or 0)
    match kind:
        case "default":
            return RopeScaling()
        case "linear":
            return RopeScaling(kind="linear", factor=float(rope["factor"]))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=float(rope["factor"]),
                original_positions=positions,
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
            )
        case "yarn":
            factor = float(rope.get("factor") or fields["max_position_embeddings"] / positions)
            return RopeScaling(
                kind="yarn",
                factor=factor,
                original_positions=positions,
                beta_fast=float(rope.get("beta_fast") or 32),
                beta_slow=float(rope.get("beta_slow") or 1),
                truncate=bool(rope.get("truncate", True)),
                amplitude=_yarn_amplitude(rope, factor),
            )
        case _:
            raise UnsupportedRope(str(kind))


def _yarn_amplitude(rope: Mapping[str, Any], factor: float) -> float:
    """Square root of YaRN's temperature (section 3.4), unless the configuration states it."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    log = math.log(factor) if factor > 1 else 0.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return (0.1 * float(rope["mscale"]) * log + 1) / (0.1 * float(rope["mscale_all_dim"]) * log + 1)
    return 0.1 * log + 1


def _scaling_from_module(module: Any, kind: Kind) -> RopeScaling:
    match kind:
        case "default":
            return RopeScaling()
        case "linear":
            factors = list(module.scaling_factors)
            if len(factors) != 1:
                raise UnsupportedRope(f"linear scaling with {len(factors)} factors")
            return RopeScaling(kind="linear", factor=float(factors[0]))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=float(module.scaling_factor),
                original_positions=int(module.orig_max_position),
                low_freq_factor=float(module.low_freq_factor),
                high_freq_factor=float(module.high_freq_factor),
            )
        case "yarn":
            return RopeScaling(
                kind="yarn",
                factor=float(module.scaling_factor),
                original_positions=int(module.max_position_embeddings),
                beta_fast=float(module.beta_fast),
                beta_slow=float(module.beta_slow),
                extrapolation_factor=float(module.extrapolation_factor),
                truncate=bool(module.truncate),
                amplitude=float(module.mscale),
            )
