"""What it costs to encode facts: facts per second, tokens prefilled per fact token, bytes per fact, by policy.

Each policy has a server of its own, so that none shares the other's prefixes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from locomo.arms.stateful import StatefulServer
from locomo.retrieval.units import UnitKind, UnitText, units_of
from locomo.server import ServerProcess

from .setting import arguments, conversation_of, say, write

POLICIES = ("ladder:0+4", "anchor:4", "anchor:16", "window:0", "window:5")


def row_of(args: Any, policy: str, folder: Path) -> dict[str, Any]:
    """Encode the conversation under one policy."""
    conversation = conversation_of(args)
    units = units_of(conversation, UnitKind(args.units), text=UnitText.PLAIN, captions=True)
    flags = ["--policy", policy, "--max-total-tokens", "20000"]
    process = ServerProcess(args.model, folder / "memory", flags=flags, log=folder / "server.log")
    with process, StatefulServer(process.url, args.model, max_tokens=1) as server:
        if not httpx.get(f"{process.url}/v1/memory/status", timeout=60.0).json()["verified"]:
            raise SystemExit(f"the server's self-test failed; its log is in {folder}")
        started = time.perf_counter()
        server.open(conversation, units, lambda done, total: None)
        elapsed = time.perf_counter() - started
        status = httpx.get(f"{process.url}/v1/memory/status", timeout=60.0).json()
    counts = status["encoder"]["policies"].values()
    facts = len(units)
    # A ladder's rungs are policies of their own: each fact is encoded under all of them.
    prefilled = sum(count["tokens_prefilled"] for count in counts)
    fact_tokens = max(count["fact_tokens"] for count in counts)
    say(f"{policy}: {facts} facts in {elapsed:.1f} s")
    return {
        "policy": policy,
        "facts": facts,
        "facts_per_s": facts / elapsed,
        "tokens_prefilled_per_fact_token": prefilled / fact_tokens,
        "bytes_per_fact": sum(count["bytes"] for count in counts) / facts,
        "seconds": elapsed,
    }


def main() -> None:
    """Parse, measure, print."""
    args = arguments(__doc__ or "", policies={"default": ",".join(POLICIES), "help": "comma-separated"}).parse_args()
    rows = []
    for policy in args.policies.split(","):
        with tempfile.TemporaryDirectory(prefix="encode-bench-") as folder:
            rows.append(row_of(args, policy, Path(folder)))
    for row in rows:
        costs = f"{row['tokens_prefilled_per_fact_token']:5.2f} tokens prefilled a fact token"
        print(
            f"{row['policy']:12s} {row['facts_per_s']:6.1f} facts/s  {costs}  {row['bytes_per_fact'] / 1024:7.0f} KiB"
        )
    write(args, {"encode_tokens_per_fact_token": rows[0]["tokens_prefilled_per_fact_token"]}, rows)


if __name__ == "__main__":
    main()
