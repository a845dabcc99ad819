from array import array
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memstore import EncodingId
from sgl_stateful.splice import ArenaFullError, FactArena

LAYERS, HEADS, DIM = 2, 1, 2
BYTES_PER_TOKEN = 2 * LAYERS * HEADS * DIM * 4  # keys and values, fp32
NAMES = [EncodingId(letter * 4) for letter in "abcdefgh"]


def arena_of(tokens: int, *, spare_bytes: int = 0) -> FactArena:
    return FactArena(
        budget_bytes=tokens * BYTES_PER_TOKEN + spare_bytes,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device="cpu",
    )


def content(number: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(number))
    return both[0], both[1]


def is_run(rows: torch.Tensor) -> bool:
    return all(b == a + 1 for a, b in pairwise(rows.tolist()))


class ArenaMachine(RuleBasedStateMachine):
    """The arena against a dict in order of use, which knows lengths and contents only."""

    @initialize(capacity=st.integers(0, 24))
    def open(self, capacity: int) -> None:
        self.capacity = capacity
        self.arena = arena_of(capacity, spare_bytes=BYTES_PER_TOKEN - 1)
        self.model: OrderedDict[EncodingId, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self.made = self.evicted = self.hits = self.misses = 0

    def model_free(self) -> int:
        return self.capacity - sum(k.shape[1] for k, _ in self.model.values())

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
        k, v = content(self.made, tokens)
        self.model.pop(name, None)
        evictable = sum(k.shape[1] for n, (k, _) in self.model.items() if n not in keep)
        if self.model_free() + evictable < tokens:  # then nothing is dropped in vain
            with pytest.raises(ArenaFullError, match=f"{tokens} tokens do not fit"):
                self.arena.put(name, k, v, token_ids=array("q", range(tokens)), keep=keep)
            return
        while self.model_free() < tokens:
            del self.model[next(n for n in self.model if n not in keep)]
            self.evicted += 1
        rows = self.arena.put(name, k, v, token_ids=array("q", range(tokens)), keep=keep)
        # Its own rows count as free: the longest run that there was before is the one that it could have had.
        run_there_was = self.longest_free_run_before(rows)
        self.model[name] = (k.clone(), v.clone())
        k.fill_(float("nan"))  # the arena holds a copy
        v.fill_(float("nan"))
        if run_there_was >= tokens:
            assert is_run(rows)

    def longest_free_run_before(self, rows: torch.Tensor) -> int:
        del rows  # not in the model yet, so counted as free
        return self.longest_free_run()

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
        for name, (k, v) in self.model.items():
            rows = self.arena._rows[name]
            assert rows.dtype == torch.int64
            assert torch.equal(self.arena.keys[:, rows], k)
            assert torch.equal(self.arena.values[:, rows], v)
            taken += rows.tolist()
        assert len(taken) == len(set(taken)), "facts share a row"
        assert all(0 <= row < self.capacity for row in taken)
        assert self.arena.free_tokens == self.model_free()
        assert self.arena.fits_free(self.model_free())
        assert not self.arena.fits_free(self.model_free() + 1)

    @invariant()
    def counts(self) -> None:
        used = self.capacity - self.model_free()
        assert self.arena.stats() == (
            len(self.model),
            used,
            self.capacity,
            used * BYTES_PER_TOKEN,
            self.hits,
            self.misses,
            self.evicted,
        )


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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
