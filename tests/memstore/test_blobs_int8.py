"""`KVBlobs` of quantised encodings: int8 and scales bit for bit, beside native ones and those of earlier releases."""

import dataclasses
import json
import random
from collections.abc import Callable

import pytest
import torch
import xxhash
from small_kv import TOKENS, encoding, entries, flipped, kv, overwrite, raw

from kv_splice import KVScales, quantise
from memstore import CorruptBlob, FactId, InvalidEncoding, KVBlob, KVBlobs, OwnerId
from memstore.kv.encoding import pack_blob, unpack_blob

ANA, FACT = OwnerId("ana"), FactId("fact")
KIND = {"fingerprint": "model-a", "policy": "anchor:4"}

# Written by the release before int8, under the key b"key": K [[[[1.5, -2]]]] and V [[[[0.25, 3]]]] in bf16, token 7.
OLD = (
    b"KVB1"
    + bytes.fromhex("748cea15111015eb08f0b18449c5f18e")  # checksum
    + (192).to_bytes(8, "little")
    + b'{"token_ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},'
    b'"k":{"dtype":"BF16","shape":[1,1,1,2],"data_offsets":[8,12]},'
    b'"v":{"dtype":"BF16","shape":[1,1,1,2],"data_offsets":[12,16]}}       '
    + bytes.fromhex("0700000000000000c03f00c0803e4040")
)

Parts = tuple[torch.Tensor, torch.Tensor, KVScales]


def put(blobs: KVBlobs, number: int, parts: Parts) -> bool:
    k, v, scales = parts
    return blobs.put(encoding(number, rung=number), k, v, scales=scales)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def test_int8_and_scales_are_bit_exact(blobs: KVBlobs) -> None:
    parts = quantise(*kv(1))
    assert put(blobs, 1, parts)
    loaded = blobs.load(encoding(1).id)
    assert loaded is not None
    assert loaded.scales is not None
    assert same(loaded.k, parts[0])
    assert same(loaded.v, parts[1])
    assert same(loaded.scales.keys, parts[2].keys)
    assert same(loaded.scales.values, parts[2].values)
    assert loaded.token_ids == encoding(1).token_ids


def test_its_size_counts_the_scales(blobs: KVBlobs) -> None:
    put(blobs, 0, quantise(*kv(0)))
    # K and V of 3 layers, 5 tokens, 2 heads of 8; scales of two bytes: 3 * 2 * 8 of K, 3 * 5 * 2 of V.
    size = 2 * 3 * 5 * 2 * 8 + 2 * (3 * 2 * 8 + 3 * 5 * 2)
    described = dataclasses.replace(encoding(0), nbytes=size)
    assert blobs.current(ANA, [(FACT, 1)], **KIND) == {FACT: {0: described}}
    loaded = blobs.load(encoding(0).id)
    assert loaded is not None
    assert loaded.nbytes == size


@pytest.mark.parametrize("tokens", [20, 23, 60])
def test_the_whole_value_is_about_half_of_a_native_one(tokens: int) -> None:
    k, v = torch.randn(2, 30, tokens, 3, 64).bfloat16()  # the shape of SmolLM2-135M
    k8, v8, scales = quantise(k, v)
    ids = tuple(range(tokens))
    native, int8 = pack_blob(b"key", KVBlob(k, v, ids)), pack_blob(b"key", KVBlob(k8, v8, ids, scales))
    assert len(int8) <= 0.55 * len(native)


def test_native_and_int8_lie_side_by_side(blobs: KVBlobs) -> None:
    blobs.put(encoding(0), *kv(0))
    put(blobs, 1, quantise(*kv(1)))
    native, int8 = blobs.load(encoding(0).id), blobs.load(encoding(1).id)
    assert native is not None
    assert int8 is not None
    assert native.scales is None
    assert same(native.k, kv(0)[0])
    assert int8.k.dtype == torch.int8
    report = blobs.verify(repair=False)
    assert (report.encodings, report.corrupt, report.dangling) == (2, 0, 0)
    assert report.bytes == sum(len(value) for value in raw(blobs).values())


def test_blobs_of_the_release_before_are_read() -> None:
    blob = unpack_blob(b"key", OLD)
    assert same(blob.k, torch.tensor([[[[1.5, -2.0]]]]).bfloat16())
    assert same(blob.v, torch.tensor([[[[0.25, 3.0]]]]).bfloat16())
    assert (blob.token_ids, blob.scales) == ((7,), None)
    assert pack_blob(b"key", blob)[:4] == b"KVB1", "and that release reads native ones of this"


def sealed(header: object, size: int = 16) -> bytes:
    """A value whose checksum, under the key b"key", is right: the magic, the header, and that many bytes."""
    text = json.dumps(header).encode()
    payload = len(text).to_bytes(8, "little") + text + bytes(size)
    return b"KVB1" + xxhash.xxh3_128(b"key" + payload).digest() + payload


def header(**changed: object) -> dict[str, object]:
    """Of the blob of the release before, with some entries changed."""
    plain = {
        "token_ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "k": {"dtype": "BF16", "shape": [1, 1, 1, 2], "data_offsets": [8, 12]},
        "v": {"dtype": "BF16", "shape": [1, 1, 1, 2], "data_offsets": [12, 16]},
    }
    return plain | changed


def at(start: object, end: object, dtype: object = "BF16") -> dict[str, object]:
    return {"dtype": dtype, "shape": [1, 1, 1, 2], "data_offsets": [start, end]}


def test_a_right_checksum_is_right() -> None:
    assert unpack_blob(b"key", sealed(header())).token_ids == (0,)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [1, 2],
        None,
        3,
        "k",
        header(k=[1, 2]),
        header(k=None),
        header(k="BF16"),
        header(k={}),
        header(k=at(-4, 0)),
        header(k=at(-8, -4)),
        header(k=at(6, 10)),
        header(k=at(12, 16)),
        header(v=at(10, 14)),
        header(v=at(16, 20)),
        header(v=at(16, 12)),
        header(v=at(12, 2**70)),
        header(v=at(2**70, 2**70 + 4)),
        header(v=at(12, "16")),
        header(v=at(12.0, 16.0)),
        header(v=at(12, None)),
        header(v=at(12, 16, "F8_E4M3")),
        header(v=at(12, 16, ["BF16"])),
        header(v={"dtype": "BF16", "shape": [1, 1, 1, 2], "data_offsets": [12, 14, 16]}),
        header(v={"dtype": "BF16", "shape": [1, 1, 1, 3], "data_offsets": [12, 16]}),
        header(v={"dtype": "BF16", "shape": [1, 1, 1, 2**70], "data_offsets": [12, 16]}),
        header(v={"dtype": "BF16", "shape": {"a": 1}, "data_offsets": [12, 16]}),
        header(v={"dtype": "BF16", "shape": [1, 1, 1, 2], "data_offsets": 12}),
    ],
    ids=repr,
)
def test_a_header_that_is_wrong_behind_a_right_checksum_is_damage(wrong: object) -> None:
    with pytest.raises(ValueError, match="payload is not safetensors"):
        unpack_blob(b"key", sealed(wrong))


def test_a_flipped_bit_is_found_and_repaired_wherever_it_is(blobs: KVBlobs) -> None:
    rng = random.Random(7)
    put(blobs, 1, quantise(*kv(1)))
    [(key, value)] = raw(blobs).items()
    bits = [*range(24 * 8), *rng.sample(range(len(value) * 8), 200), len(value) * 8 - 1]
    for bit in bits:
        overwrite(blobs, key, flipped(value, bit))
        with pytest.raises(CorruptBlob):
            blobs.load(encoding(1).id)
        put(blobs, 1, quantise(*kv(1)))
    overwrite(blobs, key, flipped(value, bits[-1]))
    report = blobs.verify(repair=True)
    assert (report.encodings, report.corrupt, report.repaired) == (1, 1, 1)
    assert entries(blobs)["blobs"] == 0


def test_a_value_of_the_other_format_is_none(blobs: KVBlobs) -> None:
    """The first four bytes are the format, which the checksum does not cover."""
    put(blobs, 1, quantise(*kv(1)))
    [(key, value)] = raw(blobs).items()
    blobs.put(encoding(2, rung=2), *kv(2))
    [(native_key, native)] = [pair for pair in raw(blobs).items() if pair[0] != key]
    assert (value[:4], native[:4]) == (b"KVB2", b"KVB1")
    for name, other in ((key, b"KVB1" + value[4:]), (native_key, b"KVB2" + native[4:])):
        with pytest.raises(ValueError, match=r"another layout: (K is torch.int8 without|no) scales"):
            unpack_blob(name, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p[0], p[1], None), "K is torch.int8 without scales"),
        (lambda p: (p[0].bfloat16(), p[1].bfloat16(), p[2]), "K is torch.bfloat16 with scales"),
        (lambda p: (p[0], p[1].bfloat16(), p[2]), "V is torch.bfloat16"),
        (lambda p: (p[0], p[1], p[2]._replace(keys=p[2].keys[:, :1])), "scales of keys are"),
        (lambda p: (p[0], p[1], p[2]._replace(keys=p[2].keys.float())), "scales of keys are torch.float32"),
        (lambda p: (p[0], p[1], p[2]._replace(values=p[2].values[:, 1:])), "scales of values are"),
        (lambda p: (p[0], p[1], p[2]._replace(values=p[2].values.bfloat16())), "scales of values are torch.bfloat16"),
    ],
    ids=["no scales", "native with scales", "V native", "a head less", "fp32", "a token less", "bf16"],
)
def test_what_does_not_fit_is_refused(blobs: KVBlobs, change: Callable[[Parts], Parts], message: str) -> None:
    with pytest.raises(InvalidEncoding, match=message):
        put(blobs, 1, change(quantise(*kv(1))))
    assert not any(entries(blobs).values())


def test_views_of_scales(blobs: KVBlobs) -> None:
    k, v, scales = quantise(*kv(1, tokens=TOKENS))
    wide = torch.stack((scales.keys, scales.keys), dim=-1)
    put(blobs, 1, (k, v, scales._replace(keys=wide[..., 0])))
    loaded = blobs.load(encoding(1).id)
    assert loaded is not None
    assert loaded.scales is not None
    assert same(loaded.scales.keys, scales.keys)
