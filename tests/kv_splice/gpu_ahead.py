"""Kernels compiled ahead for GPUs that are not here, and what can be read off their code."""

import re
import subprocess
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv_splice.gpu.kernels import capture_kernel, splice_kernel
from kv_splice.gpu.quantise_kernel import quantise_kernel
from kv_splice.gpu.tiles import Tile, blocks_of, quantise_blocks_of

CUDA = {80: GPUTarget("cuda", 80, 32), 90: GPUTarget("cuda", 90, 32), 100: GPUTarget("cuda", 100, 32)}
HIP = GPUTarget("hip", "gfx942", 64)
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
    """What one thread takes, by the assembler: registers, and what it keeps elsewhere: spilled, and in local memory."""

    registers: int
    spilled: int
    local: int


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
    blocks = quantise_blocks_of(head_dim=shape.head_dim, rotary_dim=shape.rotary_dim, warp_size=target.warp_size)
    constants = constants_of(shape, target) | {
        "LARGEST": 8319008.0,
        "BLOCK_T": blocks.tokens,
        "BLOCK_HALF": blocks.half,
        "BLOCK_TAIL": blocks.tail,
        "BLOCK_D": blocks.width,
    }
    del constants["H"], constants["BLOCK_H"]
    return compiled(quantise_kernel, target, types, constants, blocks.num_warps)


def usage(kernel: Any) -> Usage:
    """As `cuobjdump` reads it off a CUDA binary, or as AMD's code says itself."""
    if "amdgcn" in kernel.asm:
        registers, vector_spills, scalar_spills, local = (
            re.search(rf"\.{name}: +(\d+)", kernel.asm["amdgcn"])
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        )
        assert registers
        assert vector_spills
        assert scalar_spills
        assert local
        return Usage(int(registers[1]), int(vector_spills[1]) + int(scalar_spills[1]), int(local[1]))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", binary.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    assert found, said
    return Usage(*map(int, found.groups()))


def accesses(kernel: Any, verb: str) -> Counter[str]:
    """How often each width of global access stands in the PTX: `v4.b32` is 16 bytes a thread."""
    return Counter(re.findall(rf"\b{verb}\.global(?:\.L1::\w+|\.L2::\w+)*\.((?:v\d\.)?\w+)", kernel.asm["ptx"]))


def widths(kernel: Any, verb: str) -> Counter[int]:
    """How often each number of bytes is loaded ("ld") or stored ("st") by a thread at once, of any target's code."""
    if "amdgcn" in kernel.asm:
        name = {"ld": "load", "st": "store"}[verb]
        found = re.findall(rf"\b(?:global|buffer)_{name}_(byte|short|dword)(?:x(\d))?", kernel.asm["amdgcn"])
        return Counter({"byte": 1, "short": 2, "dword": 4}[unit] * int(count or 1) for unit, count in found)
    counted: Counter[int] = Counter()
    for name, times in accesses(kernel, verb).items():
        *vector, unit = name.split(".")
        counted[int(unit[1:]) // 8 * (int(vector[0][1:]) if vector else 1)] += times
    return counted


def uses_local_memory(kernel: Any) -> bool:
    """Whether the code reads or writes what a thread keeps outside its registers."""
    if "amdgcn" in kernel.asm:
        return bool(re.search(r"\bscratch_(load|store)", kernel.asm["amdgcn"]))
    return bool(re.search(r"\b(ld|st)\.local|\.local ", kernel.asm["ptx"]))


def assert_small(kernel: Any) -> None:
    """Registers for two thirds of a full house at least, nothing in local memory."""
    took = usage(kernel)
    print(took, f"shared={kernel.metadata.shared}", *(dict(widths(kernel, verb)) for verb in ("ld", "st")))  # -rP
    assert took.registers < MOST_REGISTERS, took
    assert (took.spilled, took.local) == (0, 0), took
    assert not uses_local_memory(kernel)
