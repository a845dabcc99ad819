"""The kernels compiled ahead for GPUs that are not here: what the code says of vectors, registers and addresses."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv_splice.gpu.capture import QUANTISE_TOKENS, QUANTISE_WARPS
from kv_splice.gpu.kernels import capture_kernel, splice_kernel
from kv_splice.gpu.quantise_kernel import quantise_kernel
from kv_splice.gpu.tiles import TILES, Tile, blocks_of

CUDA = {80: GPUTarget("cuda", 80, 32), 90: GPUTarget("cuda", 90, 32), 100: GPUTarget("cuda", 100, 32)}
HIP = GPUTarget("hip", "gfx942", 64)
ARCHES = pytest.mark.parametrize("arch", CUDA)
NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
MOST_REGISTERS = 128
NAMES = {tl.bfloat16: "bf16", tl.float16: "fp16", tl.float32: "fp32"}
POINTERS = {"k_pools", "v_pools", "slots", "rows", "positions", "sets", "offsets", "first_rows"}


class Shape(NamedTuple):
    """Llama-3.1-8B unless said otherwise."""

    heads: int = 8
    head_dim: int = 128
    rotary_dim: int = 128
    pool: Any = tl.bfloat16
    is_neox: bool = True
    tile: Tile = Tile(1, 4)


class Usage(NamedTuple):
    """What one thread takes, by the assembler."""

    registers: int
    stack: int
    local: int


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled here and now, not found where an earlier run left it."""
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def compiled(kernel: Any, target: GPUTarget, types: dict[str, str], constants: dict[str, Any], num_warps: int) -> Any:
    """As a launch compiles it, which specialises on no argument."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i64" if name in POINTERS else "i64")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=target, options={"num_warps": num_warps})


def constants_of(shape: Shape, target: GPUTarget) -> dict[str, Any]:
    blocks = blocks_of(
        shape.tile,
        num_kv_heads=shape.heads,
        head_dim=shape.head_dim,
        rotary_dim=shape.rotary_dim,
        element_size=shape.pool.primitive_bitwidth // 8,
        warp_size=target.warp_size,
    )
    return {
        "POOL": shape.pool,
        "H": shape.heads,
        "D": shape.head_dim,
        "R": shape.rotary_dim,
        "IS_NEOX": shape.is_neox,
        "ANGLE_ALIGNMENT": 16,
        "BLOCK_T": blocks.tokens,
        "BLOCK_H": blocks.heads,
        "BLOCK_HALF": blocks.half,
        "BLOCK_TAIL": blocks.tail,
    }


def splice_for(target: GPUTarget, shape: Shape, *, source: str | None = None, by_facts: bool = False) -> Any:
    """Out of an arena, with positions; `source` is "i8" for int8."""
    name = source or NAMES[shape.pool]
    types = {"k_source": f"*{name}", "v_source": f"*{name}", "cos_sin": "*fp32"}
    types |= {"key_scales": "*fp16", "value_scales": "*fp16"}
    absent = ["rows", "sets"] if by_facts else ["first_rows", "offsets"]
    if name != "i8":
        absent += ["sets", "key_scales", "value_scales"]
    constants = constants_of(shape, target) | dict.fromkeys(absent)
    return compiled(splice_kernel, target, types, constants, shape.tile.num_warps)


def capture_for(target: GPUTarget, shape: Shape) -> Any:
    name = f"*{NAMES[shape.pool]}"
    types = {"k_out": name, "v_out": name, "cos_sin": "*fp32"}
    return compiled(capture_kernel, target, types, constants_of(shape, target), shape.tile.num_warps)


def quantise_for(target: GPUTarget, shape: Shape) -> Any:
    types = dict.fromkeys(("k_out", "v_out"), "*i8") | {"cos_sin": "*fp32", "refused": "*i32"}
    types |= {"key_scales": "*fp16", "value_scales": "*fp16"}
    constants = constants_of(shape, target) | {
        "LARGEST": 8319008.0,
        "BLOCK_T": QUANTISE_TOKENS,
        "BLOCK_D": 1 << (shape.head_dim - 1).bit_length(),
    }
    del constants["H"], constants["BLOCK_H"]
    return compiled(quantise_kernel, target, types, constants, QUANTISE_WARPS)


def usage(kernel: Any, folder: Path) -> Usage:
    """As `cuobjdump` reads it off the binary."""
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    assert found, said
    return Usage(*map(int, found.groups()))


def accesses(kernel: Any, verb: str) -> Counter[str]:
    """How often each width of global access stands in the PTX: `v4.b32` is 16 bytes a thread."""
    return Counter(re.findall(rf"\b{verb}\.global(?:\.L1::\w+|\.L2::\w+)*\.((?:v\d\.)?\w+)", kernel.asm["ptx"]))


def assert_small(kernel: Any, folder: Path) -> None:
    """Registers for two thirds of a full house at least, nothing in local memory."""
    took = usage(kernel, folder)
    print(took, f"shared={kernel.metadata.shared}", *(dict(accesses(kernel, verb)) for verb in ("ld", "st")))  # -rP
    assert took.registers < MOST_REGISTERS, took
    assert (took.stack, took.local) == (0, 0), took
    assert not re.search(r"\b(ld|st)\.local|\.local ", kernel.asm["ptx"])


@ARCHES
@pytest.mark.parametrize("tile", TILES)
def test_the_main_path_moves_16_bytes_at_a_time(arch: int, tile: Tile, tmp_path: Path) -> None:
    kernel = splice_for(CUDA[arch], Shape(tile=tile))
    # A thread moves `vectors` of each half of keys and values, and reads as many bytes of both cosines and sines.
    assert accesses(kernel, "st") == {"v4.b32": 4 * tile.vectors}
    loads = accesses(kernel, "ld")
    assert loads.pop("v4.b32") == (4 + 4) * tile.vectors
    assert set(loads) == {"b64"}, f"{loads}: only indices and addresses are narrower"
    assert kernel.metadata.shared == 0
    assert_small(kernel, tmp_path)


@ARCHES
def test_int8_is_read_8_bytes_at_a_time_and_written_16(arch: int, tmp_path: Path) -> None:
    kernel = splice_for(CUDA[arch], Shape(), source="i8")
    assert accesses(kernel, "st") == {"v4.b32": 4}
    loads = accesses(kernel, "ld")
    assert (loads.pop("v2.b32"), loads.pop("v4.b32")) == (4, 4 + 2)  # scales of keys beside cosines and sines
    assert set(loads) <= {"b64", "b16"}, f"{loads}: indices, addresses and scales of values"
    assert kernel.metadata.shared == 0
    assert_small(kernel, tmp_path)


@ARCHES
@pytest.mark.parametrize("tile", TILES)
def test_int8_fits_whatever_the_tile(arch: int, tile: Tile, tmp_path: Path) -> None:
    kernel = splice_for(CUDA[arch], Shape(tile=tile), source="i8")
    assert set(accesses(kernel, "st")) == {"v4.b32"}
    assert_small(kernel, tmp_path)


@ARCHES
def test_a_capture_moves_16_bytes_at_a_time(arch: int, tmp_path: Path) -> None:
    kernel = capture_for(CUDA[arch], Shape())
    assert accesses(kernel, "st") == {"v4.b32": 4}
    assert accesses(kernel, "ld")["v4.b32"] == 8
    assert_small(kernel, tmp_path)


@ARCHES
@NEOX
def test_a_capture_into_int8_stays_in_registers(arch: int, is_neox: bool, tmp_path: Path) -> None:
    assert_small(quantise_for(CUDA[arch], Shape(is_neox=is_neox)), tmp_path)


SHAPES = [
    Shape(3, 64, 64),
    Shape(8, 80, 32),
    Shape(4, 96, 96),
    Shape(1, 256, 256),
    Shape(16, 128, 64, tl.float16),
    Shape(8, 128, 128, tl.float32),
    Shape(8, 128, 128, is_neox=False),
    Shape(2, 80, 80, tl.float32, is_neox=False),
    Shape(4, 256, 64, tl.float16, is_neox=False),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", [None, "i8"], ids=["native", "int8"])
def test_other_shapes_write_16_bytes_at_a_time_too(shape: Shape, source: str | None, tmp_path: Path) -> None:
    kernel = splice_for(CUDA[90], shape, source=source)
    assert set(accesses(kernel, "st")) == {"v4.b32"}
    assert_small(kernel, tmp_path)


@NEOX
@pytest.mark.parametrize(
    ("source", "pool"), [("bf16", tl.bfloat16), ("i8", tl.bfloat16), ("fp32", tl.bfloat16), ("fp32", tl.float32)]
)
def test_the_largest_tile_fits_whatever_is_stored(source: str, pool: Any, is_neox: bool, tmp_path: Path) -> None:
    kernel = splice_for(CUDA[90], Shape(pool=pool, is_neox=is_neox, tile=Tile(2, 8)), source=source)
    assert set(accesses(kernel, "st")) == {"v4.b32"}
    assert_small(kernel, tmp_path)


def test_keys_are_turned_in_fp32_and_rounded_to_nearest() -> None:
    for pool, rounding in ((tl.bfloat16, "cvt.rn.bf16"), (tl.float16, "cvt.rn.f16")):
        ptx = splice_for(CUDA[90], Shape(pool=pool)).asm["ptx"]
        assert rounding in ptx
        assert not re.search(r"cvt\.r[zmp]", ptx)
        assert "fma.rn.f32" in ptx


def test_scales_are_divided_by_exactly() -> None:
    """To the bit of `quantise`; for an angle, two units in the last place of fp32 will do."""
    ptx = quantise_for(CUDA[90], Shape()).asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "div.full.f32" in capture_for(CUDA[90], Shape()).asm["ptx"]
    assert "div.approx" not in ptx


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
def test_amd_gpus_take_it_without_spilling(source: str | None, is_neox: bool) -> None:
    assembly = splice_for(HIP, Shape(is_neox=is_neox), source=source).asm["amdgcn"]
    assert re.search(r"\.vgpr_spill_count: +0\b", assembly)
    assert re.search(r"\.sgpr_spill_count: +0\b", assembly)
    assert re.search(r"\.private_segment_fixed_size: +0\b", assembly)
    assert not re.search(r"\bscratch_(load|store)", assembly)
    registers = re.search(r"\.vgpr_count: +(\d+)", assembly)
    assert registers
    assert int(registers[1]) < MOST_REGISTERS
    assert len(re.findall(r"\b(?:global|buffer)_store_dwordx4\b", assembly)) == 4
    assert not re.search(r"\b(?:global|buffer)_store_(?!dwordx4)", assembly)


def test_amd_gpus_take_captures() -> None:
    for kernel in (capture_for(HIP, Shape()), quantise_for(HIP, Shape())):
        assert re.search(r"\.vgpr_spill_count: +0\b", kernel.asm["amdgcn"])
        assert not re.search(r"\bscratch_(load|store)", kernel.asm["amdgcn"])
