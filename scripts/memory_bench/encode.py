"""What it costs to add and to encode facts, by policy: both times, tokens prefilled per fact token, bytes per fact.

Each policy has a server of its own, so that none shares the other's prefixes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from locomo.errors import ConfigError
from sgl_stateful.encoding import parse_ladder

from .command import run
from .output import Output, say
from .setting import DEFAULT_POLICY, Setting, serving
from .subject import Subject

POLICIES = (DEFAULT_POLICY, "anchor:4", "anchor:16", "window:0", "window:5")
BARS = ("encode_tokens_per_fact_token",)
_POOL_TOKENS = 20_000


def row_of(setting: Setting, facts: int) -> dict[str, Any]:
    """One row. A ladder's rungs are policies of their own: each fact is encoded under all of them.

    ``facts_per_s`` is of encoding alone, by the encoder's own clock; ``added_per_s`` of what a caller waits for who
    does not wait for KV: embedding and storing.
    """
    counts = setting.status["encoder"]["policies"].values()
    encode_s = sum(count["seconds"] for count in counts)
    return {
        "policy": setting.policy,
        "facts": facts,
        "facts_per_s": facts / encode_s,
        "added_per_s": facts / setting.add_s,
        "encode_s": encode_s,
        "add_s": setting.add_s,
        "tokens_prefilled_per_fact_token": sum(count["tokens_prefilled"] for count in counts)
        / max(count["fact_tokens"] for count in counts),
        "bytes_per_fact": sum(count["bytes"] for count in counts) / facts,
        "gate_kl": setting.divergence._asdict(),
    }


def bars_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The default policy's; None where it was not measured."""
    found = {row["policy"]: row["tokens_prefilled_per_fact_token"] for row in rows}
    return {"encode_tokens_per_fact_token": found.get(DEFAULT_POLICY)}


def _measure(args: argparse.Namespace, subject: Subject, output: Output) -> None:
    if not args.policies:
        raise ConfigError("--policies names none")
    say(f"{len(args.policies)} policies, of about 3 minutes each on two cores")
    rows: list[dict[str, Any]] = []
    for policy in args.policies:
        with serving(subject, pool_tokens=_POOL_TOKENS, policy=policy) as setting:
            output.meta |= {"embedder": setting.status["embedder"]}
            rows.append(row_of(setting, len(subject.units)))
        output.write(rows)
    for row in rows:
        times = f"{row['facts_per_s']:6.1f} facts encoded/s  {row['added_per_s']:6.1f} added/s"
        costs = f"{row['tokens_prefilled_per_fact_token']:5.2f} tokens prefilled a fact token"
        print(f"{row['policy']:12s} {times}  {costs}  {row['bytes_per_fact'] / 1024:7.0f} KiB a fact")
    output.finish(rows, bars_of(rows))


def policies(text: str) -> tuple[str, ...]:
    """Comma-separated policies, each once.

    Raises
    ------
    ValueError
        One is none.
    """
    return tuple(dict.fromkeys(parse_ladder(part.strip()).name for part in text.split(",") if part.strip()))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    options = {"policies": {"type": policies, "default": POLICIES, "help": "comma-separated"}}
    run(_measure, program="bench_encode", doc=__doc__ or "", bars=BARS, options=options, argv=argv)


if __name__ == "__main__":
    main()
