"""The compiled forwards of `portable_cpu` against SGLang's own and against the definition in fp64."""

from typing import Any

import pytest
import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from torch import Tensor

from sgl_stateful.sglang_adapter import cpu_linear, cpu_ops
from sgl_stateful.sglang_adapter.platform import DISPATCH_KEY

ROWS = (1, 15, 63, 2900)
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def close(ours: Tensor, native: Tensor, exact: Tensor) -> None:
    """Both near the exact value, and ours no further from it in the mean than SGLang's."""
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, native, rtol=tolerance, atol=tolerance)
    error, native_error = (ours.double() - exact).abs().mean(), (native.double() - exact).abs().mean()
    assert error <= 1.05 * native_error + 1e-9


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 576])
@pytest.mark.parametrize("add", [True, False])
def test_norm(num_rows: int, dtype: torch.dtype, width: int, add: bool) -> None:
    norm = RMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, residual = torch.randn(num_rows, width).to(dtype), torch.randn(num_rows, width).to(dtype)
    total = x.double() + residual.double() if add else x.double()
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.detach().double()
    if add:
        native, native_sum = norm.forward_native(x.clone(), residual.clone())
        ours, our_sum = cpu_ops.rms_norm(norm, x.clone(), residual.clone())
        assert torch.equal(our_sum, native_sum)
    else:
        native, before = norm.forward_native(x), x.clone()
        ours = cpu_ops.rms_norm(norm, x)
        assert torch.equal(x, before)
    close(ours, native, exact)


def test_norm_leaves_the_less_usual_forms_to_sglang() -> None:
    norm = RMSNorm(64, eps=1e-5, cast_x_before_out_mul=True).bfloat16()
    x = torch.randn(4, 64).bfloat16()
    assert torch.equal(cpu_ops.rms_norm(norm, x), norm.forward_native(x))
    partial = RMSNorm(64, var_hidden_size=32).bfloat16()
    assert torch.equal(cpu_ops.rms_norm(partial, x), partial.forward_native(x))
    with pytest.raises(ValueError, match="hidden_size"):
        cpu_ops.rms_norm(RMSNorm(32).bfloat16(), x)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(num_rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_rows, 2 * 1536) * 4
    x[0, :8] = torch.tensor([0.0, -0.0, 100.0, -100.0, 1e4, -1e4, 1e-30, -90.0])
    x = x.to(dtype)
    gate, up = x.double().chunk(2, -1)
    layer = SiluAndMul()
    ours, native = cpu_ops.silu_and_mul(layer, x), layer.forward_native(x)
    exact = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(ours, native, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotate(num_rows: int, dtype: torch.dtype, head_dim: int, rotary_dim: int, is_neox: bool) -> None:
    rotary = RotaryEmbedding(head_dim, rotary_dim, 4096, 10000, is_neox, dtype)
    positions = torch.randint(0, 4096, (num_rows,))
    qkv = torch.randn(num_rows, 15 * head_dim).to(dtype)
    cos, sin = rotary.cos_sin_cache[positions].to(dtype).double()[:, None].chunk(2, -1)

    def exact(x: Tensor) -> Tensor:
        heads = x.double().view(num_rows, -1, head_dim)
        turned, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
        if is_neox:
            a, b = turned.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([turned, rest], -1).view(num_rows, -1)

    sizes = [9 * head_dim, 3 * head_dim, 3 * head_dim]
    query, key, value = qkv.split(sizes, -1)
    expected, before = [exact(query), exact(key)], value.clone()
    native = rotary.forward_native(positions, query, key)
    ours = cpu_ops.rotate(rotary, positions, query, key)
    for one, other, definition in zip(ours, native, expected, strict=True):
        close(one, other, definition)
    assert torch.equal(value, before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_store(dtype: torch.dtype) -> None:
    qkv = torch.randn(15, 15 * 64).to(dtype)
    source = qkv[:, 12 * 64 :].view(15, 3, 64)
    pool, expected = torch.zeros(64, 3, 64, dtype=dtype), torch.zeros(64, 3, 64, dtype=dtype)
    slots = torch.randperm(64)[:15]
    expected[slots] = source
    cpu_ops.store(source, pool, slots)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(
    ("layer", "ours"),
    [
        (RMSNorm(64), cpu_ops.rms_norm),
        (SiluAndMul(), cpu_ops.silu_and_mul),
        (RotaryEmbedding(64, 64, 128, 10000, True, torch.bfloat16), cpu_ops.rotate),
    ],
)
@pytest.mark.parametrize(("key", "active"), [(DISPATCH_KEY, True), ("other", False), (None, False)])
def test_serves_its_own_platform_only(
    monkeypatch: pytest.MonkeyPatch, layer: BaseFusedOp, ours: Any, key: str | None, active: bool
) -> None:
    cpu_ops.register(DISPATCH_KEY)
    monkeypatch.setattr("sglang.kernels.fused_op._oot_dispatch_key", lambda: key)
    method = layer._resolve_forward_method()
    assert (getattr(method, "__func__", None) is ours) == active


@pytest.fixture
def linear() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(96, 576).bfloat16(), requires_grad=False)
    layer.quant_method = UnquantizedLinearMethod()
    if cpu_linear.adopt(layer) == 0:
        pytest.skip("this CPU has no AMX")
    return layer


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 32, 33, 2900])
def test_small_products(linear: torch.nn.Module, num_rows: int) -> None:
    x = torch.randn(num_rows, 576).bfloat16()
    for _ in range(2):
        ours = linear.quant_method.apply(linear, x)
        exact = x.double() @ linear.weight.double().T
        torch.testing.assert_close(ours.double(), exact, rtol=1e-2, atol=1e-1)
        assert (ours.double() - exact).square().mean().sqrt() < 3e-3 * exact.square().mean().sqrt()
        linear.weight.data.copy_(torch.randn(96, 576))  # an update in place is seen by the next call


def test_products_of_other_forms_are_sglangs(linear: torch.nn.Module) -> None:
    x, bias = torch.randn(4, 576).bfloat16(), torch.randn(96).bfloat16()
    expected = torch.nn.functional.linear(x, linear.weight, bias)
    assert torch.equal(linear.quant_method.apply(linear, x, bias), expected)
    linear.weight.data = linear.weight.data.float()
    x = x.float()
    assert torch.equal(linear.quant_method.apply(linear, x), torch.nn.functional.linear(x, linear.weight))
