"""What must be equal for KV to be exchangeable: the model's files, how its weights are read, and the pool's layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from kv_splice import SCHEME
from sgl_stateful.settings import KVStorage

_WEIGHTS = {".safetensors", ".bin", ".gguf"}
_END_BYTES = 1 << 16
_BLOCKS, _BLOCK_BYTES = 256, 1 << 12

_ARGUMENTS = (  # of SGLang: with another value, the same files give other weights, or other arithmetic
    "custom_weight_loader",
    "load_format",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "quantization_param_path",
    "rl_quant_profile",
)


def model_directory(model_path: str, *, revision: str | None, download_dir: str | None) -> str:
    """The directory that SGLang has loaded the model from; what it was told where that is not found.

    A hub id stands for the commit that is in the cache of ``--download-dir``, or in Hugging Face's own.
    """
    if Path(model_path).exists():
        return model_path
    for cache in dict.fromkeys([download_dir, None]):
        try:
            found = try_to_load_from_cache(model_path, "config.json", cache_dir=cache, revision=revision)
        except HFValidationError:  # the address of another kind of store
            break
        if isinstance(found, str):
            return str(Path(found).parent)
    return model_path if revision is None else f"{model_path}@{revision}"


def model_digest(model_path: str) -> str:
    """Digest of a model directory: configuration bytes, and name, size and both ends of each weight file.

    A path that is not a directory is digested by its name.
    """
    digest = hashlib.blake2b(digest_size=16)
    root = Path(model_path)
    if not root.is_dir():
        digest.update(model_path.encode())
        return digest.hexdigest()
    for path in sorted(root.iterdir()):
        if path.suffix == ".json":
            digest.update(path.name.encode() + path.read_bytes())
        elif path.suffix in _WEIGHTS:
            size = path.stat().st_size
            with path.open("rb") as file:
                ends = file.read(_END_BYTES)
                file.seek(max(size - _END_BYTES, 0))
                ends += file.read()
            digest.update(f"{path.name}:{size}".encode() + ends)
    return digest.hexdigest()


def weights_digest(model_path: str) -> str:
    """Digest of 256 blocks of 4 KiB, at even distances, of each weight file: one that is smaller counts whole.

    So tensors that are as long as the distance count, wherever they are: 1/255 of their file.
    """
    digest = hashlib.blake2b(digest_size=16)
    root = Path(model_path)
    files = sorted(root.iterdir()) if root.is_dir() else [root] if root.is_file() else []
    for path in files:
        if path.suffix in _WEIGHTS:
            for block in _blocks(path):
                digest.update(block)
    return digest.hexdigest()


def computation(server_args: Any, model_config: Any) -> dict[str, Any]:
    """What makes KV of the same files and tokens another, apart from the pool's layout.

    Adapters are not among it: requests whose KV is kept have none.
    """
    return {
        "dtype": str(model_config.dtype),
        "quantization": model_config.quantization,
        "overrides": json.loads(server_args.json_model_override_args or "{}"),
        **{name: str(getattr(server_args, name)) for name in _ARGUMENTS},
    }


def kv_fingerprint(parts: dict[str, Any]) -> str:
    """Digest of everything that must be equal for KV to be exchangeable."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def fact_fingerprint(fingerprint: str, storage: KVStorage) -> str:
    """Of facts' KV as it is kept, given that of the KV: the same where it is kept as it is.

    Quantised KV is other KV, so that an encoding of one kind is never spliced for one of the other.
    """
    return fingerprint if storage == KVStorage.NATIVE else kv_fingerprint({"kv": fingerprint, "storage": SCHEME})


def _blocks(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _BLOCKS * _BLOCK_BYTES:
            yield file.read()
            return
        for i in range(_BLOCKS):
            file.seek(i * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            yield file.read(_BLOCK_BYTES)
