"""Small KV encodings, worked out from a number."""

from typing import Any

import torch

from memstore import Encoding, EncodingId, FactId, KVBlobs, OwnerId

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


def raw(blobs: KVBlobs, table: str = "blobs") -> dict[bytes, bytes]:
    with blobs._env.transaction() as txn:
        return dict(txn.cursor(getattr(blobs._env.tables, table)))


def overwrite(blobs: KVBlobs, key: bytes, value: bytes, *, table: str = "blobs") -> None:
    with blobs._env.transaction(write=True) as txn:
        txn.put(key, value, db=getattr(blobs._env.tables, table))


def delete(blobs: KVBlobs, key: bytes, *, table: str) -> None:
    with blobs._env.transaction(write=True) as txn:
        assert txn.delete(key, db=getattr(blobs._env.tables, table))


def entries(blobs: KVBlobs) -> dict[str, int]:
    with blobs._env.transaction() as txn:
        return {name: txn.stat(db)["entries"] for name, db in blobs._env.tables._asdict().items()}


def flipped(value: bytes, bit: int) -> bytes:
    damaged = bytearray(value)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
