"""Small KV encodings, worked out from a number."""

from typing import Any

import torch

from memstore import Encoding, EncodingId, FactId, OwnerId

TOKENS = 5


def encoding(number: int, **fields: Any) -> Encoding:
    values: dict[str, Any] = {
        "id": EncodingId(f"{number:032x}"),
        "owner": OwnerId("ana"),
        "fact_id": FactId("fact"),
        "fact_version": 1,
        "fingerprint": "model-a",
        "policy": "anchor:4",
        "token_ids": tuple(range(number, number + TOKENS)),
        "created_at": 1000.0,
    }
    return Encoding(**(values | fields))


def kv(number: int, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, each `[num_layers=3, tokens, num_kv_heads=2, head_dim=8]`."""
    both = torch.randn(2, 3, tokens, 2, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
    return both[0], both[1]
