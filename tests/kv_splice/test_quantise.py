"""Int8 of keys and values against a search through all of fp16, and the error that arithmetic allows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kv_splice import QuantiseError, quantise
from kv_splice.quantise import LARGEST_QUANTISED, dequantise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Every positive finite number of fp16, ascending, in fp64.
HALVES = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
# Division in fp32 may take an element that lies half-way to either side.
SLACK = 1 + 127 * 2.0**-23


def kv(dtype: torch.dtype, *, tokens: int = 33, seed: int = 1) -> tuple[Tensor, Tensor]:
    """`[num_layers=3, tokens, num_kv_heads=2, head_dim=8]`, channels and tokens of very different size."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 3, tokens, 2, 8, generator=generator)
    sizes = torch.tensor([1e-4, 1e-2, 0.3, 1.0, 3.0, 20.0, 300.0, 2000.0])
    return (k * sizes).to(dtype), (v * sizes[torch.arange(tokens) % 8][:, None, None]).to(dtype)


def least_scales(x: Tensor, axis: int) -> np.ndarray:
    """The smallest fp16 of which 127 reach the largest magnitude along `axis`."""
    largest = x.double().abs().numpy().max(axis)
    return HALVES[np.searchsorted(127 * HALVES, largest)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_the_least_that_clip_nothing(dtype: torch.dtype) -> None:
    k, v = kv(dtype)
    _, _, scales = quantise(k, v)
    assert scales.keys.dtype == scales.values.dtype == torch.float16
    assert np.array_equal(scales.keys.double().numpy(), least_scales(k, 1))
    assert np.array_equal(scales.values.double().numpy(), least_scales(v, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_the_nearest_multiple_of_its_scale(dtype: torch.dtype) -> None:
    k, v = kv(dtype)
    k8, v8, scales = quantise(k, v)
    assert k8.dtype == v8.dtype == torch.int8
    assert k8.is_contiguous()
    assert v8.is_contiguous()
    for x, x8, scale, back in zip(
        (k, v), (k8, v8), (scales.keys[:, None], scales.values[..., None]), dequantise(k8, v8, scales), strict=True
    ):
        assert back.dtype == torch.float32
        assert torch.equal(back.double(), x8.double() * scale.double()), "nothing is rounded on the way back"
        assert ((x.double() - back.double()).abs() <= scale.double() / 2 * SLACK).all()
        assert int(x8.abs().max()) == 127
    # A channel of 2,000 leaves one of 1e-4 as exact as it would be alone.
    assert scales.keys[..., 0].max() < 1e-5


@given(st.lists(st.floats(-LARGEST_QUANTISED, LARGEST_QUANTISED, width=32), min_size=1, max_size=9))
def test_any_finite_numbers(numbers: list[float]) -> None:
    k = torch.tensor(numbers)[None, :, None, None]
    v = k.transpose(1, 3)
    for x, back in ((k, dequantise(*quantise(k, k))[0]), (v, dequantise(*quantise(v, v))[1])):
        largest = max(map(abs, numbers))
        error = (x.double() - back.double()).abs().max().item()
        assert error <= largest * 2.0**-7.98 + 2.0**-25
        assert back.abs().max().item() <= largest * (1 + 2.0**-10) + 127 * 2.0**-24


def test_by_hand() -> None:
    k = torch.tensor([[254.0, 0.0], [-127.0, -3.0], [2.9, 1.0]])[None, :, None]  # three tokens of two channels
    v = torch.tensor([[63.5, -0.2], [0.0, 0.0], [-1.0, 127.0]])[None, :, None]
    k8, v8, scales = quantise(k, v)
    assert scales.keys[0, 0, 0] == 2
    # 3 / 127 = 0.0236220...; in [2**-6, 2**-5) the numbers of fp16 lie 2**-16 apart
    assert scales.keys[0, 0, 1] == math.ceil(3 / 127 * 2**16) / 2**16
    assert k8[0, :, 0].tolist() == [[127, 0], [-64, -127], [1, 42]]  # -63.5 is rounded to even; 1 / 0.02362 = 42.3
    assert scales.values[0, :, 0].tolist() == [0.5, 0, 1]
    assert v8[0, :, 0].tolist() == [[127, 0], [0, 0], [-1, 127]]


def test_zeros_stay_zeros() -> None:
    k = torch.zeros(2, 3, 1, 4)
    k[..., 1] = -0.0
    k8, v8, scales = quantise(k, k)
    assert not scales.keys.any()
    assert not scales.values.any()
    for back in dequantise(k8, v8, scales):
        assert torch.equal(back, torch.zeros(2, 3, 1, 4))


@pytest.mark.parametrize("number", [2.0**-149, 2.0**-126, 1e-30, 2.0**-26, 2.0**-24, 1e-6])
def test_a_scale_does_not_underflow(number: float) -> None:
    k = torch.full((1, 2, 1, 2), number)
    k8, v8, scales = quantise(k, k)
    assert scales.keys.min() == 2.0**-24
    for back in dequantise(k8, v8, scales):
        assert (back - k).abs().max() <= 2.0**-25


@pytest.mark.parametrize("number", [65504.0, -65504.0, 65472.0, 65440.0, 32752.0])
def test_the_largest_numbers_of_fp16_come_back_finite(number: float) -> None:
    k = torch.tensor([number, 0.1, 300.0]).half()[None, :, None, None]
    for x in (k, k.transpose(1, 3)):
        for back in dequantise(*quantise(x, x)):
            assert back.half().isfinite().all()
            scale = abs(number) / 127
            assert (back.double() - x.double()).abs().max() <= scale / 2 * (1 + 2**-10)


def test_the_largest_numbers_of_all() -> None:
    largest = torch.tensor(LARGEST_QUANTISED)
    assert LARGEST_QUANTISED == 127 * 65504
    for dtype in (torch.float32, torch.bfloat16):
        k = torch.full((1, 2, 1, 2), float(largest) * (1 if dtype == torch.float32 else 0.99), dtype=dtype)
        for back in dequantise(*quantise(k, -k)):
            assert (back.abs() - k.float()).abs().max() <= 65504 / 2
    beyond = torch.full((1, 2, 1, 2), float(torch.nextafter(largest, torch.tensor(math.inf))))
    with pytest.raises(QuantiseError, match="magnitudes up to 8319008"):
        quantise(beyond, beyond)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_refused(dtype: torch.dtype, number: float) -> None:
    for which in range(2):
        both = list(kv(dtype))
        both[which][1, 4, 0, 3] = number
        with pytest.raises(QuantiseError, match=f"{'KV'[which]} holds"):
            quantise(*both)


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)),
        (torch.zeros(2, 3, 1, 4), torch.zeros(2, 4, 1, 4)),
        (torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 4).half()),
        (torch.zeros(2, 3, 1, 4).double(), torch.zeros(2, 3, 1, 4).double()),
        (torch.zeros(2, 3, 1, 4, dtype=torch.int8), torch.zeros(2, 3, 1, 4, dtype=torch.int8)),
        (torch.zeros(2, 0, 1, 4), torch.zeros(2, 0, 1, 4)),
    ],
    ids=["three dimensions", "two shapes", "two dtypes", "fp64", "int8", "empty"],
)
def test_other_tensors_are_refused(k: Tensor, v: Tensor) -> None:
    with pytest.raises(QuantiseError, match=r"both must be \[num_layers"):
        quantise(k, v)


def test_views_are_read_as_they_are() -> None:
    k, v = kv(torch.bfloat16)
    both = torch.stack((k, v), dim=-1)
    assert not both[..., 0].is_contiguous()
    for ours, expected in zip(quantise(both[..., 0], both[..., 1])[:2], quantise(k, v)[:2], strict=True):
        assert torch.equal(ours, expected)
        assert ours.is_contiguous()


@pytest.mark.parametrize("tokens", [20, 23, 51, 1000])
def test_bytes(tokens: int) -> None:
    layers, heads, head_dim = 5, 3, 64
    k, v = torch.randn(2, layers, tokens, heads, head_dim).bfloat16()
    k8, v8, scales = quantise(k, v)
    stored = sum(x.nbytes for x in (k8, v8, *scales))
    native = k.nbytes + v.nbytes
    assert stored == pytest.approx(native * (1 / 2 + 1 / (2 * tokens) + 1 / (2 * head_dim)))
    assert stored <= 0.55 * native
