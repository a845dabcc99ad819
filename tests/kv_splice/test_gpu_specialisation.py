"""What a launch compiles, and that it compiles once: Triton takes the launcher's own arguments, up to the launch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kv_splice import ArenaScales
from kv_splice.facts import Facts, FactScales
from kv_splice.gpu import Tile, capture, launch, launch_capture, launch_quantise, launch_splice, warm, warm_up
from kv_splice.gpu.tiles import DEFAULT_TILE, Choices

LAYERS, HEADS, DIM = 2, 8, 128
TARGETS = [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)]


class Device:
    """A GPU, as far as Triton asks before it launches."""

    def __init__(self, number: int, target: GPUTarget) -> None:
        self._number, self._target = number, target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Compiling:
    """A kernel that is compiled for its arguments, and not launched."""

    def __init__(self, kernel: Any, made: list[Any]) -> None:
        self._kernel, self._made = kernel, made

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self._made.append(self._kernel.run(*args, grid=grid, warmup=True, **options))


@pytest.fixture(params=TARGETS, ids=lambda target: str(target.arch))
def made(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Any]]:
    """What the launches of a test compiled, in their order."""
    kernels: list[Any] = []
    # Triton keeps kernels by the number of the device: a new one begins with none.
    monkeypatch.setattr(driver, "_active", Device(id(kernels), request.param))
    for module, name in ((launch, "splice_kernel"), (capture, "capture_kernel"), (capture, "quantise_kernel")):
        monkeypatch.setattr(module, name, Compiling(getattr(module, name), kernels))
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield kernels


def pools(num_slots: int, padding: int = 0) -> list[Tensor]:
    memory = torch.zeros(LAYERS, num_slots, HEADS * DIM + padding, dtype=torch.bfloat16)
    return list(memory[..., : HEADS * DIM].unflatten(2, (HEADS, DIM)))


def run_splice(
    num_tokens: int,
    *,
    padding: int = 0,
    is_int8: bool = False,
    num_facts: int = 0,
    skip: int = 0,
    tile: Tile | None = DEFAULT_TILE,
) -> None:
    """With lengths, strides and starts of indices that have nothing in common."""
    capacity = num_tokens + 1 + skip
    arena = torch.zeros(LAYERS, capacity, HEADS, DIM, dtype=torch.int8 if is_int8 else torch.bfloat16)
    indices = torch.arange(num_tokens + skip)[skip:]
    source: dict[str, Any] = {"rows": indices}
    if num_facts:
        offsets = torch.linspace(0, num_tokens, num_facts + 1).long()
        source = {"facts": Facts(offsets, offsets[:-1].clone())}
    if is_int8:
        keys = torch.zeros(LAYERS, max(num_facts, 3), HEADS, DIM, dtype=torch.float16)
        values = torch.zeros(LAYERS, capacity, HEADS, dtype=torch.float16)
        source["scales"] = FactScales(keys, values) if num_facts else ArenaScales(keys, indices, values)
    k_pools, v_pools = pools(capacity, padding), pools(capacity)
    launch_splice(
        arena,
        arena,
        **source,
        cos_sin=torch.zeros(50 + skip, DIM),
        positions=indices,
        slots=indices,
        k_pools=k_pools,
        v_pools=v_pools,
        is_neox=True,
        tile=tile,
    )


def of(made: list[Any]) -> set[str]:
    return {kernel.hash for kernel in made}


@pytest.mark.parametrize("is_int8", [False, True], ids=["native", "int8"])
def test_one_kernel_for_all_lengths_and_strides(made: list[Any], is_int8: bool) -> None:
    run_splice(1, is_int8=is_int8)
    run_splice(16, padding=64, is_int8=is_int8)
    run_splice(1000, padding=8, is_int8=is_int8, skip=3)
    assert len(made) == 3
    assert len(of(made)) == 1


def test_one_kernel_for_any_number_of_facts(made: list[Any]) -> None:
    for num_facts in (1, 2, 16, 33):
        run_splice(100, is_int8=True, num_facts=num_facts)
    assert len(made) == 4
    assert len(of(made)) == 1


def test_numbers_are_64_bits_and_stores_16_bytes(made: list[Any]) -> None:
    # Tiles are counted in the warps of this machine's Torch, of which a wavefront of gfx942 is two.
    run_splice(16, tile=Tile(driver.active.get_current_target().warp_size // 32, 4))
    [kernel] = made
    types = dict(zip(launch.splice_kernel._kernel.arg_names, kernel.src.signature.values(), strict=True))
    numbers = {types[name] for name in types if name.endswith("_stride") or name.startswith("num_")}
    assert numbers <= {"i64", "constexpr"}
    assert types["num_tokens"] == types["k_token_stride"] == types["k_pool_stride"] == "i64"
    assert types["k_source"] == "*bf16"
    assert types["slots"] == types["k_pools"] == "*i64"
    if "ptx" in kernel.asm:
        assert kernel.asm["ptx"].count("st.global.v4.b32") == 4
        assert kernel.asm["ptx"].count("ld.global.v4.b32") == 8
    else:
        assert kernel.asm["amdgcn"].count("global_store_dwordx4") == 4
        assert kernel.asm["amdgcn"].count("global_load_dwordx4") == 8


def test_one_kernel_for_every_capture(made: list[Any]) -> None:
    for num_tokens in (1, 16, 77):
        indices = torch.arange(num_tokens)
        launch_capture(
            pools(num_tokens, 8),
            pools(num_tokens),
            indices,
            torch.zeros(100, DIM),
            positions=indices,
            is_neox=True,
            tile=DEFAULT_TILE,
        )
    assert len(made) == 3
    assert len(of(made)) == 1


def test_one_kernel_for_every_capture_in_int8(made: list[Any]) -> None:
    for num_tokens in (1, 16, 77):
        indices, offsets = torch.arange(num_tokens), torch.tensor([0, num_tokens])
        table = torch.zeros(100, DIM)
        launch_quantise(pools(num_tokens, 8), pools(num_tokens), indices, table, indices, offsets, is_neox=True)
    assert len(made) == 3
    assert len(of(made)) == 1


@pytest.mark.parametrize("made", TARGETS[:1], indirect=True, ids=["90"])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.int8], ids=["native", "int8"])
def test_after_warming_up_no_request_compiles(
    made: list[Any], source: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = Choices()
    for module in (launch, capture, warm):
        monkeypatch.setattr(module, "CHOICES", choices)
    monkeypatch.setattr(warm, "check_device", lambda _pools: None)
    table, is_int8 = torch.zeros(100, DIM), source == torch.int8
    warm_up(pools(9), pools(9), source, table, is_neox=True, sizes=(2, 64), repeats=1)
    warmed = of(made)
    made.clear()
    for num_tokens in (1, 30, 1000):
        run_splice(num_tokens, padding=8, is_int8=is_int8, tile=None)
        indices = torch.arange(num_tokens) % 9
        arguments = (pools(9), pools(9), indices, table)
        if is_int8:
            launch_quantise(*arguments, indices, torch.tensor([0, num_tokens]), is_neox=True)
        else:
            launch_capture(*arguments, positions=indices, is_neox=True)
    assert len(made) == 6
    assert of(made) <= warmed
