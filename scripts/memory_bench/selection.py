"""What the order of retrieved facts, and a floor under their scores, do to answers and to what is found cached.

Orders: the questions of a conversation are asked one after the other from one cache, as a user would ask them, once in
each order. What stands at the same place of two prompts is found cached; the gold answer forced behind each prompt says
what the order does to the answer. Floors: facts under a score are left out of what was found, in the default order.
Intervals are over conversations.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from locomo.arms.base import Answer, Served
from locomo.arms.stateful import StatefulServer
from locomo.dataset import Question
from locomo.errors import ConfigError
from locomo.scores.estimates import mean, mean_difference
from locomo.scores.rows import Figures

from .command import positive, run_over
from .gate import RedGate
from .output import Output, say
from .setting import DEFAULT_POLICY, encode, started, status_of
from .spread import spread_ms
from .subject import Subject, require_facts

BARS = ("cached_chronological_over_relevance_last",)
RELEVANCE_LAST, CHRONOLOGICAL, SHUFFLED = "relevance_last", "chronological", "shuffled"
FLOORS = (0.3, 0.4, 0.5, 0.6)
_K = 10
_QUESTIONS = 100
_POOL_TOKENS = 40_000


class Way(NamedTuple):
    """One way to select and order what was found; ``policy`` None prefills it as text."""

    order: str
    floor: float | None
    policy: str | None


class Asked(NamedTuple):
    """A question, its units as they were found, the best first with their scores, and those that answer it."""

    sample: str
    question: Question
    found: tuple[tuple[str, float], ...]
    evidence: frozenset[str]


Taken = dict[Way, dict[str, Figures]]
"""By way, then by figure, then by conversation and question."""


def orders_of(places: Mapping[str, int]) -> dict[str, Callable[[Asked, list[str]], list[str]]]:
    """What each order makes of units, the best of which is first; ``places`` are those in the conversation."""

    def shuffled(asked: Asked, units: list[str]) -> list[str]:
        return random.Random(f"{asked.sample} {asked.question.index}").sample(units, len(units))

    return {
        RELEVANCE_LAST: lambda _, units: units[::-1],
        CHRONOLOGICAL: lambda _, units: sorted(units, key=places.__getitem__),
        SHUFFLED: shuffled,
    }


def ways_of(floors: Sequence[float]) -> list[Way]:
    """Every order as text and spliced, and every floor as text."""
    orders = [Way(order, None, policy) for policy in (None, DEFAULT_POLICY) for order in orders_of({})]
    return orders + [Way(RELEVANCE_LAST, floor, None) for floor in floors]


def cached_share(answer: Answer) -> float:
    """Share of a prompt whose KV was there from earlier prompts: neither prefilled nor spliced."""
    return 1 - (answer.tokens["prefilled"] + answer.tokens["spliced"]) / answer.tokens["prompt"]


def take(server: StatefulServer, way: Way, asked: Sequence[Asked], figures: dict[str, Figures]) -> None:
    """Ask all questions of the open conversation in one way, from an empty cache.

    Raises
    ------
    RedGate
        A prompt had other facts than it was to have, or they got there in another way.
    """
    order = orders_of({unit: place for place, unit in enumerate(server.units)})[way.order]
    server.forget()
    for one in asked:
        kept = [unit for unit, score in one.found if way.floor is None or score >= way.floor]
        what = Served(tuple(order(one, kept)), "tail", way.policy)
        answer = server.answer(one.question.question, what)
        _require(one, way, what, answer)
        [gold] = server.score(one.question.question, what, [str(one.question.answer)], prompt=answer, top=0) or []
        key = (one.sample, one.question.index)
        found = {
            "nll": gold.nll,
            "cached": cached_share(answer),
            "prefilled": float(answer.tokens["prefilled"]),
            "prompt": float(answer.tokens["prompt"]),
            "facts": float(len(kept)),
            "evidence": len(one.evidence & set(kept)) / len(one.evidence),
            "ttft_ms": answer.ttft_ms,
        }
        for name, value in found.items():
            figures[name] = {**figures.get(name, {}), key: value}


def _require(one: Asked, way: Way, what: Served, answer: Answer) -> None:
    tiers = ("none",) if not what.units else ("text", "exact") if way.policy is None else ("spliced", "exact")
    if answer.tier not in tiers or answer.used != what.units:
        said = f"{len(answer.used)} of {len(what.units)} facts as {answer.tier!r}: {answer.reason}"
        raise RedGate(f"{one.question.question!r} had {said}")


def asked_of(subject: Subject, server: StatefulServer, count: int) -> list[Asked]:
    """So many questions from all over the open conversation, in its order, with what is found for them.

    Raises
    ------
    ConfigError
        There are fewer with an answer and evidence.
    """
    with_answer = [q for q in subject.conversation.questions if q.answer and q.question in subject.questions]
    if count > len(with_answer):
        raise ConfigError(f"{subject.conversation.sample_id} has {len(with_answer)} questions, not {count}")
    covering = {unit.id: set(unit.covers) for unit in subject.units}
    chosen = [with_answer[number * len(with_answer) // count] for number in range(count)]
    found = []
    for question in chosen:
        evidence = frozenset(unit for unit, covers in covering.items() if covers & set(question.evidence))
        if not evidence:
            raise ConfigError(f"{subject.conversation.sample_id}: no unit answers {question.question!r}")
        hits = tuple(server.search(question.question, _K))
        found.append(Asked(subject.conversation.sample_id, question, hits, evidence))
    return found


def row_of(way: Way, taken: Taken) -> dict[str, Any]:
    """One line of the table; differences are from the same facts in the default order without a floor."""
    mine, default = taken[way], taken[Way(RELEVANCE_LAST, None, way.policy)]
    return {
        "order": way.order,
        "min_score": way.floor,
        "served": "text" if way.policy is None else way.policy,
        "questions": len(mine["nll"]),
        "nll": mean(mine["nll"]),
        "dnll": mean_difference(mine["nll"], default["nll"]),
        "cached_share": mean(mine["cached"], within=(0.0, 1.0)),
        "prefilled_tokens": statistics.mean(mine["prefilled"].values()),
        "prompt_tokens": statistics.mean(mine["prompt"].values()),
        "facts": statistics.mean(mine["facts"].values()),
        "evidence_share": statistics.mean(mine["evidence"].values()),
        "ttft_ms": spread_ms(list(mine["ttft_ms"].values())),
    }


def bars_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """How much more of a text prompt is found cached in order of time than in order of relevance."""
    shares = {
        row["order"]: row["cached_share"]["mean"] for row in rows if row["served"] == "text" and not row["min_score"]
    }
    return {BARS[0]: shares[CHRONOLOGICAL] / shares[RELEVANCE_LAST] if shares.get(RELEVANCE_LAST) else None}


# ---- command line ----


def _measure(args: argparse.Namespace, subjects: Sequence[Subject], output: Output) -> None:
    for subject in subjects:
        require_facts(subject, _K)
    ways, encoded = ways_of(args.floors), 0
    taken: Taken = defaultdict(dict)
    with started(subjects[0].model, pool_tokens=_POOL_TOKENS, policy=DEFAULT_POLICY) as (url, server):
        for number, subject in enumerate(subjects):
            encode(url, server, subject, already=encoded)
            encoded += len(subject.units)
            share = args.questions // len(subjects) + (number < args.questions % len(subjects))
            asked = asked_of(subject, server, share)
            for way in ways:
                say(f"{subject.conversation.sample_id}: {way.order}, floor {way.floor}, {way.policy or 'text'}")
                take(server, way, asked, taken[way])
            output.write([row_of(way, taken) for way in ways])
        status = status_of(url)
    output.meta["conversation"] = [subject.meta["conversation"] for subject in subjects]
    output.meta |= {"embedder": status["embedder"], "k": _K}
    rows = [row_of(way, taken) for way in ways]
    _print(rows)
    output.finish(rows, bars_of(rows))


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        interval = row["dnll"]["interval"]
        said = f" [{interval[0]:+.3f}, {interval[1]:+.3f}]" if interval else ""
        floor = "-" if row["min_score"] is None else format(row["min_score"], ".2f")
        print(
            f"{row['order']:15s} min_score {floor:>4s} {row['served']:18s} n {row['questions']:3d}  "
            f"cached {row['cached_share']['mean']:6.1%}  prefilled {row['prefilled_tokens']:5.0f} of "
            f"{row['prompt_tokens']:5.0f}  facts {row['facts']:4.1f}  evidence {row['evidence_share']:5.1%}  "
            f"NLL {row['nll']['mean']:.3f}  difference {row['dnll']['mean']:+.3f}{said}  "
            f"TTFT {row['ttft_ms']['p50']:5.0f} ms"
        )


def floors(text: str) -> tuple[float, ...]:
    """Comma-separated scores from 0 to 1, each once.

    Raises
    ------
    ValueError
        Something else.
    """
    found = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    if not all(0 <= floor <= 1 for floor in found):
        raise ValueError(text)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    options: dict[str, dict[str, Any]] = {
        "floors": {"type": floors, "default": FLOORS, "help": "values of min_score, comma-separated"},
        "questions": {"type": positive, "default": _QUESTIONS, "help": "over all conversations"},
    }
    run_over(_measure, program="bench_selection", doc=__doc__ or "", bars=BARS, options=options, argv=argv)


if __name__ == "__main__":
    main()
