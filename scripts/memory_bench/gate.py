"""What is not right is not timed: splices near enough to full prefill before, really spliced answers all along."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from locomo.arms.base import Answer, Served, System
from locomo.errors import LocomoError
from locomo.fidelity import kl_divergence

QUESTIONS = 8
# At 10 facts ladder:0+4 is at 0.9 of the floor, at 50 at 1.4; KV encoded behind the bare header alone is at 17.
# Means over 8 questions scatter by some tens of per cent: 2 passes what is right, and not what lost its context. KL
# hardly sees a wrong rotation: the server's self-test does.
MOST_OVER_SHUFFLED = 2.0
MOST_OVER_WITHOUT = 0.5
_K, _TOP = 10, 1000
_TIERS = {"splice": "spliced", "text": "text", "off": "none"}


class RedGate(LocomoError):
    """What is to be timed does not do what it should."""


class Divergence(NamedTuple):
    """Mean KL in nats, at the first token, to full prefill of the same facts: spliced, in another order, without."""

    spliced: float
    shuffled: float
    without: float


def spread(questions: Sequence[str], count: int = QUESTIONS) -> list[str]:
    """So many questions from all over a conversation.

    Raises
    ------
    RedGate
        There are fewer.
    """
    if len(questions) < count:
        raise RedGate(f"the gate takes {count} questions, and the conversation has {len(questions)}")
    return [questions[number * len(questions) // count] for number in range(count)]


def diverge(system: System, questions: Sequence[str], policy: str) -> Divergence:
    """Measure the divergence of a policy, and make sure that what was spliced was, and was the same prompt.

    Raises
    ------
    RedGate
        A spliced answer was served in another way, or its prompt was another one.
    """
    found = [_divergence(system, question, policy, number) for number, question in enumerate(questions)]
    return Divergence(*(sum(column) / len(found) for column in zip(*found, strict=True)))


def require_near(divergence: Divergence) -> None:
    """Pass where splicing changes less than twice what another order does, and less than half of what no facts do.

    Raises
    ------
    RedGate
        It does not.
    """
    spliced, shuffled, without = divergence
    said = f"spliced answers are {spliced:.3f} nats from full prefill at the first token"
    if not spliced <= MOST_OVER_SHUFFLED * shuffled:
        raise RedGate(f"{said}, more than {MOST_OVER_SHUFFLED:g} times what another order does ({shuffled:.3f})")
    if not spliced < MOST_OVER_WITHOUT * without:
        raise RedGate(f"{said}, not below {MOST_OVER_WITHOUT:g} times what leaving the facts out does ({without:.3f})")


def require_served(question: str, report: Mapping[str, Any], *, mode: str, k: int) -> None:
    """Make sure that a request got all of its facts, and all of them in the way it asked for.

    Parameters
    ----------
    report
        The server's, of that request.
    mode
        ``splice``, ``text`` or ``off``, as was asked for.

    Raises
    ------
    RedGate
        It did not; the message names the question and the reason.
    """
    tier, reason, facts = report["tier"], report["reason"], len(report["facts"])
    if tier != _TIERS[mode] or reason is not None:
        raise RedGate(
            f"{question!r} was asked with mode {mode!r} and served as {tier!r}: {reason or 'no reason given'}"
        )
    if facts != k:
        raise RedGate(f"{question!r} was served with {facts} facts, not {k}")


def _divergence(system: System, question: str, policy: str, seed: int) -> Divergence:
    facts = tuple(reversed(system.retrieve(question, _K)))
    spliced, text = Served(facts, "tail", policy), Served(facts, "tail", None)
    without, shuffled = Served((), "tail", None), Served(_other_order(facts, seed), "tail", None)
    arms = (spliced, text, shuffled, without)  # text that was prefilled exactly would be found by the spliced one
    system.forget()
    answers = {served: system.answer(question, served) for served in arms}
    _require_same_prompt(question, answers[spliced], answers[text])
    system.forget()
    first = {}
    for served in arms:
        [scored] = system.score(question, served, [" "], prompt=answers[served], top=_TOP) or []
        if served is spliced and (scored.tier != "spliced" or scored.reason is not None):
            raise RedGate(f"{question!r} was to be scored spliced and was served as {scored.tier!r}: {scored.reason}")
        first[served] = scored.distributions[0]
    return Divergence(*(kl_divergence(first[text], first[served]) for served in (spliced, shuffled, without)))


def _require_same_prompt(question: str, spliced: Answer, text: Answer) -> None:
    if spliced.tier != "spliced" or spliced.reason is not None:
        raise RedGate(f"{question!r} was to be spliced and was served as {spliced.tier!r}: {spliced.reason}")
    if spliced.prompt_ids != text.prompt_ids:
        raise RedGate(f"{question!r}: the spliced prompt and that of text are not the same ids")


def _other_order(facts: Sequence[str], seed: int) -> tuple[str, ...]:
    draw, shuffled = random.Random(seed), list(facts)
    while len(facts) > 1 and shuffled == list(facts):
        draw.shuffle(shuffled)
    return tuple(shuffled)
