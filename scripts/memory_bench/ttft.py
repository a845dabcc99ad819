"""Time to the first token over k: the same facts spliced and as text, retrieval and everything else included.

Every round has a question of its own, so its facts are a new block; both arms then ask it once more, which finds
all of it in the radix cache. Spliced prompts go first: text that was prefilled exactly would be found by them.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from locomo.arms.prompts import PromptIds

from .client import Client, Timed
from .setting import Setting, arguments, say, serving, write

KS = (0, 1, 5, 10, 20, 50)
_WARM_UP_ROUNDS = 2
_POOL_TOKENS = 40_000

Key = tuple[str, int, str]


async def measure(setting: Setting, prompts: PromptIds, *, repeats: int, ks: tuple[int, ...]) -> dict[Key, list[Timed]]:
    """Times by (mode, k, case), ``repeats`` each."""
    client = Client(setting.url, prompts, owner=setting.owner, policy=setting.policy)
    taken: dict[Key, list[Timed]] = defaultdict(list)
    for number in range(-_WARM_UP_ROUNDS, repeats):
        question = setting.questions[number % len(setting.questions)]
        await client.flush()
        turned = ks[number % len(ks) :] + ks[: number % len(ks)]
        for mode in ("splice", "text"):
            for k in turned:
                if k == 0 and mode == "text":
                    continue  # one and the same prompt, which is now in the cache
                for case in ("new", "repeated"):
                    found = await client.ask(question, mode=mode if k else "off", k=k, answer=1)
                    if number >= 0:
                        taken[mode if k else "none", k, case].append(found)
        say(f"round {number + 1} of {repeats}") if number % 10 == 9 else None
    await client.close()
    return taken


def row_of(key: Key, taken: list[Timed], policy: str) -> dict[str, Any]:
    """One row of the output."""
    mode, k, case = key
    ttft = sorted(timed.ttft_ms for timed in taken)
    parts = {
        stage: statistics.median(timed.memory["ms"][stage] for timed in taken)
        for stage in ("retrieve", "assemble", "splice")
    }
    parts["prefill"] = statistics.median(timed.forward_ms for timed in taken)
    parts["other"] = max(statistics.median(ttft) - sum(parts.values()), 0.0)
    arm = {"none": "none", "text": "text/tail", "splice": f"splice/{policy}/tail"}[mode]
    return {
        "arm": arm,
        "k": k,
        "case": case,
        "ttft_ms": {
            "p50": statistics.median(ttft),
            "p95": ttft[max(-(-len(ttft) * 95 // 100), 1) - 1],
            "p25": ttft[len(ttft) // 4],
            "p75": ttft[3 * len(ttft) // 4],
            "repeats": len(ttft),
        },
        "parts_ms": parts,
        "prefilled_tokens": statistics.median(timed.memory["tokens"]["prefilled"] for timed in taken),
        "spliced_tokens": statistics.median(timed.memory["tokens"]["spliced"] for timed in taken),
        "tiers": sorted({timed.memory["tier"] for timed in taken}),
    }


def main() -> None:
    """Parse, measure, print."""
    args = arguments(
        __doc__ or "",
        repeats={"type": int, "default": 30, "help": "rounds, each with a new question"},
        k={"default": ",".join(map(str, KS)), "help": "numbers of facts"},
    ).parse_args()
    ks = tuple(int(part) for part in args.k.split(","))
    with serving(args, pool_tokens=_POOL_TOKENS) as setting:
        taken = asyncio.run(measure(setting, PromptIds(Path(args.model)), repeats=args.repeats, ks=ks))
    rows = [row_of(key, found, setting.policy) for key, found in taken.items()]
    p50 = {(row["arm"], row["k"], row["case"]): row["ttft_ms"]["p50"] for row in rows}
    splice = f"splice/{setting.policy}/tail"
    bars = {"ttft_text_over_splice_k50": None, "ttft_splice_k50_over_k0": None}
    for row in rows:
        line = f"{row['arm']:24s} k {row['k']:3d} {row['case']:9s} p50 {row['ttft_ms']['p50']:7.1f} ms"
        print(f"{line}  p95 {row['ttft_ms']['p95']:7.1f}  prefilled {row['prefilled_tokens']:6.0f}  {row['tiers']}")
    if 50 in ks:
        bars["ttft_text_over_splice_k50"] = p50["text/tail", 50, "new"] / p50[splice, 50, "new"]
        if 0 in ks:
            bars["ttft_splice_k50_over_k0"] = p50[splice, 50, "new"] / p50["none", 0, "new"]
    write(args, bars, rows)


if __name__ == "__main__":
    main()
