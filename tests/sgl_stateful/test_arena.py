from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_splice import KVScales, quantise
from memstore import EncodingId
from sgl_stateful.splice import ArenaFullError, FactArena

LAYERS, HEADS, DIM = 2, 1, 2
BYTES_PER_TOKEN = 2 * LAYERS * HEADS * DIM * 4  # keys and values, fp32
# Keys and values, an fp16 scale of a head's values in each layer, and where the scales of its keys are.
BYTES_PER_INT8 = 2 * LAYERS * HEADS * DIM + 2 * LAYERS * HEADS + 8
NAMES = [EncodingId(letter * 4) for letter in "abcdefgh"]


def arena_of(rows: int, *, spare_bytes: int = 0, dtype: torch.dtype = torch.float32) -> FactArena:
    row_bytes = BYTES_PER_INT8 if dtype == torch.int8 else BYTES_PER_TOKEN
    return FactArena(
        budget_bytes=rows * row_bytes + spare_bytes,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=dtype,
        device="cpu",
    )


def content(number: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(number))
    return both[0], both[1]


def is_run(rows: torch.Tensor) -> bool:
    return all(b == a + 1 for a, b in pairwise(rows.tolist()))


class Content(NamedTuple):
    """What the model remembers of a fact."""

    k: torch.Tensor
    v: torch.Tensor
    scales: KVScales | None
    rows: int

    def copy(self) -> Content:
        scales = None if self.scales is None else KVScales(*(tensor.clone() for tensor in self.scales))
        return Content(self.k.clone(), self.v.clone(), scales, self.rows)


class ArenaMachine(RuleBasedStateMachine):
    """The arena against a dict in order of use, which knows lengths and contents only."""

    dtype = torch.float32
    row_bytes = BYTES_PER_TOKEN
    extra_rows = 0

    @initialize(capacity=st.integers(0, 24))
    def open(self, capacity: int) -> None:
        self.capacity = capacity
        self.arena = arena_of(capacity, spare_bytes=self.row_bytes - 1, dtype=self.dtype)
        self.model: OrderedDict[EncodingId, Content] = OrderedDict()
        self.made = self.evicted = self.hits = self.misses = 0

    def made_of(self, tokens: int) -> Content:
        return Content(*content(self.made, tokens), None, tokens)

    def model_free(self) -> int:
        return self.capacity - sum(fact.rows for fact in self.model.values())

    def longest_free_run(self) -> int:
        taken = {row for name in self.model for row in self.arena._rows[name].tolist()}
        longest = length = 0
        for row in range(self.capacity):
            length = 0 if row in taken else length + 1
            longest = max(longest, length)
        return longest

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(0, 9), keep=st.frozensets(st.sampled_from(NAMES)))
    def put(self, name: EncodingId, tokens: int, keep: frozenset[EncodingId]) -> None:
        self.made += 1
        fact = self.made_of(tokens)
        ids = array("q", range(fact.k.shape[1]))
        self.model.pop(name, None)
        evictable = sum(other.rows for n, other in self.model.items() if n not in keep)
        if self.model_free() + evictable < fact.rows:  # then nothing is dropped in vain
            with pytest.raises(ArenaFullError, match=f"{len(ids)} tokens take {fact.rows} rows: "):
                self.arena.put(name, fact.k, fact.v, token_ids=ids, keep=keep, scales=fact.scales)
            return
        while self.model_free() < fact.rows:
            del self.model[next(n for n in self.model if n not in keep)]
            self.evicted += 1
        rows = self.arena.put(name, fact.k, fact.v, token_ids=ids, keep=keep, scales=fact.scales)
        assert len(rows) == len(ids)
        # Its own rows count as free: the longest run that there was before is the one that it could have had.
        run_there_was = self.longest_free_run()
        self.model[name] = fact.copy()
        for tensor in (fact.k, fact.v, *(fact.scales or ())):
            tensor.fill_(99)  # the arena holds a copy
        if run_there_was >= fact.rows:
            assert is_run(rows)

    @rule(name=st.sampled_from(NAMES))
    def use(self, name: EncodingId) -> None:
        rows = self.arena.rows(name)
        assert (rows is not None) == (name in self.model)
        if rows is None:
            self.misses += 1
        else:
            self.hits += 1
            self.model.move_to_end(name)

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: EncodingId) -> None:
        assert self.arena.drop(name) == (self.model.pop(name, None) is not None)

    @rule()
    def clear(self) -> None:
        self.arena.clear()
        self.model.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert [name for name in NAMES if name in self.arena] == [name for name in NAMES if name in self.model]
        assert list(self.arena._rows) == list(self.model), "order of use"
        taken: list[int] = []
        for name, fact in self.model.items():
            owned = self.arena._rows[name]
            assert owned.dtype == torch.int64
            assert len(owned) == fact.rows
            rows = owned[self.extra_rows :]
            assert torch.equal(self.arena.keys[:, rows], fact.k)
            assert torch.equal(self.arena.values[:, rows], fact.v)
            self.check_scales(rows, fact)
            taken += owned.tolist()
        assert len(taken) == len(set(taken)), "facts share a row"
        assert all(0 <= row < self.capacity for row in taken)
        assert self.arena.free_rows == self.model_free()
        assert not self.arena.fits_free(self.model_free() - self.extra_rows + 1)
        if self.model_free() >= self.extra_rows:
            assert self.arena.fits_free(self.model_free() - self.extra_rows)

    def check_scales(self, rows: torch.Tensor, fact: Content) -> None:
        assert self.arena.scales(rows) is None

    @invariant()
    def counts(self) -> None:
        used = self.capacity - self.model_free()
        assert self.arena.stats() == (
            len(self.model),
            used - self.extra_rows * len(self.model),
            used,
            self.capacity,
            used * self.row_bytes,
            self.hits,
            self.misses,
            self.evicted,
        )


class Int8ArenaMachine(ArenaMachine):
    """Facts of at least one token, with a row of their own for the scales of their keys."""

    dtype = torch.int8
    row_bytes = BYTES_PER_INT8
    extra_rows = 1

    def made_of(self, tokens: int) -> Content:
        k, v, scales = quantise(*content(self.made, max(tokens, 1)))
        return Content(k, v, scales, max(tokens, 1) + 1)

    def check_scales(self, rows: torch.Tensor, fact: Content) -> None:
        found = self.arena.scales(rows)
        assert found is not None
        assert fact.scales is not None
        for token in range(len(rows)):
            assert torch.equal(found.keys[:, found.sets[token]], fact.scales.keys)
        assert torch.equal(found.values[:, rows], fact.scales.values)


TestArenaMachine = ArenaMachine.TestCase
TestInt8ArenaMachine = Int8ArenaMachine.TestCase
for machine in (TestArenaMachine, TestInt8ArenaMachine):
    machine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_least_recently_used_fact_makes_room() -> None:
    arena = arena_of(6)
    for number, name in enumerate(NAMES[:3]):
        arena.put(name, *content(number, 2), token_ids=array("q", [1, 2]), keep=frozenset())
    arena.rows(NAMES[0])
    arena.put(NAMES[3], *content(3, 2), token_ids=array("q", [1, 2]), keep=frozenset())
    assert [name in arena for name in NAMES[:4]] == [True, False, True, True]


def test_what_the_request_needs_is_not_dropped_for_it() -> None:
    arena = arena_of(4)
    arena.put(NAMES[0], *content(0, 2), token_ids=array("q", range(2)), keep=frozenset())
    arena.put(NAMES[1], *content(1, 2), token_ids=array("q", range(2)), keep=frozenset())
    with pytest.raises(ArenaFullError):
        arena.put(NAMES[2], *content(2, 1), token_ids=array("q", range(1)), keep=frozenset(NAMES[:3]))
    assert NAMES[0] in arena
    assert NAMES[1] in arena


def test_a_fact_in_pieces_is_bit_exact() -> None:
    arena = arena_of(6)
    for number, name in enumerate(NAMES[:6]):
        arena.put(name, *content(number, 1), token_ids=array("q", range(1)), keep=frozenset())
    for name in NAMES[0:6:2]:
        arena.drop(name)
    k, v = content(7, 3)
    rows = arena.put(NAMES[7], k, v, token_ids=array("q", range(k.shape[1])), keep=frozenset(NAMES))
    assert rows.tolist() == [0, 2, 4]
    assert torch.equal(arena.keys[:, rows], k)
    assert torch.equal(arena.values[:, rows], v)


def test_other_dtypes_are_rounded_once_to_the_pools() -> None:
    arena = FactArena(
        budget_bytes=1024, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.bfloat16, device="cpu"
    )
    k, v = content(1, 3)
    rows = arena.put(NAMES[0], k, v, token_ids=array("q", range(k.shape[1])), keep=frozenset())
    assert torch.equal(arena.keys[:, rows], k.bfloat16())
    assert torch.equal(arena.values[:, rows], v.bfloat16())


def test_an_arena_takes_its_own_kind_alone() -> None:
    native, int8 = arena_of(9), arena_of(9, dtype=torch.int8)
    assert (native.is_quantised, int8.is_quantised) == (False, True)
    k, v = content(1, 3)
    quantised = quantise(k, v)
    ids = array("q", range(3))
    with pytest.raises(AssertionError, match=r"torch.int8 for an arena of torch.float32"):
        native.put(NAMES[0], *quantised[:2], token_ids=ids, keep=frozenset(), scales=quantised[2])
    with pytest.raises(AssertionError, match=r"torch.float32 for an arena of torch.int8"):
        int8.put(NAMES[0], k, v, token_ids=ids, keep=frozenset())
    assert (native.free_rows, int8.free_rows) == (9, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_write_that_fails_takes_no_rows(dtype: torch.dtype) -> None:
    arena = arena_of(8, dtype=dtype)

    def put(name: EncodingId, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = (k, v, None) if dtype == torch.float32 else quantise(k, v)
        ids = array("q", range(k.shape[1]))
        return arena.put(name, *parts[:2], token_ids=ids, keep=frozenset(), scales=parts[2])

    put(NAMES[0], *content(0, 3))
    before = arena.stats()
    wide = torch.randn(2, LAYERS, 3, HEADS, DIM + 1)  # of another model
    for _ in range(3):  # more rows than there are
        with pytest.raises(RuntimeError, match="must match"):
            put(NAMES[1], wide[0], wide[1])
        assert arena.stats() == before
        assert NAMES[1] not in arena
    k, v = content(2, 4 - arena._slabs.extra_rows)
    rows = put(NAMES[2], k, v)  # beside the first
    assert arena.ids() == [NAMES[0], NAMES[2]]
    assert torch.equal(arena.keys[:, rows], k if dtype == torch.float32 else quantise(k, v)[0])
    put(NAMES[3], *content(3, 8 - arena._slabs.extra_rows))  # in all rows
    assert arena.ids() == [NAMES[3]]
    assert (arena.free_rows, arena.stats().rows, arena.stats().capacity_rows) == (0, 8, 8)


def test_rows_that_are_lost_are_an_error_of_our_own() -> None:
    arena = arena_of(4)
    arena._free = [(0, 1)]
    with pytest.raises(AssertionError, match="1 free rows of 4, 2 wanted: some are lost"):
        arena.put(NAMES[0], *content(0, 2), token_ids=array("q", range(2)), keep=frozenset())


def test_what_does_not_fit_is_told_in_rows() -> None:
    arena = arena_of(6, dtype=torch.int8)
    for name, tokens in ((NAMES[0], 2), (NAMES[1], 1)):
        k, v, scales = quantise(*content(1, tokens))
        arena.put(name, k, v, token_ids=array("q", range(tokens)), keep=frozenset(), scales=scales)
    k, v, scales = quantise(*content(2, 3))
    # A row for each token, and one for the scales of the fact's keys: 3 and 2 of 6 are taken.
    with pytest.raises(ArenaFullError, match=r"^3 tokens take 4 rows: 1 of 6 are free, and 3 are of facts that"):
        arena.put(NAMES[2], k, v, token_ids=array("q", range(3)), keep=frozenset(NAMES[:1]), scales=scales)
    assert arena.stats()[:4] == (2, 3, 5, 6)


def test_int8_holds_nearly_twice_the_facts() -> None:
    """Of SmolLM2-135M: 30 layers of 3 heads of 64, and facts of 23 tokens."""
    k, v = torch.randn(2, 30, 23, 3, 64).bfloat16()
    held = []
    for dtype in (torch.bfloat16, torch.int8):
        arena = FactArena(budget_bytes=32 << 20, num_layers=30, num_kv_heads=3, head_dim=64, dtype=dtype, device="cpu")
        parts = (k, v, None) if dtype == torch.bfloat16 else quantise(k, v)
        while arena.fits_free(23):
            name = EncodingId(f"{len(arena.ids()):04x}")
            arena.put(name, *parts[:2], token_ids=array("q", range(23)), keep=frozenset(), scales=parts[2])
        assert arena.stats().evictions == 0
        held.append(arena.stats().facts)
    assert held[0] == (32 << 20) // (23 * 2 * 30 * 3 * 64 * 2)
    assert held[1] >= 1.85 * held[0]
