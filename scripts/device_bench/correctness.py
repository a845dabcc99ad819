"""The kernels against the reference, with random data, on the device."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from device_bench.settings import Setting
from kv_splice import ArenaScales, RopeSpec, on_stream, quantise, splice_reference, unrotate_keys
from kv_splice.gpu import capture_quantised, launch_splice, splice, unrotate_capture

__all__ = ["check_all", "error_of"]

OTHER_DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
LAYERS = 2

Check = tuple[str, Callable[[], None]]


def check_all(setting: Setting) -> list[dict[str, str]]:
    """Name of each check, and what was wrong; empty where nothing was."""
    return [{"name": name, "error": error_of(check)} for name, check in _checks(setting)]


def error_of(check: Callable[[], None]) -> str:
    """What was wrong; empty where nothing was."""
    try:
        check()
    except Exception as error:  # a kernel that does not compile or start is one wrong result, not the end of the run
        return f"{type(error).__name__}: {error}"
    return ""


def _checks(setting: Setting) -> Iterator[Check]:
    """A case is (width, heads, tokens, dtype, pairing); each is another kernel to compile, so the grid is thin."""
    heads, num_tokens = setting.heads[-1], setting.check_tokens[-1]
    cases = [
        (width, heads, num_tokens, torch.bfloat16, is_neox) for width in setting.widths for is_neox in (True, False)
    ]
    cases += [(width, heads, num_tokens, dtype, True) for width in setting.widths[:2] for dtype in OTHER_DTYPES]
    cases += [(setting.widths[0], few, num_tokens, torch.bfloat16, True) for few in setting.heads[:-1]]
    cases += [(setting.widths[0], heads, few, torch.bfloat16, True) for few in setting.check_tokens[:-1]]
    for (head_dim, rotary_dim), heads, num_tokens, dtype, is_neox in cases:
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
    """A launch on another stream reads what the current one writes late, and what the current one frees at once."""
    shape = (1, 1024, 8, 128)
    stream = torch.cuda.Stream(device)
    k_pools, v_pools = (_pools(shape, shape[1], torch.bfloat16, device) for _ in range(2))
    slots = torch.arange(shape[1], device=device)
    cos_sin = _cos_sin(shape[1], 128, device)
    numbers = (slots % 128).to(torch.bfloat16)[None, :, None, None].expand(shape)
    arena = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    arguments: dict[str, Any] = {
        "cos_sin": cos_sin,
        "slots": slots,
        "k_pools": k_pools,
        "v_pools": v_pools,
        "is_neox": True,
    }
    launch_splice(arena, arena, rows=slots, **arguments)  # compiled now, so that it is late for nothing
    torch.cuda.synchronize(device)
    torch.cuda._sleep(100_000_000)
    arena.copy_(numbers)
    rows = slots.clone()
    with on_stream(stream, rows, slots, cos_sin):
        torch.cuda._sleep(100_000_000)
        launch_splice(arena, arena, rows=rows, **arguments)
    del rows
    reused = [torch.zeros(shape[1], dtype=torch.int64, device=device) for _ in range(8)]
    torch.cuda.synchronize(device)
    assert len(reused) == 8
    assert torch.equal(v_pools[0], numbers[0]), "another stream did not wait, or read memory that was given away"
