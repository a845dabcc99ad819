"""Load on a server: a closed loop of users who wait for their answers, an open loop of arrivals that do not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .client import Client, Timed


@dataclass(frozen=True, slots=True)
class Load:
    """One cell of the table: users in a closed loop, or arrivals per second in an open one.

    Attributes
    ----------
    requests
        Of each block.
    blocks
        How often both arms are measured, in turns.
    """

    requests: int
    users: int | None = None
    rate_per_s: float | None = None
    blocks: int = 1

    def __str__(self) -> str:
        return f"{self.users} users" if self.users is not None else f"{self.rate_per_s:g} per s"


@dataclass(frozen=True, slots=True)
class Asking:
    """What every request of a load has."""

    mode: str
    k: int
    answer: int


@dataclass(frozen=True, slots=True)
class Block:
    """What came of one block: its duration, and each answer's time to the first token and tier."""

    elapsed_s: float
    ttft_ms: tuple[float, ...]
    tiers: frozenset[str]


async def closed(client: Client, questions: Sequence[str], asking: Asking, *, users: int) -> Block:
    """So many users, each of whom asks the next question when he has his answer.

    Raises
    ------
    ServerFailed, RedGate
        As of `Client.ask`, by the first request that failed; the others are cancelled.
    """
    left = iter(questions)
    found: list[Timed] = []

    async def user() -> None:
        for question in left:
            found.append(await client.ask(question, mode=asking.mode, k=asking.k, answer=asking.answer))

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    elapsed_s = time.perf_counter() - started
    return Block(elapsed_s, tuple(timed.ttft_ms for timed in found), frozenset(t.memory["tier"] for t in found))


async def opened(client: Client, questions: Sequence[str], asking: Asking, *, rate_per_s: float, seed: int) -> Block:
    """Poisson arrivals; the clock of a request starts when it arrives, not when it is sent.

    Raises
    ------
    ServerFailed, RedGate
        As of `closed`.
    """
    draw = random.Random(seed)
    found: list[tuple[float, Timed]] = []

    async def arrive(question: str, due: float) -> None:
        late_ms = 1e3 * (time.perf_counter() - due)
        timed = await client.ask(question, mode=asking.mode, k=asking.k, answer=asking.answer)
        found.append((late_ms + timed.ttft_ms, timed))

    started = due = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for question in questions:
                due += draw.expovariate(rate_per_s)
                # Not every loop sleeps as long as it is told to: one with a clock of milliseconds wakes up early.
                while (left := due - time.perf_counter()) > 0:
                    await asyncio.sleep(left)
                group.create_task(arrive(question, due))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    elapsed_s = time.perf_counter() - started
    return Block(elapsed_s, tuple(ms for ms, _ in found), frozenset(timed.memory["tier"] for _, timed in found))
