"""The capture kernels, interpreted: RoPE's inverse as the reference has it, and int8 as `quantise` has it."""

from typing import NamedTuple

import pytest
import torch
from gpu_cases import angles, pools
from torch import Tensor

from kv_splice import ArenaScales, QuantiseError, RopeScaling, RopeSpec, quantise, rotate_keys, unrotate_keys
from kv_splice.facts import Facts
from kv_splice.gpu import (
    LAUNCHES,
    TILES,
    capture_quantised,
    launch_capture,
    quantise_fact,
    splice,
    unrotate_capture,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
WIDTHS = pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (80, 80), (80, 32), (96, 48), (128, 128), (256, 64)]
)


class Served(NamedTuple):
    """A pool with tokens in it, and their angles."""

    k_pools: list[Tensor]
    v_pools: list[Tensor]
    slots: Tensor
    cos_sin: Tensor


def served(
    num_tokens: int = 5,
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 16,
) -> Served:
    torch.manual_seed(7)
    slots = torch.randperm(num_tokens + 4)[:num_tokens]
    k_pools, v_pools = (pools(layers, num_tokens + 4, heads, head_dim, dtype=dtype, padding=padding) for _ in range(2))
    for pool in k_pools + v_pools:
        pool[slots] = (torch.randn(num_tokens, heads, head_dim) * 3).to(dtype)
    return Served(k_pools, v_pools, slots, angles(torch.randint(0, 4000, (num_tokens,)), rotary_dim or head_dim))


def plain(it: Served, *, is_neox: bool) -> tuple[Tensor, Tensor]:
    """Keys before rotation and values, by the reference."""
    keys = torch.stack([pool[it.slots] for pool in it.k_pools])
    values = torch.stack([pool[it.slots] for pool in it.v_pools])
    return unrotate_keys(keys, it.cos_sin, is_neox=is_neox).to(keys.dtype), values


@NEOX
@WIDTHS
@pytest.mark.parametrize("dtype", DTYPES)
def test_undoes_the_rotation(head_dim: int, rotary_dim: int, dtype: torch.dtype, is_neox: bool) -> None:
    it = served(head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype)
    before = LAUNCHES["capture"]
    k, v = unrotate_capture(*it, is_neox=is_neox)
    assert LAUNCHES["capture"] == before + 1
    want_k, want_v = plain(it, is_neox=is_neox)
    assert torch.equal(k, want_k)
    assert torch.equal(v, want_v)


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("num_tokens", [1, 63])
def test_lengths_and_heads_of_a_capture(num_tokens: int, heads: int) -> None:
    it = served(num_tokens, layers=1, heads=heads)
    k, v = launch_capture(*it, is_neox=True, tile=TILES[-1])
    assert torch.equal(k, plain(it, is_neox=True)[0])
    assert torch.equal(v, plain(it, is_neox=True)[1])


def test_an_amplitude_and_a_narrow_table_cancel() -> None:
    scaling = RopeScaling(kind="yarn", factor=8.0, original_positions=512, amplitude=1.2)
    spec = RopeSpec(head_dim=64, rotary_dim=64, is_neox=True, base=1e4, scaling=scaling)
    table, positions = spec.cos_sin(torch.arange(40)).bfloat16(), torch.tensor([39, 0, 3, 3, 20])
    it = served(dtype=torch.float32)
    before = torch.randn(2, 5, 2, 64)
    for pool, keys in zip(it.k_pools, rotate_keys(before, table[positions].float(), is_neox=True), strict=True):
        pool[it.slots] = keys
    k, _ = unrotate_capture(it.k_pools, it.v_pools, it.slots, table, positions=positions, is_neox=True)
    torch.testing.assert_close(k, before, rtol=1e-5, atol=1e-5)


def test_captures_out_of_pools_of_more_than_2_to_the_31_elements() -> None:
    """Memory that nobody writes is never there: a few pages are."""
    num_slots = 2**31 // (16 * 128) + 8
    k_pools, v_pools = ([torch.empty(num_slots, 16, 128, dtype=torch.bfloat16)] for _ in "kv")
    slots = torch.tensor([num_slots - 1, 2, num_slots - 5])
    for pool in k_pools + v_pools:
        pool[slots] = torch.randn(3, 16, 128).bfloat16()
    it = Served(k_pools, v_pools, slots, angles(torch.tensor([7, 0, 3999]), 128))
    k, v = unrotate_capture(*it, is_neox=True)
    assert torch.equal(k, plain(it, is_neox=True)[0])
    assert torch.equal(v[0], v_pools[0][slots])
    check_quantised(it, [1, 2], is_neox=True)


def test_capture_of_nothing_in_int8() -> None:
    got = capture_quantised(*served(0), offsets=torch.tensor([0, 0]), is_neox=True)
    assert got.k.shape == got.v.shape == (2, 0, 2, 64)
    assert got.scales.values.shape == (2, 0, 2)
    assert not got.scales.keys.any()


def test_capture_of_nothing() -> None:
    it = served(0)
    k, v = unrotate_capture(*it, is_neox=True)
    assert k.shape == v.shape == (2, 0, 2, 64)


@NEOX
@WIDTHS
@pytest.mark.parametrize("dtype", DTYPES)
def test_captures_a_fact_in_int8(head_dim: int, rotary_dim: int, dtype: torch.dtype, is_neox: bool) -> None:
    check_quantised(served(5, layers=1, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype), [5], is_neox=is_neox)


@NEOX
@pytest.mark.parametrize("lengths", [[1, 0, 17, 16], [0, 33, 0]], ids=str)
def test_captures_facts_of_any_length_in_int8(lengths: list[int], is_neox: bool) -> None:
    check_quantised(served(sum(lengths), head_dim=80, rotary_dim=32), lengths, is_neox=is_neox)


def check_quantised(it: Served, lengths: list[int], *, is_neox: bool) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    before = LAUNCHES["quantise"]
    got = capture_quantised(*it, offsets=offsets, is_neox=is_neox)
    assert LAUNCHES["quantise"] == before + 1
    want_k, want_v = plain(it, is_neox=is_neox)
    for fact, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if start == end:
            continue
        k, v, scales = quantise(want_k[:, start:end], want_v[:, start:end])
        assert torch.equal(got.scales.keys[:, fact], scales.keys)
        assert torch.equal(got.scales.values[:, start:end], scales.values)
        assert torch.equal(got.k[:, start:end], k)
        assert torch.equal(got.v[:, start:end], v)


def test_positions_of_a_quantised_capture() -> None:
    it = served(rotary_dim=32)
    table, positions = angles(torch.arange(40), 32).bfloat16(), torch.tensor([39, 0, 3, 3, 20])
    offsets = torch.tensor([0, 2, 5])
    got = capture_quantised(it.k_pools, it.v_pools, it.slots, table, positions=positions, offsets=offsets, is_neox=True)
    want = capture_quantised(*it[:3], table[positions].float(), offsets=offsets, is_neox=True)
    assert torch.equal(got.k, want.k)
    assert torch.equal(got.scales.keys, want.scales.keys)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_quantises_like_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(9)
    k, v = (torch.randn(2, 2, 37, 3, head_dim) * 10.0 ** torch.randint(-6, 3, (2, 2, 37, 3, head_dim))).to(dtype)
    k[:, :, 1, 3] = v[0, 5] = 0
    got, want = quantise_fact(k, v), quantise(k, v)
    for ours, theirs in ((got[0], want[0]), (got[1], want[1]), *zip(got[2], want[2], strict=True)):
        assert torch.equal(ours, theirs)


def test_quotients_next_to_the_middle_of_two_steps() -> None:
    """Of all scales that fp16 has, each with numbers one, two or no units in the last place off a half."""
    torch.manual_seed(11)
    scales = (
        torch.arange(1, 0x7C00, dtype=torch.int16)[: 0x7BFF // 64 * 64].view(torch.float16).float().view(1, 1, -1, 64)
    )
    steps = torch.randint(-127, 127, (1, 8, *scales.shape[2:])) + 0.5
    numbers = steps * scales
    off = torch.randint(-2, 3, numbers.shape, dtype=torch.int32)
    # The first token makes each channel's scale what it is: 127 of it.
    k = torch.cat((127 * scales, (numbers.view(torch.int32) + off).view(torch.float32)), dim=1)
    k8, _, found = quantise_fact(k, k)
    assert torch.equal(found.keys.float(), scales[:, 0])
    want = (k.double() / scales.double()).float().round()
    assert torch.equal(k8.float(), want)


def test_halfway_goes_to_even_and_the_largest_to_127() -> None:
    k = torch.zeros(1, 4, 1, 64)
    k[0, :, 0, 0] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    k8, _, scales = quantise_fact(k, k)
    assert scales.keys[0, 0, 0] == 1
    assert k8[0, :, 0, 0].tolist() == [127, 0, 2, -2]


def test_the_largest_number_of_fp16() -> None:
    k = torch.full((1, 3, 1, 64), 65504.0, dtype=torch.float16)
    k8, _, scales = quantise_fact(k, k)
    assert scales.keys.unique().tolist() == [515.5]
    assert (k8.float() * 515.5).half().isfinite().all()


NOT_HELD = {
    "nan": ("k", 7, float("nan")),
    "infinity": ("k", 7, -float("inf")),
    "large key": ("k", 7, 1e30),
    "large tail": ("k", 40, -8319009.0),
    "nan in a value": ("v", 7, float("nan")),
    "large value": ("v", 63, 8319009.0),
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_a_fact_that_int8_does_not_hold_is_named(name: str) -> None:
    of, element, bad = NOT_HELD[name]
    it = served(6, dtype=torch.float32, rotary_dim=32)
    pools = it.k_pools if of == "k" else it.v_pools
    pools[1][it.slots[4], 1, element] = bad
    with pytest.raises(QuantiseError, match=r"facts \[2\] hold"):
        capture_quantised(*it, offsets=torch.tensor([0, 1, 4, 6]), is_neox=True)


def test_the_largest_that_int8_holds() -> None:
    it = served(6, dtype=torch.float32, rotary_dim=32)
    it.k_pools[1][it.slots[4], 1, 40] = it.v_pools[1][it.slots[4], 1, 63] = 8319008.0
    got = capture_quantised(*it, offsets=torch.tensor([0, 1, 4, 6]), is_neox=True)
    assert got.scales.keys[1, 2, 1, 40] == got.scales.values[1, 4, 1] == 65504
    assert got.k[1, 4, 1, 40] == got.v[1, 4, 1, 63] == 127


@NEOX
def test_what_was_captured_in_int8_is_spliced_back(is_neox: bool) -> None:
    it = served(12, rotary_dim=32, dtype=torch.float32)
    offsets = torch.tensor([0, 7, 12])
    got = capture_quantised(*it, offsets=offsets, is_neox=is_neox)
    k_pools, v_pools = (pools(2, 20, 2, 64, dtype=torch.float32) for _ in range(2))
    facts = Facts(offsets, offsets[:-1])
    splice(got.k, got.v, it.cos_sin, it.slots, k_pools, v_pools, scales=got.scales, facts=facts, is_neox=is_neox)
    for pool, want in zip(k_pools + v_pools, it.k_pools + it.v_pools, strict=True):
        # Half a step of a 127th of the largest number, a fifth of it more where a pair turns.
        torch.testing.assert_close(pool[it.slots], want[it.slots], rtol=0, atol=0.1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(k_pools[0][it.slots], it.k_pools[0][it.slots], rtol=0, atol=1e-4)


def test_scales_of_an_arena_take_what_was_captured() -> None:
    it = served(12, dtype=torch.float32)
    offsets = torch.tensor([0, 7, 12])
    got = capture_quantised(*it, offsets=offsets, is_neox=True)
    by_facts, by_rows = ([pools(2, 16, 2, 64, dtype=torch.float32) for _ in "kv"] for _ in range(2))
    sets = torch.tensor([0] * 7 + [1] * 5)
    arguments = (got.k, got.v, it.cos_sin, it.slots)
    splice(*arguments, *by_facts, scales=got.scales, facts=Facts(offsets, offsets[:-1]), is_neox=True)
    splice(*arguments, *by_rows, scales=ArenaScales(got.scales.keys, sets, got.scales.values), is_neox=True)
    for ours, theirs in zip(by_facts[0] + by_facts[1], by_rows[0] + by_rows[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
