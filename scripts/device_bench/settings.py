"""What is checked and timed: all of it on a GPU, or a little of each on a CPU."""

from dataclasses import dataclass, replace
from typing import Self

import torch

__all__ = ["FULL", "TINY", "Setting", "missing_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run.

    Attributes
    ----------
    widths: (head_dim, rotary_dim) of the checks.
    heads: KV heads of the checks.
    check_tokens: lengths of the checks.
    num_layers, num_kv_heads, head_dim: of the timings.
    tokens: lengths of the timings.
    fact_tokens: length of a fact in the timings.
    repeats: of a timing.
    flush_bytes: written between two timings, so that nothing is in the cache that was not there before.
    buffer_bytes: of the host tier's buffers.
    """

    device: torch.device
    widths: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    check_tokens: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokens: tuple[int, ...]
    fact_tokens: int
    repeats: int
    flush_bytes: int
    buffer_bytes: int

    def with_repeats(self, repeats: int) -> Self:
        """The same, timed that often."""
        return replace(self, repeats=repeats)


FULL = Setting(
    device=torch.device("cuda"),
    widths=((128, 128), (80, 32), (64, 64), (96, 96), (256, 64)),
    heads=(1, 3, 16, 8),
    check_tokens=(1, 63, 1000),
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    tokens=(500, 2000, 8000),
    fact_tokens=28,
    repeats=50,
    flush_bytes=256 << 20,
    buffer_bytes=32 << 20,
)
"""Timed at the shape of Llama-3.1-8B."""

TINY = Setting(
    device=torch.device("cpu"),
    widths=((64, 64), (80, 32)),
    heads=(3,),
    check_tokens=(5,),
    num_layers=3,
    num_kv_heads=2,
    head_dim=64,
    tokens=(4, 10),
    fact_tokens=3,
    repeats=1,
    flush_bytes=1,
    buffer_bytes=6 << 10,
)


def missing_device() -> str:
    """Why this machine cannot run `FULL`; empty where it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return ""
