"""What the launcher refuses, by name and before any write."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu_cases import Case, case

from kv_splice import ArenaScales, KVScales, QuantiseError, SpliceError, UnsupportedDevice
from kv_splice.facts import Facts, FactScales
from kv_splice.gpu import LAUNCHES, capture_quantised, quantise_fact, unrotate_capture

FACTS = Facts(torch.tensor([0, 2, 5]), torch.tensor([0, 3]))
TABLE = torch.rand(40, 64)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, 2 bytes off."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    return memory[1:].view(x.shape).copy_(x)


def narrower(it: Case) -> dict[str, Any]:
    """Heads of 60 elements: 120 bytes."""
    cut = {name: getattr(it, name)[..., :60].contiguous() for name in ("arena_k", "arena_v")}
    pools = {name: [pool[..., :60].contiguous() for pool in getattr(it, name)] for name in ("k_pools", "v_pools")}
    return {**cut, **pools, "cos_sin": it.cos_sin[:, :60]}


def at(x: torch.Tensor, index: int, value: int) -> torch.Tensor:
    return x.index_fill(0, torch.tensor([index]), value)


def rows_of(it: Case) -> torch.Tensor:
    assert it.rows is not None
    return it.rows


def in_one(it: Case, *, apart: int, layers_apart: int = 0) -> dict[str, Any]:
    """Keys and values of a token in one row, values `apart` elements behind keys, and layers further on."""
    width = it.k_pools[0][0].numel()
    memory = torch.zeros(11, 4 * width, dtype=torch.bfloat16)
    starts = [layer * layers_apart for layer in range(2)]
    keys, values = ([memory[:, at + to : at + to + width].unflatten(1, (2, 64)) for at in starts] for to in (0, apart))
    return {"k_pools": keys, "v_pools": values}


def out_of_a_pool(it: Case) -> dict[str, Any]:
    """An arena in the memory of the last value pool."""
    memory = torch.zeros(2, 11, 2, 64, dtype=torch.bfloat16)
    return {"v_pools": list(memory), "arena_k": memory[:, 3:]}


Mistake = tuple[Callable[[Case], dict[str, Any]], str]
MISTAKES: dict[str, Mistake] = {
    "two layers in one pool": (
        lambda it: {"k_pools": it.k_pools[:1] * 2},
        r"k_pools\[0\] and k_pools\[1\] share memory",
    ),
    "keys and values in one pool": (
        lambda it: {"v_pools": it.k_pools},
        r"k_pools\[0\] and v_pools\[0\] share memory",
    ),
    "pools half a token apart": (
        lambda it: in_one(it, apart=64, layers_apart=256),
        r"k_pools\[0\] and v_pools\[0\] share memory",
    ),
    "layers half a token apart": (
        lambda it: in_one(it, apart=128, layers_apart=192),
        r"k_pools\[1\] and v_pools\[0\] share memory",
    ),
    "an arena in a pool": (out_of_a_pool, r"v_pools\[0\] and arena_k share memory"),
    "slots in two dimensions": (lambda it: {"slots": it.slots[None]}, r"slots is torch.int64 of shape \(1, 5\)"),
    "slots past 64 bits of bytes": (
        lambda it: {"slots": at(it.slots, 1, 2**62)},
        "slots from .* to 4611686018427387904",
    ),
    "slots on another device": (lambda it: {"slots": it.slots.to("meta")}, "slots is on meta"),
    "a pool without slots": (
        lambda it: {name: [pool[:0] for pool in getattr(it, name)] for name in ("k_pools", "v_pools")},
        r"slots from .* leave \[0, 0\)",
    ),
    "one slot that seems to be eleven": (
        lambda it: {"k_pools": [pool[:1].expand(11, 2, 64) for pool in it.k_pools]},
        r"k_pools\[0\] has strides \(0, 64, 1\)",
    ),
    "pools on another device": (
        lambda it: {"v_pools": [pool.to("meta") for pool in it.v_pools]},
        r"v_pools\[0\] is torch.bfloat16 on meta",
    ),
    "pools with fewer heads": (
        lambda it: {name: [pool[:, :1] for pool in getattr(it, name)] for name in ("k_pools", "v_pools")},
        r"k_pools\[0\] has shape \(11, 1, 64\), not \(11, 2, 64\)",
    ),
    "an arena in three dimensions": (
        lambda it: {"arena_k": it.arena_k[0], "arena_v": it.arena_v[0]},
        "arenas have shapes",
    ),
    "arenas of two shapes": (lambda it: {"arena_v": it.arena_v[:, :-1]}, "arenas have shapes"),
    "an arena without rows": (
        lambda it: {"arena_k": it.arena_k[:, :0], "arena_v": it.arena_v[:, :0]},
        r"rows from .* leave \[0, 0\)",
    ),
    "an arena on another device": (lambda it: {"arena_k": it.arena_k.to("meta")}, "arena_k is on meta"),
    "elements of an arena apart": (
        lambda it: {"arena_k": it.arena_k.transpose(2, 3).contiguous().transpose(2, 3)},
        "arena_k has strides",
    ),
    "a negative row": (lambda it: {"rows": at(rows_of(it), 1, -1)}, "rows from -1"),
    "rows in floating point": (lambda it: {"rows": rows_of(it).float()}, "rows is torch.float32"),
    "cos_sin in one dimension": (lambda it: {"cos_sin": it.cos_sin[:, 0]}, "cos_sin has shape"),
    "an odd number of angles": (lambda it: {"cos_sin": it.cos_sin[:, :7]}, "cos_sin turns 7 of 64"),
    "no angles": (lambda it: {"cos_sin": it.cos_sin[:, :0]}, "cos_sin turns 0 of 64"),
    "cos_sin on another device": (lambda it: {"cos_sin": it.cos_sin.to("meta")}, "on meta"),
    "positions of int32": (
        lambda it: {"cos_sin": TABLE, "positions": torch.arange(5, dtype=torch.int32)},
        "positions is torch.int32",
    ),
    "a table without rows": (
        lambda it: {"cos_sin": TABLE[:0], "positions": torch.arange(5)},
        r"positions from 0 to 4 leave \[0, 0\)",
    ),
    "a first row below the arena": (
        lambda it: {"rows": None, "facts": FACTS._replace(first_rows=torch.tensor([-1, 3]))},
        "first_rows from -1",
    ),
    "an offset past the tokens": (
        lambda it: {"rows": None, "facts": FACTS._replace(offsets=torch.tensor([0, 6, 5]))},
        "offsets from 0 to 6",
    ),
    "slot past the pool": (lambda it: {"slots": at(it.slots, 1, 11)}, r"slots from .* leave \[0, 11\)"),
    "negative slot": (lambda it: {"slots": at(it.slots, 1, -1)}, "slots from -1"),
    "repeated slot": (lambda it: {"slots": at(it.slots, 1, int(it.slots[3]))}, "slots repeat"),
    "slots of int32": (lambda it: {"slots": it.slots.int()}, "slots is torch.int32"),
    "row past the arena": (lambda it: {"rows": at(rows_of(it), 1, 8)}, r"rows from .* leave \[0, 8\)"),
    "too few rows": (lambda it: {"rows": rows_of(it)[1:]}, "4 rows for 5 slots"),
    "a blob of another length": (lambda it: {"rows": None}, "a blob of 8 tokens for 5 slots"),
    "no layers": (lambda it: {"k_pools": [], "v_pools": []}, "0 key pools"),
    "too few pools": (lambda it: {"v_pools": it.v_pools[1:]}, "2 key and 1 value pools"),
    "pools of fp64": (
        lambda it: {name: [p.double() for p in getattr(it, name)] for name in ("k_pools", "v_pools")},
        "pools are torch.float64",
    ),
    "an arena of another dtype": (lambda it: {"arena_k": it.arena_k.half()}, "arena_k is torch.float16"),
    "int8 without scales": (lambda it: {"arena_k": it.arena_k.char()}, "arena_k is torch.int8; int8 takes scales"),
    "pools of two strides": (
        lambda it: {
            "k_pools": [it.k_pools[0], torch.zeros(11, 128 + 8, dtype=torch.bfloat16)[:, :128].view(11, 2, 64)]
        },
        r"tokens of k_pools are \[128, 136\] elements apart",
    ),
    "heads apart": (
        lambda it: {"k_pools": [p.transpose(1, 2).contiguous().transpose(1, 2) for p in it.k_pools]},
        r"k_pools\[0\] has strides",
    ),
    "a pool off 16 bytes": (
        lambda it: {"k_pools": [it.k_pools[0], shifted(it.k_pools[1])]},
        r"k_pools\[1\] starts 2 bytes past",
    ),
    "an arena off 16 bytes": (lambda it: {"arena_v": shifted(it.arena_v)}, "arena_v starts 2 bytes past"),
    "tokens off 16 bytes": (
        lambda it: {"k_pools": [torch.zeros(11, 130, dtype=torch.bfloat16)[:, :128].view(11, 2, 64) for _ in range(2)]},
        r"tokens or layers of k_pools\[0\] are 260 bytes apart",
    ),
    "head_dim off 16 bytes": (narrower, r"heads of k_pools\[0\] are 120 bytes apart"),
    "cos_sin too short": (lambda it: {"cos_sin": it.cos_sin[:-1]}, "cos_sin has shape"),
    "cos_sin too wide": (lambda it: {"cos_sin": it.cos_sin.repeat(1, 2)}, "cos_sin turns 128 of 64"),
    "cos_sin in bf16": (lambda it: {"cos_sin": it.cos_sin.bfloat16()}, "cos_sin is torch.bfloat16"),
    "a table too short for a position": (
        lambda it: {"cos_sin": TABLE, "positions": torch.tensor([0, 1, 40, 3, 4])},
        r"positions from 0 to 40 leave \[0, 40\)",
    ),
    "a negative position": (
        lambda it: {"cos_sin": TABLE, "positions": torch.tensor([0, 1, -1, 3, 4])},
        "positions from -1",
    ),
    "too few positions": (lambda it: {"cos_sin": TABLE, "positions": torch.arange(4)}, "4 positions for 5 slots"),
    "a table in fp64": (
        lambda it: {"cos_sin": TABLE.double(), "positions": torch.arange(5)},
        "cos_sin is torch.float64",
    ),
    "rows and facts": (lambda it: {"facts": FACTS}, "rows and facts"),
    "offsets short of the end": (
        lambda it: {"rows": None, "facts": FACTS._replace(offsets=torch.tensor([0, 2, 4]))},
        "3 offsets do not go from 0 to 5",
    ),
    "offsets that fall": (
        lambda it: {"rows": None, "facts": Facts(torch.tensor([0, 4, 2, 5]), torch.tensor([0, 0, 0]))},
        "offsets fall",
    ),
    "no facts": (
        lambda it: {"rows": None, "facts": Facts(torch.tensor([0]), torch.tensor([], dtype=torch.int64))},
        "1 offsets do not go",
    ),
    "too few first rows": (
        lambda it: {"rows": None, "facts": FACTS._replace(first_rows=torch.tensor([0]))},
        "1 first rows for 2 facts",
    ),
    "a fact past the arena": (
        lambda it: {"rows": None, "facts": FACTS._replace(first_rows=torch.tensor([0, 6]))},
        "a fact ends at row 9 of 8",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_writes_nothing(name: str) -> None:
    it = case()
    change, message = MISTAKES[name]
    changes = change(it)
    pools = [*it.k_pools, *it.v_pools, *changes.get("k_pools", []), *changes.get("v_pools", [])]
    pools = [pool for pool in pools if pool.device.type != "meta"]
    before, launches = [pool.clone() for pool in pools], LAUNCHES.total()
    with pytest.raises(SpliceError, match=message):
        it.run(**changes)
    assert LAUNCHES.total() == launches
    for pool, was in zip(pools, before, strict=True):
        torch.testing.assert_close(pool, was, rtol=0, atol=0, equal_nan=True)


def scales_of(it: Case) -> ArenaScales:
    assert it.scales is not None
    return it.scales


SCALE_MISTAKES: dict[str, Mistake] = {
    "the scales of one fact": (
        lambda it: {"scales": KVScales(scales_of(it).keys[:, 0], scales_of(it).values)},
        "scales are KVScales",
    ),
    "no sets": (
        lambda it: {"scales": scales_of(it)._replace(keys=scales_of(it).keys[:, :0])},
        r"scales.sets from .* leave \[0, 0\)",
    ),
    "value scales of other rows": (
        lambda it: {"scales": scales_of(it)._replace(values=scales_of(it).values[:, :-1])},
        r"scales.values has shape \(2, 7, 2\)",
    ),
    "key scales in three dimensions": (
        lambda it: {"scales": scales_of(it)._replace(keys=scales_of(it).keys[:, 0])},
        "scales.keys has shape",
    ),
    "too few sets": (
        lambda it: {"scales": scales_of(it)._replace(sets=scales_of(it).sets[1:])},
        "scales.sets of 4 tokens for 5 slots",
    ),
    "scales on another device": (
        lambda it: {"scales": scales_of(it)._replace(values=scales_of(it).values.to("meta"))},
        "scales.values is torch.float16 on meta",
    ),
    "key scales in fp32": (
        lambda it: {"scales": scales_of(it)._replace(keys=scales_of(it).keys.float())},
        "scales.keys is torch.float32",
    ),
    "key scales off 16 bytes": (
        lambda it: {"scales": scales_of(it)._replace(keys=shifted(scales_of(it).keys))},
        "scales.keys starts 2 bytes past",
    ),
    "a set past the end": (
        lambda it: {"scales": scales_of(it)._replace(sets=at(scales_of(it).sets, 0, 3))},
        r"scales.sets from .* leave \[0, 3\)",
    ),
    "an arena's scales with facts": (lambda it: {"rows": None, "facts": FACTS}, "scales of facts go with facts"),
    "facts' scales with rows": (
        lambda it: {"scales": FactScales(scales_of(it).keys, scales_of(it).values)},
        "scales of facts go with facts",
    ),
    "a set too many": (
        lambda it: {
            "rows": None,
            "facts": FACTS,
            "scales": FactScales(scales_of(it).keys, scales_of(it).values),
        },
        "3 sets of scales for 2 facts",
    ),
    "heads of 8 bytes": (
        lambda it: {
            **{name: getattr(it, name)[..., :8].contiguous() for name in ("arena_k", "arena_v")},
            **{n: [p[..., :8].contiguous() for p in getattr(it, n)] for n in ("k_pools", "v_pools")},
            "cos_sin": it.cos_sin[:, :8],
            "scales": scales_of(it)._replace(keys=scales_of(it).keys[..., :8].contiguous()),
        },
        "heads of arena_k are 8 bytes apart",
    ),
}


@pytest.mark.parametrize("name", SCALE_MISTAKES)
def test_a_mistake_with_scales_is_named_and_writes_nothing(name: str) -> None:
    it = case(source=torch.int8)
    change, message = SCALE_MISTAKES[name]
    with pytest.raises(SpliceError, match=message):
        it.run(**change(it))
    assert all(bool(pool.isnan().all()) for pool in it.k_pools + it.v_pools)


def test_a_device_that_has_no_kernel() -> None:
    it = case()
    pools = [pool.to("meta") for pool in it.k_pools]
    with pytest.raises(UnsupportedDevice, match="pools are on meta"):
        it.run(k_pools=pools, v_pools=pools)


CAPTURE_MISTAKES: dict[str, Mistake] = {
    "negative slot": (lambda it: {"slots": at(it.slots, 1, -1)}, "slots from -1"),
    "slots of int32": (lambda it: {"slots": it.slots.int()}, "slots is torch.int32"),
    "an odd number of angles": (lambda it: {"cos_sin": it.cos_sin[:, :7]}, "cos_sin turns 7 of 64"),
    "pools of two dtypes": (
        lambda it: {"v_pools": [pool.half() for pool in it.v_pools]},
        "v_pools.0. is torch.float16",
    ),
    "too few positions": (lambda it: {"cos_sin": TABLE, "positions": torch.arange(4)}, "4 positions for 5 slots"),
    "slot past the pool": (lambda it: {"slots": at(it.slots, 1, 11)}, "slots from .* leave"),
    "no layers": (lambda it: {"k_pools": [], "v_pools": []}, "0 key pools"),
    "too few pools": (lambda it: {"v_pools": it.v_pools[1:]}, "2 key and 1 value pools"),
    "cos_sin too short": (lambda it: {"cos_sin": it.cos_sin[:-1]}, "cos_sin has shape"),
    "a table too short for a position": (
        lambda it: {"cos_sin": TABLE, "positions": torch.tensor([0, 1, 40, 3, 4])},
        "positions from 0 to 40 leave",
    ),
    "a pool off 16 bytes": (lambda it: {"k_pools": [shifted(pool) for pool in it.k_pools]}, "starts 2 bytes past"),
    "pools in two dimensions": (
        lambda it: {n: [p.flatten(1) for p in getattr(it, n)] for n in ("k_pools", "v_pools")},
        r"k_pools\[0\] has shape \(11, 128\)",
    ),
}


@pytest.mark.parametrize("name", CAPTURE_MISTAKES)
@pytest.mark.parametrize("quantised", [False, True], ids=["native", "int8"])
def test_a_mistake_with_a_capture_is_named(name: str, quantised: bool) -> None:
    it = case()
    change, message = CAPTURE_MISTAKES[name]
    arguments = {key: getattr(it, key) for key in ("k_pools", "v_pools", "slots", "cos_sin", "is_neox")}
    arguments.update(change(it))
    launches = LAUNCHES.total()
    run = partial(capture_quantised, offsets=torch.tensor([0, 5])) if quantised else unrotate_capture
    with pytest.raises(SpliceError, match=message):
        run(**arguments)
    assert LAUNCHES.total() == launches


@pytest.mark.parametrize("offsets", [[0, 4], [1, 5], [0, 3, 2, 5], [5], []], ids=str)
def test_offsets_that_are_no_facts(offsets: list[int]) -> None:
    it = case()
    with pytest.raises(SpliceError, match="offsets"):
        capture_quantised(
            it.k_pools,
            it.v_pools,
            it.slots,
            it.cos_sin,
            offsets=torch.tensor(offsets, dtype=torch.int64),
            is_neox=True,
        )


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (torch.zeros(1, 0, 1, 64), torch.zeros(1, 0, 1, 64)),
        (torch.zeros(1, 2, 64), torch.zeros(1, 2, 64)),
        (torch.zeros(1, 2, 1, 64), torch.zeros(1, 3, 1, 64)),
        (torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64).half()),
        (torch.zeros(1, 2, 1, 64).double(), torch.zeros(1, 2, 1, 64).double()),
    ],
    ids=["empty", "flat", "lengths", "dtypes", "fp64"],
)
def test_what_quantise_does_not_take(k: torch.Tensor, v: torch.Tensor) -> None:
    with pytest.raises(QuantiseError, match="both must be"):
        quantise_fact(k, v)


def test_keys_and_values_on_two_devices() -> None:
    with pytest.raises(SpliceError, match="V is on meta, not on cpu"):
        quantise_fact(torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64, device="meta"))
