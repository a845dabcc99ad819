"""The kernels compiled ahead for GPUs that are not here: what the code says of vectors, registers and addresses."""

import re

import pytest
import triton.language as tl
from gpu_ahead import (
    CUDA,
    HIP,
    Shape,
    accesses,
    assert_small,
    capture_for,
    quantise_for,
    splice_for,
    widths,
)

from kv_splice.gpu.tiles import TILES, Tile

pytestmark = pytest.mark.usefixtures("compile_cache")

ARCHES = pytest.mark.parametrize("arch", CUDA)
NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])


@ARCHES
@pytest.mark.parametrize("tile", TILES)
def test_the_main_path_moves_16_bytes_at_a_time(arch: int, tile: Tile) -> None:
    kernel = splice_for(CUDA[arch], Shape(tile=tile))
    # A thread moves `vectors` of each half of keys and values, and reads as many bytes of both cosines and sines.
    assert accesses(kernel, "st") == {"v4.b32": 4 * tile.vectors}
    loads = accesses(kernel, "ld")
    assert loads.pop("v4.b32") == (4 + 4) * tile.vectors
    assert set(loads) == {"b64"}, f"{loads}: only indices and addresses are narrower"
    assert kernel.metadata.shared == 0
    assert_small(kernel)


@ARCHES
def test_int8_is_read_8_bytes_at_a_time_and_written_16(arch: int) -> None:
    kernel = splice_for(CUDA[arch], Shape(), source="i8")
    assert accesses(kernel, "st") == {"v4.b32": 4}
    loads = accesses(kernel, "ld")
    assert (loads.pop("v2.b32"), loads.pop("v4.b32")) == (4, 4 + 2)  # scales of keys beside cosines and sines
    assert set(loads) <= {"b64", "b16"}, f"{loads}: indices, addresses and scales of values"
    assert kernel.metadata.shared == 0
    assert_small(kernel)


@ARCHES
@pytest.mark.parametrize("tile", TILES)
def test_int8_fits_whatever_the_tile(arch: int, tile: Tile) -> None:
    kernel = splice_for(CUDA[arch], Shape(tile=tile), source="i8")
    assert set(accesses(kernel, "st")) == {"v4.b32"}
    assert_small(kernel)


@ARCHES
def test_a_capture_moves_16_bytes_at_a_time(arch: int) -> None:
    kernel = capture_for(CUDA[arch], Shape())
    assert accesses(kernel, "st") == {"v4.b32": 4}
    assert accesses(kernel, "ld")["v4.b32"] == 8
    assert_small(kernel)


@ARCHES
@NEOX
def test_a_capture_into_int8_reads_16_bytes_at_a_time(arch: int, is_neox: bool) -> None:
    kernel = quantise_for(CUDA[arch], Shape(is_neox=is_neox))
    assert_small(kernel)
    # Values, and pairs that lie together, are written 16 bytes at a time. Halves that lie apart are 8 numbers each, of
    # the 16 that a thread read. What is narrower is a scale, or a fact's mark.
    stores, loads = widths(kernel, "st"), widths(kernel, "ld")
    assert (stores[16], stores[8]) == ((1, 2) if is_neox else (2, 0))
    assert set(stores) <= {16, 8, 4, 2}
    assert set(loads) == {16, 8}, f"{loads}: only indices and addresses are narrower"


def test_keys_are_turned_in_fp32_and_rounded_to_nearest() -> None:
    for pool, rounding in ((tl.bfloat16, "cvt.rn.bf16"), (tl.float16, "cvt.rn.f16")):
        ptx = splice_for(CUDA[90], Shape(pool=pool)).asm["ptx"]
        assert rounding in ptx
        assert not re.search(r"cvt\.r[zmp]", ptx)
        assert "fma.rn.f32" in ptx


def test_nothing_is_a_call() -> None:
    """A division to the last bit would be one: quotients are corrected, and two units of fp32 will do for an angle."""
    for kernel in (quantise_for(CUDA[90], Shape()), capture_for(CUDA[90], Shape())):
        ptx = kernel.asm["ptx"]
        assert "div.full.f32" in ptx
        assert "div.rn.f32" not in ptx
        assert "div.approx" not in ptx
    assert "fma.rn.f32" in quantise_for(CUDA[90], Shape()).asm["ptx"]


@NEOX
def test_addresses_are_64_bits(is_neox: bool) -> None:
    shape = Shape(head_dim=80, rotary_dim=32, is_neox=is_neox)
    kernels = [
        splice_for(CUDA[90], shape),
        splice_for(CUDA[90], shape, source="i8"),
        splice_for(CUDA[90], shape, source="i8", by_facts=True),
        capture_for(CUDA[90], shape),
        quantise_for(CUDA[90], shape),
    ]
    for kernel in kernels:
        added = re.findall(r"tt\.addptr .* : .*, (\S+?)(?: loc\(.*\))?$", kernel.asm["ttir"], re.MULTILINE)
        assert len(added) > 10
        assert {re.sub(r"tensor<[\dx]+x(\w+)>", r"\1", offset) for offset in added} == {"i64"}


@NEOX
@pytest.mark.parametrize("source", [None, "i8"], ids=["native", "int8"])
def test_amd_gpus_write_16_bytes_at_a_time(source: str | None, is_neox: bool) -> None:
    kernel = splice_for(HIP, Shape(is_neox=is_neox), source=source)
    assert widths(kernel, "st") == {16: 4}
    assert_small(kernel)
