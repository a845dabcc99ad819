"""How large everything is."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in tokens, and counts, of one run.

    Attributes
    ----------
    pool, budget
        Cells of either server's KV pool, and those of them that pinned sessions of ours may have.
    contexts
        Lengths of the stream at which all arms are timed, ascending.
    rounds
        At each length; before each a record is appended. ``warm`` more before the first do not count.
    hits, decodes
        Of each round: how often a stored answer is taken, and the same question decoded for real.
    answer
        Of every open question.
    ahead
        Of the answer to an entry, that are decoded before it is asked.
    evictions
        Rounds at the last length, without new data, before each of which unrelated prompts of ``flood`` tokens each
        have filled the pool.
    gate_versions
        Of the stream: on the first half gates are calibrated, on the second they are judged.
    gate_context
        At which that begins.
    blocks, block
        With and without registered questions, in turns, and requests of each.
    registered
        Questions of the blocks that have some.
    busy_blocks, busy_block
        Idle and saturated, in turns, and hits of each.
    interleavings
        Of appends, rewinds, changes of facts and questions, in float32.
    checked
        Lengths at which all arms' answers are compared in float32.
    """

    pool: int = 12_000
    budget: int = 9_600
    contexts: tuple[int, ...] = (500, 1_500, 3_000, 5_000, 7_000)
    rounds: int = 12
    warm: int = 2
    hits: int = 8
    decodes: int = 3
    answer: int = 8
    ahead: int = 4
    evictions: int = 10
    flood: int = 1_000
    gate_versions: int = 56
    gate_context: int = 400
    blocks: int = 10
    block: int = 30
    registered: int = 20
    busy_blocks: int = 6
    busy_block: int = 40
    interleavings: int = 100
    checked: tuple[int, ...] = (300, 1_000, 2_500)

    @property
    def longest(self) -> int:
        """What the session of the timed stream may grow to; a record has fewer than 64 tokens."""
        return self.contexts[-1] + 64 * (self.warm + self.rounds)


FULL = Shape()
QUICK = replace(
    FULL,
    pool=4_000,
    budget=3_000,
    contexts=(300, 1_200),
    rounds=3,
    hits=3,
    evictions=2,
    flood=500,
    gate_versions=40,
    gate_context=150,
    blocks=2,
    block=6,
    registered=8,
    busy_blocks=2,
    busy_block=10,
    interleavings=10,
    checked=(200, 600),
)
"""Does it run?"""
