"""How large everything is."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in tokens and counts of one run.

    Attributes
    ----------
    pool
        Cells of the KV pool of either server.
    budget
        Cells of it that pinned sessions may have in ours; the rest serves everything else.
    question, answer
        Of every question and every answer that is timed.
    short, long
        Sessions whose queries are compared.
    plain
        Of the session that is compared with a plain prompt of the same length.
    load_session, load_rounds
        Sessions of the streaming load, and how often each is appended to and asked.
    flood, visits_per_flood
        One-off prompts of the load, and after how many appends and questions each comes.
    """

    pool: int = 24_000
    budget: int = 19_200
    question: int = 16
    answer: int = 4
    short: int = 600
    long: int = 6_000
    query_repeats: int = 40
    plain: int = 2_000
    overhead_repeats: int = 60
    control_blocks: int = 8
    control_block: int = 6
    load_session: int = 2_000
    load_rounds: int = 3
    load_append: tuple[int, int] = (20, 100)
    flood: int = 600
    visits_per_flood: int = 6
    appends: int = 55
    append: tuple[int, int] = (20, 200)
    restart: int = 2_000
    checked_sessions: int = 6
    checked_answer: int = 16

    @property
    def load_sessions(self) -> int:
        """So many that together they are three times the rival's pool."""
        return -(-3 * self.pool // self.load_session)

    @property
    def load_reserve(self) -> int:
        """What a pinned session of the load may grow by."""
        return self.load_rounds * self.load_append[1]

    @property
    def load_pinned(self) -> int:
        """How many sessions of the load fit the budget, growth included."""
        return min(self.budget // (self.load_session + self.load_reserve), self.load_sessions)


FULL = Shape()
QUICK = replace(
    FULL,
    pool=4_000,
    budget=3_200,
    short=300,
    long=2_400,
    query_repeats=6,
    plain=500,
    overhead_repeats=8,
    control_blocks=4,
    control_block=3,
    load_session=500,
    load_rounds=1,
    appends=8,
    restart=500,
    checked_sessions=3,
    checked_answer=8,
)
"""Does it run?"""
