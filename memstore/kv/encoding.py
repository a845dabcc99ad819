"""One KV encoding of a fact: its description, its tensors, and how both become bytes."""

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from memstore.errors import InvalidEncoding
from memstore.types import EncodingId, FactId, OwnerId

if TYPE_CHECKING:
    import torch

    from kv_splice.quantise import KVScales

_NATIVE = b"KVB1"
_INT8 = b"KVB2"  # has scales besides
_DIGEST_BYTES = 16
_MAX_ID_CHARS = 128


@dataclass(frozen=True, slots=True)
class Encoding:
    """What is known of one encoding without its tensors.

    Attributes
    ----------
    id
        Made by the caller from everything below, so that equal ids mean equal tensors.
    fact_id, fact_version
        The fact whose tokens were encoded.
    fingerprint
        Of model, tokenizer, template and rope; a KV of another fingerprint must not be spliced.
    policy, rung
        How the context in front was chosen, and which of several encodings under that policy this is.
    saw
        The facts (id, version) that stood in front, and whose change makes this encoding stale.
    token_ids
        The fact's own tokens.
    nbytes
        Size of K and V of one shard, and of their scales; set by `KVBlobs.put`.
    created_at
        Unix seconds.
    """

    id: EncodingId
    owner: OwnerId
    fact_id: FactId
    fact_version: int
    fingerprint: str
    policy: str
    token_ids: tuple[int, ...]
    rung: int = 0
    saw: tuple[tuple[FactId, int], ...] = ()
    nbytes: int = 0
    created_at: float = field(default_factory=time.time)


class KVBlob(NamedTuple):
    """The tensors of one encoding, on the CPU."""

    k: "torch.Tensor"
    """`[num_layers, num_tokens, num_kv_heads, head_dim]`, before rotation."""

    v: "torch.Tensor"
    """`[num_layers, num_tokens, num_kv_heads, head_dim]`."""

    token_ids: tuple[int, ...]

    scales: "KVScales | None" = None
    """Of K and V in int8; None of any other dtype."""

    @property
    def nbytes(self) -> int:
        """Size of K, V and scales."""
        return sum(int(tensor.nbytes) for tensor in (self.k, self.v, *(self.scales or ())))


def validate_encoding(
    encoding: Encoding, k: "torch.Tensor", v: "torch.Tensor", scales: "KVScales | None" = None
) -> None:
    """Raise `InvalidEncoding` unless the tensors and the description fit together."""
    if not (0 < len(encoding.id) <= _MAX_ID_CHARS) or set(encoding.id) - set("0123456789abcdef"):
        raise InvalidEncoding(f"encoding id {encoding.id!r} is not 1 to {_MAX_ID_CHARS} lower-case hex characters")
    if k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype:
        raise InvalidEncoding(
            f"K is {k.dtype} {list(k.shape)} and V is {v.dtype} {list(v.shape)}: "
            "both must be [num_layers, num_tokens, num_kv_heads, head_dim] of one dtype"
        )
    if 0 in k.shape or k.shape[1] != len(encoding.token_ids):
        raise InvalidEncoding(f"K has shape {list(k.shape)} for {len(encoding.token_ids)} token ids")
    if problem := _scales_problem(k, scales):
        raise InvalidEncoding(problem)
    if not 0 <= encoding.rung < 2**32:
        raise InvalidEncoding(f"rung {encoding.rung} is not in [0, 2**32)")


def pack_blob(key: bytes, blob: KVBlob) -> bytes:
    """Return the value for `blob`: magic, checksum over `key` and payload, payload in safetensors layout."""
    import torch
    from safetensors.torch import save

    tensors = {"k": blob.k, "v": blob.v}
    if blob.scales is not None:
        tensors |= {"k_scales": blob.scales.keys, "v_scales": blob.scales.values}
    # Copies, because safetensors refuses tensors that overlap in memory, and these may be views.
    copies = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    payload = save({**copies, "token_ids": torch.tensor(blob.token_ids, dtype=torch.int64)})
    return (_NATIVE if blob.scales is None else _INT8) + _checksum(key, payload) + payload


def unpack_blob(key: bytes, value: bytes | memoryview) -> KVBlob:
    """Return the blob in `value`, or raise `ValueError` where any bit of it, or its key, is not as it was packed."""
    start = len(_NATIVE) + _DIGEST_BYTES
    payload = bytearray(value[start:])
    magic = bytes(value[: len(_NATIVE)])
    if magic not in (_NATIVE, _INT8) or value[len(_NATIVE) : start] != _checksum(key, payload):
        raise ValueError("checksum does not match")
    try:
        tensors = _tensors_in(payload)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"payload is not safetensors: {error!r}") from error
    k, v, token_ids = (tensors.get(name) for name in ("k", "v", "token_ids"))
    if k is None or v is None or token_ids is None or k.dim() != 4 or k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError("payload has another layout")
    if token_ids.shape != k.shape[1:2]:
        raise ValueError(f"payload has {k.shape[1]} positions for {len(token_ids)} token ids")
    scales = _scales_in(tensors) if magic == _INT8 else None
    if magic == _INT8 and scales is None:
        raise ValueError("payload has another layout: no scales")
    if problem := _scales_problem(k, scales):
        raise ValueError(f"payload has another layout: {problem}")
    return KVBlob(k, v, tuple(token_ids.tolist()), scales)


def _tensors_in(payload: bytearray) -> dict[str, "torch.Tensor"]:
    """Views of the tensors in a safetensors file; `safetensors.torch.load` would copy each, which is half of a load.

    The layout is a little-endian uint64, the length of the header; the header, in JSON; and the tensors, at the offsets
    that the header has for them (https://github.com/huggingface/safetensors, "Format").
    """
    import torch

    dtypes = {
        "I8": torch.int8,
        "I64": torch.int64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
    }
    first = 8 + int.from_bytes(payload[:8], "little")
    described = json.loads(payload[8:first]).items()
    tensors = {}
    ends_before = 0
    for name, at in sorted(described, key=lambda entry: list(entry[1]["data_offsets"])):
        start, end = at["data_offsets"]
        if not ends_before <= start <= end <= len(payload) - first:
            raise ValueError(f"{name} is at [{start}, {end}) of {len(payload) - first} bytes, behind {ends_before}")
        ends_before = end
        dtype = dtypes[at["dtype"]]
        shape, count = at["shape"], (end - start) // dtype.itemsize
        if count:
            flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=first + start)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(shape)
    return tensors


def _scales_in(tensors: Mapping[str, "torch.Tensor"]) -> "KVScales | None":
    from kv_splice.quantise import KVScales

    keys, values = tensors.get("k_scales"), tensors.get("v_scales")
    return None if keys is None or values is None else KVScales(keys, values)


def _scales_problem(k: "torch.Tensor", scales: "KVScales | None") -> str | None:
    """What keeps these scales from being those of K `[num_layers, num_tokens, num_kv_heads, head_dim]`."""
    import torch

    if (k.dtype == torch.int8) != (scales is not None):
        return f"K is {k.dtype} {'without' if scales is None else 'with'} scales: int8 has some, and nothing else does"
    if scales is None:
        return None
    num_layers, num_tokens, num_heads, head_dim = k.shape
    for name, tensor, shape in (
        ("keys", scales.keys, (num_layers, num_heads, head_dim)),
        ("values", scales.values, (num_layers, num_tokens, num_heads)),
    ):
        if tensor.shape != shape or tensor.dtype != torch.float16:
            return f"scales of {name} are {tensor.dtype} {list(tensor.shape)}, not torch.float16 {list(shape)}"
    return None


def pack_encoding(key: bytes, encoding: Encoding) -> bytes:
    """Return the value for `encoding`: checksum over `key` and payload, payload in JSON."""
    # A bare list, in the order of the fields: 50 of them are parsed for one request.
    row = [getattr(encoding, name) for name in _FIELDS]
    payload = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()
    return seal(key, payload)


def unpack_encoding(key: bytes, value: bytes | memoryview) -> Encoding:
    """Return the encoding in `value`, or raise `ValueError` where it is not as it was packed."""
    fields = dict(zip(_FIELDS, json.loads(unseal(key, value)), strict=True))
    fields["token_ids"] = tuple(fields["token_ids"])
    fields["saw"] = tuple((fact_id, version) for fact_id, version in fields["saw"])
    return Encoding(**fields)


def seal(key: bytes, payload: bytes) -> bytes:
    """Return `payload` behind its checksum, which covers `key` too."""
    return _checksum(key, payload) + payload


def unseal(key: bytes, value: bytes | memoryview) -> bytes:
    """Return the payload in `value`, or raise `ValueError` where it, or its key, is not as it was sealed."""
    payload = bytes(value[_DIGEST_BYTES:])
    if value[:_DIGEST_BYTES] != _checksum(key, payload):
        raise ValueError("checksum does not match")
    return payload


_FIELDS = tuple(spec.name for spec in dataclasses.fields(Encoding))


def _checksum(key: bytes, payload: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(payload)
    return digest.digest()
