"""Which of several continuations of a text is likeliest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod

from sgl_stateful.client import InvalidCall

_MAX_AT_ONCE = 8

TokenIds = tuple[int, ...]
FactIds = tuple[str, ...]
# Log probabilities of the tokens of each sequence from a position on, given those before them.
Score = Callable[[Sequence[TokenIds], int], list[list[float]]]


class NextTokens(NamedTuple):
    """What one query says of the token after its prompt."""

    logprobs: Mapping[int, float]
    facts: FactIds
    """Those that stood in the prompt, in their order."""


class PromptChanged(Exception):
    """The queries of one decision were not about the same prompt, so that their scores cannot be compared."""


def select(
    choices: Sequence[str],
    method: ChoicesSamplingMethod,
    *,
    text: str,
    tokenize: Callable[[str], TokenIds],
    score: Score,
    alone: Callable[[Sequence[TokenIds]], list[list[Any]]],
) -> ChoicesDecision:
    """Let ``method`` choose.

    A choice is scored as the tokens that ``text`` and choice have together, from the first on that is not the same for
    text alone and with each choice: where a choice begins inside a token, the token before it counts too.

    Parameters
    ----------
    alone
        ``[logprob, token, …]`` of each token of each sequence without anything before it.

    Raises
    ------
    InvalidCall
        There is nothing to ask about, since ``text`` is empty; or a choice is, or adds no token that can be scored.
    PromptChanged
    """
    base = tokenize(text)
    if not choices:
        raise InvalidCall("select needs a choice")
    if not base or not all(choices):
        raise InvalidCall("select needs some text before the choices, and no choice may be empty")
    whole = [tokenize(text + choice) for choice in choices]
    start = max(1, min(_common(base, ids) for ids in whole))
    for choice, ids in zip(choices, whole, strict=True):
        if len(ids) <= start:
            raise InvalidCall(f"the choice {choice!r} adds no token to the text, so that there is nothing to score")
    scores = score(whole, start)
    decision: ChoicesDecision = method(
        choices=list(choices),
        normalized_prompt_logprobs=[sum(logprobs) / len(logprobs) for logprobs in scores],
        input_token_logprobs=[
            [[logprob, token, None] for logprob, token in zip(logprobs, ids[start:], strict=True)]
            for logprobs, ids in zip(scores, whole, strict=True)
        ],
        output_token_logprobs=[[] for _ in whole],
        unconditional_token_logprobs=(
            alone([ids[start:] for ids in whole]) if method.requires_unconditional_logprobs else None
        ),
    )
    return decision


def by_next_tokens(ask: Callable[[TokenIds, Sequence[int], FactIds | None], NextTokens]) -> Score:
    """Score by one next token at a time, asking once for every distinct beginning.

    Parameters
    ----------
    ask
        Of a prompt and of which tokens behind it; with which facts, or with those that are found for None.
    """

    def score(whole: Sequence[TokenIds], start: int) -> list[list[float]]:
        wanted: dict[TokenIds, set[int]] = defaultdict(set)
        for ids in whole:
            for end in range(start, len(ids)):
                wanted[ids[:end]].add(ids[end])
        # The longest finds the facts for all: what fits beside it fits beside each.
        first, *others = sorted(wanted, key=len, reverse=True)
        found = {first: ask(first, sorted(wanted[first]), None)}
        facts = found[first].facts
        if others:
            with ThreadPoolExecutor(min(_MAX_AT_ONCE, len(others))) as threads:
                replies = threads.map(lambda prompt: ask(prompt, sorted(wanted[prompt]), facts), others)
                found |= zip(others, replies, strict=True)
        if any(reply.facts != facts for reply in found.values()):
            raise PromptChanged("facts that stood in the prompt have changed")
        return [[found[ids[:end]].logprobs[ids[end]] for end in range(start, len(ids))] for ids in whole]

    return score


def _common(left: TokenIds, right: TokenIds) -> int:
    """How many first tokens are the same."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
