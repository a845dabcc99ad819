"""The kernels against the reference, with random data, on the device."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from device_bench.settings import Setting
from kv_splice import ArenaScales, RopeSpec, on_stream, quantise, splice_reference, unrotate_keys
from kv_splice.gpu import capture_quantised, splice, unrotate_capture

__all__ = ["check_all"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
LAYERS = 2

Check = tuple[str, Callable[[], None]]


def check_all(setting: Setting) -> list[dict[str, str]]:
    """Name of each check, and what was wrong; empty where nothing was."""
    return [{"name": name, "error": _error_of(check)} for name, check in _checks(setting)]


def _error_of(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return str(error) or "assertion failed"
    return ""


def _checks(setting: Setting) -> Iterator[Check]:
    grid = product(setting.widths, (setting.heads[-1],), (setting.check_tokens[-1],), DTYPES, (True, False))
    lengths = product(setting.widths[:1], setting.heads, setting.check_tokens, (torch.bfloat16,), (True,))
    for (head_dim, rotary_dim), heads, num_tokens, dtype, is_neox in (*grid, *lengths):
        pairing = "neox" if is_neox else "interleaved"
        name = f"{num_tokens} tokens, {heads} heads of {head_dim}, {rotary_dim} {pairing}, {dtype}"
        shape = (LAYERS, num_tokens, heads, head_dim)
        arguments = {"rotary_dim": rotary_dim, "dtype": dtype, "is_neox": is_neox, "device": setting.device}
        yield f"splice, {name}", partial(_check_splice, shape, source=dtype, **arguments)
        yield f"splice of int8, {name}", partial(_check_splice, shape, source=torch.int8, **arguments)
        yield f"capture, {name}", partial(_check_capture, shape, **arguments)
    if setting.device.type == "cuda":
        yield "order of streams", partial(_check_streams, setting.device)


def _pools(shape: tuple[int, ...], num_slots: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """NaN, with 16 bytes of it between tokens."""
    width = shape[2] * shape[3]
    memory = torch.full((shape[0], num_slots, width + 16 // dtype.itemsize), float("nan"), dtype=dtype, device=device)
    return list(memory[..., :width].unflatten(2, shape[2:]))


def _cos_sin(num_tokens: int, rotary_dim: int, device: torch.device) -> Tensor:
    spec = RopeSpec(head_dim=rotary_dim, rotary_dim=rotary_dim, is_neox=True, base=1e4)
    return spec.cos_sin(torch.randint(0, 100_000, (num_tokens,))).to(device)


def _check_splice(
    shape: tuple[int, int, int, int],
    *,
    source: torch.dtype,
    rotary_dim: int,
    dtype: torch.dtype,
    is_neox: bool,
    device: torch.device,
) -> None:
    num_tokens, num_slots, num_sets = shape[1], 2 * shape[1] + 1, 7
    scales = None
    if source == torch.int8:
        arena_k, arena_v = torch.randint(-127, 128, (2, *shape), dtype=torch.int8, device=device)
        scales = ArenaScales(
            (torch.rand((shape[0], num_sets, *shape[2:]), device=device) / 50).half(),
            torch.randint(0, num_sets, (num_tokens,), device=device),
            (torch.rand(shape[:3], device=device) / 50).half(),
        )
    else:
        arena_k, arena_v = torch.randn(2, *shape, device=device).to(source)
    arguments: dict[str, Any] = {
        "arena_k": arena_k,
        "arena_v": arena_v,
        "scales": scales,
        "rows": torch.randperm(num_tokens, device=device),
        "cos_sin": _cos_sin(num_tokens, rotary_dim, device),
        "slots": torch.randperm(num_slots, device=device)[:num_tokens],
        "is_neox": is_neox,
    }
    got, want = ([_pools(shape, num_slots, dtype, device) for _ in "kv"] for _ in range(2))
    splice(**arguments, k_pools=got[0], v_pools=got[1])
    splice_reference(**arguments, k_pools=want[0], v_pools=want[1])
    for layer in range(shape[0]):
        torch.testing.assert_close(got[1][layer], want[1][layer], rtol=0, atol=0, equal_nan=True)
        _assert_close(got[0][layer], want[0][layer])


def _check_capture(
    shape: tuple[int, int, int, int], *, rotary_dim: int, dtype: torch.dtype, is_neox: bool, device: torch.device
) -> None:
    num_tokens, num_slots = shape[1], 2 * shape[1] + 1
    slots = torch.randperm(num_slots, device=device)[:num_tokens]
    pools = [_pools(shape, num_slots, dtype, device) for _ in "kv"]
    for pool in (*pools[0], *pools[1]):
        pool[slots] = torch.randn(shape[1:], device=device).to(dtype)
    cos_sin = _cos_sin(num_tokens, rotary_dim, device)
    want_k, want_v = (torch.stack([pool[slots] for pool in of]) for of in pools)
    want_k = unrotate_keys(want_k, cos_sin, is_neox=is_neox).to(dtype)
    k, v = unrotate_capture(*pools, slots, cos_sin, is_neox=is_neox)
    assert torch.equal(v, want_v), "values differ"
    _assert_close(k, want_k)
    # The fused multiply of a GPU may turn a key to its other neighbour, and so move an element by a step.
    offsets = torch.tensor([0, num_tokens // 3, num_tokens], device=device)
    got = capture_quantised(*pools, slots, cos_sin, offsets=offsets, is_neox=is_neox)
    for fact, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if start == end:
            continue
        k8, v8, scales = quantise(want_k[:, start:end], want_v[:, start:end])
        assert torch.equal(got.v[:, start:end], v8), "values in int8 differ"
        assert torch.equal(got.scales.values[:, start:end], scales.values), "scales of values differ"
        torch.testing.assert_close(got.scales.keys[:, fact], scales.keys, rtol=1e-2, atol=1e-6)
        steps = (got.k[:, start:end].int() - k8.int()).abs()
        assert int(steps.max()) <= 1, f"keys in int8 differ by {int(steps.max())} steps"
        assert float(steps.float().mean()) < 0.02, f"{float(steps.float().mean()):.1%} of keys in int8 differ"


def _assert_close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def _check_streams(device: torch.device) -> None:
    """The splice on another stream reads what the current one writes late, and keeps memory that is freed at once."""
    shape = (1, 1024, 8, 128)
    stream = torch.cuda.Stream(device)
    k_pools, v_pools = (_pools(shape, shape[1], torch.bfloat16, device) for _ in range(2))
    slots = torch.arange(shape[1], device=device)
    still = torch.cat((torch.ones(shape[1], 64), torch.zeros(shape[1], 64)), dim=1).to(device)
    arena = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(50_000_000)
    arena.fill_(3)
    rows = torch.arange(shape[1], device=device)
    with on_stream(stream, rows, slots, still):
        torch.cuda._sleep(50_000_000)
        splice(arena, arena, still, slots, k_pools, v_pools, rows=rows, is_neox=True)
    del rows
    for _ in range(8):
        torch.full((shape[1],), -1, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    assert bool((k_pools[0] == 3).all()), "the splice did not wait for the current stream"
