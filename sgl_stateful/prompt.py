"""Prompts from segments: what stands before the facts, the facts, and what stands after them.

Each segment is tokenised alone, without special tokens, and ends with a newline, so ids never merge across a seam.
Text mode and splice mode therefore send the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from memstore import Fact

Placement = Literal["tail", "system"]
Order = Literal["relevance_last", "chronological"]

# Split marker for rendered chat templates: private-use characters that no tokenizer treats as one token.
SENTINEL = "\ue000\ue001memory\ue001\ue000"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def render_fact(fact: Fact) -> str:
    """One line for the model, such as ``[8 May, 2023] Ana: I moved.``; date and speaker where the fact has them."""
    return render(fact.text, speaker=fact.speaker, time=fact.time)


def render(text: str, *, speaker: str | None, time: str | None) -> str:
    """The line of ``render_fact``, from its parts."""
    date = f"[{time}] " if time else ""
    name = f"{speaker}: " if speaker else ""
    return f"{date}{name}{' '.join(text.split())}\n"


@dataclass(frozen=True, slots=True)
class FactTokens:
    """A fact and the ids of its rendering."""

    fact: Fact
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Where a fact landed in the prompt: positions ``[start, end)``."""

    fact: FactTokens
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of a whole prompt and the place of each fact in it."""

    token_ids: list[int]
    blocks: tuple[Block, ...]


def assemble(
    *,
    head: Sequence[int],
    header: Sequence[int],
    facts: Sequence[FactTokens],
    footer: Sequence[int],
    tail: Sequence[int],
) -> Prompt:
    """Join the segments; without facts, header and footer are left out too."""
    if not facts:
        return Prompt([*head, *tail], ())
    ids = [*head, *header]
    blocks = []
    for fact in facts:
        blocks.append(Block(fact, len(ids), len(ids) + len(fact.token_ids)))
        ids.extend(fact.token_ids)
    ids.extend(footer)
    ids.extend(tail)
    return Prompt(ids, tuple(blocks))


def order_facts(facts: Sequence[FactTokens], scores: Sequence[float], order: Order) -> list[FactTokens]:
    """Sort retrieved facts for the prompt: best nearest the question, or as they happened."""
    if order == "chronological":
        return sorted(facts, key=lambda f: f.fact.seq)
    ranked = sorted(zip(scores, facts, strict=True), key=lambda pair: (pair[0], -pair[1].fact.seq))
    return [fact for _, fact in ranked]


def split_at_sentinel(text: str) -> tuple[str, str]:
    """The text before and after the sentinel.

    Raises
    ------
    ValueError
        The template dropped the sentinel, or shows it more than once.
    """
    if (count := text.count(SENTINEL)) != 1:
        raise ValueError(f"the chat template shows the insertion point {count} times, not once")
    before, after = text.split(SENTINEL)
    return before, after
