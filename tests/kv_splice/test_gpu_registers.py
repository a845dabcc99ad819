"""Shapes that are served, compiled for every GPU: fewer than 128 registers a thread, and nothing outside them."""

import os
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import cycle
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from gpu_ahead import (
    CUDA,
    HIP,
    MOST_REGISTERS,
    Shape,
    capture_for,
    quantise_for,
    splice_for,
    usage,
    uses_local_memory,
    widths,
)
from triton import knobs

from kv_splice.gpu.tiles import Kind, Tile

TARGETS = {f"sm_{arch}": target for arch, target in CUDA.items()} | {"gfx942": HIP}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i8": torch.int8}
POOLS = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
WIDTHS = ((64, 64), (64, 16), (80, 80), (80, 32), (96, 96), (96, 24), (128, 128), (128, 64), (256, 256), (256, 64))
SOURCES = (
    ("bf16", "bf16"),
    ("i8", "bf16"),
    ("fp32", "bf16"),
    ("fp32", "fp32"),
    ("i8", "fp32"),
    ("fp16", "fp16"),
    ("i8", "fp16"),
)


class Case(NamedTuple):
    """One kernel for one target."""

    kernel: str
    target: str
    source: str
    pool: str
    head_dim: int
    rotary_dim: int
    is_neox: bool
    heads: int
    by_facts: bool
    tile: Tile


class Read(NamedTuple):
    """What its code says."""

    registers: int
    spilled: int
    local: int
    has_local_code: bool
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]


def cases() -> Iterator[Case]:
    """All of source, pool, width and pairing, with the largest tile that is tried of each; heads and facts take turns.

    To a compiler fp16 is much like bf16: one target has it. gfx942 is spared two pairs of dtypes that few have.
    """
    heads, by_facts = cycle((8, 1, 16, 3, 5, 2, 4)), cycle((True, False))
    for target in TARGETS:
        for source, pool in SOURCES:
            if pool == "fp16" and target != "sm_90":
                continue
            if target == "gfx942" and (source, pool) in (("fp32", "bf16"), ("i8", "fp32")):
                continue
            for head_dim, rotary_dim in WIDTHS:
                for is_neox in (True, False):
                    kind = Kind("", DTYPES[source], DTYPES[pool], 8, head_dim, rotary_dim, is_neox, 1)
                    case = Case(
                        "splice",
                        target,
                        source,
                        pool,
                        head_dim,
                        rotary_dim,
                        is_neox,
                        next(heads),
                        next(by_facts),
                        kind.tiles[-1],
                    )
                    yield case
                    if source == pool:
                        yield case._replace(kernel="capture", by_facts=False)
                        yield case._replace(kernel="quantise", by_facts=False)


def drawn() -> list[Case]:
    """A third of the cases, drawn once and for all; with KV_SPLICE_WHOLE_GRID=1 all, which takes ten minutes."""
    every = list(cases())
    if os.environ.get("KV_SPLICE_WHOLE_GRID") == "1":
        return every
    return [every[i] for i in sorted(random.Random(0).sample(range(len(every)), len(every) // 3))]


CASES = drawn()


def read(case: Case) -> Read:
    """Compile, and look; in a process that may have its own cache."""
    target = TARGETS[case.target]
    shape = Shape(case.heads, case.head_dim, case.rotary_dim, POOLS[case.pool], case.is_neox, case.tile)
    match case.kernel:
        case "splice":
            source = None if case.source == case.pool else case.source
            kernel = splice_for(target, shape, source=source, by_facts=case.by_facts)
        case "capture":
            kernel = capture_for(target, shape)
        case _:
            kernel = quantise_for(target, shape)
    loads, stores = (dict(widths(kernel, verb)) for verb in ("ld", "st"))
    return Read(*usage(kernel), uses_local_memory(kernel), kernel.metadata.shared, loads, stores)


def compile_into(folder: str) -> None:
    """Where a process of the pool keeps what it compiles: nothing that an earlier run left is found."""
    knobs.cache.dir = tempfile.mkdtemp(dir=folder)


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Future[Read]]]:
    """Of every case; one process a core compiles them in their order."""
    folder = str(tmp_path_factory.mktemp("triton"))
    context: Any = get_context("spawn")
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=context, initializer=compile_into, initargs=(folder,))
    with pool:
        yield {case: pool.submit(read, case) for case in CASES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:-1])))
def test_a_thread_keeps_everything_in_registers(case: Case, readings: dict[Case, Future[Read]]) -> None:
    got = readings[case].result()
    print(got)  # -rP
    assert got.registers < MOST_REGISTERS
    assert (got.spilled, got.local, got.has_local_code) == (0, 0, False)
    assert 16 in got.loads
    assert 16 in got.stores
    # Where both halves and the rest begin at multiples of 16 bytes, nothing narrower is written.
    if case.kernel != "quantise" and case.rotary_dim % 16 == 0:
        assert set(got.stores) == {16}
