"""What happens in the streaming load, in which order: numbers only, drawn from a seed, the same for both servers."""

import random
from dataclasses import dataclass
from typing import Literal

from .shape import Shape

Kind = Literal["open", "append", "ask", "flood"]


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the load.

    Attributes
    ----------
    kind
        `open` a session, `append` to it, `ask` it; `flood` is a prompt that belongs to no session and never returns.
    session
        Its number; -1 of a flood.
    tokens
        How many it brings.
    content
        Number of these tokens: no two events have the same.
    """

    kind: Kind
    session: int
    tokens: int
    content: int


def schedule(shape: Shape, seed: int) -> list[Event]:
    """Open every session, then append to and ask each once a round, with floods in between.

    The order of a round is drawn anew, appends and questions apart: most questions come long after the last append,
    and some soon upon the last question, which may still be cached where nothing is pinned.
    """
    rng = random.Random(seed)
    sessions = range(shape.load_sessions)
    steps: list[tuple[Kind, int, int]] = [("open", session, shape.load_session) for session in sessions]
    visits = 0
    for _ in range(shape.load_rounds):
        turn: list[tuple[Kind, int, int]] = [
            ("append", session, rng.randint(*shape.load_append)) for session in sessions
        ]
        turn += [("ask", session, shape.question) for session in sessions]
        rng.shuffle(turn)
        for visit in turn:
            steps.append(visit)
            visits += 1
            if visits % shape.visits_per_flood == 0:
                steps.append(("flood", -1, shape.flood))
    return [Event(*step, content) for content, step in enumerate(steps)]
