"""Requests per second and time to the first token under load: facts spliced, and the same facts as text at the tail.

A closed loop has so many users who each ask the next question when they have their answer; an open loop has Poisson
arrivals that do not wait. Retrieval and splice are included. Every block of requests begins with empty caches, the
arena's too, and no question comes twice in it; both arms get the same questions and take turns to be first. The load
whose ratio is a bar is measured in several blocks.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locomo.arms.prompts import PromptIds
from locomo.errors import ConfigError

from .client import Client
from .command import integers, positive, rates, run
from .loops import Asking, Block, Load, closed, opened
from .output import Output, say
from .setting import SPLICE, TEXT, serving, status_of
from .spread import interval_of_ratios, spread_ms
from .subject import Subject, require_facts, require_questions

BARS = ("qps_ratio_16_users_k50",)
BAR_USERS, BAR_K, BAR_BLOCKS = 16, 50, 3
_LEAST_REQUESTS = 16
_POOL_TOKENS = 100_000
_ARMS = {"splice": SPLICE, "text": TEXT}
_TIERS = {SPLICE: ["spliced"], TEXT: ["text"]}

Measured = list[tuple[Block, float]]
"""The blocks of one load, each with the arena's MiB behind it."""


def loads_of(users: Sequence[int], rates_per_s: Sequence[float], *, per_user: int, arrivals: int) -> list[Load]:
    """The table's cells; that of the bar has its blocks."""
    loads = [
        Load(max(per_user * n, _LEAST_REQUESTS), users=n, blocks=BAR_BLOCKS if n == BAR_USERS else 1) for n in users
    ]
    return loads + [Load(arrivals, rate_per_s=rate) for rate in rates_per_s]


def seconds_of(loads: Sequence[Load], alone_s: Mapping[str, float]) -> float:
    """At most what loads take, from what one request of each arm takes alone: under load none takes longer."""
    found = 0.0
    for load in loads:
        for request_s in alone_s.values():
            block_s = load.requests * request_s
            if load.rate_per_s is not None:
                block_s = max(block_s, load.requests / load.rate_per_s)
            found += load.blocks * block_s
    return found


async def measure(
    client: Client,
    questions: Sequence[str],
    loads: Sequence[Load],
    output: Output,
    *,
    k: int,
    answer: int,
    arena_mib: Callable[[], float],
) -> list[dict[str, Any]]:
    """Rows of both arms for every load, written after every block."""
    alone_s = {}
    for mode in _ARMS:  # twice, for what is done at the first request only
        await client.flush()
        await client.ask(questions[-1], mode=mode, k=k, answer=answer)
        await client.flush()
        alone_s[mode] = (await client.ask(questions[-1], mode=mode, k=k, answer=answer)).total_ms / 1e3
    say(f"at most about {seconds_of(loads, alone_s) / 60:.0f} minutes")
    taken: dict[Load, dict[str, Measured]] = defaultdict(lambda: defaultdict(list))
    first = number = 0
    for load in loads:
        for _ in range(load.blocks):
            chosen = [questions[(first + i) % len(questions)] for i in range(load.requests)]
            first, number = first + load.requests, number + 1
            for mode in _ARMS if number % 2 else reversed(_ARMS):
                await client.flush()
                asking = Asking(mode, k, answer)
                if load.users is not None:
                    block = await closed(client, chosen, asking, users=load.users)
                else:
                    assert load.rate_per_s is not None, load
                    block = await opened(client, chosen, asking, rate_per_s=load.rate_per_s, seed=number)
                taken[load][_ARMS[mode]].append((block, arena_mib()))
                output.write(rows_of(taken, k=k, answer=answer))
                say(f"{_ARMS[mode]:24s} {load!s:12s} {len(block.ttft_ms) / block.elapsed_s:6.2f} answers/s")
    return rows_of(taken, k=k, answer=answer)


def rows_of(taken: Mapping[Load, Mapping[str, Measured]], *, k: int, answer: int) -> list[dict[str, Any]]:
    """Rows of the loads in their order, the blocks of each pooled."""
    return [
        row_of(load, arm, by_arm[arm], k=k, answer=answer)
        for load, by_arm in taken.items()
        for arm in _TIERS
        if arm in by_arm
    ]


def row_of(load: Load, arm: str, measured: Measured, *, k: int, answer: int) -> dict[str, Any]:
    """One row: rates over all blocks, and of each."""
    blocks = [block for block, _ in measured]
    ttft_ms = [ms for block in blocks for ms in block.ttft_ms]
    of_blocks = [len(block.ttft_ms) / block.elapsed_s for block in blocks]
    return {
        "arm": arm,
        "load": "closed" if load.users is not None else "open",
        "users": load.users,
        "rate_per_s": load.rate_per_s,
        "k": k,
        "answer_tokens": answer,
        "requests": len(ttft_ms),
        "qps": len(ttft_ms) / sum(block.elapsed_s for block in blocks),
        "qps_of_blocks": of_blocks,
        "qps_min": min(of_blocks),
        "qps_max": max(of_blocks),
        "ttft_ms": spread_ms(ttft_ms),
        "tiers": sorted({tier for block in blocks for tier in block.tiers}),
        "arena_mib": max(mib for _, mib in measured),
    }


def ratios_of_blocks(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Requests per second spliced over text, block by block, at the bar's load.

    Empty where either arm was not measured, was served otherwise, or the other has not as many blocks.
    """
    at = {
        row["arm"]: row["qps_of_blocks"]
        for row in rows
        if row["users"] == BAR_USERS and row["k"] == BAR_K and row["tiers"] == _TIERS[row["arm"]]
    }
    splice, text = at.get(SPLICE, []), at.get(TEXT, [])
    return [mine / other for mine, other in zip(splice, text, strict=True)] if len(splice) == len(text) else []


def bars_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The ratio of both arms' requests per second over all blocks; None where there are too few."""
    ratio = None
    if len(ratios_of_blocks(rows)) >= BAR_BLOCKS:
        qps = {row["arm"]: row["qps"] for row in rows if row["users"] == BAR_USERS}
        ratio = qps[SPLICE] / qps[TEXT]
    return {"qps_ratio_16_users_k50": ratio}


def _measure(args: argparse.Namespace, subject: Subject, output: Output) -> None:
    loads = loads_of(args.users, args.rates, per_user=args.per_user, arrivals=args.arrivals)
    if not loads or 0 in args.users:
        raise ConfigError("a load has at least one user or some arrivals per second")
    most = max(loads, key=lambda load: load.requests)
    require_questions(subject, most.requests, f"the load of {most}")
    require_facts(subject, args.k)
    with serving(subject, pool_tokens=_POOL_TOKENS) as setting:
        output.meta |= {"embedder": setting.status["embedder"], "gate_kl": setting.divergence._asdict()}

        def arena_mib() -> float:
            return float(status_of(setting.url)["scheduler"]["arena"]["bytes"]) / (1 << 20)

        async def measured() -> list[dict[str, Any]]:
            prompts = PromptIds(subject.model)
            async with Client(setting.url, prompts, owner=setting.owner, policy=setting.policy) as client:
                return await measure(
                    client, subject.questions, loads, output, k=args.k, answer=args.answer, arena_mib=arena_mib
                )

        rows = asyncio.run(measured())
    for row in rows:
        ms = row["ttft_ms"]
        what = f"{row['users']} users" if row["users"] is not None else f"{row['rate_per_s']:g} per s"
        rate = f"{row['qps']:6.2f} answers/s ({row['qps_min']:.2f} to {row['qps_max']:.2f})"
        print(
            f"{row['arm']:24s} {what:12s} {rate}  first token p95 {ms['p95']:8.0f} ms{'*' if ms['p95_of_few'] else ''}"
        )
    print("* one of the three largest: too few samples for a 95th percentile")
    if ratios := ratios_of_blocks(rows):
        output.meta |= {"qps_ratio_of_blocks": ratios}
        print(f"{BAR_USERS} users, spliced over text by block: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    intervals = {BARS[0]: interval_of_ratios(ratios)} if len(ratios) >= BAR_BLOCKS else {}
    output.finish(rows, bars_of(rows), intervals)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    options = {
        "k": {"type": positive, "default": BAR_K, "help": "facts of every request"},
        "answer": {"type": positive, "default": 8, "help": "tokens of every answer"},
        "users": {"type": integers, "default": (1, 4, 16, 32), "help": "closed loops, comma-separated"},
        "rates": {"type": rates, "default": (0.5, 2.0, 8.0), "help": "open loops, arrivals per second"},
        "per_user": {
            "type": positive,
            "default": 2,
            "help": f"questions of each user, {_LEAST_REQUESTS} at least in all",
        },
        "arrivals": {"type": positive, "default": 24, "help": "of an open loop"},
    }
    run(_measure, program="bench_throughput", doc=__doc__ or "", bars=BARS, options=options, argv=argv)


if __name__ == "__main__":
    main()
