"""Requests per second and time to the first token under load: facts spliced, and the same facts as text at the tail.

A closed loop has so many users who each ask the next question when they have their answer; an open loop has Poisson
arrivals that do not wait. Every question is new, so every block of facts is; retrieval and splice are included.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from locomo.arms.prompts import PromptIds

from .client import Client, Timed
from .setting import Setting, arguments, say, serving, write

_MODES = ("splice", "text")
_POOL_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class Load:
    """What one cell of the table asks for: users in a closed loop, or arrivals per second in an open one."""

    requests: int
    users: int | None = None
    rate_per_s: float | None = None


@dataclass(slots=True)
class Taken:
    """What came of one load."""

    elapsed_s: float
    ttft_ms: list[float]
    tiers: set[str]

    @property
    def qps(self) -> float:
        """Answers per second."""
        return len(self.ttft_ms) / self.elapsed_s

    def percentile(self, percent: int) -> float:
        """Nearest rank."""
        return sorted(self.ttft_ms)[max(-(-len(self.ttft_ms) * percent // 100), 1) - 1]


async def closed(client: Client, load: Load, questions: Iterator[str], *, mode: str, k: int, answer: int) -> Taken:
    """So many users, each waiting for its answer."""
    assert load.users is not None, load
    left = iter(range(load.requests))
    found: list[Timed] = []

    async def user() -> None:
        for _ in left:
            found.append(await client.ask(next(questions), mode=mode, k=k, answer=answer))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.users):
            group.create_task(user())
    elapsed = time.perf_counter() - started
    return Taken(elapsed, [timed.ttft_ms for timed in found], {timed.memory["tier"] for timed in found})


async def opened(
    client: Client, load: Load, questions: Iterator[str], *, mode: str, k: int, answer: int, seed: int
) -> Taken:
    """Arrivals at random times; the clock of a request starts when it arrives, not when it is sent."""
    assert load.rate_per_s is not None, load
    draw = random.Random(seed)
    found: list[tuple[float, Timed]] = []

    async def arrive(due: float) -> None:
        late = time.perf_counter() - due
        found.append((late, await client.ask(next(questions), mode=mode, k=k, answer=answer)))

    started = due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.requests):
            due += draw.expovariate(load.rate_per_s)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            group.create_task(arrive(due))
    elapsed = time.perf_counter() - started
    return Taken(elapsed, [1e3 * late + timed.ttft_ms for late, timed in found], {t.memory["tier"] for _, t in found})


async def measure(
    setting: Setting, prompts: PromptIds, loads: Sequence[Load], *, k: int, answer: int
) -> list[dict[str, Any]]:
    """Rows of both arms for every load, in turns."""
    client = Client(setting.url, prompts, owner=setting.owner, policy=setting.policy)
    rows = []
    for number, load in enumerate(loads):
        # Both arms get the same questions; each finds an empty cache.
        first = (number * load.requests) % len(setting.questions)
        chosen = [setting.questions[(first + i) % len(setting.questions)] for i in range(load.requests)]
        for mode in _MODES if number % 2 else reversed(_MODES):
            await client.flush()
            questions = iter(chosen)
            if load.users is not None:
                taken = await closed(client, load, questions, mode=mode, k=k, answer=answer)
            else:
                taken = await opened(client, load, questions, mode=mode, k=k, answer=answer, seed=number)
            arm = "text/tail" if mode == "text" else f"splice/{setting.policy}/tail"
            rows.append(
                {
                    "arm": arm,
                    "load": "closed" if load.users is not None else "open",
                    "users": load.users,
                    "rate_per_s": load.rate_per_s,
                    "k": k,
                    "answer_tokens": answer,
                    "requests": len(taken.ttft_ms),
                    "qps": taken.qps,
                    "ttft_ms": {"p50": taken.percentile(50), "p95": taken.percentile(95)},
                    "tiers": sorted(taken.tiers),
                    "arena_mib": arena_mib(setting.url),
                }
            )
            what = f"{load.users} users" if load.users is not None else f"{load.rate_per_s:g} per s"
            line = f"{arm:24s} {what:12s} {taken.qps:6.2f} answers/s"
            say(f"{line}  first token p95 {taken.percentile(95):8.0f} ms")
    await client.close()
    return rows


def arena_mib(url: str) -> float:
    """Memory that encoded facts take in the scheduler."""
    arena = httpx.get(f"{url}/v1/memory/status", timeout=60.0).json()["scheduler"]["arena"]
    return float(arena["bytes"]) / (1 << 20)


def main() -> None:
    """Parse, measure, print."""
    args = arguments(
        __doc__ or "",
        k={"type": int, "default": 50, "help": "facts of every request"},
        answer={"type": int, "default": 8, "help": "tokens of every answer"},
        users={"default": "1,4,16,32", "help": "closed loops"},
        rates={"default": "0.5,2,8", "help": "open loops, arrivals per second"},
        per_user={"type": int, "default": 4, "help": "questions of each user, of 24 at least in all"},
        arrivals={"type": int, "default": 30, "help": "of an open loop"},
    ).parse_args()
    users = [int(part) for part in args.users.split(",") if part]
    rates = [float(part) for part in args.rates.split(",") if part]
    loads = [Load(max(args.per_user * n, 24), users=n) for n in users]
    loads += [Load(args.arrivals, rate_per_s=rate) for rate in rates]
    with serving(args, pool_tokens=_POOL_TOKENS) as setting:
        rows = asyncio.run(measure(setting, PromptIds(Path(args.model)), loads, k=args.k, answer=args.answer))
    at_16 = {row["arm"].partition("/")[0]: row["qps"] for row in rows if row["users"] == 16}
    ratio = at_16["splice"] / at_16["text"] if at_16 and args.k == 50 else None
    write(args, {"qps_ratio_16_users_k50": ratio}, rows)


if __name__ == "__main__":
    main()
