"""How near spliced answers are to full prefill, and what that costs: one table, one plot.

Every arm gets the same facts as text would, and the gold answer is forced behind each prompt: KL is from the
next-token distributions of full prefill, mean over the answer's tokens. The floor is full prefill of the same facts in
another order. Every request whose time counts begins with empty caches but for what all prompts share, and arms take
turns to be first. Intervals are over conversations, Student's t for means and Fieller's for ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from locomo.arms.base import Answer, Scored, Served
from locomo.arms.stateful import StatefulServer
from locomo.errors import ConfigError
from locomo.fidelity import kl_divergence, top1
from locomo.scores.estimates import POSITIVE, Estimate, mean, mean_difference, ratio
from locomo.scores.rows import Figures
from sgl_stateful.encoding import parse_ladder
from sgl_stateful.repair import parse_repair

from .command import integers, positive, run_over
from .fidelity_plot import draw
from .gate import RedGate
from .output import Output, say
from .setting import DEFAULT_POLICY, encode, started, status_of
from .spread import spread_ms
from .subject import Subject, require_facts

BARS = (
    "kl_over_floor_k10",
    "kl_over_floor_k50",
    "kl_over_floor_k10_repaired",
    "kl_over_floor_k50_repaired",
    "top1_k50",
    "dnll_k50",
    "ttft_default_over_plain",
    "bytes_over_bf16",
)
TEXT, FLOOR, NOTHING, AS_SERVED = "text", "floor", "no facts", "as served"
QUESTIONS = {10: 60, 50: 40}
DEFAULT_REPAIR = "last:6%"  # with the first of ten facts, which the default computes, less than 15 % in all
_TOP = 1000
_POOL_TOKENS = 20_000


class Arm(NamedTuple):
    """One way to serve facts; ``policy`` None is full prefill, ``repair`` None what the server does by itself."""

    name: str
    policy: str | None = None
    repair: str | None = "none"

    @property
    def tiers(self) -> tuple[str, ...]:
        """How its facts may have got into the prompt."""
        if self.policy is None:
            return ("none",) if self.name == NOTHING else ("text",)
        return {"none": ("spliced",), None: ("spliced", "repaired")}.get(self.repair, ("repaired",))


class Case(NamedTuple):
    """One question with its gold answer and the facts found for it, in the prompt's order."""

    sample: str
    index: int
    question: str
    gold: str
    units: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm for one case."""

    answer: Answer
    gold: Scored


Taken = dict[tuple[Arm, int], dict[tuple[str, int], Measured]]
"""By arm and k, then by conversation and question."""


def arms_of(policies: Sequence[str], repairs: Sequence[str]) -> list[Arm]:
    """Full prefill, floor, no facts; every policy without repair; the first by the server's own way, and repaired."""
    plain = [Arm(policy, policy) for policy in policies]
    repaired = [Arm(f"{policies[0]}, {repair}", policies[0], repair) for repair in repairs]
    return [Arm(TEXT), Arm(FLOOR), Arm(NOTHING), *plain, Arm(AS_SERVED, policies[0], None), *repaired]


def served(arm: Arm, case: Case) -> Served:
    """What an arm puts before the model. The floor's order is drawn from the question alone."""
    units = list(case.units)
    if arm.name == NOTHING:
        units = []
    if arm.name == FLOOR:
        draw_order = random.Random(f"{case.sample} {case.index}")
        while tuple(units) == case.units:
            draw_order.shuffle(units)
    return Served(tuple(units), "tail", arm.policy, arm.repair)


def require_as_asked(case: Case, arm: Arm, tier: str, reason: str | None) -> None:
    """Make sure that facts got into a prompt in the way that its arm is about.

    Raises
    ------
    RedGate
        They did not.
    """
    if tier not in arm.tiers or reason is not None:
        raise RedGate(f"{case.question!r} was served as {tier!r} in the arm {arm.name!r}: {reason}")


class Bench:
    """Asks one server with one conversation open."""

    def __init__(self, server: StatefulServer, arms: Sequence[Arm], taken: Taken) -> None:
        self._server = server
        self._arms = arms
        self._taken = taken

    def take(self, case: Case, k: int, turn: int) -> None:
        """Measure every arm on one case, another one first at every turn."""
        at = turn % len(self._arms)
        for arm in [*self._arms[at:], *self._arms[:at]]:
            what = served(arm, case)
            self._server.forget()
            # The beginning of all prompts, the memory's header included: with no fact of this case.
            self._server.answer("Hello?", Served((self._spare(case),), "tail", None))
            answer = self._server.answer(case.question, what)
            [gold] = self._server.score(case.question, what, [case.gold], prompt=answer, top=_TOP) or []
            for one in (answer, gold):
                require_as_asked(case, arm, one.tier, one.reason)
            if answer.used != what.units:
                raise RedGate(f"{case.question!r} had {len(answer.used)} of {len(what.units)} facts as {arm.name}")
            self._taken[arm, k][case.sample, case.index] = Measured(answer, gold)

    def _spare(self, case: Case) -> str:
        return next(unit for unit in self._server.units if unit not in case.units)


def cases_of(subject: Subject, server: StatefulServer, k: int, count: int) -> list[Case]:
    """So many questions from all over a conversation, each with its facts, the best nearest the question.

    Raises
    ------
    ConfigError
        There are fewer questions with an answer.
    """
    asked = [q for q in subject.conversation.questions if q.answer and q.question in subject.questions]
    if count > len(asked):
        raise ConfigError(f"{subject.conversation.sample_id} has {len(asked)} questions, not {count}")
    chosen = [asked[number * len(asked) // count] for number in range(count)]
    return [
        Case(
            subject.conversation.sample_id,
            question.index,
            question.question,
            str(question.answer),
            tuple(reversed(server.retrieve(question.question, k))),
        )
        for question in chosen
    ]


# ---- figures ----


def figures_of(arm: Arm, k: int, taken: Taken) -> dict[str, Figures]:
    """Figures of one arm by question, against full prefill of the same facts."""
    found: dict[str, Figures] = defaultdict(dict)
    for key, mine in taken[arm, k].items():
        reference = taken[Arm(TEXT), k][key]
        steps = list(zip(reference.gold.distributions, mine.gold.distributions, strict=True))
        found["kl"][key] = statistics.mean(kl_divergence(*step) for step in steps)
        found["kl_start"][key] = kl_divergence(*steps[0])
        found["top1"][key] = float(top1(steps[0][0]) == top1(steps[0][1]))
        found["nll"][key] = mine.gold.nll
        found["ttft_ms"][key] = mine.answer.ttft_ms
        found["computed"][key] = _share_computed(mine.answer, taken[Arm(NOTHING), k][key].answer)
    return found


def _share_computed(answer: Answer, without: Answer) -> float:
    """Share of the facts' tokens that were prefilled: all that the same prompt without facts has not."""
    facts = answer.tokens["prompt"] - without.tokens["prompt"]
    return max(answer.tokens["prefilled"] - without.tokens["prefilled"], 0) / facts if facts > 0 else 0.0


def row_of(arm: Arm, k: int, taken: Taken) -> dict[str, Any]:
    """One line of the table; estimates are ``{"mean", "interval", ...}``."""
    mine, text = figures_of(arm, k, taken), figures_of(Arm(TEXT), k, taken)
    floor = figures_of(Arm(FLOOR), k, taken)
    answers = [one.answer for one in taken[arm, k].values()]
    return {
        "arm": arm.name,
        "policy": arm.policy,
        "repair": arm.repair,
        "k": k,
        "questions": len(answers),
        "kl": mean(mine["kl"], within=POSITIVE),
        "kl_median": statistics.median(mine["kl"].values()),
        "kl_over_floor": ratio(mine["kl"], floor["kl"]),
        "kl_start": mean(mine["kl_start"], within=POSITIVE),
        "top1": mean(mine["top1"], within=(0.0, 1.0)),
        "dnll": mean_difference(mine["nll"], text["nll"]),
        "ttft_ms": spread_ms(list(mine["ttft_ms"].values())),
        "ttft_over_text": statistics.median(mine["ttft_ms"].values()) / statistics.median(text["ttft_ms"].values()),
        "share_computed": statistics.mean(mine["computed"].values()),
        "tokens": {name: statistics.median(a.tokens[name] for a in answers) for name in answers[0].tokens},
    }


def rows_of(taken: Taken) -> list[dict[str, Any]]:
    """A row per arm and k, of the questions that all arms of the k have."""
    rows = []
    for k in sorted({k for _, k in taken}):
        at_k = {arm: cases for (arm, other), cases in taken.items() if other == k}
        shared = set.intersection(*(set(cases) for cases in at_k.values()))
        if shared:
            kept = {(arm, k): {key: cases[key] for key in sorted(shared)} for arm, cases in at_k.items()}
            rows += [row_of(arm, k, kept) for arm in at_k]
    return rows


def bars_of(
    rows: Sequence[Mapping[str, Any]], *, policy: str, repair: str, bytes_over_bf16: float
) -> tuple[dict[str, float | None], dict[str, tuple[float, float]]]:
    """The bars of one policy and one repair, and their intervals; None where something was not measured."""
    by = {(row["policy"], row["repair"], row["k"]): row for row in rows if row["policy"] is not None}
    plain_10, plain_50 = by.get((policy, "none", 10)), by.get((policy, "none", 50))
    estimates: dict[str, Estimate | None] = {
        "kl_over_floor_k10": plain_10 and plain_10["kl_over_floor"],
        "kl_over_floor_k50": plain_50 and plain_50["kl_over_floor"],
        "kl_over_floor_k10_repaired": (row := by.get((policy, repair, 10))) and row["kl_over_floor"],
        "kl_over_floor_k50_repaired": (row := by.get((policy, repair, 50))) and row["kl_over_floor"],
        "top1_k50": plain_50 and plain_50["top1"],
        "dnll_k50": plain_50 and plain_50["dnll"],
    }
    bars = {name: found["mean"] if found else None for name, found in estimates.items()}
    intervals = {name: found["interval"] for name, found in estimates.items() if found and found["interval"]}
    default_50 = by.get((policy, None, 50))
    bars["ttft_default_over_plain"] = (
        default_50["ttft_ms"]["p50"] / plain_50["ttft_ms"]["p50"] if default_50 and plain_50 else None
    )
    return bars | {"bytes_over_bf16": bytes_over_bf16}, intervals


def bytes_over_bf16_of(status: Mapping[str, Any], ladder: str, model: Path) -> float:
    """Bytes of all encodings of a ladder per token of a fact, over those of one in bf16."""
    counts = [status["encoder"]["policies"][policy.name] for policy in parse_ladder(ladder).policies]
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plain = 2 * 2 * config["num_hidden_layers"] * heads * head_dim
    return float(sum(count["bytes"] / count["fact_tokens"] for count in counts) / plain)


# ---- command line ----


def _measure(args: argparse.Namespace, subjects: Sequence[Subject], output: Output) -> None:
    counts = dict(zip(args.k, args.questions, strict=True)) if args.questions else {k: QUESTIONS[k] for k in args.k}
    for subject in subjects:
        require_facts(subject, max(counts) + 1)
    arms = arms_of(args.policies, args.repairs)
    taken: Taken = defaultdict(dict)
    flags = ["--also-encode", ",".join(args.policies[1:])] if args.policies[1:] else []
    encoded = 0
    with started(
        subjects[0].model, pool_tokens=_POOL_TOKENS, policy=args.policies[0], flags=[*flags, *args.server_flag]
    ) as (url, server):
        for number, subject in enumerate(subjects):
            encode(url, server, subject, already=encoded)
            encoded += len(subject.units)
            bench = Bench(server, arms, taken)
            for k, count in counts.items():
                say(f"{subject.conversation.sample_id}: k {k}")
                share = count // len(subjects) + (number < count % len(subjects))
                for turn, case in enumerate(cases_of(subject, server, k, share)):
                    bench.take(case, k, turn)
            output.write(rows_of(taken))
        status = status_of(url)
    output.meta["conversation"] = [subject.meta["conversation"] for subject in subjects]
    output.meta |= {"embedder": status["embedder"], "encoder": status["encoder"], "server_flags": args.server_flag}
    rows = rows_of(taken)
    _print(rows)
    in_bf16 = bytes_over_bf16_of(status, args.policies[0], subjects[0].model)
    repair = args.repairs[0] if args.repairs else "none"
    bars, intervals = bars_of(rows, policy=args.policies[0], repair=repair, bytes_over_bf16=in_bf16)
    output.finish(rows, bars, intervals)
    if args.json is not None:
        draw(rows, args.json.with_suffix(".png"))


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        over = f"{row['kl_over_floor']['mean']:5.2f}" if row["kl_over_floor"] else "    -"
        if row["kl_over_floor"] and (interval := row["kl_over_floor"]["interval"]):
            over += f" [{interval[0]:.2f}, {interval[1]:.2f}]"
        print(
            f"{row['arm']:34s} k {row['k']:2d} n {row['questions']:3d}  KL {row['kl']['mean']:.3f} "
            f"(median {row['kl_median']:.3f})  over floor {over:20s} start {row['kl_start']['mean']:.3f}  "
            f"top-1 {row['top1']['mean']:.2f}  dNLL {row['dnll']['mean']:+.3f}  TTFT {row['ttft_ms']['p50']:6.0f} ms  "
            f"computed {row['share_computed']:.1%}"
        )


def specs(parse: Any) -> Any:
    """A type of argument: names separated by commas, each once, of what ``parse`` takes."""

    def names(text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(parse(part.strip()).name for part in text.split(",") if part.strip()))

    return names


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    options: dict[str, dict[str, Any]] = {
        "policies": {
            "type": specs(parse_ladder),
            "default": (DEFAULT_POLICY,),
            "help": "comma-separated; the first is the one that bars are of",
        },
        "repairs": {
            "type": specs(parse_repair),
            "default": (DEFAULT_REPAIR,),
            "help": "comma-separated, of the first policy; bars are of the first",
        },
        "k": {"type": integers, "default": tuple(QUESTIONS), "help": "numbers of facts, comma-separated"},
        "questions": {"type": integers_each, "default": (), "help": "over all conversations, for every k"},
        "server_flag": {"action": "append", "default": [], "help": "one more for the server, as in --server-flag=--x"},
    }
    run_over(_measure, program="bench_fidelity", doc=__doc__ or "", bars=BARS, options=options, argv=argv)


def integers_each(text: str) -> tuple[int, ...]:
    """Comma-separated numbers from 1."""
    return tuple(positive(part) for part in text.split(","))


if __name__ == "__main__":
    main()
