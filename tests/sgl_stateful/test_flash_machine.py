"""Nothing stale is served, in whatever order things happen: seeded interleavings, and Hypothesis' own."""

import os
from contextlib import suppress
from random import Random

import hypothesis.strategies as st
from flash_world import OWNERS, World, question
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_stateful.errors import FlashExists, FlashLimitReached
from sgl_stateful.flash.question import Question
from sgl_stateful.params import MemoryParams

INTERLEAVINGS = int(os.environ.get("FLASH_INTERLEAVINGS", "500"))
STEPS = 60

WORDS, SAMPLINGS, NAMES = ("up", "down"), ("{}", '{"top_p":0.5}'), ("one", "two", "three")
MEMORIES = (None, "search", ("f1", "f2"), "off")


def asked(word: str, sampling: str, memory: object, owner: str, name: str = "one") -> Question:
    if isinstance(memory, tuple):
        params = MemoryParams(owner=owner, facts=memory)
    else:
        params = None if memory is None else MemoryParams(owner=owner, mode="off" if memory == "off" else "splice")
    return question(name, word, sampling, memory=params)


def step(world: World, rng: Random) -> None:
    """One thing happens, drawn by its weight."""
    names, owner = sorted(world.sessions), rng.choice(OWNERS)
    word, sampling, memory = rng.choice(WORDS), rng.choice(SAMPLINGS), rng.choice(MEMORIES)
    entries = world.table.registrations.everyone()
    fact_id = rng.choice(("f1", "f2", "f3"))
    dice = rng.random()
    if not names or dice < 0.04:
        world.open(owner, rng.choice(("", "a")))
    elif dice < 0.14:
        name = rng.choice(names)
        of_owner = world.sessions[name].owner
        with suppress(FlashExists, FlashLimitReached):
            world.register(name, asked(word, sampling, memory, of_owner, rng.choice(NAMES)))
    elif dice < 0.19:
        world.append(rng.choice(names), rng.choice("ab"))
    elif dice < 0.21:
        world.rewind(rng.choice(names))
    elif dice < 0.22:
        world.close(rng.choice(names))
    elif dice < 0.24 and entries:
        entry = rng.choice(entries)
        with suppress(FlashExists):
            world.update(entry, asked(word, sampling, memory, entry.owner, entry.name))
    elif dice < 0.25 and entries:
        world.table.remove(rng.choice(entries))
    elif dice < 0.29:
        world.set_fact(owner, fact_id, rng.choice("xyz"))
    elif dice < 0.31 and fact_id in world.facts[owner]:
        world.delete_fact(owner, fact_id)
    elif dice < 0.315:
        world.purge(owner)
    elif dice < 0.32:
        world.flush()
    elif dice < 0.34 or (world.weights is None and dice < 0.5):
        world.update_weights()
    elif dice < 0.38:
        world.clock.now += rng.choice((0.5, 3.0))
    elif dice < 0.50:
        world.take()
    elif dice < 0.68:
        world.finish(rng.choice(("evaluated", "evaluated", "evaluated", "failed", "put back")))
    elif dice < 0.72:
        world.audit()
    elif dice < 0.74:
        world.deliver()
    elif entries and rng.random() < 0.8:
        entry = rng.choice(entries)
        if entry.session_id in world.sessions:
            world.ask(entry.session_id, entry.question, rng.choice((0.0, 0.0, 2.0)))
    else:
        name = rng.choice(names)
        world.ask(name, asked(word, sampling, memory, world.sessions[name].owner), 0.0)


def test_no_interleaving_serves_what_is_stale() -> None:
    hits = stale_allowed = misses = 0
    for seed in range(INTERLEAVINGS):
        rng = Random(seed)
        world = World(rng)
        for _ in range(STEPS):
            step(world, rng)
        hits, misses = hits + world.hits, misses + world.misses
        stale_allowed += world.stale_allowed
    # Otherwise the comparison with the truth would have had nothing to compare.
    assert hits > INTERLEAVINGS / 2
    assert misses > INTERLEAVINGS
    assert stale_allowed > INTERLEAVINGS / 100


class FlashMachine(RuleBasedStateMachine):
    """The same, in orders that Hypothesis looks for and shortens."""

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.world = World(Random(seed))
        self.world.open("ana", "a")

    @rule(data=st.randoms(use_true_random=False))
    def anything(self, data: Random) -> None:
        step(self.world, data)

    @rule(words=st.sampled_from(WORDS), memory=st.sampled_from(MEMORIES))
    def answer_all(self, words: str, memory: object) -> None:
        """Register, evaluate and ask without anything between: it is served."""
        world = self.world
        world.deliver()
        if world.weights is None:
            world.update_weights()
            world.deliver()
        world.open("bo", "b")
        name = max(world.sessions, key=lambda one: int(one[1:]))
        wanted = asked(words, "{}", memory, "bo")
        try:
            entry = world.register(name, wanted)
        except FlashLimitReached:
            return
        while world.runs:
            world.finish("evaluated")
        for _ in range(50):
            if not len(world.table.queue):
                break
            world.clock.now += 1.0
            world.take()
            while world.runs:
                world.finish("evaluated")
        assert entry.stored is not None
        hits = world.hits
        world.ask(name, wanted, 0.0)
        assert world.hits == hits + 1

    @precondition(lambda self: self.world.runs)
    @rule()
    def finish(self) -> None:
        self.world.finish("evaluated")

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "world"):
            return
        registrations = self.world.table.registrations
        everyone = registrations.everyone()
        assert len(registrations) == len(everyone) <= 9
        for owner in OWNERS:
            assert sum(entry.owner == owner for entry in everyone) <= 6
        assert set(self.world.table.queue) <= set(everyone)
        assert all(entry.retired is None for entry in self.world.table.queue)


TestFlash = FlashMachine.TestCase
TestFlash.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
