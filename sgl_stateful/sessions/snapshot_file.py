"""The file that holds a session's KV: safetensors, with a checksum for each layer, so that it is read layer by layer.

``k`` and ``v`` are ``[num_layers, num_tokens, num_kv_heads, head_dim]`` as they were in the pool, keys after rotation:
they are right at positions ``[0, num_tokens)`` and nowhere else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    import torch

_FORMAT = "sgl-stateful session KV 1"
_MAX_HEADER_BYTES = 4 << 20
_LENGTH_BYTES = 8
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class SnapshotDamaged(Exception):
    """The file is not as it was written."""


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What is known of a snapshot without its tensors.

    Attributes
    ----------
    fingerprint
        Of the model, its weights, and the pool's layout; under another one the KV means nothing.
    tokens_digest
        Of the token ids whose KV it is; see ``tokens_digest``.
    shape
        ``(num_layers, num_tokens, num_kv_heads, head_dim)`` of keys and of values.
    dtype
        ``float32``, ``float16`` or ``bfloat16``.
    """

    fingerprint: str
    tokens_digest: str
    shape: tuple[int, int, int, int]
    dtype: str

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV it is."""
        return self.shape[1]

    @property
    def layer_bytes(self) -> int:
        """Size of one layer's keys, or values."""
        _, tokens, heads, width = self.shape
        return tokens * heads * width * (4 if self.dtype == "float32" else 2)

    @property
    def payload_bytes(self) -> int:
        """Size of all keys and values."""
        return 2 * self.shape[0] * self.layer_bytes


def tokens_digest(token_ids: Sequence[int] | npt.NDArray[Any]) -> str:
    """Stands for token ids in their order."""
    return blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=16).hexdigest()


def write_snapshot(path: Path, name: str, header: SnapshotHeader, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write a new file of two CPU tensors of ``header.shape``.

    ``name`` is what the file will be called: the seal covers it.

    Raises
    ------
    OSError
    """
    assert tuple(keys.shape) == tuple(values.shape) == header.shape, (keys.shape, values.shape, header.shape)
    layers = [_bytes_of(layer) for tensor in (keys, values) for layer in tensor]
    checksums = [xxhash.xxh3_128_hexdigest(layer) for layer in layers]
    half = header.payload_bytes // 2
    described = {"dtype": _DTYPES[header.dtype], "shape": header.shape}
    text = json.dumps(
        {
            "__metadata__": _sealed(name, header, checksums),
            "k": {**described, "data_offsets": [0, half]},
            "v": {**described, "data_offsets": [half, 2 * half]},
        }
    ).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # safetensors aligns the payload
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for layer in layers:
            file.write(layer)


def read_header(path: Path) -> SnapshotHeader:
    """What a file says of itself; its tensors are not looked at.

    Raises
    ------
    SnapshotDamaged, OSError
    """
    with path.open("rb") as file:
        return _read_header(file, path)[0]


def read_layers(path: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, ``[num_tokens, num_kv_heads, head_dim]``; valid until the next is asked for.

    Raises
    ------
    SnapshotDamaged
        Before anything of the damaged layer is returned.
    OSError
    """
    import torch

    with path.open("rb") as file:
        header, checksums, start = _read_header(file, path)
        size, num_layers = header.layer_bytes, header.shape[0]
        buffers = [bytearray(size) for _ in range(2)]
        for layer in range(num_layers):
            for part, buffer in enumerate(buffers):
                at = part * num_layers + layer
                file.seek(start + at * size)
                if file.readinto(buffer) != size:
                    raise SnapshotDamaged(f"{path.name}: it ends early")
                if xxhash.xxh3_128_hexdigest(buffer) != checksums[at]:
                    raise SnapshotDamaged(f"{path.name}: the checksum of layer {layer} does not match")
            dtype: torch.dtype = getattr(torch, header.dtype)
            keys, values = (torch.frombuffer(b, dtype=dtype).view(header.shape[1:]) for b in buffers)
            yield keys, values


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data


def _sealed(name: str, header: SnapshotHeader, checksums: list[str]) -> dict[str, str]:
    metadata = {"format": _FORMAT, "header": json.dumps(asdict(header)), "checksums": " ".join(checksums)}
    return {**metadata, "seal": _seal(name, metadata)}


def _seal(name: str, metadata: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([name, metadata["header"], metadata["checksums"]]).encode())


def _read_header(file: IO[bytes], path: Path) -> tuple[SnapshotHeader, list[str], int]:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if not 0 < length <= _MAX_HEADER_BYTES:
        raise SnapshotDamaged(f"{path.name}: its header would be {length} bytes long")
    try:
        metadata = json.loads(file.read(length))["__metadata__"]
        if metadata["format"] != _FORMAT or metadata["seal"] != _seal(path.name, metadata):
            raise SnapshotDamaged(f"{path.name}: its header is not as it was written")
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotDamaged(f"{path.name}: its header cannot be read: {error}") from error
    fields = json.loads(metadata["header"])
    header = SnapshotHeader(**{**fields, "shape": tuple(fields["shape"])})
    start = _LENGTH_BYTES + length
    if os.fstat(file.fileno()).st_size != start + header.payload_bytes:
        raise SnapshotDamaged(f"{path.name}: its size is not that of its tensors")
    return header, metadata["checksums"].split(), start
