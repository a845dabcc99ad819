"""Time to the first token over k: the same facts spliced and as text, retrieval and everything else included.

Every cell (one arm at one k) begins with empty caches. ``new``: the facts' KV is read from the store. ``repeated``: the
same request once more, all of it in the radix cache. ``arena``, spliced only: the same facts behind another line, so
that their KV is in the arena, from other requests as it were, and their block is not in the radix cache. Both arms of a
k have the same question, which is another one in every round and for every k; arms take turns to be first.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from locomo.arms.prompts import PromptIds
from locomo.errors import ConfigError

from .client import Client, Timed
from .command import integers, positive, run
from .output import Output, say
from .setting import SPLICE, TEXT, serving
from .spread import interval_of_medians, spread_ms
from .subject import Subject, require_facts, require_questions

KS = (0, 1, 5, 10, 20, 50)
BARS = ("ttft_text_over_splice_k50", "ttft_splice_k50_over_k0")
LEAST_REPEATS = 30
_POOL_TOKENS = 40_000
_ARMS = {"off": "none", "text": TEXT, "splice": SPLICE}
_TIERS = {"none": ["none"], TEXT: ["text"], SPLICE: ["spliced"]}
_STAGES = ("retrieve", "assemble", "splice")


class Cell(NamedTuple):
    """One arm at one k, with its question."""

    mode: str
    k: int
    question: str


class Key(NamedTuple):
    """What a row is of."""

    mode: str
    k: int
    case: str


Taken = Mapping[Key, Sequence[Timed]]


def cells_of_round(number: int, ks: Sequence[int], questions: Sequence[str]) -> list[Cell]:
    """The cells of one round in their order.

    With as many questions as rounds no question comes twice for one k, in either arm.
    """
    cells = []
    for turn in range(len(ks)):
        place = (turn + number) % len(ks)
        k, question = ks[place], questions[(number + place * len(questions) // len(ks)) % len(questions)]
        modes = ("splice", "text") if k else ("off",)
        cells += [Cell(mode, k, question) for mode in (modes if (number + place) % 2 else reversed(modes))]
    return cells


async def take(client: Client, cell: Cell) -> dict[Key, Timed]:
    """Times of one cell, by case."""
    mode, k, question = cell
    await client.flush()
    found = {}
    for case in ("new", "repeated"):
        found[Key(mode, k, case)] = await client.ask(question, mode=mode, k=k, answer=1)
    if mode == "splice":
        found[Key(mode, k, "arena")] = await client.ask(question, mode=mode, k=k, answer=1, other_beginning=True)
    return found


async def measure(
    client: Client, questions: Sequence[str], output: Output, *, repeats: int, ks: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows of ``repeats`` rounds, which are written after every one; a round before them warms the server up."""
    started = time.monotonic()
    for cell in cells_of_round(0, ks, questions[::-1]):
        await take(client, cell)
    round_s = time.monotonic() - started
    say(f"{repeats} rounds of about {round_s:.0f} s: {repeats * round_s / 60:.0f} minutes")
    taken: dict[Key, list[Timed]] = defaultdict(list)
    for number in range(repeats):
        for cell in cells_of_round(number, ks, questions):
            for key, timed in (await take(client, cell)).items():
                taken[key].append(timed)
        output.write(rows_of(taken))
        if number % 5 == 4:
            say(f"round {number + 1} of {repeats}")
    return rows_of(taken)


def rows_of(taken: Taken) -> list[dict[str, Any]]:
    """Rows in order of arm, k and case."""
    return [row_of(key, taken[key]) for key in sorted(taken)]


def row_of(key: Key, taken: Sequence[Timed]) -> dict[str, Any]:
    """One row: the total's spread, and means of the parts, which add up to the mean total."""
    total = spread_ms([timed.ttft_ms for timed in taken])
    parts = {stage: statistics.mean(timed.memory["ms"][stage] for timed in taken) for stage in _STAGES}
    parts["prefill"] = statistics.mean(timed.forward_ms for timed in taken)
    parts["other"] = total["mean"] - sum(parts.values())
    return {
        "arm": _ARMS[key.mode],
        "k": key.k,
        "case": key.case,
        "ttft_ms": total,
        "rounds_ms": [round(timed.ttft_ms, 2) for timed in taken],
        "parts_ms": parts,
        "prefilled_tokens": statistics.median(timed.memory["tokens"]["prefilled"] for timed in taken),
        "spliced_tokens": statistics.median(timed.memory["tokens"]["spliced"] for timed in taken),
        "tiers": sorted({timed.memory["tier"] for timed in taken}),
    }


def sides_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Times of both sides of each bar, by round, new facts every time.

    Without the bars of which a side has too few repeats or was served otherwise.
    """
    rounds = {
        (row["arm"], row["k"]): row["rounds_ms"]
        for row in rows
        if row["case"] == "new" and row["ttft_ms"]["repeats"] >= LEAST_REPEATS and row["tiers"] == _TIERS[row["arm"]]
    }
    text, splice, none = rounds.get((TEXT, 50)), rounds.get((SPLICE, 50)), rounds.get(("none", 0))
    sides = {"ttft_text_over_splice_k50": (text, splice), "ttft_splice_k50_over_k0": (splice, none)}
    return {bar: (above, below) for bar, (above, below) in sides.items() if above and below}


def bars_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Ratios of medians, None where `sides_of` has not both sides."""
    sides = sides_of(rows)
    return {
        bar: statistics.median(sides[bar][0]) / statistics.median(sides[bar][1]) if bar in sides else None
        for bar in BARS
    }


def intervals_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Their intervals over the rounds."""
    return {bar: interval_of_medians(above, below) for bar, (above, below) in sides_of(rows).items()}


def _measure(args: argparse.Namespace, subject: Subject, output: Output) -> None:
    if not args.k:
        raise ConfigError("--k names no number of facts")
    require_questions(subject, args.repeats, f"--repeats {args.repeats}")
    require_facts(subject, max(args.k))
    with serving(subject, pool_tokens=_POOL_TOKENS) as setting:
        output.meta |= {"embedder": setting.status["embedder"], "gate_kl": setting.divergence._asdict()}

        async def measured() -> list[dict[str, Any]]:
            prompts = PromptIds(subject.model)
            async with Client(setting.url, prompts, owner=setting.owner, policy=setting.policy) as client:
                return await measure(client, subject.questions, output, repeats=args.repeats, ks=args.k)

        rows = asyncio.run(measured())
    for row in rows:
        ms = row["ttft_ms"]
        line = f"{row['arm']:24s} k {row['k']:3d} {row['case']:9s} p50 {ms['p50']:7.1f} ms  p95 {ms['p95']:7.1f}"
        print(f"{line}{'*' if ms['p95_of_few'] else ' '} prefilled {row['prefilled_tokens']:6.0f}")
    print("* one of the three largest: too few samples for a 95th percentile")
    output.finish(rows, bars_of(rows), intervals_of(rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    options = {
        "repeats": {"type": positive, "default": LEAST_REPEATS, "help": "rounds; bars need 30"},
        "k": {"type": integers, "default": KS, "help": "numbers of facts, comma-separated"},
    }
    run(_measure, program="bench_ttft", doc=__doc__ or "", bars=BARS, options=options, argv=argv)


if __name__ == "__main__":
    main()
